// The fast path: a block of a heap's slabs or quick lists, allocated and freed under the heap's lock alone, without a
// driver call or a host allocation. On a lasting stream that this thread used last nothing else is looked at, and where
// the lock is biased to the thread there is no locked instruction either. Whatever is out of the ordinary is left to
// the full calls: these functions then say `no` and have changed no block.
//
// A record goes from live to freed only under the lock of its slab's heap, a large block's under that of its home's:
// here by a plain store and in the full free by an exchange. The one transition without that lock is the implicit
// release of a block that an object owns, and the object sees to it that it does not free at the same time.
#pragma once

#include "core.hpp"
#include "thread_cache.hpp"

namespace streampool::pool {

// What a call must find to go on here: the same pool and stream as last time, nothing to do first, and no reason to
// look twice (captures, a close, implicit releases: each changes the epoch; a thread that forks or ends the process
// forgets its stream).
[[gnu::always_inline]] inline bool Core::at_home(const ThreadCache& cache, driver::StreamHandle stream) const {
  return cache.key == door_.epoch.load(std::memory_order_acquire) && cache.handle == stream;
}

// Takes the lock of the heap that the thread remembers, where it is the thread's by bias.
[[gnu::always_inline]] inline bool Core::enter_home(Heap& heap, const ThreadCache& cache, LockSeat& seat) const {
  if (!heap.stream.lock.enter(seat)) [[unlikely]]
    return false;
  // Again: the stream may have been forgotten, and its heap be another's, before the lock was ours.
  if (cache.key == door_.epoch.load(std::memory_order_acquire)) [[likely]]
    return true;
  BiasedLock::leave(seat);
  return false;
}

// Writes down what every block needs. Nobody else has the record: its state is `freed` or `fresh`.
inline std::uint32_t Core::write_record(BlockRecord& record, std::uint64_t word, Bytes size, std::uint64_t origin) {
  record.size.store(size, std::memory_order_relaxed);
  record.origin.store(origin, std::memory_order_relaxed);
  const std::uint32_t generation = BlockRecord::generation_of(word) + 1;
  record.word.store(BlockRecord::pack(generation, Magic::live), std::memory_order_release);
  return generation;
}

// A raw block that lies where it seems to and holds on to nothing.
inline bool of_raw_block(const BlockRecord& record) {
  constexpr std::uint32_t kIdle = (kSampled | kOwned) << BlockRecord::kFrontBits;  // say nothing of where it lies
  return (record.layout() & ~kIdle) == kRawBlock << BlockRecord::kFrontBits;
}

// -- under the heap's lock

[[gnu::always_inline]] inline bool Core::serve_slot(Heap& heap, Bytes size, std::uint64_t origin, BlockRef* out,
                                                    Bytes* gross) {
  Slab* slab = heap.classes[placement::class_of_slot(size)].head;
  if (slab == nullptr) [[unlikely]]
    return false;
  const unsigned slot = slab->stack.top();
  BlockRecord& record = slab->records[slot];
  const std::uint64_t word = record.word.load(std::memory_order_relaxed);
  if (!is_free_magic(BlockRecord::magic_of(word))) [[unlikely]]
    return false;
  slab->stack.pop();
  if (slab->stack.empty()) [[unlikely]]
    heap.unlist(slab);
  out->generation = write_record(record, word, size, origin);
  out->record = &record;
  out->address = slab->slot_begin(slot);
  *gross = slab->gross;
  return true;
}

[[gnu::always_inline]] inline bool Core::serve_quick(Heap& heap, Bytes size, std::uint64_t origin, BlockRef* out,
                                                     Bytes* gross) {
  const Bytes bytes = round_up(size, placement::kExtentAlign);
  QuickLists::List& list = heap.quick.of(bytes);
  BlockRecord* record = list.head;
  if (record == nullptr || list.bytes != bytes) [[unlikely]]
    return false;
  const std::uint64_t word = record->word.load(std::memory_order_relaxed);
  if (!is_free_magic(BlockRecord::magic_of(word))) [[unlikely]]
    return false;
  list.head = record->link;
  heap.quick.bytes -= bytes;
  out->generation = write_record(*record, word, size, origin);
  out->record = record;
  out->address = LargeBlock::of(*record)->begin.load(std::memory_order_relaxed);
  *gross = bytes;
  return true;
}

[[gnu::always_inline]] inline bool Core::serve(Heap& heap, Bytes size, std::uint64_t origin, BlockRef* out,
                                               Bytes* gross) {
  if (size - 1 < placement::kMaxSlotSize) [[likely]]
    return serve_slot(heap, size, origin, out, gross);
  return size - 1 < QuickLists::kMaxBlock && serve_quick(heap, size, origin, out, gross);
}

// The record is live in a slab of this heap, and holds on to nothing.
[[gnu::always_inline]] inline bool Core::put_slot(Heap& heap, Slab* slab, unsigned slot, std::uint64_t word,
                                                  Freed* freed) {
  BlockRecord& record = slab->records[slot];
  if (slab->stack.free_count + 1 == slab->stack.slots && slab->listed &&
      (slab->prev != nullptr || slab->next != nullptr) && heap.idle_slabs(slab->cls) >= Heap::kIdleKept) [[unlikely]]
    return false;  // one more slab without a live block: it may have to give its memory back
  record.word.store(BlockRecord::pack(BlockRecord::generation_of(word), Magic::freed), std::memory_order_release);
  heap.push(slab, slot, record, freed->ticket = heap.stream.take_ticket());
  freed->size = record.size.load(std::memory_order_relaxed);
  freed->gross = slab->gross;
  return true;
}

// Into its quick list. False: there is no room.
[[gnu::always_inline]] inline bool Core::list_quick(Heap& heap, LargeBlock& block, order::Ticket* ticket) {
  BlockRecord& record = block.record;
  const Bytes bytes = block.bytes.load(std::memory_order_relaxed);
  QuickLists::List& list = heap.quick.of(bytes);
  if (bytes > QuickLists::kMaxBlock || heap.quick.bytes + bytes > QuickLists::kMaxBytes) [[unlikely]]
    return false;
  if (list.bytes != bytes) [[unlikely]] {
    if (list.head != nullptr) return false;
    list.bytes = bytes;
  }
  record.ticket = *ticket = heap.stream.take_ticket();
  record.link = list.head;
  list.head = &record;
  heap.quick.bytes += bytes;
  return true;
}

// The record is live, of this heap, and holds on to nothing.
[[gnu::always_inline]] inline bool Core::put_quick(Heap& heap, LargeBlock& block, std::uint64_t word, Freed* freed) {
  if (!list_quick(heap, block, &freed->ticket)) return false;
  BlockRecord& record = block.record;
  record.word.store(BlockRecord::pack(BlockRecord::generation_of(word), Magic::freed), std::memory_order_release);
  freed->size = record.size.load(std::memory_order_relaxed);
  freed->gross = block.bytes.load(std::memory_order_relaxed);
  return true;
}

[[gnu::always_inline]] inline bool Core::put_large(Heap& heap, LargeBlock& block, std::uint64_t word, Freed* freed) {
  if (put_quick(heap, block, word, freed)) [[likely]]
    return true;
  freed->whole = &block;
  freed->word = word;
  return false;
}

// By raw address. Only raw blocks: nobody's object can be releasing them meanwhile.
[[gnu::always_inline]] inline bool Core::take_back(Address address, Heap& heap, ThreadCache& cache, Freed* freed) {
  // The slab of the last free first: it is most often this one too, and is then known without waiting for the page map.
  Slab* slab = cache.slab;
  if (address - slab->base.load(std::memory_order_relaxed) >= slab->bytes) {
    const placement::PageMap::Entry entry = placement::PageMap::find(address);
    if (!entry) [[unlikely]]
      return false;
    if (entry.tag() == placement::PageMap::Tag::large) {
      LargeBlock& block = *static_cast<LargeBlock*>(entry.pointer());
      const std::uint64_t word = block.record.word.load(std::memory_order_acquire);
      if (BlockRecord::magic_of(word) != static_cast<std::uint32_t>(Magic::live) ||
          block.begin.load(std::memory_order_relaxed) != address ||
          block.record.home.load(std::memory_order_relaxed) != &heap || !of_raw_block(block.record)) [[unlikely]]
        return false;
      return put_large(heap, block, word, freed);
    }
    slab = static_cast<Slab*>(entry.pointer());
  }
  const Bytes offset = address - slab->base.load(std::memory_order_relaxed);
  const unsigned slot = slab->slot_at(offset);
  BlockRecord& record = slab->records[slot];
  // The state first, the slab's heap after it: a slab that was cut anew for another stream shows that before its blocks
  // are live again.
  const std::uint64_t word = slot < slab->stack.slots ? record.word.load(std::memory_order_acquire) : 0;
  if (BlockRecord::magic_of(word) != static_cast<std::uint32_t>(Magic::live) || offset != slot * slab->slot_bytes ||
      slab->heap.load(std::memory_order_relaxed) != &heap || !of_raw_block(record)) [[unlikely]] {
    cache.slab = &g_no_slab;  // it may be what is left of a slab whose memory has gone elsewhere
    return false;
  }
  cache.slab = slab;
  return put_slot(heap, slab, slot, word, freed);
}

// For the block's owner, who alone may release it.
[[gnu::always_inline]] inline bool Core::take_back(const BlockRef& ref, Heap& heap, ThreadCache&, Freed* freed) {
  BlockRecord& record = *ref.record;
  const std::uint64_t word = record.word.load(std::memory_order_acquire);
  if (word != BlockRecord::pack(ref.generation, Magic::live) ||
      (record.layout() & ~((kRawBlock | kSampled | kOwned) << BlockRecord::kFrontBits)) != 0) [[unlikely]]
    return false;
  const placement::PageMap::Entry container{record.container};
  if (container.tag() == placement::PageMap::Tag::large)
    return record.home.load(std::memory_order_relaxed) == &heap &&
           put_large(heap, *static_cast<LargeBlock*>(container.pointer()), word, freed);
  Slab* slab = static_cast<Slab*>(container.pointer());
  return slab->heap.load(std::memory_order_relaxed) == &heap &&
         put_slot(heap, slab, slab->number_of(&record), word, freed);
}

// -- the calls: nothing is called in them, so that they need no registers but those that a call may spoil

[[gnu::always_inline]] inline Core::Fast Core::fast_allocate(Bytes size, driver::StreamHandle stream,
                                                             std::uint32_t flags, debug::StackId stack, BlockRef* out) {
  ThreadCache& cache = thread_cache();
  if (!at_home(cache, stream)) [[unlikely]]
    return Fast::no;
  if (cache.counters->allocated_bytes.load(std::memory_order_relaxed) + size >= cache.next_sample) [[unlikely]]
    return Fast::no;  // its call stack is due
  LockSeat& seat = *g_lock_seat;
  if (!enter_home(*cache.heap, cache, seat)) [[unlikely]]
    return Fast::no;
  Bytes gross = 0;
  const bool served = serve(*cache.heap, size, BlockRecord::pack_origin(0, flags, stack), out, &gross);
  BiasedLock::leave(seat);
  if (!served) [[unlikely]]
    return Fast::no;
  return bank_->on_allocate(*cache.counters, size, gross, 0) ? Fast::raise : Fast::done;
}

template <typename Name>
[[gnu::always_inline]] inline Core::Fast Core::fast_free(const Name& name, driver::StreamHandle stream) {
  ThreadCache& cache = thread_cache();
  if (!at_home(cache, stream)) [[unlikely]]
    return Fast::no;
  LockSeat& seat = *g_lock_seat;
  if (!enter_home(*cache.heap, cache, seat)) [[unlikely]]
    return Fast::no;
  Freed freed;
  const bool done = take_back(name, *cache.heap, cache, &freed);
  BiasedLock::leave(seat);
  if (!done) [[unlikely]]
    return Fast::no;
  return bank_->on_free(*cache.counters, freed.size, freed.gross, 0) ? Fast::raise : Fast::done;
}

}  // namespace streampool::pool
