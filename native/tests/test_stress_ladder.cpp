// Eight threads that go through every rung of the slow path (R11) at once, with trims, statistics, checks and streams
// that come and go beside them. It runs until so many calls were made and every rung was taken: the counters say which
// were not. STREAMPOOL_STRESS_OPERATIONS=N sets the calls, STREAMPOOL_TEST_SEED the seed (docs/developing.md).
#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "stress.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using namespace streampool::pool;
using testing::kThreads;
using testing::Live;
using testing::Stress;
using testing::Worker;

constexpr std::uint64_t kFewOperations = 200000;
constexpr Bytes kLimit = 24 * kMiB;  // of each pool
constexpr Bytes kHandle = 2 * kMiB;  // what the simulated device maps at once
constexpr std::size_t kMostHostages = 6;

Options ladder_options(OptionMap more) {
  more["limit"] = std::to_string(kLimit);
  more["wait_timeout"] = "0.01";
  more["fence_age"] = "0";
  Options options;
  std::string error;
  if (!to_options(more, &options, &error)) testing::fail(__FILE__, __LINE__, error);
  return options;
}

// Pools that have the rungs between them: mapped memory, memory in pieces, a quarantine, memory of the host, and a
// tight one, where nobody leaves so much idle that growth alone would find it.
struct Ladder : Stress {
  enum Which : std::size_t { mapped, pieces, debugged, host, tight, count };

  std::uint64_t wanted = testing::chosen("STREAMPOOL_STRESS_OPERATIONS", kFewOperations);
  std::atomic<std::uint64_t> collections{0}, callbacks{0}, streams_seen{0};
  std::array<Stats, count> last;

  Ladder() : Stress(ladder_options({{"segments", "vmm"}})) {
    pools.push_back(make(ladder_options({{"segments", "malloc"}}), Kind::device, "pieces"));
    pools.push_back(
        make(ladder_options(
                 {{"mode", "debug"}, {"stack_depth", "0"}, {"quarantine_bytes", "12MiB"}, {"fill_edge_bytes", "1024"}}),
             Kind::device, "debugged"));
    pools.push_back(make(ladder_options({}), Kind::pinned, "host"));
    pools.push_back(make(ladder_options({{"segments", "vmm"}}), Kind::device, "tight"));
    apart = 1;
    for (const auto& pool : pools) {
      pool::Failure failure;
      for (const StreamHandle s : shared)
        if (pool != core) CHECK(pool->register_stream(s, &failure) == Errc::ok);
      pool->hooks().collect_garbage = [this] { collections.fetch_add(1); };
      pool->hooks().out_of_memory = [this, p = pool.get()](Bytes) { return let_one_go(p); };
    }
  }

  // What the callback frees: on the stream of the call that ran out of memory, which finds it there.
  bool let_one_go(const Core* of) {
    Live hostage;
    {
      std::lock_guard lock(mutex);
      const auto one =
          std::find_if(hostages.begin(), hostages.end(), [&](const Live& h) { return h.pool.get() == of; });
      if (one == hostages.end()) return false;
      hostage = std::move(*one);
      hostages.erase(one);
    }
    callbacks.fetch_add(1);
    pool::Failure failure;
    FreeRequest request;
    request.stream = Worker::asking;
    if (hostage.pool->free(hostage.block, request, &failure) != Errc::ok) failed(failure.text);
    return true;
  }

  // -- what a worker does besides

  // Calls in a row on its own stream, with no work between them: the fast path beside all the rest.
  void burst(Worker& w) {
    const auto& pool = pools[w.below(2)];
    AllocRequest request;
    request.stream = Worker::asking = w.own;
    request.raw = true;
    FreeRequest by;
    by.stream = w.own;
    constexpr int kPairs = 400;
    for (int i = 0; i < kPairs; ++i) {
      request.size = 1 + w.below(30000);
      BlockRef block;
      pool::Failure failure;
      if (!pool->try_allocate(request, &block)) {
        const Errc errc = pool->allocate(request, &block, &failure);
        if (errc == Errc::out_of_memory) return void(refusals.fetch_add(1));
        if (errc != Errc::ok) testing::fail(__FILE__, __LINE__, failure.text);
      }
      if (!pool->try_free(block.address, by) && pool->free(block.address, by, &failure) != Errc::ok)
        testing::fail(__FILE__, __LINE__, failure.text);
    }
    operations.fetch_add(2 * kPairs, std::memory_order_relaxed);
  }
  // A large block on the raw stream goes while its work is held back: its free is fenced in the call, so another stream
  // may be made to wait for it.
  void leave_pending(Worker& w) {
    Live block;
    block.pool = pools[w.below(tight)];
    if (!w.get(kMiB + w.below(3 * kMiB), w.raw, &block)) return;
    launch(w.raw, block.stamp, true, w.shut_gate());
    w.give(block, w.raw);
  }
  // More than is free in one piece.
  void ask_for_much(Worker& w) {
    Live block;
    block.pool = pools[w.below(tight)];
    if (!w.get(2 * kMiB + w.below(8 * kMiB), w.own, &block)) return;
    launch(w.own, block.stamp, true);
    w.free(std::move(block), w.own);
  }
  void take_hostage(Worker& w) {
    Live block;
    block.pool = pools[w.below(tight)];
    if (!w.get(kMiB + w.below(2 * kMiB), w.own, &block)) return;
    std::unique_lock lock(mutex);
    if (hostages.size() < kMostHostages) return hostages.push_back(std::move(block));
    lock.unlock();
    w.give(block, w.own);
  }
  // A pool full of blocks of a handle each, two of which go: memory for one of two handles is there, in two places.
  void leave_holes(Worker& w) {
    const StreamHandle s = registered();
    std::vector<Live> blocks;
    Live block;
    block.pool = pools[tight];
    while (blocks.size() < kLimit / kHandle && w.get(kHandle, s, &block)) blocks.push_back(block);
    std::sort(blocks.begin(), blocks.end(),
              [](const Live& a, const Live& b) { return a.block.address < b.block.address; });
    for (std::size_t i = 0; i < blocks.size(); ++i)
      if (i == 0 || i == 2) w.give(blocks[i], s);
    if (w.get(2 * kHandle, s, &block)) w.give(block, s);
    for (std::size_t i = 0; i < blocks.size(); ++i)
      if (i != 0 && i != 2) w.give(blocks[i], s);
    forget(s);
  }
  // A registered stream that lives for a few calls.
  void brief_stream(Worker& w) {
    const StreamHandle s = registered();
    Live block;
    block.pool = pools[w.below(tight)];
    if (w.get(w.below(100000), s, &block)) {
      launch(s, block.stamp, true);
      w.free(std::move(block), s);
    }
    forget(s);
    streams_seen.fetch_add(1);
  }
  void do_a_piece(Worker& w) {
    switch (w.below(12)) {
      case 0: return leave_pending(w);
      case 1: return ask_for_much(w);
      case 2: return take_hostage(w);
      case 3: return w.below(3) == 0 ? leave_holes(w) : brief_stream(w);
      default: return burst(w);
    }
  }

  // -- the rungs

  std::uint64_t taken(Which pool, Path path) const { return last[pool].paths[static_cast<std::size_t>(path)]; }
  std::uint64_t taken(Path path) const {
    std::uint64_t sum = 0;
    for (std::size_t pool = 0; pool < count; ++pool) sum += taken(static_cast<Which>(pool), path);
    return sum;
  }
  std::uint64_t sum(std::uint64_t Stats::* counter) const {
    std::uint64_t sum = 0;
    for (const Stats& stats : last) sum += stats.*counter;
    return sum;
  }
  std::vector<std::pair<const char*, std::uint64_t>> rungs() {
    for (std::size_t i = 0; i < last.size(); ++i) last[i] = pools[i]->stats();
    return {
        {"own heap", taken(Path::own)},
        {"memory of nobody", taken(Path::fresh)},
        {"completed frees of other heaps", taken(Path::completed)},
        {"growth", taken(Path::grown)},
        {"idle segments back, and growth again", taken(tight, Path::moved)},
        {"wait edge", std::min(taken(Path::waited), sum(&Stats::wait_edges))},
        {"context event", sum(&Stats::context_events)},
        {"bounded wait on the host", std::min(taken(Path::host_waited), sum(&Stats::host_waits))},
        {"quarantine given up", taken(debugged, Path::quarantine)},
        {"idle pieces freed, and growth again", taken(pieces, Path::moved)},
        {"pieces of the host freed, and growth again", taken(host, Path::moved)},
        {"garbage collection", collections.load()},
        {"out-of-memory callback", std::min(taken(Path::called_back), callbacks.load())},
        {"error", std::min(sum(&Stats::out_of_memory), refusals.load())},
        {"streams that come and go", streams_seen.load()},
    };
  }
};

}  // namespace

STREAMPOOL_TEST("stress: eight threads take every rung of the slow path beside trims, checks and brief streams (R11)") {
  Ladder all;
  all.piece = [&](Worker& w) { all.do_a_piece(w); };
  // Memory fills up and empties again: full pools wait and refuse, empty ones give back and grow.
  constexpr int kBreath = 64;
  all.beside = [&, breath = 0]() mutable {
    all.most_live.store(++breath % kBreath < kBreath / 2 ? testing::kMostLive : 2);
    all.pools[Ladder::debugged]->check(0.001);
  };
  // Far beyond what it takes where it works: what is missing then is named below.
  const auto latest = std::chrono::steady_clock::now() + std::chrono::seconds(60 + all.wanted / 5000);
  all.enough = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (std::chrono::steady_clock::now() > latest) return true;
    if (all.operations.load() < all.wanted) return false;
    for (const auto& [name, times] : all.rungs())
      if (times == 0) return false;
    return true;
  };
  std::printf("stress: seed %llu, %llu operations on %d threads\n", static_cast<unsigned long long>(all.seed),
              static_cast<unsigned long long>(all.wanted), kThreads);
  std::vector<std::pair<const char*, std::uint64_t>> rungs;
  const std::vector<std::shared_ptr<Core>> pools = all.pools;  // stress() lets them go
  testing::stress(all);
  all.pools = pools;
  rungs = all.rungs();
  all.pools.clear();
  std::string missing;
  for (const auto& [name, times] : rungs) {
    std::printf("  %-44s %llu\n", name, static_cast<unsigned long long>(times));
    if (times == 0) missing += std::string(missing.empty() ? "" : ", ") + name;
  }
  std::printf("  %-44s %llu\n", "operations", static_cast<unsigned long long>(all.operations.load()));
  if (!missing.empty()) testing::fail(__FILE__, __LINE__, "not taken, though everything else was: " + missing);
  CHECK(all.operations.load() >= all.wanted);
  CHECK(pools[Ladder::debugged]->take_faults().empty());
}
