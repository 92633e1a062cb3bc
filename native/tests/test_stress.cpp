// Threads on one pool, on streams of their own and on shared ones, with work that writes and verifies stamps in the
// blocks while the pool hands them out, back and on. STREAMPOOL_STRESS_SECONDS=N runs each part for so long (0.6 by
// default). What this file is for: ThreadSanitizer, AddressSanitizer, and races that the simulated device sees.
// test_stress_ladder.cpp goes through the slow path.
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include "base/spin_wait.hpp"
#include "stress.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using namespace streampool::pool;
using testing::chosen_time;
using testing::PoolScene;
using testing::Stress;
using testing::stress;

STREAMPOOL_TEST("stress: eight threads on own, shared, raw and default streams corrupt nothing and lose nothing") {
  Stress all{Options{}};
  stress(all);
}

STREAMPOOL_TEST(
    "stress: the same under a limit, where threads wait, reuse across streams, grow and give back beside each other") {
  Options options;
  options.limit = 24 * kMiB;
  options.wait_timeout = 0.02;
  Stress all(options);
  stress(all);
}

STREAMPOOL_TEST("stress: the same from the driver's own pool, whose pieces come and go beside each other") {
  Options options;
  options.segments = SegmentSource::driver;
  options.limit = 64 * kMiB;
  options.wait_timeout = 0.02;
  Stress all(options);
  stress(all);
}

STREAMPOOL_TEST("stress: the same on two pools at once, one of them of memory that the host writes immediately") {
  Options options;
  options.limit = 64 * kMiB;
  options.wait_timeout = 0.02;
  Stress all(Options{});
  all.pools.push_back(all.make(options, Kind::pinned, "host"));
  for (const StreamHandle s : all.shared) {
    pool::Failure failure;
    CHECK(all.pools[1]->register_stream(s, &failure) == Errc::ok);
  }
  stress(all);
}

STREAMPOOL_TEST("stress: the same in debug mode, with guards, fills, a quarantine and checks beside") {
  Options options;
  options.debug.track = true;
  options.debug.guard_bytes = 256;
  options.debug.fill = true;
  options.debug.quarantine_bytes = 4 * kMiB;
  Stress all(options);
  const std::shared_ptr<Core> core = all.core;
  all.beside = [&] { core->check(0.01); };
  stress(all);
  CHECK(core->take_faults().empty());
}

STREAMPOOL_TEST("stress: the same with somebody who lists the live blocks all the time") {
  Stress all{Options{}};
  const std::shared_ptr<Core> core = all.core;
  all.beside = [&] {
    for (const debug::BlockFacts& facts : core->live_blocks()) CHECK(facts.address != 0);
  };
  stress(all);
}

}  // namespace

STREAMPOOL_TEST("two threads that free one block at the same time: one does, the other is told (R8)") {
  // One of them by the fast path, whose heap it has made its own.
  PoolScene scene(testing::steady(), sim::Config{.scheduler = sim::Scheduler::threads});
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  constexpr int kRounds = 3000;
  std::atomic<int> turn{0}, done{0};
  std::atomic<Address> block{0};
  std::atomic<int> freed{0}, refused{0};
  const auto try_free = [&](StreamHandle by) {
    pool::Failure failure;
    pool::FreeRequest request;
    request.stream = by;
    const Errc errc =
        scene.core->try_free(block.load(), request) ? Errc::ok : scene.core->free(block.load(), request, &failure);
    if (errc == Errc::ok)
      freed.fetch_add(1);
    else if (errc == Errc::double_free)
      refused.fetch_add(1);
  };
  std::thread other([&] {
    for (int i = 1; i <= kRounds; ++i) {
      while (turn.load() < i) std::this_thread::yield();
      try_free(i % 2 ? s : t);
      done.store(i);
    }
  });
  for (int i = 1; i <= kRounds; ++i) {
    AllocRequest request;
    request.size = 4096;
    request.stream = s;
    request.raw = true;
    BlockRef ref;
    pool::Failure failure;
    for (int warm = 0; warm < 40; ++warm) {
      CHECK(scene.core->allocate(request, &ref, &failure) == Errc::ok);
      pool::FreeRequest by;
      by.stream = s;
      if (!scene.core->try_free(ref.address, by)) CHECK(scene.core->free(ref, by, &failure) == Errc::ok);
    }
    CHECK(scene.core->allocate(request, &ref, &failure) == Errc::ok);
    block.store(ref.address);
    turn.store(i);
    try_free(s);
    while (done.load() < i) std::this_thread::yield();
  }
  other.join();
  CHECK_EQ(freed.load(), kRounds);
  CHECK_EQ(refused.load(), kRounds);
  scene.audit();
}

STREAMPOOL_TEST("a use that is declared while its block is freed leaves nothing for the memory's next owner") {
  // A review's finding: the next owner's declared streams were forgotten, and its memory reused under them.
  PoolScene scene(testing::steady(), sim::Config{.scheduler = sim::Scheduler::threads});
  const StreamHandle s = scene.lasting(), t = scene.lasting(), u = scene.lasting();
  AllocRequest request;
  request.size = 4096;
  request.stream = s;
  request.raw = true;
  pool::FreeRequest by;
  by.stream = s;
  pool::Failure failure;
  const auto take = [&] {
    BlockRef block;
    if (!scene.core->try_allocate(request, &block)) CHECK(scene.core->allocate(request, &block, &failure) == Errc::ok);
    return block;
  };
  const auto give = [&](const BlockRef& block) {
    if (!scene.core->try_free(block, by)) CHECK(scene.core->free(block, by, &failure) == Errc::ok);
  };
  SpinLock lock;  // of `shared`, which may be stale when it is used
  BlockRef shared = take();
  give(shared);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop.load()) {
      lock.lock();
      const BlockRef block = shared;
      lock.unlock();
      pool::Failure ignored;
      scene.core->record_stream(block, t, &ignored);
    }
  });
  const auto end = std::chrono::steady_clock::now() + chosen_time();
  for (int round = 0; std::chrono::steady_clock::now() < end; ++round) {
    const BlockRef block = take();
    lock.lock();
    shared = block;
    lock.unlock();
    SpinWait wait;
    for (int pause = 0; pause < round % 40; ++pause) wait();
    give(block);
  }
  stop.store(true);
  other.join();
  // The heap is this thread's alone again, and its frees are fast ones.
  bool fast = !BiasedLock::prepare();
  for (int i = 0; i < 1 << 18 && !fast; ++i) {
    const BlockRef block = take();
    fast = scene.core->try_free(block, by);
    if (!fast) give(block);
  }
  CHECK(fast);
  for (int i = 0; i < 64; ++i) {
    const BlockRef block = take();
    CHECK(block.record->extra == nullptr);
    CHECK(scene.core->record_stream(block, u, &failure) == Errc::ok);
    give(block);
    BlockRef next;
    if (!scene.core->try_allocate(request, &next)) continue;  // nothing free: the next one looks for what is complete
    CHECK(next.address != block.address);
    give(next);
  }
  scene.audit();
}
