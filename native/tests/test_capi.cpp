// The C ABI and its C++ face from many threads: what tests/test_capi.py cannot show under the sanitizers.
// May import the public headers and what tests share.
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "streampool/pool.hpp"
#include "test.hpp"

namespace {

constexpr int kThreads = 4;
constexpr int kRounds = 300;

// Sizes that meet slabs and extents alike.
std::size_t size_of_round(int thread, int round) {
  const auto mixed = static_cast<std::uint32_t>(thread * kRounds + round) * 2654435761u;
  return mixed % 16 == 0 ? std::size_t{3} << 20 : std::size_t{1} + mixed % 20000;
}

void run_threads(void (*body)(const sp::Pool&, const sp::Device&, int, std::atomic<int>*), const char* options,
                 bool trim_beside = true) {
  const sp::Device device("sim:0");
  const sp::Pool pool(device, "device", options);
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        body(pool, device, t, &failed);
      } catch (const std::exception&) {
        failed.fetch_add(1);
      }
    });
  }
  for (int i = 0; i < 50; ++i) {  // beside them: statistics and trims
    CHECK(pool.stats().reserved <= pool.stats().reserved_peak);
    if (trim_beside) pool.trim();
    std::this_thread::yield();
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQ(failed.load(), 0);
  CHECK_EQ(pool.check_memory(), 0u);
  CHECK_EQ(pool.stats().live_blocks, 0u);
  CHECK_EQ(pool.stats().allocations, pool.stats().frees);
}

void on_own_streams(const sp::Pool& pool, const sp::Device& device, int thread, std::atomic<int>*) {
  const sp::Stream own = device.create_stream(), other = device.create_stream();
  pool.register_stream(own);
  std::vector<sp::Block> window(8);
  for (int round = 0; round < kRounds; ++round) {
    sp::Block& place = window[static_cast<std::size_t>(round) % window.size()];
    if (place && round % 3 == 0) place.free(own);
    if (place && round % 7 == 0) place.record_stream(other);
    place = pool.allocate(size_of_round(thread, round), own);
  }
  window.clear();
  pool.forget_stream(own);
}

void racing_for_one_block(const sp::Pool& pool, const sp::Device& device, int thread, std::atomic<int>* failed) {
  const sp::Stream own = device.create_stream();
  for (int round = 0; round < kRounds; ++round) {
    void* const ptr = pool.allocate(size_of_round(thread, round), own).detach();
    sp_status second = SP_OK;
    std::thread rival([&] { second = sp_free(pool.get(), ptr, own); });
    const sp_status first = sp_free(pool.get(), ptr, own);
    rival.join();
    const bool one_won = (first == SP_OK) != (second == SP_OK);
    if (!one_won || (first != SP_OK ? first : second) != SP_ERROR_DOUBLE_FREE) failed->fetch_add(1);
  }
}

}  // namespace

STREAMPOOL_TEST("threads on streams of their own share a pool in production mode") { run_threads(on_own_streams, ""); }

STREAMPOOL_TEST("threads on streams of their own share a pool in debug mode") {
  run_threads(on_own_streams, "mode=debug");
}

// A race is only a race while nobody else gets the address in between: debug mode's quarantine sees to that, as long as
// nobody trims, which gives the quarantine up.
STREAMPOOL_TEST("of two threads that free one block through the C ABI, one is told so") {
  run_threads(racing_for_one_block, "mode=debug:quarantine_bytes=4GiB", false);
}

STREAMPOOL_TEST("blocks outlive the pool, the device and the streams they came from") {
  sp::Block block;
  {
    const sp::Device device("sim:0");
    const sp::Stream stream = device.create_stream();
    const sp::Pool pool(device);
    block = pool.allocate(4096, stream);
    pool.close();
  }
  CHECK(block.data() != nullptr);
}

STREAMPOOL_TEST("a pool handle can be given up while a block is live, which stays valid") {
  const sp::Device device("sim:0");
  const sp::Stream stream = device.create_stream();
  sp_pool* pool = nullptr;
  sp::check(sp_pool_create(device.get(), "device", nullptr, nullptr, &pool));
  void* ptr = nullptr;
  sp::check(sp_alloc(pool, 64, 0, stream, &ptr));
  sp::check(sp_pool_destroy(pool));
  *static_cast<volatile char*>(ptr) = 1;  // simulated device memory is the host's
}

STREAMPOOL_TEST("a function in C++ is told of each fault, and lives as long as the pool's blocks") {
  const sp::Device device("sim:0");
  const sp::Stream stream = device.create_stream();
  std::vector<std::string> told;
  sp::Block left;
  {
    const sp::Pool pool(device, "device", "mode=debug:on_fault=callback");
    pool.on_fault([&told](const sp_fault_t& fault) { told.push_back(fault.kind); });
    sp::Block block = pool.allocate(1000, stream);
    static_cast<char*>(block.data())[1000] = 1;  // simulated device memory is the host's
    CHECK_EQ(pool.check_memory(), 1u);
    CHECK_EQ(told.size(), 1u);
    CHECK_EQ(told.at(0), std::string("overrun"));
    left = pool.allocate(8, stream);
    static_cast<char*>(left.data())[-1] = 1;
    pool.close();
    CHECK_EQ(told.size(), 2u);
    const sp::Pool silent(device, "device", "mode=debug");
    try {
      silent.on_fault([](const sp_fault_t&) {});
      CHECK(false);
    } catch (const sp::Error& error) {
      CHECK(error.status() == SP_ERROR_INVALID_ARGUMENT);
    }
  }
  CHECK_EQ(told.at(1), std::string("underrun"));
}

STREAMPOOL_TEST("a function that threw when it was told of a fault is told of the next one") {
  const sp::Device device("sim:0");
  const sp::Stream stream = device.create_stream();
  sp_pool* pool = nullptr;
  sp::check(sp_pool_create(device.get(), "device", nullptr, "mode=debug:on_fault=callback", &pool));
  int told = 0;
  const sp_fault_function throws = [](sp_pool*, const sp_fault_t*, void* count) {
    ++*static_cast<int*>(count);
    throw std::runtime_error("no room for faults");
  };
  sp::check(sp_set_fault_function(pool, throws, &told));
  for (int i = 1; i <= 2; ++i) {
    void* ptr = nullptr;
    sp::check(sp_alloc(pool, 1000, 0, stream, &ptr));
    static_cast<char*>(ptr)[1000] = 1;  // simulated device memory is the host's
    std::uint64_t faults = 0;
    CHECK(sp_check(pool, 5, &faults) == SP_ERROR_INTERNAL);
    CHECK_EQ(std::string(sp_last_error()), std::string("no room for faults"));
    CHECK_EQ(told, i);
    sp_free(pool, ptr, stream);
  }
  sp::check(sp_pool_destroy(pool));
}

// Threads without Python: inside Python their stacks are native ones.
STREAMPOOL_TEST("threads on streams of their own share a pool in debug mode that keeps native stacks") {
  run_threads(on_own_streams, "mode=debug:native_depth=8");
}
