#include "extent_map.hpp"

#include <algorithm>
#include <utility>

namespace streampool::placement {

Extent* FreeIndex::best_fit(Bytes size, Bytes alignment) const {
  // With an alignment above an extent's own, the smallest extents may hold the size but not at a fitting address; what
  // is larger by the alignment always does.
  Extent* extent = by_size_.first_from(size);
  while (extent != nullptr && round_up(extent->begin, alignment) + size > extent->end())
    extent = by_size_.first_from(extent->size, extent->begin + 1);
  return extent;
}

Extent* ExtentMap::make() {
  ++live_extents_;
  if (spare_ != nullptr) {
    Extent* extent = spare_;
    spare_ = extent->next;
    extent->next = nullptr;
    return extent;
  }
  return &store_.emplace_back();
}

// One more of the same state; the neighbours and the index are the caller's.
Extent* ExtentMap::make_beside(const Extent& from) {
  Extent* extent = make();
  extent->state = from.state;
  extent->range = from.range;
  extent->prev = from.prev;
  extent->next = from.next;
  extent->index = nullptr;
  extent->stamp = from.stamp;
  extent->note = from.note;
  extent->older = extent->newer = nullptr;
  return extent;
}

void ExtentMap::drop(Extent* extent) {
  --live_extents_;
  extent->next = spare_;
  spare_ = extent;
}

// Its place by age: behind `after`.
void ExtentMap::age_after(Extent* extent, Extent* after) {
  FreeIndex& index = *extent->index;
  extent->older = after;
  extent->newer = after != nullptr ? after->newer : index.oldest_;
  (extent->older != nullptr ? extent->older->newer : index.oldest_) = extent;
  (extent->newer != nullptr ? extent->newer->older : index.newest_) = extent;
}

void ExtentMap::age_out(Extent* extent) {
  FreeIndex& index = *extent->index;
  (extent->older != nullptr ? extent->older->newer : index.oldest_) = extent->newer;
  (extent->newer != nullptr ? extent->newer->older : index.newest_) = extent->older;
  extent->older = extent->newer = nullptr;
}

// Behind the newest whose stamp is not larger. What was freed just now is the newest.
void ExtentMap::age_in(Extent* extent) {
  Extent* after = extent->index->newest_;
  while (after != nullptr && after->stamp > extent->stamp) after = after->older;
  age_after(extent, after);
}

// Into the index; its place by age comes next.
void ExtentMap::size_in(Extent* extent, FreeIndex& index, std::uint64_t stamp) {
  extent->index = &index;
  extent->stamp = stamp;
  index.by_size_.insert(extent);
  index.count_in(extent->size);
}

// Another place and size in its index, where its age stays.
void ExtentMap::resize(Extent* extent, Address begin, Bytes size) {
  FreeIndex& index = *extent->index;
  const Bytes before = extent->size;
  index.by_size_.change(extent, begin, size);
  index.count_out(before);
  index.count_in(size);
}

void ExtentMap::link_after(Extent* extent, FreeIndex& index, std::uint64_t stamp, Extent* after) {
  size_in(extent, index, stamp);
  age_after(extent, after);
}

void ExtentMap::link_index(Extent* extent, FreeIndex& index, std::uint64_t stamp) {
  size_in(extent, index, stamp);
  age_in(extent);
}

void ExtentMap::unlink_index(Extent* extent) {
  FreeIndex& index = *extent->index;
  index.by_size_.erase(extent);
  index.count_out(extent->size);
  age_out(extent);
  extent->index = nullptr;
}

Range* ExtentMap::add_range(Address begin, Bytes size) {
  range_store_.push_back(std::make_unique<Range>());
  Range* range = range_store_.back().get();
  *range = Range{begin, size, nullptr, next_range_++, nullptr};
  Extent outside;
  outside.range = range;
  Extent* extent = make_beside(outside);
  extent->begin = begin;
  extent->size = size;
  range->first = extent;
  link_index(extent, unmapped_, 0);
  ranges_.insert(std::upper_bound(ranges_.begin(), ranges_.end(), range,
                                  [](const Range* a, const Range* b) { return a->begin < b->begin; }),
                 range);
  return range;
}

void ExtentMap::remove_range(Range* range) {
  if (range->first->index != nullptr) unlink_index(range->first);
  drop(range->first);
  std::erase(ranges_, range);
  std::erase_if(range_store_, [range](const auto& r) { return r.get() == range; });
}

Range* ExtentMap::range_of(Address address) const {
  auto it =
      std::upper_bound(ranges_.begin(), ranges_.end(), address, [](Address a, const Range* r) { return a < r->begin; });
  if (it == ranges_.begin()) return nullptr;
  Range* range = *--it;
  return address < range->end() ? range : nullptr;
}

Extent* ExtentMap::carve(Extent* from, Address begin, Bytes size, ExtentState state) {
  FreeIndex* index = from->index;
  if (index != nullptr && begin == from->begin && size < from->size) {
    // The usual case: what is left stays in the index, with its age.
    Extent* piece = make_beside(*from);
    piece->begin = begin;
    piece->size = size;
    piece->state = state;
    piece->next = from;
    (piece->prev != nullptr ? piece->prev->next : piece->range->first) = piece;
    from->prev = piece;
    resize(from, begin + size, from->size - size);
    return piece;
  }
  const std::uint64_t stamp = from->stamp;
  Extent* older = from->older;  // what is left keeps its place in the order of age
  if (index != nullptr) unlink_index(from);
  const ExtentState rest = from->state;
  void* const note = from->note;

  if (begin > from->begin) {  // the front stays what it was
    Extent* front = make_beside(*from);
    front->begin = from->begin;
    front->size = begin - from->begin;
    front->next = from;
    if (front->prev != nullptr)
      front->prev->next = front;
    else
      front->range->first = front;
    from->prev = front;
    from->begin = begin;
    from->size -= front->size;
    if (index != nullptr) link_after(front, *index, stamp, older);
  }
  if (from->size > size) {  // and so does the back
    Extent* back = make_beside(*from);
    back->begin = begin + size;
    back->size = from->size - size;
    back->prev = from;
    if (back->next != nullptr) back->next->prev = back;
    from->next = back;
    from->size = size;
    back->state = rest;
    back->note = note;
    if (index != nullptr) link_after(back, *index, stamp, older);
  }
  from->state = state;
  from->stamp = stamp;
  return from;
}

// Makes `extent` and its next neighbour one. Neither stands in an index.
Extent* ExtentMap::absorb_next(Extent* extent) {
  Extent* next = extent->next;
  extent->size += next->size;
  extent->next = next->next;
  if (next->next != nullptr) next->next->prev = extent;
  drop(next);
  return extent;
}

Extent* ExtentMap::put(Extent* extent, ExtentState state, FreeIndex& index, std::uint64_t stamp, Alike alike) {
  const auto joins = [&](const Extent* e) { return e != nullptr && e->index == &index && alike.has(e->stamp); };
  Extent* const prev = index.merges() && joins(extent->prev) ? extent->prev : nullptr;
  Extent* const next = index.merges() && joins(extent->next) ? extent->next : nullptr;
  if (prev == nullptr && next == nullptr) {
    extent->state = state;
    extent->note = nullptr;
    link_index(extent, index, stamp);
    return extent;
  }
  if (prev != nullptr) stamp = std::max(stamp, prev->stamp);
  if (next != nullptr) stamp = std::max(stamp, next->stamp);
  // One of them stays in the index, larger.
  Extent* const kept = prev != nullptr ? prev : next;
  const Address begin = prev != nullptr ? prev->begin : extent->begin;
  const Bytes size = (next != nullptr ? next : extent)->end() - begin;
  if (kept != next && next != nullptr) {
    unlink_index(next);
    absorb_next(extent);
  }
  resize(kept, begin, size);
  if (kept == prev) {
    kept->next = extent->next;
    if (kept->next != nullptr) kept->next->prev = kept;
  } else {
    kept->prev = extent->prev;
    (kept->prev != nullptr ? kept->prev->next : kept->range->first) = kept;
  }
  drop(extent);
  if (stamp != kept->stamp) {
    age_out(kept);
    kept->stamp = stamp;
    age_in(kept);
  }
  return kept;
}

Extent* ExtentMap::put_free(Extent* extent, FreeIndex& index, std::uint64_t stamp, Alike alike) {
  return put(extent, ExtentState::free, index, stamp, alike);
}

Extent* ExtentMap::put_unmapped(Extent* extent) { return put(extent, ExtentState::unmapped, unmapped_, 0, {}); }

void ExtentMap::hold(Extent* extent) {
  unlink_index(extent);
  extent->state = ExtentState::busy;
}

Extent* ExtentMap::join(Extent* first, Extent* last) {
  while (first != last) {
    const bool done = first->next == last;
    first->stamp = std::max(first->stamp, first->next->stamp);
    absorb_next(first);
    if (done) break;
  }
  return first;
}

std::string ExtentMap::validate() const {
  std::size_t seen = 0;
  for (const Range* range : ranges_) {
    Address at = range->begin;
    const Extent* prev = nullptr;
    for (const Extent* e = range->first; e != nullptr; prev = e, e = e->next) {
      ++seen;
      if (e->begin != at) return "extents cover their range without gap or overlap";
      if (e->size == 0) return "no extent is empty";
      if (e->prev != prev || e->range != range) return "neighbours know each other";
      if ((e->state == ExtentState::free || e->state == ExtentState::unmapped) != (e->index != nullptr))
        return "an extent is in an index when it is free or unmapped";
      if ((e->state == ExtentState::unmapped) != (e->index == &unmapped_))
        return "unmapped extents have an index of their own";
      if (e->index != nullptr && e->index->largest() != e->index->greatest())
        return "an index knows its largest extent";
      if (e->index != nullptr && !e->index->by_size_.has(e)) return "a free extent stands in its index under its size";
      if (prev != nullptr && prev->index != nullptr && prev->index == e->index && prev->stamp == e->stamp &&
          e->index->merges())
        return "neighbours of one index and stamp are one";
      at += e->size;
    }
    if (at != range->end()) return "extents reach the end of their range";
  }
  if (seen != live_extents_) return "every live extent is in a range";
  return {};
}

}  // namespace streampool::placement
