// Extents: the best fit among a stream's own and nobody's, runs of both, and the records of large blocks.
#include <algorithm>
#include <utility>

#include "fast.hpp"

namespace streampool::pool {

using order::Ticket;
using placement::Extent;
using placement::ExtentState;
using placement::PageMap;

// Under the extent lock. An old entry that is written over belonged to freed memory: its holder becomes a spare.
void Core::claim_pages(Address begin, Bytes bytes, void* pointer, PageMap::Tag tag) {
  constexpr Bytes kPage = Bytes{1} << PageMap::kPageBits;
  for (Address page = round_down(begin, kPage); page < begin + bytes; page += kPage) {
    const PageMap::Entry old = PageMap::find(page);
    if (!old || old.pointer() == pointer) continue;
    if (old.tag() == PageMap::Tag::slab) {
      Slab* slab = static_cast<Slab*>(old.pointer());
      if (slab->core != this) continue;  // cannot be: ranges take their entries with them
      if (--slab->pages == 0 && slab->retired) spare_slabs_[slab->cls].push_back(slab);
    } else if (LargeBlock* block = static_cast<LargeBlock*>(old.pointer()); block->core == this) {
      spare_large_.push_back(block);
    }
  }
  PageMap::set(begin, bytes, pointer, tag);
  if (tag == PageMap::Tag::slab) static_cast<Slab*>(pointer)->pages = static_cast<std::uint32_t>(bytes / kPage);
}

// Under the extent lock: the better of the best fits among T's own extents and those of nobody. `own` is the ticket of
// T that may still be touching it, 0 if none.
Extent* Core::fit(Heap& t, Bytes bytes, Bytes alignment, bool strict, Ticket* own, Path* path) {
  Extent* mine = strict ? nullptr : t.extents.best_fit(bytes, alignment);
  Extent* free = common_.best_fit(bytes, alignment);
  Extent* best = mine != nullptr && (free == nullptr || mine->size <= free->size) ? mine : free;
  if (best == nullptr) return nullptr;
  *own = best == mine ? best->stamp : 0;
  *path = best == mine ? Path::own : Path::fresh;
  // What is smaller than a handle lies at the end, away from the large, so that runs of whole handles last; but where
  // growth can add memory behind, the rest stays beside it.
  const bool at_edge = best->next != nullptr && best->next->state == ExtentState::unmapped;
  const Address at = bytes < granularity_ && !at_edge ? (best->end() - bytes) / alignment * alignment
                                                      : round_up(best->begin, alignment);
  return extents_.carve(best, at, bytes, ExtentState::taken);
}

// The same, and where there is none, a run of them.
Extent* Core::grab(Heap& t, Bytes bytes, Bytes alignment, bool strict, Ticket* own, Path* path) {
  if (Extent* extent = fit(t, bytes, alignment, strict, own, path)) return extent;
  *path = Path::own;
  return grab_run(t, bytes, alignment, strict, own);
}

// Under the extent lock: neighbouring extents of T and of nobody, together large enough. They did not merge, so that
// nobody's memory stays everybody's, and T's older memory does not wait for its newer; T may use them as one.
Extent* Core::grab_run(Heap& t, Bytes bytes, Bytes alignment, bool strict, Ticket* own) {
  if (strict || t.extents.empty()) return nullptr;
  if (t.extents.free_bytes() + common_.free_bytes() < bytes) return nullptr;  // no need to look at each
  const auto usable = [&](const Extent* e) { return e != nullptr && (e->index == &t.extents || e->index == &common_); };
  Extent* best_first = nullptr;
  Bytes best_size = ~Bytes{0};
  t.extents.for_each([&](Extent* e) {
    // Each run is looked at once, from its first extent of T.
    Extent* first = usable(e->prev) ? e->prev : e;
    if (first != e && (first->index == &t.extents || usable(first->prev))) return;
    Extent* last = e;
    while (usable(last->next)) last = last->next;
    if (first == last) return;
    const Bytes size = last->end() - first->begin;
    const Address at = round_up(first->begin, alignment);
    if (at + bytes <= last->end() && size < best_size) {
      best_size = size;
      best_first = first;
    }
  });
  if (best_first == nullptr) return nullptr;

  const Address at = round_up(best_first->begin, alignment);
  *own = 0;
  // Skip whole extents before `at`, then hold piece by piece up to the last byte needed; what sticks out keeps its
  // owner.
  Extent* e = best_first;
  while (e->end() <= at) e = e->next;
  Extent* first = nullptr;
  Extent* last = nullptr;
  for (Address from = at; from < at + bytes;) {
    const Bytes part = std::min(e->end(), at + bytes) - from;
    if (e->index == &t.extents) *own = std::max(*own, e->stamp);
    Extent* piece = extents_.carve(e, from, part, ExtentState::busy);
    if (first == nullptr) first = piece;
    last = piece;
    from += part;
    e = piece->next;
  }
  Extent* whole = extents_.join(first, last);
  extents_.set_state(whole, ExtentState::taken);
  return whole;
}

// A large block that the stream freed, of exactly this size.
bool Core::take_quick(Heap& t, const Need& need, Found* found) {
  if (need.strict || need.bytes > QuickLists::kMaxBlock) return false;
  std::lock_guard lock(t.stream.lock);
  QuickLists::List& list = t.quick.of(need.bytes);
  if (list.bytes != need.bytes) return false;
  BlockRecord* record = list.head;
  if (record == nullptr) return false;
  if (!good_free(*record)) {  // nothing in it is followed: what is behind it is lost too
    list.head = nullptr;
    return false;
  }
  const Address begin = LargeBlock::of(*record)->begin;
  if (begin % need.alignment != 0) return false;
  list.head = record->link;
  t.quick.bytes -= need.bytes;
  *found = {record, begin, need.bytes, Path::own, true, false};
  return true;
}

// The quick lists have no place for a block of so many bytes: those of another size in the one it belongs to go where
// they merge, or all.
void Core::make_room(Heap& heap, Bytes bytes) {
  if (bytes > QuickLists::kMaxBlock) return;
  BlockRecord* out = nullptr;
  {
    std::lock_guard lock(heap.stream.lock);
    QuickLists& quick = heap.quick;
    out = quick.of(bytes).bytes != bytes ? quick.take(quick.of(bytes)) : quick.take_all();
  }
  file_quick(heap, out);
}

// Blocks that were in the quick lists of a heap, which the caller holds: as free extents. True: there were some.
bool Core::file_quick(Heap& heap, BlockRecord* record) {
  const bool some = record != nullptr;
  while (record != nullptr) {
    BlockRecord& freed = *std::exchange(record, record->link);
    order::MarkSet marks;
    marks.add({&heap.stream, freed.ticket});
    settle_extent(LargeBlock::of(freed), std::move(marks));
    heap.users.fetch_sub(1, std::memory_order_release);
  }
  return some;
}

// Under the heap's lock: a large block for a plain request. False: it does not fit anywhere, or others are at the
// extents; nobody waits for them here.
bool Core::serve_extent(Heap& heap, Bytes size, std::uint64_t origin, BlockRef* out, Bytes* gross) {
  if (size <= placement::kMaxSlotSize || size >= PageMap::kAddressLimit || !extent_lock_.try_lock()) return false;
  Need need;
  need.bytes = round_up(size, kExtentAlignment);
  Found found;
  {
    std::lock_guard lock(extent_lock_, std::adopt_lock);
    if (need.bytes <= QuickLists::kMaxBlock) {
      const QuickLists::List& list = heap.quick.of(need.bytes);
      if (list.head != nullptr && list.bytes == need.bytes) return false;  // and was not taken: take_quick sees why
    }
    Ticket own = 0;
    Path path = Path::own;
    Extent* extent = fit(heap, need.bytes, need.alignment, false, &own, &path);
    if (extent == nullptr) return false;
    fill_large(extent, own, need, path, &found);
  }
  heap.count_inside(1);
  if (found.path != Path::own) count_path(found.path);
  BlockRecord& record = *found.record;
  record.home.store(&heap, std::memory_order_relaxed);
  out->generation = write_record(record, record.word.load(std::memory_order_relaxed), size, origin);
  out->record = &record;
  out->address = found.begin;
  *gross = found.bytes;
  return true;
}

// Under the heap's lock: a large block that take_back had no place for, as a free extent. False: others are at the
// extents, or it is for the quick lists once they have room.
bool Core::put_whole(Heap& heap, Freed* freed) {
  LargeBlock& block = *freed->whole;
  const Bytes bytes = block.bytes.load(std::memory_order_relaxed);
  if (bytes <= QuickLists::kMaxBlock || !extent_lock_.try_lock()) return false;
  std::lock_guard lock(extent_lock_, std::adopt_lock);
  BlockRecord& record = block.record;
  record.word.store(BlockRecord::pack(BlockRecord::generation_of(freed->word), Magic::freed),
                    std::memory_order_release);
  freed->ticket = heap.stream.take_ticket();
  freed->size = record.size.load(std::memory_order_relaxed);
  freed->gross = bytes;
  const auto [first, last] = order::together(heap.stream, freed->ticket);
  extents_.put_free(std::exchange(block.extent, nullptr), heap.extents, freed->ticket, {first, last});
  heap.count_inside(~std::uint32_t{0});
  return true;
}

bool Core::take_extent(Heap& t, const Need& need, Found* found) {
  std::lock_guard lock(extent_lock_);
  Ticket own = 0;
  Path path = Path::own;
  Extent* extent = grab(t, need.bytes, need.alignment, need.strict, &own, &path);
  if (extent == nullptr) return false;
  fill_large(extent, own, need, path, found);
  return true;
}

// Under the extent lock: a record that no page names.
LargeBlock* Core::spare_large() {
  if (spare_large_.empty()) {
    large_.push_back(std::make_unique<LargeBlock[]>(kLargeChunk));
    for (std::size_t i = kLargeChunk; i-- > 0;) {
      LargeBlock& block = large_.back()[i];
      block.core = this;
      block.record.container =
          reinterpret_cast<std::uintptr_t>(&block) | static_cast<std::uintptr_t>(PageMap::Tag::large);
      spare_large_.push_back(&block);
    }
  }
  LargeBlock* block = spare_large_.back();
  spare_large_.pop_back();
  return block;
}

// Under the extent lock. `own`: the ticket of the stream it is for that may still be touching it.
void Core::fill_large(Extent* extent, Ticket own, const Need& need, Path path, Found* found) {
  LargeBlock* block = nullptr;
  // The page's own record first: it may still name the block that was freed here.
  const PageMap::Entry entry = PageMap::find(extent->begin + need.front);
  if (entry && entry.tag() == PageMap::Tag::large && static_cast<LargeBlock*>(entry.pointer())->core == this) {
    block = static_cast<LargeBlock*>(entry.pointer());
  } else {
    block = spare_large();
    block->page.store(extent->begin + need.front, std::memory_order_relaxed);
    claim_pages(block->page, 1, block, PageMap::Tag::large);
  }
  block->extent = extent;
  block->begin.store(extent->begin, std::memory_order_relaxed);
  block->bytes.store(extent->size, std::memory_order_relaxed);
  block->page.store(extent->begin + need.front, std::memory_order_relaxed);
  block->record.ticket = own;
  extent->note = reinterpret_cast<void*>(block->record.container);
  found->record = &block->record;
  found->begin = extent->begin;
  found->bytes = extent->size;
  found->path = path;
}

}  // namespace streampool::pool
