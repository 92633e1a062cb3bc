// Which blocks get pages of their own, between unmapped ones, and on which side of them they lie. Pure bookkeeping:
// the pages themselves are the pool's to map and to revoke. Thread-safe. Imports base/, fault and options.
//
//   unmapped page | .... slack .... | body |  unmapped page      right: a byte behind the end faults
//   unmapped page | body | .... slack .... |  unmapped page      left: a byte before the start faults
//
// Slack is watched like a guard, close to the body.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fault.hpp"
#include "options.hpp"

namespace streampool::debug {

// A frame of a resolved stack.
struct SourceFrame {
  std::string file;
  int line = 0;
  std::string function;
};
using ResolveStack = std::function<std::vector<SourceFrame>(StackId)>;

struct PageGuardTotals {
  std::uint64_t guarded = 0;   // blocks that got pages of their own
  std::uint64_t live = 0;      // of them not revoked yet
  Bytes bytes = 0;             // behind them
  std::uint64_t over_cap = 0;  // that should have got some, and did not: the cap was reached,
  std::uint64_t refused = 0;   // the limit or the driver refused them,
  std::uint64_t covered = 0;   // or their call site had its share when little room was left (sampled only)
};

class PageGuards {
 public:
  // `salt` tells pools of one process apart that have the same seed.
  PageGuards(const PageGuardOptions& options, std::uint64_t salt);

  // The seed that sides and samples are drawn with; chosen once a process where none was given.
  static std::uint64_t seed_of(const PageGuardOptions& options);

  // Whether a block of `size` bytes, which takes `pages` bytes, is to have pages of its own; then they count as taken
  // until `release`. Stacks are resolved only where sites are chosen by name, and called with nothing locked.
  bool take(Bytes size, Bytes pages, StackId stack, std::string_view tag, const ResolveStack& resolve);
  void release(Bytes pages, StackId stack);
  void refused(Bytes pages, StackId stack);  // taken, but could not be had
  PageGuard draw_side();
  PageGuardTotals totals() const;
  Bytes bytes() const { return bytes_.load(std::memory_order_relaxed); }  // of the totals, without a lock

  // Where a body goes in pages that begin at `begin`.
  static Address place(PageGuard side, Address begin, Bytes pages, Bytes size, Bytes alignment);

 private:
  bool site_fits(StackId stack, std::string_view tag, const ResolveStack& resolve);

  const PageGuardOptions options_;
  mutable std::mutex mutex_;
  std::mt19937_64 random_;
  double until_sample_ = 0;
  PageGuardTotals totals_;
  std::atomic<Bytes> bytes_{0};                         // as in totals_, and written with it
  std::unordered_map<StackId, std::uint32_t> live_of_;  // by call site
  std::unordered_map<StackId, bool> fits_;              // what `sites` said of a stack
};

}  // namespace streampool::debug
