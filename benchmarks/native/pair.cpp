// What one alloc + free costs the calling thread, against glibc's malloc + free in the same run.
//   pair [DEVICE] [OPTIONS]      defaults: sim:0, the production preset
// glibc is measured first, while the process has one thread, which is its best case. Prints a table and one line of
// JSON. May import the public headers only: it measures what a C++ program gets.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <streampool/pool.hpp>
#include <string>

namespace {

constexpr int kPasses = 7;  // after one that is not counted; the median is given
constexpr int kPairs = 200000;
constexpr std::size_t kWindow = 256;  // live blocks in the mixed pattern

// Keeps the compiler from seeing that a pointer is not used.
void keep(void* ptr) { asm volatile("" : : "r"(ptr) : "memory"); }

template <typename Body>
double median_ns(int pairs, Body body) {
  std::array<double, kPasses> results{};
  body();
  for (double& result : results) {
    const auto start = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
    result = spent.count() / pairs;
  }
  std::nth_element(results.begin(), results.begin() + kPasses / 2, results.end());
  return results[kPasses / 2];
}

template <typename Alloc, typename Free>
double pair_ns(std::size_t size, Alloc alloc, Free free) {
  return median_ns(kPairs, [&] {
    for (int i = 0; i < kPairs; ++i) {
      void* const ptr = alloc(size);
      keep(ptr);
      free(ptr);
    }
  });
}

// 256 blocks live, sizes from 512 bytes to 1 MiB + 511 by a fixed generator: each step frees one and allocates one.
template <typename Alloc, typename Free>
double window_ns(Alloc alloc, Free free) {
  std::array<void*, kWindow> live{};
  std::uint32_t x = 2654435761u;
  const double result = median_ns(kPairs, [&] {
    for (int i = 0; i < kPairs; ++i) {
      x ^= x << 13;
      x ^= x >> 17;
      x ^= x << 5;
      void*& place = live[x % kWindow];
      if (place != nullptr) free(place);
      place = alloc((std::size_t{512} << ((x >> 8) % 12)) + (x >> 16) % 512);
      keep(place);
    }
  });
  for (void* ptr : live)
    if (ptr != nullptr) free(ptr);
  return result;
}

struct Row {
  const char* what;
  double glibc;
  double registered;
  double raw;
};

}  // namespace

int main(int argc, char** argv) {
  const auto malloc_free = [](auto measure) {
    return measure([](std::size_t size) { return std::malloc(size); }, [](void* ptr) { std::free(ptr); });
  };
  const auto pair_of = [](std::size_t size) {
    return [size](auto alloc, auto free) { return pair_ns(size, alloc, free); };
  };
  const auto window = [](auto alloc, auto free) { return window_ns(alloc, free); };

  std::array<Row, 3> rows{{{"4 KiB pair", 0, 0, 0}, {"1 MiB pair", 0, 0, 0}, {"256 live, mixed sizes", 0, 0, 0}}};
  rows[0].glibc = malloc_free(pair_of(4096));
  rows[1].glibc = malloc_free(pair_of(1 << 20));
  rows[2].glibc = malloc_free(window);

  try {
    const sp::Device device(argc > 1 ? argv[1] : "sim:0");
    const sp::Stream lasting = device.create_stream(), raw = device.create_stream();
    const sp::Pool pool(device, "device", argc > 2 ? argv[2] : "mode=production");
    pool.register_stream(lasting);
    const auto pooled = [&](const sp::Stream& stream, auto measure) {
      return measure(
          [&](std::size_t size) {
            void* out = nullptr;
            sp::check(sp_alloc(pool.get(), size, 0, stream, &out));
            return out;
          },
          [&](void* ptr) { sp::check(sp_free(pool.get(), ptr, stream)); });
    };
    rows[0].registered = pooled(lasting, pair_of(4096));
    rows[0].raw = pooled(raw, pair_of(4096));
    rows[1].registered = pooled(lasting, pair_of(1 << 20));
    rows[1].raw = pooled(raw, pair_of(1 << 20));
    rows[2].registered = pooled(lasting, window);
    rows[2].raw = pooled(raw, window);

    std::printf("%s, ns a pair, median of %d passes of %d\n", device.name().c_str(), kPasses, kPairs);
    std::printf("%-24s %10s %12s %8s %12s %8s\n", "", "malloc", "registered", "ratio", "raw handle", "ratio");
    std::string json = "{\"benchmark\": \"pair\", \"device\": \"" + device.name() + "\", \"unit\": \"ns\", \"rows\": [";
    for (const Row& row : rows) {
      std::printf("%-24s %10.1f %12.1f %8.2f %12.1f %8.2f\n", row.what, row.glibc, row.registered,
                  row.registered / row.glibc, row.raw, row.raw / row.glibc);
      char text[200];
      std::snprintf(text, sizeof text, "%s{\"what\": \"%s\", \"malloc\": %.1f, \"registered\": %.1f, \"raw\": %.1f}",
                    &row == rows.data() ? "" : ", ", row.what, row.glibc, row.registered, row.raw);
      json += text;
    }
    std::printf("%s]}\n", json.c_str());
    pool.forget_stream(lasting);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
