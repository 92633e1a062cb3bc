// Slots and slabs: taking a slot of the own stream, one that waited, or another stream's; cutting slabs.
#include <sys/mman.h>

#include <algorithm>

#include "core.hpp"

namespace streampool::pool {

using order::Ticket;
using placement::Extent;
using placement::PageMap;

bool Core::good_free(BlockRecord& record) {
  const std::uint32_t magic = BlockRecord::magic_of(record.word.load(std::memory_order_acquire));
  if (is_free_magic(magic)) return true;
  // Somebody wrote over it. The slot is lost; nothing in the record is followed.
  trampled_.fetch_add(1, std::memory_order_relaxed);
  return false;
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
  if (position == stack.free_count)
    stack.pop();
  else
    stack.remove_at(position - 1);
  if (stack.empty()) heap.unlist(slab);
  BlockRecord& record = slab->records[slot];
  if (!good_free(record)) return false;
  found->record = &record;
  found->begin = slab->slot_begin(slot);
  found->bytes = slab->gross;
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
    // What only this stream may use, since it waits for another one, is complete once this stream has come past the
    // wait.
    bool waited = false;
    for (const order::Mark& m : w.marks) waited = waited || (m.stream != &heap.stream && !order::complete(m));
    slab->records[w.slot].home.store(&heap, std::memory_order_relaxed);
    heap.push(slab, w.slot, waited ? heap.stream.take_ticket() : w.marks.ticket_of(heap.stream));
    --slab->waiting;
    heap.count_waiting(-1, slab->gross);
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
  fresh->stack.slots = static_cast<std::uint16_t>(slots);
  fresh->cls = cls;
  fresh->core = this;
  fresh->slot_bytes = cls == kZeroClass ? kMinAlignment : placement::class_size(cls);
  fresh->gross = cls == kZeroClass ? 0 : fresh->slot_bytes;
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
  slab->stack.fill(placement::slots_of(need.cls));
  // The slab's memory may still be used by this very stream: each slot carries that mark on (R1).
  for (unsigned i = 0; i < slab->stack.slots; ++i) {
    slab->records[i].ticket = own;
    slab->records[i].home.store(&t, std::memory_order_relaxed);
  }
  std::lock_guard lock(t.stream.lock);
  t.list(slab);
  t.count_slab(1, slab->bytes);
  return true;
}

// Addresses that no memory stands behind, for blocks of no bytes.
bool Core::cut_zero_slab(Heap& t) {
  constexpr Bytes kUnit = placement::kSlabUnit;
  Slab* slab = spare_slab(kZeroClass);
  if (slab->base == 0) {
    void* area = mmap(nullptr, 2 * kUnit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    std::lock_guard lock(extent_lock_);
    if (area == MAP_FAILED) {
      spare_slabs_[kZeroClass].push_back(slab);
      return false;
    }
    zero_areas_.emplace_back(area, 2 * kUnit);
    slab->base = round_up(reinterpret_cast<Address>(area), kUnit);
    claim_pages(slab->base, kUnit, slab, PageMap::Tag::slab);
  }
  slab->retired = false;
  for (unsigned i = 0; i < placement::kMaxSlots; ++i) {
    slab->records[i].ticket = 0;
    slab->records[i].home.store(&t, std::memory_order_relaxed);
  }
  slab->heap = &t;
  slab->stack.fill(placement::kMaxSlots);
  std::lock_guard lock(t.stream.lock);
  t.list(slab);
  t.count_slab(1, 0);  // no memory is behind it
  return true;
}

}  // namespace streampool::pool
