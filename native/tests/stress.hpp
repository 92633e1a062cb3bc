// Threads on one pool or several, on streams of their own, shared, raw and default ones, with work that writes and
// verifies stamps in the blocks while the pools hand them out, take them back and pass them on.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pool_scene.hpp"
#include "test.hpp"

namespace streampool::testing {

using namespace streampool::pool;

inline constexpr int kThreads = 8;
inline constexpr std::size_t kMostLive = 24;     // of each thread
inline constexpr std::size_t kMostLetters = 48;  // of all: what is in no thread's hands

inline std::uint64_t chosen(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}
inline std::chrono::duration<double> chosen_time() {
  const char* text = std::getenv("STREAMPOOL_STRESS_SECONDS");
  return std::chrono::duration<double>(text == nullptr ? 0.6 : std::atof(text));
}

// What a block must hold, from the work that stamps it to the free: its number at both ends.
struct Stamp {
  Address at = 0;
  Bytes size = 0;
  std::uint64_t number = 0;

  bool has_room() const { return size >= 2 * sizeof number; }
  void write() const {
    std::memcpy(reinterpret_cast<void*>(at), &number, sizeof number);
    std::memcpy(reinterpret_cast<void*>(at + size - sizeof number), &number, sizeof number);
  }
  bool holds() const {
    std::uint64_t low = 0, high = 0;
    std::memcpy(&low, reinterpret_cast<const void*>(at), sizeof low);
    std::memcpy(&high, reinterpret_cast<const void*>(at + size - sizeof high), sizeof high);
    return low == number && high == number;
  }
};

struct Live {
  std::shared_ptr<Core> pool;
  BlockRef block;
  Stamp stamp;
  StreamHandle home = 0;
  EventHandle event = 0;  // in the letter box: covers all use so far
};

struct Worker;

struct Stress : PoolScene {
  std::vector<std::shared_ptr<Core>> pools;
  std::size_t apart = 0;  // so many of the pools, the last ones, are left alone by the workers' ordinary steps
  std::vector<StreamHandle> shared;
  std::function<void()> beside;        // done again and again while the threads run
  std::function<void(Worker&)> piece;  // what a worker does besides, every 16th step
  std::function<bool()> enough;        // ends the run; none: it ends after the chosen time
  std::uint64_t seed = chosen("STREAMPOOL_TEST_SEED", 1);
  std::atomic<std::size_t> most_live{kMostLive};
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> numbers{0}, corrupt{0}, pairs{0}, refusals{0};
  std::atomic<std::uint64_t> operations{0};  // calls of a pool
  std::mutex mutex;                          // guards what follows
  std::vector<Live> letters;
  std::vector<Live> hostages;  // never used by any work: anybody may free them on any stream
  std::vector<std::shared_ptr<sim::Gate>> gates;
  std::string error;

  explicit Stress(const Options& options) : PoolScene(options, sim::Config{}) {
    pools.push_back(core);
    for (int i = 0; i < 2; ++i) shared.push_back(registered());
  }
  StreamHandle registered() {
    const StreamHandle s = stream();
    pool::Failure failure;
    for (const auto& pool : pools) CHECK(pool->register_stream(s, &failure) == Errc::ok);
    return s;
  }
  void forget(StreamHandle s) {
    pool::Failure failure;
    for (const auto& pool : pools) CHECK(pool->forget_stream(s, &failure) == Errc::ok);
    CHECK(device->stream_destroy(s));
  }
  void failed(const std::string& what) {
    std::lock_guard lock(mutex);
    if (error.empty()) error = what;
    stop = true;
  }
  void launch(StreamHandle s, const Stamp& stamp, bool write, std::shared_ptr<sim::Gate> gate = {}) {
    if (!stamp.has_room()) return;
    sim::Work work;
    work.stream = s;
    work.gate = std::move(gate);
    work.label = "block " + std::to_string(stamp.number);
    const Bytes word = sizeof stamp.number;
    work.accesses = {{stamp.at, word, write}, {stamp.at + stamp.size - word, word, write}};
    work.body = [this, stamp, write] {
      if (write)
        stamp.write();
      else if (!stamp.holds())
        corrupt.fetch_add(1);
    };
    CHECK(device->launch(std::move(work)));
  }
  EventHandle covers(StreamHandle s) { return recorded(s); }
  void wait(StreamHandle s, EventHandle event) {
    CHECK(device->stream_wait_event(s, event));
    CHECK(device->event_destroy(event));
  }
};

// One thread's program.
struct Worker {
  Stress& all;
  std::uint64_t x;
  StreamHandle own;
  StreamHandle raw = 0;
  std::vector<Live> live;
  // The stream that this thread's call names: what an out-of-memory callback frees, it frees there.
  static inline thread_local StreamHandle asking = kLegacyStream;

  Worker(Stress& stress, int number)
      : all(stress),
        x(88172645463325252u + (stress.seed * kThreads + static_cast<std::uint64_t>(number)) * 2654435761u),
        own(stress.registered()),
        raw(stress.stream()) {}

  std::uint64_t below(std::uint64_t bound) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return (x >> 11) % bound;
  }
  StreamHandle some_stream() {
    switch (below(6)) {
      case 0: return all.shared[below(all.shared.size())];
      case 1: return raw;
      case 2: return below(8) == 0 ? kLegacyStream : kPerThreadStream;
      default: return own;
    }
  }
  Live take(std::size_t at) {
    Live block = std::move(live[at]);
    live[at] = std::move(live.back());
    live.pop_back();
    return block;
  }

  // False: a limit refused it.
  bool get(Bytes size, StreamHandle home, Live* block) {
    AllocRequest request;
    request.size = size;
    request.stream = block->home = asking = home;
    all.operations.fetch_add(1, std::memory_order_relaxed);
    pool::Failure failure;
    if (!block->pool->try_allocate(request, &block->block)) {
      const Errc errc = block->pool->allocate(request, &block->block, &failure);
      if (errc == Errc::out_of_memory && block->pool->options().limit != 0) {
        all.refusals.fetch_add(1);
        return false;
      }
      if (errc != Errc::ok) fail(__FILE__, __LINE__, failure.text);
    }
    block->stamp = {block->block.address, size, all.numbers.fetch_add(1) + 1};
    return true;
  }
  std::shared_ptr<sim::Gate> shut_gate() {
    auto gate = std::make_shared<sim::Gate>();
    std::lock_guard lock(all.mutex);
    all.gates.push_back(gate);
    return gate;
  }
  void allocate() {
    Live block;
    block.pool = all.pools[below(all.pools.size() - all.apart)];
    const std::uint64_t kind = below(16);
    if (!get(kind == 0 ? below(3 * kMiB) : kind == 1 ? 0 : kind == 2 ? 4096 : below(40000), some_stream(), &block))
      return;
    const std::shared_ptr<sim::Gate> gate = below(64) == 0 ? shut_gate() : nullptr;
    if (host_visible(block.pool->kind()) && block.stamp.has_room()) block.stamp.write();  // the host, at once
    all.launch(block.home, block.stamp, true, gate);
    live.push_back(std::move(block));
  }
  void read_elsewhere() {
    if (live.empty()) return;
    Live& block = live[below(live.size())];
    const StreamHandle other = some_stream();
    all.wait(other, all.covers(block.home));
    pool::Failure failure;
    all.operations.fetch_add(1, std::memory_order_relaxed);
    if (block.pool->record_stream(block.block.address, other, &failure) != Errc::ok)
      fail(__FILE__, __LINE__, failure.text);
    all.launch(other, block.stamp, false);
  }
  void free(Live block, StreamHandle by) {
    all.launch(by, block.stamp, false);
    give(block, by);
  }
  void give(const Live& block, StreamHandle by) {
    FreeRequest request;
    all.operations.fetch_add(1, std::memory_order_relaxed);
    request.stream = by;
    pool::Failure failure;
    const Errc errc = below(2) == 0 ? block.pool->free(block.block, request, &failure)
                                    : (block.pool->try_free(block.block.address, request)
                                           ? Errc::ok
                                           : block.pool->free(block.block.address, request, &failure));
    if (errc != Errc::ok) fail(__FILE__, __LINE__, failure.text);
    all.pairs.fetch_add(1);
  }
  void release_one() {
    if (live.empty()) return;
    Live block = take(below(live.size()));
    switch (below(8)) {
      case 0:
        all.launch(block.home, block.stamp, false);
        all.operations.fetch_add(1, std::memory_order_relaxed);
        block.pool->release(block.block);
        all.pairs.fetch_add(1);
        return;
      case 1:  // somebody else frees it
      case 2: {
        block.event = all.covers(block.home);
        std::unique_lock lock(all.mutex);
        all.letters.push_back(std::move(block));
        if (all.letters.size() <= kMostLetters) return;
        lock.unlock();
        return open_letter();
      }
      case 3: {
        const StreamHandle by = some_stream();
        all.wait(by, all.covers(block.home));
        return free(std::move(block), by);
      }
      default: {
        const StreamHandle by = block.home;
        return free(std::move(block), by);
      }
    }
  }
  void open_letter() {
    Live block;
    {
      std::lock_guard lock(all.mutex);
      if (all.letters.empty()) return;
      block = std::move(all.letters.back());
      all.letters.pop_back();
    }
    const StreamHandle by = some_stream();
    all.wait(by, block.event);
    free(std::move(block), by);
  }
  // The raw stream ends and another one takes its place, its handle often too.
  void change_stream() {
    for (std::size_t i = 0; i < live.size();)
      if (live[i].home == raw) {
        Live block = take(i);
        block.pool->release(block.block);
      } else {
        ++i;
      }
    CHECK(all.device->stream_destroy(raw));
    raw = all.stream();
  }

  void run() try {
    for (int step = 0; !all.stop.load(std::memory_order_relaxed); ++step) {
      if (all.piece && step % 16 == 0) all.piece(*this);
      const std::uint64_t what = below(64);
      if (what < 30 && live.size() < all.most_live.load(std::memory_order_relaxed))
        allocate();
      else if (what < 36)
        read_elsewhere();
      else if (what < 58)
        release_one();
      else if (what < 62)
        open_letter();
      else if (what < 63)
        change_stream();
      else
        CHECK(all.device->stream_synchronize(own));  // no program queues without end
    }
  } catch (const std::exception& problem) {
    all.failed(problem.what());
  }
  void end() {
    while (!live.empty()) {
      Live block = take(live.size() - 1);
      free(std::move(block), own);
    }
    all.forget(own);
    CHECK(all.device->stream_destroy(raw));
  }
};

inline void stress(Stress& all) {
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < kThreads; ++i) workers.push_back(std::make_unique<Worker>(all, i));
  std::vector<std::thread> threads;
  for (const auto& worker : workers) threads.emplace_back([&worker] { worker->run(); });
  // Gates open a little later than they were shut, as long as anybody may wait for one.
  std::atomic<bool> joined{false};
  std::thread opener([&] {
    while (!joined.load()) {
      std::vector<std::shared_ptr<sim::Gate>> open;
      {
        std::lock_guard lock(all.mutex);
        open.swap(all.gates);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(500));
      for (const auto& gate : open) gate->open();
    }
  });
  // Beside them: statistics, trims, a look at what is live.
  threads.emplace_back([&all] {
    for (int i = 0; !all.stop.load(); ++i)
      for (const auto& pool : all.pools) {
        const Stats stats = pool->stats();
        if (stats.reserved > stats.reserved_peak) all.failed("reserved is above its peak");
        if (stats.in_use > stats.in_use_peak) all.failed("in_use is above its peak");
        if (stats.limit != 0 && stats.reserved_peak > stats.limit) all.failed("reserved went above the limit");
        if (all.beside) all.beside();
        if (i % 4 == 0) pool->trim(i % 8 == 0 ? 0 : 32 * kMiB);
        all.operations.fetch_add(i % 4 == 0 ? 2 : 1, std::memory_order_relaxed);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
  });
  const auto until = std::chrono::steady_clock::now() + chosen_time();
  while (!all.stop.load() && (all.enough ? !all.enough() : std::chrono::steady_clock::now() < until))
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  all.stop = true;
  for (std::thread& thread : threads) thread.join();
  joined = true;
  opener.join();
  for (const auto& gate : all.gates) gate->open();
  if (!all.error.empty())
    fail(__FILE__, __LINE__, all.error + " (STREAMPOOL_TEST_SEED=" + std::to_string(all.seed) + ")");

  CHECK(all.device->synchronize());
  while (!all.letters.empty()) workers[0]->open_letter();
  for (const Live& hostage : all.hostages) workers[0]->give(hostage, workers[0]->own);
  all.hostages.clear();
  for (const auto& worker : workers) {
    for (Live& block : worker->live)
      if (block.home == kPerThreadStream)
        block.home = worker->own;  // the thread is gone, and its default stream with it
    worker->end();
  }
  for (const StreamHandle s : all.shared) all.forget(s);
  CHECK(sim::settle());
  CHECK_EQ(all.corrupt.load(), std::uint64_t{0});
  const std::vector<sim::Race> races = sim::races();
  if (!races.empty()) {
    const sim::Race& race = races.front();
    const auto side = [](const sim::RaceSide& r) {
      return r.label + " on " + r.stream_name + (r.write ? " writes" : " reads");
    };
    fail(__FILE__, __LINE__,
         std::to_string(races.size()) + " races, the first at " + hex(race.address) + ": " + side(race.first) + ", " +
             side(race.second));
  }
  const std::vector<std::string> traps = sim::traps();
  if (!traps.empty()) fail(__FILE__, __LINE__, traps.front());
  CHECK_EQ(all.device->fault_text(), std::string());
  CHECK(all.pairs.load() > 100);
  for (const auto& pool : all.pools) {
    CHECK_EQ(pool->audit(), std::string());
    CHECK_EQ(pool->stats().live_blocks, std::uint64_t{0});
    CHECK_EQ(pool->stats().in_use, Bytes{0});
    // Each close waits for the options' wait_timeout, which a busy machine may use up.
    const auto latest = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    do pool->close();
    while (pool->stats().reserved != 0 && std::chrono::steady_clock::now() < latest);
    CHECK_EQ(pool->stats().reserved, Bytes{0});
  }
  CHECK_EQ(all.device->used_memory(), Bytes{0});
  all.pools.clear();
  all.core.reset();
  all.beside = nullptr;
  CHECK_EQ(all.device->live_events(), std::uint64_t{0});
  CHECK_EQ(all.device->live_streams(), std::uint64_t{0});
}

}  // namespace streampool::testing
