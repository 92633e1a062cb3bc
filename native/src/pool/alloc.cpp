// Allocation: what is needed, the fast path, and the searches that make no driver call.
#include <sys/mman.h>

#include <algorithm>

#include "core.hpp"
#include "thread_cache.hpp"

namespace streampool::pool {

using order::Ticket;
using placement::Extent;
using placement::ExtentState;
using placement::FreeIndex;
using placement::PageMap;

Errc Core::enter(Failure* failure) const {
  if (closed()) return failure->set(Errc::closed, "pool '" + name_ + "' on " + std::string(driver_->name()) + " is closed");
  switch (driver::ending()) {
    case driver::Ending::no: return Errc::ok;
    case driver::Ending::forked:
      return failure->set(Errc::forked,
                          "a pool cannot be used in a forked child: CUDA does not survive a fork. Start processes with "
                          "multiprocessing.get_context('spawn')");
    case driver::Ending::exiting: return failure->set(Errc::exiting, "the process is exiting: no more memory is handed out");
  }
  return Errc::ok;
}

Errc Core::plan(const AllocRequest& request, Need* need, Failure* failure) const {
  if (!is_power_of_two(request.alignment) || request.alignment > kMaxAlignment)
    return failure->set(Errc::invalid_alignment, "alignment " + std::to_string(request.alignment) +
                                                     " is not a power of two from 1 to 2097152 (2 MiB)");
  const Bytes alignment = std::max(request.alignment, kMinAlignment);
  need->size = request.size;
  need->strict = host_visible(kind_) && !request.stream_ordered && !options_.stream_ordered;
  if (request.size == 0 && debugger_ == nullptr) {
    need->cls = kZeroClass;
    need->bytes = 0;
    // Addresses without memory are aligned as asked only up to their spacing; more is served from memory.
    if (alignment == kMinAlignment) return Errc::ok;
  }
  need->front = debugger_ != nullptr ? debugger_->front_bytes(alignment) : 0;
  const Bytes extra = need->front + (debugger_ != nullptr ? debugger_->back_bytes() : 0);
  Bytes total = 0, rounded = 0;
  if (request.size > ~Bytes{0} - extra || !round_up_checked(total = request.size + extra, kExtentAlignment, &rounded) ||
      rounded >= PageMap::kAddressLimit) {
    failure->oom = std::make_unique<OomReport>();
    OomReport& r = *failure->oom;
    r.request = request.size;
    r.alignment = request.alignment;
    r.device = driver_->name();
    r.pool = name_;
    r.kind = kind_name(kind_);
    r.limit = options_.limit;
    r.reserved = reserved_.load();
    r.in_use = static_cast<Bytes>(bank_->totals().in_use);
    r.device_known = driver_->mem_info(&r.device_free, &r.device_total).ok();
    r.reason = OomReason::driver;
    r.driver_error = "no device has that many addresses";
    return failure->set(Errc::out_of_memory, describe(r));
  }
  if (total <= placement::kMaxSlotSize) {
    Bytes fit = std::max(total, alignment);
    unsigned cls = fit <= placement::kMaxSlotSize ? placement::class_of(fit) : kNoClass;
    // Slots lie at multiples of their size from a 64 KiB boundary: a power of two keeps any alignment up to there.
    if (cls != kNoClass && alignment > kMinAlignment && placement::class_size(cls) % alignment != 0) {
      fit = std::bit_ceil(fit);
      cls = fit <= placement::kMaxSlotSize ? placement::class_of(fit) : kNoClass;
    }
    if (cls != kNoClass) {
      need->cls = cls;
      need->bytes = placement::class_size(cls);
      return Errc::ok;
    }
  }
  need->cls = kNoClass;
  // At most one user's pointer may lie in a page of the page map: behind it the block reaches a whole page further.
  need->bytes = std::max(rounded, round_up(need->front + placement::kSlabUnit, kExtentAlignment));
  need->alignment = std::max(alignment, kExtentAlignment);
  return Errc::ok;
}

Errc Core::name_stream(driver::StreamHandle handle, Named* out, Failure* failure, bool foreign) {
  handle = canonical(handle);
  ThreadCache& cache = thread_cache();
  if (cache.uid == uid_ && cache.handle == handle && cache.epoch == streams_.epoch() && !streams_.capture_known()) {
    *out = Named(static_cast<Heap*>(cache.heap), handle, false);
    return Errc::ok;
  }
  const Errc errc = streams_.name(handle, out, failure, foreign || host_visible(kind_));
  if (errc != Errc::ok) return errc;
  if (out->stream().lasting) {
    counters();  // makes the cache this pool's
    cache.handle = handle;
    cache.epoch = streams_.epoch();
    cache.heap = out->heap();
  } else {
    fence_owed(*out);
    // Streams that come and go leave their entries behind until somebody looks.
    if (streams_.known() >= sweep_at_.load(std::memory_order_relaxed)) sweep_streams();
  }
  return Errc::ok;
}

Errc Core::allocate(const AllocRequest& request, BlockRef* out, Failure* failure) {
  Errc errc = enter(failure);
  if (errc != Errc::ok) return errc;
  Need need;
  errc = plan(request, &need, failure);
  if (errc != Errc::ok) return errc;
  Named named;
  errc = name_stream(request.stream, &named, failure);
  if (errc != Errc::ok) return errc;
  if (released_.load(std::memory_order_relaxed) != nullptr) drain();
  Found found;
  if (!find_own(named, need, &found)) {
    errc = climb(named, need, request, &found, failure);
    if (errc != Errc::ok) return errc;
  } else if (found.path != Path::own) {
    count_path(found.path);
  }
  if (debugger_ == nullptr) {
    *out = hand_out(request, need, named, found);
    return Errc::ok;
  }
  driver::Status status;
  {
    // A check sees the block only with its guards in place.
    std::shared_lock gate(live_gate_);
    *out = hand_out(request, need, named, found);
    // The memory is complete; guards and edges are written where the pattern is not in place already.
    status = debugger_->on_allocate(facts_of(*out->record, out->address));
  }
  {
    if (!status.ok()) {
      Failure ignored;
      free(*out, FreeRequest{}, &ignored);
      return failure->set(Errc::driver, "the guards of a new block could not be written: " + driver::describe(status));
    }
    debugger_->poll();
  }
  return Errc::ok;
}

bool Core::try_allocate(const AllocRequest& request, BlockRef* out) {
  if (debugger_ != nullptr || closed() || driver::ending() != driver::Ending::no || released_.load(std::memory_order_relaxed) != nullptr)
    return false;
  const driver::StreamHandle handle = canonical(request.stream);
  const ThreadCache& cache = thread_cache();
  if (cache.uid != uid_ || cache.handle != handle || cache.epoch != streams_.epoch() || streams_.capture_known()) return false;
  Need need;
  Failure failure;
  if (plan(request, &need, &failure) != Errc::ok || !need.slot() || need.strict) return false;
  Heap& heap = *static_cast<Heap*>(cache.heap);
  if (!heap.stream.lock.try_lock()) return false;
  Found found;
  Slab* slab = heap.classes[need.cls].head;
  const bool taken = slab != nullptr && pop_slot(heap, slab, false, &found);
  heap.stream.lock.unlock();
  if (!taken) return false;
  Named named(&heap, handle, false);
  *out = hand_out(request, need, named, found);
  return true;
}

// What every block needs written down; nobody else has the record: its state is `freed` or `fresh`.
BlockRef Core::hand_out(const AllocRequest& request, const Need& need, Named& named, const Found& found) {
  BlockRecord& record = *found.record;
  Heap* home = named.heap();
  record.size = request.size;
  record.front = static_cast<std::uint32_t>(need.front) & 0xFFFFFFu;
  record.stack = request.stack;
  record.home = home;
  const bool slot = PageMap::Entry{record.container}.tag() == PageMap::Tag::slab;
  if (!slot || static_cast<Slab*>(PageMap::Entry{record.container}.pointer())->heap != home)
    home->users.fetch_add(1, std::memory_order_relaxed);
  if (options_.debug.track || !request.tag.empty()) {
    const double now = driver_->now();
    std::lock_guard lock(extra_lock(&record));
    BlockExtra& extra = record.more();
    extra.serial = serial_.fetch_add(1, std::memory_order_relaxed) + 1;
    extra.allocated_thread = thread_id();
    extra.allocated_time = now;
    extra.freed_thread = 0;
    extra.freed_time = 0;
    extra.freed_at = 0;
    extra.tag = request.tag;
  }
  record.flags = request.raw ? kRawBlock : 0u;
  const std::uint32_t generation = BlockRecord::generation_of(record.word.load(std::memory_order_relaxed)) + 1;
  record.word.store(BlockRecord::pack(generation, Magic::live), std::memory_order_release);
  bank_->on_allocate(counters(), request.size, found.bytes, guards_of(record));
  return BlockRef{found.begin + need.front, &record, generation};
}

bool Core::find_own(Named& t, const Need& need, Found* found) {
  Heap& heap = *t.heap();
  if (!need.slot()) return take_extent(heap, need, found);
  if (take_slot(heap, need, found)) return true;
  if (take_waiting(heap, need, found)) return true;
  Path path = Path::own;
  while (cut_slab(heap, need, &path)) {
    if (!take_slot(heap, need, found)) continue;
    found->path = path;
    return true;
  }
  return false;
}

// -- slots -----------------------------------------------------------------------------------------------------------

bool Core::good_free(BlockRecord& record) {
  const std::uint32_t magic = BlockRecord::magic_of(record.word.load(std::memory_order_acquire));
  if (magic == static_cast<std::uint32_t>(Magic::freed) || magic == static_cast<std::uint32_t>(Magic::fresh)) return true;
  // Somebody wrote over it. The slot is lost; nothing in the record is followed.
  trampled_.fetch_add(1, std::memory_order_relaxed);
  return false;
}

void Core::list_slab(Heap& heap, Slab* slab) {
  ClassList& list = heap.classes[slab->cls];
  slab->prev = nullptr;
  slab->next = list.head;
  if (list.head != nullptr) list.head->prev = slab;
  list.head = slab;
  slab->listed = true;
}

void Core::unlist_slab(Heap& heap, Slab* slab) {
  (slab->prev != nullptr ? slab->prev->next : heap.classes[slab->cls].head) = slab->next;
  if (slab->next != nullptr) slab->next->prev = slab->prev;
  slab->prev = slab->next = nullptr;
  slab->listed = false;
}

// Under the heap's lock. A slot of a listed slab whose own-stream ticket is complete, or any.
bool Core::pop_slot(Heap& heap, Slab* slab, bool complete_only, Found* found) {
  placement::SlotStack& stack = slab->stack;
  unsigned position = stack.free_count;
  if (complete_only) {
    const Ticket completed = heap.stream.completed.load(std::memory_order_acquire);
    while (position > 0 && slab->records[stack.free_slots[position - 1]].ticket > completed) --position;
    if (position == 0) return false;
  }
  const unsigned slot = stack.free_slots[position - 1];
  if (position == stack.free_count) stack.pop();
  else stack.remove_at(position - 1);
  if (stack.empty()) unlist_slab(heap, slab);
  BlockRecord& record = slab->records[slot];
  if (!good_free(record)) return false;
  found->record = &record;
  found->begin = slab->slot_begin(slot);
  found->bytes = slab->cls == kZeroClass ? 0 : slab->slot_bytes;
  found->path = Path::own;
  return true;
}

bool Core::take_slot(Heap& t, const Need& need, Found* found) {
  std::lock_guard lock(t.stream.lock);
  Slab* slab = t.classes[need.cls].head;
  while (slab != nullptr) {
    Slab* next = slab->next;
    if (pop_slot(t, slab, need.strict, found)) return true;
    // A slab may stay listed after a failed pop only because of marks (strict) or a trampled record.
    slab = need.strict || !slab->listed ? next : slab;
  }
  return false;
}

// Under the heap's lock: waiting slots whose marks allow it go back to their slabs.
void Core::collect_waiting(Heap& heap, unsigned cls, bool complete_only) {
  std::vector<WaitingSlot>& waiting = heap.classes[cls].waiting;
  // A stuck slot must not make every miss slow: look at a bounded number, starting elsewhere each time.
  constexpr std::size_t kMaxLook = 512;
  std::size_t looks = std::min(waiting.size(), kMaxLook);
  std::size_t at = waiting.size() > kMaxLook ? heap.look_from++ % waiting.size() : 0;
  while (looks-- > 0 && !waiting.empty()) {
    if (at >= waiting.size()) at = 0;
    WaitingSlot& w = waiting[at];
    const bool usable = w.marks.all_complete() || (!complete_only && w.marks.may_use(heap.stream));
    if (!usable) {
      ++at;
      continue;
    }
    Slab* slab = w.slab;
    slab->records[w.slot].ticket = w.marks.ticket_of(heap.stream);
    slab->last_ticket = std::max(slab->last_ticket, slab->records[w.slot].ticket);
    slab->stack.push(w.slot);
    --slab->waiting;
    if (!slab->listed) list_slab(heap, slab);
    if (&w != &waiting.back()) w = std::move(waiting.back());
    waiting.pop_back();
  }
}

bool Core::take_waiting(Heap& t, const Need& need, Found* found) {
  if (need.strict) {
    // Host-visible memory on its own stream: somebody has to ask whether the work is done.
    bool any = false;
    {
      std::lock_guard lock(t.stream.lock);
      any = !t.classes[need.cls].waiting.empty();
    }
    if (any) poll_stream(t, false);
  }
  {
    std::lock_guard lock(t.stream.lock);
    if (t.classes[need.cls].waiting.empty()) return false;
    collect_waiting(t, need.cls, need.strict);
  }
  return take_slot(t, need, found);
}

// A single slot out of another stream's slab: its work is done, so it may go anywhere.
bool Core::take_foreign_slot(Heap& t, const Need& need, Found* found) {
  bool taken = false;
  streams_.for_each([&](Heap& heap) {
    if (taken || &heap == &t) return;
    std::lock_guard lock(heap.stream.lock);
    collect_waiting(heap, need.cls, true);
    Slab* slab = heap.classes[need.cls].head;
    while (slab != nullptr && !taken) {
      Slab* next = slab->next;
      taken = pop_slot(heap, slab, true, found);
      slab = next;
    }
  });
  if (taken) found->path = Path::completed;
  return taken;
}

Slab* Core::spare_slab(unsigned cls) {
  {
    std::lock_guard lock(extent_lock_);
    if (!spare_slabs_[cls].empty()) {
      Slab* slab = spare_slabs_[cls].back();
      spare_slabs_[cls].pop_back();
      return slab;
    }
  }
  auto fresh = std::make_unique<Slab>();
  const unsigned slots = cls == kZeroClass ? placement::kMaxSlots : placement::slots_of(cls);
  fresh->cls = cls;
  fresh->core = this;
  fresh->slot_bytes = cls == kZeroClass ? kMinAlignment : placement::class_size(cls);
  fresh->bytes = cls == kZeroClass ? placement::kSlabUnit : placement::slab_size(cls);
  fresh->reciprocal = placement::slot_reciprocal(cls == kZeroClass ? 0 : cls);
  fresh->records = std::make_unique<BlockRecord[]>(slots);
  for (unsigned i = 0; i < slots; ++i) fresh->records[i].container = reinterpret_cast<std::uintptr_t>(fresh.get());
  Slab* slab = fresh.get();
  std::lock_guard lock(extent_lock_);
  slabs_.push_back(std::move(fresh));
  return slab;
}

bool Core::cut_slab(Heap& t, const Need& need, Path* path) {
  if (need.cls == kZeroClass) return cut_zero_slab(t);
  Slab* slab = spare_slab(need.cls);
  Ticket own = 0;
  {
    std::lock_guard lock(extent_lock_);
    Extent* extent = grab(t, slab->bytes, placement::kSlabUnit, need.strict, &own, path);
    if (extent == nullptr) {
      spare_slabs_[need.cls].push_back(slab);
      return false;
    }
    slab->extent = extent;
    slab->base = extent->begin;
    extent->note = slab;  // tag: slab
    claim_pages(extent->begin, extent->size, slab, PageMap::Tag::slab);
  }
  slab->heap = &t;
  slab->retired = false;
  slab->waiting = 0;
  slab->last_ticket = own;
  slab->stack.fill(placement::slots_of(need.cls));
  // The slab's memory may still be used by this very stream: each slot carries that mark on (R1).
  for (unsigned i = 0; i < slab->stack.slots; ++i) slab->records[i].ticket = own;
  std::lock_guard lock(t.stream.lock);
  list_slab(t, slab);
  ++t.slab_count;
  return true;
}

// Addresses that no memory stands behind, for blocks of no bytes.
bool Core::cut_zero_slab(Heap& t) {
  constexpr Bytes kUnit = placement::kSlabUnit;
  void* area = mmap(nullptr, 2 * kUnit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (area == MAP_FAILED) return false;
  const Address base = round_up(reinterpret_cast<Address>(area), kUnit);
  Slab* slab = spare_slab(kZeroClass);
  {
    std::lock_guard lock(extent_lock_);
    zero_areas_.emplace_back(area, 2 * kUnit);
    claim_pages(base, kUnit, slab, PageMap::Tag::slab);
  }
  slab->base = base;
  slab->heap = &t;
  slab->last_ticket = 0;
  slab->stack.fill(placement::kMaxSlots);
  std::lock_guard lock(t.stream.lock);
  list_slab(t, slab);
  ++t.slab_count;
  return true;
}

// -- extents ---------------------------------------------------------------------------------------------------------

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

// Under the extent lock: the better of the best fits among T's own extents and those of nobody. `own` is the ticket of T that
// may still be touching it, 0 if none.
Extent* Core::grab(Heap& t, Bytes bytes, Bytes alignment, bool strict, Ticket* own, Path* path) {
  Extent* mine = strict ? nullptr : t.extents.best_fit(bytes, alignment);
  Extent* free = common_.best_fit(bytes, alignment);
  Extent* best = mine != nullptr && (free == nullptr || mine->size <= free->size) ? mine : free;
  if (best == nullptr) {
    *path = Path::own;
    return grab_run(t, bytes, alignment, strict, own);
  }
  *own = best == mine ? best->stamp : 0;
  *path = best == mine ? Path::own : Path::fresh;
  return extents_.carve(best, round_up(best->begin, alignment), bytes, ExtentState::taken);
}

// Under the extent lock: neighbouring extents of T and of nobody, together large enough. They did not merge, so that
// nobody's memory stays everybody's; T may use them as one.
Extent* Core::grab_run(Heap& t, Bytes bytes, Bytes alignment, bool strict, Ticket* own) {
  if (strict || t.extents.empty() || common_.empty()) return nullptr;
  const auto usable = [&](const Extent* e) { return e != nullptr && (e->index == &t.extents || e->index == &common_); };
  Extent* best_first = nullptr;
  Bytes best_size = ~Bytes{0};
  t.extents.for_each([&](Extent* e) {
    Extent* first = e;
    while (usable(first->prev)) first = first->prev;
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
  // Skip whole extents before `at`, then hold piece by piece up to the last byte needed; what sticks out keeps its owner.
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

bool Core::take_extent(Heap& t, const Need& need, Found* found) {
  std::lock_guard lock(extent_lock_);
  Ticket own = 0;
  Path path = Path::own;
  Extent* extent = grab(t, need.bytes, need.alignment, need.strict, &own, &path);
  if (extent == nullptr) return false;
  order::MarkSet inherited;
  if (own > t.stream.completed.load(std::memory_order_acquire)) inherited.add({&t.stream, own});
  fill_large(extent, inherited, need, path, found);
  return true;
}

// Under the extent lock.
void Core::fill_large(Extent* extent, const order::MarkSet& inherited, const Need& need, Path path, Found* found) {
  LargeBlock* block = nullptr;
  // The page's own record first: it may still name the block that was freed here.
  const PageMap::Entry entry = PageMap::find(extent->begin + need.front);
  if (entry && entry.tag() == PageMap::Tag::large && static_cast<LargeBlock*>(entry.pointer())->core == this) {
    block = static_cast<LargeBlock*>(entry.pointer());
  } else {
    if (!spare_large_.empty()) {
      block = spare_large_.back();
      spare_large_.pop_back();
    } else {
      large_.push_back(std::make_unique<LargeBlock>());
      block = large_.back().get();
      block->core = this;
      block->record.container = reinterpret_cast<std::uintptr_t>(block) | static_cast<std::uintptr_t>(PageMap::Tag::large);
    }
    block->page = extent->begin + need.front;
    claim_pages(block->page, 1, block, PageMap::Tag::large);
  }
  block->extent = extent;
  block->begin = extent->begin;
  block->bytes = extent->size;
  block->page = extent->begin + need.front;
  extent->note = reinterpret_cast<void*>(block->record.container);
  if (!inherited.empty() || block->record.extra) block->record.more().inherited = inherited;
  found->record = &block->record;
  found->begin = extent->begin;
  found->bytes = extent->size;
  found->path = path;
}

}  // namespace streampool::pool
