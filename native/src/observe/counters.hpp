// Counters of one pool: each thread counts for itself, readers add up. No shared cache line on the fast path.
//
// Peak of in-use bytes: a thread knows its own part at once and the others' parts only as far as they published them,
// which they do every kQuantum bytes. So the peak is exact while one thread uses the pool, and off by at most kQuantum
// x (other threads) while many do.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../base/types.hpp"

namespace streampool::observe {

inline constexpr std::int64_t kQuantum = 1 << 20;

// Written by its thread alone (plain load and store), read by all.
struct alignas(64) ThreadCounters {
  std::atomic<std::int64_t> in_use{0};  // requested bytes of live blocks, this thread's part (may be negative)
  std::atomic<std::int64_t> gross{0};   // whole slots and extents of the same blocks
  std::atomic<std::int64_t> guards{0};
  std::atomic<std::int64_t> unpublished{0};
  std::atomic<std::int64_t> peak{0};
  std::atomic<std::uint64_t> allocations{0};
  std::atomic<std::uint64_t> frees{0};
  std::atomic<std::uint64_t> allocated_bytes{0};
  bool used = false;
};

struct Totals {
  std::int64_t in_use = 0, gross = 0, guards = 0, peak = 0;
  std::uint64_t allocations = 0, frees = 0, allocated_bytes = 0;
};

class CounterBank {
 public:
  // This thread's counters; made on first use, folded into the bank when the thread ends.
  ThreadCounters* join();
  void leave(ThreadCounters* counters);

  void on_allocate(ThreadCounters& c, Bytes size, Bytes gross, Bytes guards) {
    bump(c.allocations, std::uint64_t{1});
    bump(c.allocated_bytes, size);
    bump(c.gross, static_cast<std::int64_t>(gross));
    if (guards != 0) bump(c.guards, static_cast<std::int64_t>(guards));
    move(c, static_cast<std::int64_t>(size));
    const std::int64_t seen =
        published_.load(std::memory_order_relaxed) + c.unpublished.load(std::memory_order_relaxed);
    if (seen > c.peak.load(std::memory_order_relaxed)) c.peak.store(seen, std::memory_order_relaxed);
  }
  void on_free(ThreadCounters& c, Bytes size, Bytes gross, Bytes guards) {
    bump(c.frees, std::uint64_t{1});
    bump(c.gross, -static_cast<std::int64_t>(gross));
    if (guards != 0) bump(c.guards, -static_cast<std::int64_t>(guards));
    move(c, -static_cast<std::int64_t>(size));
  }

  Totals totals() const;
  void reset_peak();

 private:
  template <typename T, typename V>
  static void bump(std::atomic<T>& counter, V by) {
    counter.store(counter.load(std::memory_order_relaxed) + static_cast<T>(by), std::memory_order_relaxed);
  }
  void move(ThreadCounters& c, std::int64_t by) {
    bump(c.in_use, by);
    const std::int64_t mine = c.unpublished.load(std::memory_order_relaxed) + by;
    if (mine >= kQuantum || mine <= -kQuantum) {
      published_.fetch_add(mine, std::memory_order_relaxed);
      c.unpublished.store(0, std::memory_order_relaxed);
    } else {
      c.unpublished.store(mine, std::memory_order_relaxed);
    }
  }

  std::atomic<std::int64_t> published_{0};
  mutable std::mutex mutex_;  // guards the list, not the counters
  std::vector<std::unique_ptr<ThreadCounters>> all_;
  Totals left_;  // of threads that ended
};

}  // namespace streampool::observe
