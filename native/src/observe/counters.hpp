// Counters of one pool: each thread counts for itself, readers add up. No shared cache line on the fast path.
//
// Bytes in use: what a thread adds and takes away stays with it (`net`) until it comes to a quantum, then it is
// published for all. Peak: a thread compares its own sum with a ceiling, beyond which the peak it knows is passed, and
// looks at what the others published only then. So the peak is exact while one thread uses the pool, and off by at most
// kQuantum x threads while many do.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../base/histogram.hpp"
#include "../base/types.hpp"
#include "size_histogram.hpp"

namespace streampool::observe {

inline constexpr std::int64_t kQuantum = 4 << 20;  // larger than the blocks of the fast path

// Written by its thread alone (plain load and store), read by all; the peaks and `ceiling` are written by reset_peak()
// and end_window() too. `recent` is the peak of the window under way, and never above `peak`.
struct alignas(128) ThreadCounters {
  std::atomic<std::uint64_t> allocations{0};
  std::atomic<std::uint64_t> frees{0};
  std::atomic<std::uint64_t> allocated_bytes{0};
  std::atomic<std::int64_t> gross{0};    // whole slots and extents of live blocks, this thread's part; may be negative
  std::atomic<std::int64_t> net{0};      // requested bytes of live blocks, as far as not published
  std::atomic<std::int64_t> ceiling{0};  // `net` up to here sets no new peak and needs no publishing
  std::atomic<std::int64_t> peak{0};
  std::atomic<std::int64_t> recent{0};
  std::atomic<std::int64_t> guards{0};
  std::atomic<std::uint64_t> lookups{0};
  std::array<std::atomic<std::uint64_t>, kSizeBuckets> sizes{};  // in 1/kCountUnit
  std::atomic<std::uint64_t> sized_bytes{0};
  bool used = false;
};

struct Totals {
  std::int64_t in_use = 0, gross = 0, guards = 0, peak = 0;
  std::int64_t recent = 0;  // the peak since the last end_window()
  std::uint64_t allocations = 0, frees = 0, allocated_bytes = 0, lookups = 0;
  Bins<kSizeBuckets> sizes;
};

class CounterBank {
 public:
  // This thread's counters; made on first use, folded into the bank when the thread ends.
  ThreadCounters* join();
  void leave(ThreadCounters* counters);

  // Count a block of this thread's. True: raise() is due now.
  static bool on_allocate(ThreadCounters& c, Bytes size, Bytes gross, Bytes guards) {
    bump(c.allocations, std::uint64_t{1});
    bump(c.allocated_bytes, size);
    bump(c.gross, static_cast<std::int64_t>(gross));
    if (guards != 0) bump(c.guards, static_cast<std::int64_t>(guards));
    return bump(c.net, static_cast<std::int64_t>(size)) > c.ceiling.load(std::memory_order_relaxed);
  }
  static bool on_free(ThreadCounters& c, Bytes size, Bytes gross, Bytes guards) {
    bump(c.frees, std::uint64_t{1});
    bump(c.gross, -static_cast<std::int64_t>(gross));
    if (guards != 0) bump(c.guards, -static_cast<std::int64_t>(guards));
    return bump(c.net, -static_cast<std::int64_t>(size)) < -kQuantum;
  }

  // A request of `size` bytes that stands for `bytes` (size_histogram.hpp).
  static void on_size(ThreadCounters& c, Bytes size, Bytes bytes) {
    bump(c.sizes[size_bucket(size)], size != 0 ? (bytes * kCountUnit + size / 2) / size : kCountUnit);
    bump(c.sized_bytes, bytes);
  }

  // A stream's identity was asked for.
  static void on_lookup(ThreadCounters& c) { bump(c.lookups, std::uint64_t{1}); }

  // Publishes a quantum, notes a peak, sets the ceiling anew.
  void raise(ThreadCounters& c);

  Totals totals() const;
  void reset_peak();
  // Gives the peak of the window that ends here; from here on `recent` begins anew.
  std::int64_t end_window();

 private:
  template <typename T, typename V>
  static T bump(std::atomic<T>& counter, V by) {
    const T now = counter.load(std::memory_order_relaxed) + static_cast<T>(by);
    counter.store(now, std::memory_order_relaxed);
    return now;
  }
  std::atomic<std::int64_t> published_{0};
  mutable std::mutex mutex_;  // guards the list, not the counters
  std::vector<std::unique_ptr<ThreadCounters>> all_;
  Totals left_;  // of threads that ended
};

}  // namespace streampool::observe
