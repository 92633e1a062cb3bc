// What every allocator is measured with: loops over `alloc(size)`, which gives a pointer, and `free(pointer, size)`,
// which takes it back. Sizes and the generator are those of the peers' published measurements. Knows no allocator.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace bench {

// Operations between two looks at the clock and at who had the processor: so many at first, and more until a batch
// takes a while. The looks are outside of what is timed, but a call into the kernel leaves caches and predictors cold.
inline constexpr std::int64_t kBatch = 256, kLargestBatch = 8192;
inline constexpr double kBatchTakes = 60e3;         // ns
inline constexpr std::size_t kWindow = 256;         // live blocks in the mixed pattern
inline constexpr double kFreelistPatience = 1e10;   // ns
inline constexpr std::int64_t kFreelistBatch = 16;  // so few that the number of free pieces hardly moves

// Keeps the compiler from seeing that a pointer is not used.
inline void keep(void* pointer) { asm volatile("" : : "r"(pointer) : "memory"); }

inline double now_ns() {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// How often the kernel has taken the processor from this thread to give it to another.
inline long times_preempted() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

// Memory beside the heap, for figures: what the benchmark keeps on the heap itself decides whether glibc's malloc takes
// 20 or 27 ns for a pair.
template <typename T>
struct BesideTheHeap {
  using value_type = T;
  T* allocate(std::size_t count) {
    void* const at =
        mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(at);
  }
  void deallocate(T* at, std::size_t count) { munmap(at, count * sizeof(T)); }
  bool operator==(const BesideTheHeap&) const = default;
};
using Figures = std::vector<double, BesideTheHeap<double>>;

// What a loop took: in all, and in each of its batches (ns an operation). Disturbed batches, in which somebody else had
// the processor, are kept apart: they tell of the machine, and count only where there are no others.
struct Times {
  struct Sum {
    double ns = 0;
    std::int64_t operations = 0;
    Figures batches;

    void add(double spent, std::int64_t count) {
      ns += spent;
      operations += count;
      if (count != 0) batches.push_back(spent / static_cast<double>(count));
    }
    void add(const Sum& other) {
      ns += other.ns;
      operations += other.operations;
      batches.insert(batches.end(), other.batches.begin(), other.batches.end());
    }
  };
  Sum quiet, disturbed;

  void add(double ns, std::int64_t count, bool was_disturbed) { (was_disturbed ? disturbed : quiet).add(ns, count); }
  void add(const Times& other) {
    quiet.add(other.quiet);
    disturbed.add(other.disturbed);
  }
  double mean() const {
    const Sum& sum = counted();
    return sum.operations == 0 ? 0 : sum.ns / static_cast<double>(sum.operations);
  }
  double quantile(double q) const {
    Figures sorted = counted().batches;
    if (sorted.empty()) return 0;
    std::sort(sorted.begin(), sorted.end());
    return sorted[static_cast<std::size_t>(q * static_cast<double>(sorted.size() - 1) + 0.5)];
  }
  // The part of the operations that is left out.
  double left_out() const {
    const auto all = static_cast<double>(quiet.operations + disturbed.operations);
    return quiet.operations == 0 ? 0 : static_cast<double>(disturbed.operations) / all;
  }

 private:
  const Sum& counted() const { return quiet.operations != 0 ? quiet : disturbed; }
};

// Whether the loop runs beside others that it may wait for: then all of its time counts.
enum class Company : std::uint8_t { alone, others };

// Calls `once()` so often and takes the time of each batch.
// Inline, with what the caller holds by value: a chain of references would be walked anew for each operation, which
// costs a tenth of a good allocator's time.
template <typename Once>
[[gnu::always_inline]] inline Times timed(std::int64_t operations, const Once& once, Company company = Company::alone) {
  Times times;
  for (Times::Sum* sum : {&times.quiet, &times.disturbed})
    sum->batches.reserve(static_cast<std::size_t>(operations / kBatch + 1));
  std::int64_t batch = kBatch;
  for (std::int64_t done = 0; done < operations;) {
    const std::int64_t count = std::min(batch, operations - done);
    const long before = company == Company::alone ? times_preempted() : 0;
    const double start = now_ns();
    for (std::int64_t i = count; i != 0; --i) once();
    const double spent = now_ns() - start;
    times.add(spent, count, company == Company::alone && times_preempted() != before);
    done += count;
    if (spent < kBatchTakes / 2 && batch < kLargestBatch) batch *= 2;
  }
  return times;
}

// An allocation and its free, again and again.
template <typename Alloc, typename Free>
Times pair(std::size_t size, std::int64_t pairs, const Alloc& alloc, const Free& free,
           Company company = Company::alone) {
  return timed(
      pairs,
      [=] {
        void* const pointer = alloc(size);
        keep(pointer);
        free(pointer, size);
      },
      company);
}

// 256 blocks live, sizes from 512 bytes to 1 MiB + 511: each step frees one and allocates one.
template <typename Alloc, typename Free>
Times window(unsigned seed, std::int64_t pairs, const Alloc& alloc, const Free& free) {
  struct Block {
    void* pointer = nullptr;
    std::size_t size = 0;
  };
  std::vector<Block> live(kWindow);
  unsigned x = seed * 2654435761u + 1;
  const Times times = timed(pairs, [&] {
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    Block& block = live[x % kWindow];
    if (block.pointer != nullptr) free(block.pointer, block.size);
    block.size = std::size_t{512} << ((x >> 8) % 12);
    block.size += (x >> 16) % 512;
    block.pointer = alloc(block.size);
    keep(block.pointer);
  });
  for (const Block& block : live)
    if (block.pointer != nullptr) free(block.pointer, block.size);
  return times;
}

enum class Order : std::uint8_t { address, reverse, random };

inline bool order_of(std::string_view word, Order* out) {
  if (word == "address") return *out = Order::address, true;
  if (word == "reverse") return *out = Order::reverse, true;
  if (word == "random") return *out = Order::random, true;
  return false;
}

struct FreelistTimes {
  Times alloc, free;
};

// Many free pieces, none beside another: twice as many blocks of 64.5 to 96 KiB are allocated, and every second one is
// freed. Then a few blocks of the sizes of free pieces, taken in an order of their addresses, are allocated and freed
// again, so that the number of free pieces stays. The time of allocations and of frees is taken apart.
template <typename Alloc, typename Free>
FreelistTimes freelist(std::size_t pieces, Order order, std::int64_t operations, const Alloc& alloc, const Free& free) {
  const auto size_of = [](std::size_t i) { return std::size_t{64} * 1024 + 512 + 512 * ((i * 29) % 64); };
  const double until = now_ns() + kFreelistPatience;
  const auto patient = [&] {
    if (now_ns() > until) throw std::runtime_error("making so many free extents takes longer than 10 s");
  };
  std::vector<void*> blocks(2 * pieces);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (i % kBatch == 0) patient();
    blocks[i] = alloc(size_of(i));
  }
  std::vector<std::size_t> turn(pieces);  // numbers of blocks, by address
  for (std::size_t i = 0; i < pieces; ++i) turn[i] = 2 * i + 1;
  std::sort(turn.begin(), turn.end(), [&](std::size_t a, std::size_t b) { return blocks[a] < blocks[b]; });
  if (order == Order::reverse) std::reverse(turn.begin(), turn.end());
  if (order == Order::random) {
    std::uint64_t x = 88172645463325252u;
    for (std::size_t i = pieces; i > 1; --i) {
      x ^= x << 13;
      x ^= x >> 7;
      x ^= x << 17;
      std::swap(turn[i - 1], turn[x % i]);
    }
  }
  for (std::size_t k = 0; k < pieces; ++k) {
    if (k % kBatch == 0) patient();
    free(blocks[turn[k]], size_of(turn[k]));
    blocks[turn[k]] = nullptr;
  }
  FreelistTimes times;
  std::vector<void*> held(kFreelistBatch);
  std::size_t at = 0;
  for (std::int64_t done = 0; done < operations; done += kFreelistBatch) {
    const long before = times_preempted();
    const double start = now_ns();
    for (std::size_t k = 0; k < held.size(); ++k) held[k] = alloc(size_of(turn[(at + k) % pieces]));
    const double middle = now_ns();
    for (std::size_t k = 0; k < held.size(); ++k) free(held[k], size_of(turn[(at + k) % pieces]));
    const double end = now_ns();
    const bool disturbed = times_preempted() != before;
    times.alloc.add(middle - start, kFreelistBatch, disturbed);
    times.free.add(end - middle, kFreelistBatch, disturbed);
    at = (at + held.size()) % pieces;
  }
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i] != nullptr) free(blocks[i], size_of(i));
  return times;
}

}  // namespace bench
