// Public bug reports of other allocators that need many rounds or many threads; the names of the tests name them. Most
// reports are tests in Python (tests/test_cases.py, tests/test_cases_memory.py).
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "pool_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using namespace streampool::pool;
using testing::PoolScene;
using testing::seeded;
using testing::steady;

Options with(OptionMap settings) {
  settings.emplace("fence_age", "1e9");
  Options options;
  std::string error;
  if (!to_options(settings, &options, &error)) testing::fail(__FILE__, __LINE__, error);
  return options;
}

struct Random {
  std::uint64_t x = 88172645463325252u;
  std::uint64_t below(std::uint64_t bound) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return (x >> 11) % bound;
  }
};

// Live blocks by address: none shares a byte with another one.
struct Apart {
  std::map<Address, BlockRef> blocks;
  std::map<Address, Bytes> sizes;
  void add(const BlockRef& block, Bytes size) {
    const auto next = sizes.upper_bound(block.address);
    if (next != sizes.end()) CHECK(block.address + size <= next->first);
    if (next != sizes.begin()) CHECK(std::prev(next)->first + std::prev(next)->second <= block.address);
    CHECK(sizes.emplace(block.address, size).second);
    blocks.emplace(block.address, block);
  }
};

}  // namespace

// -- case 20

STREAMPOOL_TEST(
    "NVIDIA/cccl#585, #1232: a hundred thousand blocks that come back in another order than they went keep all whole") {
  // A large free piece serves a smaller request, and what is left of it another; then all comes back in any order.
  constexpr int kRounds = 25000;
  constexpr std::size_t kMostLive = 24;
  for (const char* segments : {"vmm", "malloc"})
    for (const char* guards : {"0", "64"}) {
      PoolScene scene(with({{"segments", segments}, {"guard_bytes", guards}}));
      const std::array streams = {scene.lasting(), scene.lasting(), scene.stream()};
      Random random;
      Apart apart;
      for (int round = 0; round < kRounds; ++round) {
        if (apart.blocks.size() < kMostLive && random.below(2) == 0) {
          const Bytes size = random.below(8) == 0 ? random.below(40000) : random.below(5 * kMiB);
          const BlockRef block = scene.alloc(size, streams[random.below(3)]);
          const auto facts = scene.core->facts(block);
          CHECK(facts && facts->size == size && facts->reserved >= size);  // both are told
          CHECK(facts->begin <= block.address && block.address + size <= facts->begin + facts->reserved);
          apart.add(block, std::max<Bytes>(size, 1));
        } else if (!apart.blocks.empty()) {
          auto any = apart.blocks.begin();
          std::advance(any, static_cast<std::ptrdiff_t>(random.below(apart.blocks.size())));
          scene.free(any->second, streams[random.below(3)]);
          apart.sizes.erase(any->first);
          apart.blocks.erase(any);
        }
        if (round % 4 == 0) scene.audit();
        if (round % 1000 == 0) scene.core->trim(random.below(2) == 0 ? 0 : 32 * kMiB);
      }
      for (const auto& [address, block] : apart.blocks) scene.free(block, streams[0]);
      CHECK(sim::settle());
      scene.core->check(1.0);
      scene.audit();
      CHECK_EQ(scene.core->stats().in_use, Bytes{0});
      CHECK(scene.core->take_faults().empty());
    }
}

// -- case 14

STREAMPOOL_TEST(
    "ros2/rosidl_buffer_backends#9, LLNL/camp#71: events stay few over a hundred thousand declared uses of one block") {
  constexpr int kRounds = 100000;
  constexpr std::uint64_t kFew = 16;
  for (const bool lasting : {true, false}) {
    PoolScene scene;
    const StreamHandle s = scene.lasting(), t = lasting ? scene.lasting() : scene.stream();
    const BlockRef block = scene.alloc(64 * kKiB, s);
    std::uint64_t most = 0;
    for (int round = 0; round < kRounds; ++round) {
      scene.record(block, t);
      if (round % 16 == 0) CHECK(scene.device->launch({.stream = t, .accesses = {sim::reads(block.address, 1)}}));
      if (round % 64 == 0) CHECK(sim::settle());
      most = std::max(most, scene.device->live_events());
    }
    CHECK(most <= kFew);
    scene.free(block, s);
    scene.core->close();
    scene.core.reset();
    CHECK_EQ(scene.device->live_events(), std::uint64_t{0});
    CHECK_EQ(scene.calls(Call::event_create), scene.calls(Call::event_destroy));
  }
}

STREAMPOOL_TEST("LLNL/camp#71: events stay few over many recorded events of one block, and over pairs on two streams") {
  constexpr int kEvents = 20000, kPairs = 100000;
  constexpr std::uint64_t kFew = 32;
  PoolScene scene;
  const StreamHandle s = scene.lasting(), t = scene.lasting(), raw = scene.stream();
  const BlockRef block = scene.alloc(64 * kKiB, s);
  pool::Failure failure;
  std::uint64_t early = 0, most = 0;
  for (int round = 0; round < kEvents; ++round) {
    CHECK(scene.device->launch({.stream = t, .accesses = {sim::reads(block.address, 1)}}));
    const EventHandle event = scene.recorded(t);
    CHECK(scene.core->record_event(block, event, &failure) == Errc::ok);
    CHECK(scene.device->event_destroy(event));
    if (round % 8 == 0) CHECK(sim::settle());
    most = std::max(most, scene.device->live_events());
    if (round == kEvents / 10) early = most;
  }
  CHECK(most <= kFew);
  CHECK(most <= early + 2);  // flat
  scene.free(block, s);

  // Each block is used by both streams, and freed on the one or the other.
  std::uint64_t of_pairs = 0;
  for (int round = 0; round < kPairs; ++round) {
    const StreamHandle here = round % 2 == 0 ? s : raw, there = round % 2 == 0 ? raw : s;
    const BlockRef one = scene.alloc(round % 3 == 0 ? 256 * kKiB : 4 * kKiB, here);
    scene.record(one, there);
    scene.free(one, here);
    if (round % 64 == 0) {
      CHECK(scene.device->launch({.stream = there}));
      CHECK(sim::settle());
    }
    of_pairs = std::max(of_pairs, scene.device->live_events());
  }
  CHECK(of_pairs <= 2 * kFew);
  scene.core->close();
  scene.core.reset();
  CHECK_EQ(scene.device->live_events(), std::uint64_t{0});
  CHECK_EQ(scene.calls(Call::event_create), scene.calls(Call::event_destroy));
}

// -- case 43

STREAMPOOL_TEST("sonots/cumo#185: eight threads that take and free neighbouring pieces leave one free piece behind") {
  // There a lock was let go between taking a piece out and merging it with its neighbours.
  constexpr std::size_t kThreads = 8, kChunks = 8;
  constexpr int kRounds = 400;
  constexpr Bytes kChunk = kMiB, kAll = 2 * kThreads * kChunks * kChunk;
  for (const char* segments : {"vmm", "malloc"})
    for (const bool one_stream : {false, true}) {
      const std::string all = std::to_string(kAll);
      PoolScene scene(with({{"segments", segments}, {"initial", all}, {"limit", all}}),
                      sim::Config{.scheduler = sim::Scheduler::threads});
      const std::uint64_t extents = scene.core->stats().extents;
      CHECK_EQ(scene.core->stats().largest_free, kAll);
      const StreamHandle shared = scene.lasting();
      std::mutex mutex;
      std::string problem;
      std::vector<std::thread> threads;
      for (std::size_t number = 0; number < kThreads; ++number) {
        const StreamHandle s = one_stream ? shared : scene.lasting();
        threads.emplace_back([&, s, number] {
          try {
            Random random{.x = 88172645463325252u + number};
            for (int round = 0; round < kRounds; ++round) {
              std::array<BlockRef, kChunks> chunks;
              for (BlockRef& chunk : chunks) chunk = scene.alloc(128 * kKiB + random.below(kChunk - 128 * kKiB), s);
              for (std::size_t left = kChunks; left > 0; --left) {
                const std::size_t at = random.below(left);
                scene.free(chunks[at], s);
                std::swap(chunks[at], chunks[left - 1]);
              }
            }
          } catch (const std::exception& error) {
            const std::lock_guard lock(mutex);
            problem = error.what();
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      if (!problem.empty()) testing::fail(__FILE__, __LINE__, problem);
      CHECK(scene.device->synchronize());
      CHECK_EQ(scene.core->trim(kAll).released, Bytes{0});  // takes in what is complete, and gives nothing back
      scene.audit();
      CHECK_EQ(scene.core->stats().largest_free, kAll);
      CHECK_EQ(scene.core->stats().extents, extents);
      scene.free(scene.alloc(kAll, shared), shared);  // in one piece, without the driver
      CHECK_EQ(scene.path(Path::grown) + scene.path(Path::moved), std::uint64_t{0});
    }
}
