// Extents: which bytes of the pool's address ranges are mapped, free or taken. Pure bookkeeping: no driver, no lock, no
// streams. What makes two free extents alike is the FreeIndex they stand in; the caller decides which index that is.
//
// Invariants (validate()): the extents of a range cover it without gap or overlap; a free or unmapped extent stands in
// exactly one index; two neighbouring extents stand in different indexes, in one that does not merge, or have different
// stamps; `free_bytes` of an index is the sum of its extents.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "../base/types.hpp"
#include "size_tree.hpp"

namespace streampool::placement {

enum class ExtentState : std::uint8_t {
  unmapped,  // addresses without memory
  free,      // in a FreeIndex
  taken,     // holds one block or a slab
  busy       // in the hands of a driver call that runs without a lock
};

class FreeIndex;
struct Range;
struct Extent;

struct Extent {
  Address begin = 0;
  Bytes size = 0;
  ExtentState state = ExtentState::unmapped;
  Range* range = nullptr;
  Extent* prev = nullptr;  // by address, within the range
  Extent* next = nullptr;
  // Free and unmapped extents only. `stamp` grows when extents merge: the latest mark counts for all; the caller says
  // between which stamps that costs nobody anything. `note` is the caller's.
  FreeIndex* index = nullptr;
  std::uint64_t stamp = 0;
  void* note = nullptr;
  Extent* older = nullptr;  // in the index's list by age
  Extent* newer = nullptr;
  SizeLinks<Extent> links;  // in the index

  Address end() const { return begin + size; }
};

// Stamps whose extents may merge.
struct Alike {
  std::uint64_t first = 0;
  std::uint64_t last = ~std::uint64_t{0};
  bool has(std::uint64_t stamp) const { return first <= stamp && stamp <= last; }
};

// A reservation of addresses (or one piece of driver memory). The extents cover it.
struct Range {
  Address begin = 0;
  Bytes size = 0;
  Extent* first = nullptr;
  std::uint32_t number = 0;
  void* note = nullptr;  // the caller's
  Address end() const { return begin + size; }
};

// Free extents of one owner, by size then address, and by age (oldest first).
class FreeIndex {
 public:
  explicit FreeIndex(bool merges = true) : merges_(merges) {}
  bool merges() const { return merges_; }
  bool empty() const { return by_size_.empty(); }
  std::size_t count() const { return by_size_.count(); }
  // Both may be read without the lock that guards all else.
  Bytes free_bytes() const { return bytes_.load(std::memory_order_relaxed); }
  Bytes largest() const { return largest_.load(std::memory_order_relaxed); }
  Extent* oldest() const { return oldest_; }

  // Best fit: the smallest extent that holds `size` bytes at a multiple of `alignment`, lowest address among equals.
  Extent* best_fit(Bytes size, Bytes alignment) const;

  template <typename Function>
  void for_each(Function function) const {
    by_size_.for_each(function);
  }

 private:
  friend class ExtentMap;
  // After a change of the tree: one of `size` bytes more, or less.
  void count_in(Bytes size) {
    bytes_.store(free_bytes() + size, std::memory_order_relaxed);
    if (size > largest()) largest_.store(size, std::memory_order_relaxed);
  }
  void count_out(Bytes size) {
    bytes_.store(free_bytes() - size, std::memory_order_relaxed);
    if (size == largest()) largest_.store(greatest(), std::memory_order_relaxed);
  }
  Bytes greatest() const { return by_size_.empty() ? 0 : by_size_.largest()->size; }
  SizeTree<Extent> by_size_;
  std::atomic<Bytes> bytes_{0};
  std::atomic<Bytes> largest_{0};
  Extent* oldest_ = nullptr;
  Extent* newest_ = nullptr;
  bool merges_;
};

class ExtentMap {
 public:
  ExtentMap() = default;
  ExtentMap(const ExtentMap&) = delete;
  ExtentMap& operator=(const ExtentMap&) = delete;

  // A new range, covered by one extent in state `unmapped`.
  Range* add_range(Address begin, Bytes size);
  // The whole range is one unmapped extent.
  void remove_range(Range* range);
  const std::vector<Range*>& ranges() const { return ranges_; }

  // Cuts [begin, begin + size) out of an extent and returns it as an extent of its own in state `state`; what is left
  // on either side keeps state, index and stamp.
  Extent* carve(Extent* from, Address begin, Bytes size, ExtentState state);
  // Makes an extent that is taken or busy free, and merges it with free neighbours of the same index and alike stamps.
  Extent* put_free(Extent* extent, FreeIndex& index, std::uint64_t stamp, Alike alike = {});
  // The same for address space without memory.
  Extent* put_unmapped(Extent* extent);
  const FreeIndex& unmapped() const { return unmapped_; }
  void set_state(Extent* extent, ExtentState state) { extent->state = state; }
  // Takes a free extent out of its index, as busy.
  void hold(Extent* extent);
  // Makes neighbouring held extents one. `first` and `last` are busy, and so is everything between.
  Extent* join(Extent* first, Extent* last);

  // The extent that holds an address: O(log ranges + extents of the range); for reports and interior addresses use the
  // caller's own records first.
  Range* range_of(Address address) const;

  // Empty when all invariants hold, else the condition that does not.
  std::string validate() const;

  std::size_t extent_count() const { return live_extents_; }

 private:
  Extent* make();
  Extent* make_beside(const Extent& from);
  void drop(Extent* extent);
  Extent* put(Extent* extent, ExtentState state, FreeIndex& index, std::uint64_t stamp, Alike alike);
  static void size_in(Extent* extent, FreeIndex& index, std::uint64_t stamp);
  static void resize(Extent* extent, Address begin, Bytes size);
  static void age_after(Extent* extent, Extent* after);
  static void age_out(Extent* extent);
  static void age_in(Extent* extent);
  void link_after(Extent* extent, FreeIndex& index, std::uint64_t stamp, Extent* after);
  void link_index(Extent* extent, FreeIndex& index, std::uint64_t stamp);
  void unlink_index(Extent* extent);
  Extent* absorb_next(Extent* extent);

  std::deque<Extent> store_;
  FreeIndex unmapped_{true};
  Extent* spare_ = nullptr;
  std::size_t live_extents_ = 0;
  std::vector<Range*> ranges_;  // by address
  std::vector<std::unique_ptr<Range>> range_store_;
  std::uint32_t next_range_ = 1;
};

}  // namespace streampool::placement
