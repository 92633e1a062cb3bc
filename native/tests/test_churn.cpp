// Streams and threads that come and go: they leave nothing behind, neither in the pool's tables nor in the process.
#include <malloc.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/biased_lock.hpp"
#include "pool_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using namespace streampool::pool;
using testing::PoolScene;
using testing::steady;

// So many streams the pool may know at a time; what it keeps of each, it uses again for others.
constexpr std::uint64_t kMostKnown = 200;
// Where threads make them, more of them may wait for a fence that a busy machine has not come to yet.
constexpr std::uint64_t kThreadsKnown = 5 * kMostKnown;
constexpr std::size_t kThreadsSlack = kThreadsKnown * sizeof(Heap) + 64 * kKiB;
constexpr std::size_t kSlack = kMostKnown * sizeof(Heap) + 64 * kKiB;

// Bytes of the process's heap that are in use. Sanitizers bring a heap of their own, and this says 0.
std::size_t heap_in_use() { return mallinfo2().uordblks; }

sim::Config without_race_check(sim::Scheduler scheduler) {
  sim::Config config;
  config.scheduler = scheduler;
  config.check_races = false;  // its history is bounded, and large
  return config;
}

// One brief stream: allocates, works, lets another stream read, frees, is gone.
void live_briefly(PoolScene& scene, bool lasting, StreamHandle other) {
  const StreamHandle s = lasting ? scene.lasting() : scene.stream();
  const BlockRef small = scene.alloc(4096, s), large = scene.alloc(kMiB, s), none = scene.alloc(0, s);
  CHECK(scene.device->launch({.stream = s, .accesses = {sim::writes(large.address, kMiB)}}));
  scene.record(large, other);
  scene.free(small, s);
  scene.free(large, s);
  scene.core->release(none);
  if (lasting) {
    pool::Failure failure;
    CHECK(scene.core->forget_stream(s, &failure) == Errc::ok);
  }
  CHECK(scene.device->stream_destroy(s));
}

}  // namespace

STREAMPOOL_TEST("four thousand streams that come and go leave no state behind, registered or not") {
  constexpr int kStreams = 4000, kEarly = kStreams / 4;
  for (const bool lasting : {true, false}) {
    PoolScene scene(steady(), without_race_check(sim::Scheduler::seeded));
    const StreamHandle stays = scene.lasting();
    std::size_t early = 0;
    for (int i = 0; i < kStreams; ++i) {
      live_briefly(scene, lasting, stays);
      if (i % 16 == 0) CHECK(sim::settle());
      if (i % 1000 == 999) {
        const Stats stats = scene.core->stats();
        CHECK(stats.streams <= kMostKnown);

        CHECK(stats.reserved <= 64 * kMiB);
        CHECK_EQ(stats.live_blocks, std::uint64_t{0});
        CHECK(scene.device->live_events() <= kMostKnown);
      }
      if (i == kEarly) early = heap_in_use();
    }
    const std::size_t late = heap_in_use();
    if (late > early + kSlack)
      testing::fail(__FILE__, __LINE__,
                    std::to_string(late - early) + " bytes more after " + std::to_string(kStreams) +
                        " streams than after " + std::to_string(kEarly) +
                        (lasting ? ", registered ones" : ", raw ones"));
    CHECK(sim::traps().empty());
    scene.audit();
    CHECK(sim::settle());
    scene.core->close();
    CHECK_EQ(scene.core->stats().reserved, Bytes{0});
    scene.core.reset();
    CHECK_EQ(scene.device->live_events(), std::uint64_t{0});
  }
}

STREAMPOOL_TEST("sixteen thousand threads that come and go strand neither counts nor memory nor a stream's lock") {
  constexpr int kRounds = 4000, kEarly = kRounds / 2, kAtRest = 16;
  constexpr std::size_t kAtOnce = 4, kPairs = 40;
  PoolScene scene(steady(), without_race_check(sim::Scheduler::threads));
  std::array<StreamHandle, kAtOnce> own;
  for (StreamHandle& s : own) s = scene.lasting();
  const StreamHandle shared = scene.lasting();
  std::array<BlockRef, kAtOnce> left{};  // by the thread before, which is gone
  std::array<std::string, kAtOnce> problems;
  std::size_t early = 0;

  const auto live = [&](std::size_t number, int round) {
    // So many that the lock of its stream's heap becomes this thread's own.
    for (std::size_t i = 0; i < kPairs; ++i) {
      BlockRef block;
      scene.take_raw(4096, own[number], &block);
      scene.give_raw(block.address, own[number]);
    }
    // A stream that ends with its thread, and one that all threads use.
    const BlockRef brief = scene.alloc(300 * kKiB, kPerThreadStream);
    CHECK(scene.device->launch({.stream = kPerThreadStream, .accesses = {sim::writes(brief.address, 300 * kKiB)}}));
    scene.free(brief, kPerThreadStream);
    const BlockRef common = scene.alloc(10000, shared);
    scene.core->release(common);
    // One block is left for the next thread in this place.
    if (round > 0) scene.free(left[number], own[number]);
    left[number] = scene.alloc(1000 + number, own[number]);
  };
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::thread> threads;
    for (std::size_t number = 0; number < kAtOnce; ++number)
      threads.emplace_back([&, number] {
        try {
          live(number, round);
        } catch (const std::exception& error) {
          problems[number] = error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::string& problem : problems)
      if (!problem.empty()) testing::fail(__FILE__, __LINE__, problem);
    // A machine with other things to do may leave the device far behind: what its work holds is not stranded.
    if (round % kAtRest == 0) CHECK(scene.device->synchronize());
    if (round % 100 == 99) {
      const Stats stats = scene.core->stats();
      CHECK_EQ(stats.live_blocks, std::uint64_t{kAtOnce});
      CHECK_EQ(stats.in_use, Bytes{4 * 1000 + 0 + 1 + 2 + 3});
      CHECK_EQ(stats.allocations, static_cast<std::uint64_t>(round + 1) * kAtOnce * (kPairs + 3));
      CHECK(stats.streams <= kThreadsKnown);
      CHECK(stats.reserved <= 128 * kMiB);
      CHECK(scene.device->live_events() <= kThreadsKnown);
    }
    if (round == kEarly) early = heap_in_use();
  }
  const std::size_t late = heap_in_use();
  if (late > early + kThreadsSlack)
    testing::fail(__FILE__, __LINE__,
                  std::to_string(late - early) + " bytes more after " + std::to_string(kRounds) +
                      " rounds than after " + std::to_string(kEarly));
  // Whoever comes next has every stream for itself: nobody who is gone is still inside a lock.
  for (std::size_t number = 0; number < kAtOnce; ++number) {
    scene.free(left[number], own[number]);
    for (std::size_t i = 0; i < 64; ++i) scene.free(scene.alloc(4096, own[number]), own[number]);
  }
  CHECK(scene.device->synchronize());
  CHECK_EQ(scene.core->stats().in_use, Bytes{0});
  scene.audit();
  scene.core->close();
  CHECK_EQ(scene.core->stats().reserved, Bytes{0});
}
