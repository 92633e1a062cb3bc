// The fast path: a slot on a lasting stream that this thread used last, allocated and freed without a driver call, a
// host allocation or a locked instruction (the heap's lock is biased to the thread that uses it). Whatever is out of
// the ordinary is left to the full calls: these functions then say `no` and have changed no block.
//
// A slot's record goes from live to freed only under the lock of its slab's heap, here by a plain store and in the full
// free by an exchange; the one transition without that lock is the implicit release of a block that an object owns,
// and the object sees to it that it does not free at the same time.
#pragma once

#include "core.hpp"
#include "thread_cache.hpp"

namespace streampool::pool {

// What a call must find to go on here: the same pool and stream as last time, nothing to do first, and no reason to
// look twice (captures, a close, implicit releases: each changes the epoch).
[[gnu::always_inline]] inline bool Core::at_home(const ThreadCache& cache, driver::StreamHandle stream) const {
  return cache.key == door_.epoch.load(std::memory_order_acquire) && cache.handle == stream &&
         driver::ending_now() == driver::Ending::no;
}

// Writes down what every block needs. Nobody else has the record: its state is `freed` or `fresh`.
inline std::uint32_t Core::write_record(BlockRecord& record, std::uint64_t word, Bytes size, std::uint64_t origin) {
  record.size.store(size, std::memory_order_relaxed);
  record.origin.store(origin, std::memory_order_relaxed);
  const std::uint32_t generation = BlockRecord::generation_of(word) + 1;
  record.word.store(BlockRecord::pack(generation, Magic::live), std::memory_order_release);
  return generation;
}

[[gnu::always_inline]] inline Core::Fast Core::fast_allocate(Bytes size, driver::StreamHandle stream,
                                                             std::uint32_t flags, debug::StackId stack, BlockRef* out) {
  ThreadCache& cache = thread_cache();
  if (!at_home(cache, stream) || size - 1 >= placement::kMaxSlotSize) [[unlikely]]
    return Fast::no;
  Heap& heap = *cache.heap;
  LockSeat& seat = *g_lock_seat;
  if (!heap.stream.lock.enter(seat)) [[unlikely]]
    return Fast::no;
  const unsigned cls = placement::class_of_slot(size);
  Slab* slab = heap.classes[cls].head;
  if (slab == nullptr) [[unlikely]] {
    BiasedLock::leave(seat);
    return Fast::no;
  }
  const unsigned slot = slab->stack.top();
  BlockRecord& record = slab->records[slot];
  const std::uint64_t word = record.word.load(std::memory_order_relaxed);
  if (!is_free_magic(BlockRecord::magic_of(word))) [[unlikely]] {
    BiasedLock::leave(seat);
    return Fast::no;
  }
  slab->stack.pop();
  if (slab->stack.empty()) [[unlikely]]
    heap.unlist(slab);
  out->generation = write_record(record, word, size, BlockRecord::pack_origin(0, flags, stack));
  BiasedLock::leave(seat);
  out->record = &record;
  out->address = slab->slot_begin(slot);
  return bank_->on_allocate(*cache.counters, size, slab->gross, 0) ? Fast::raise : Fast::done;
}

// With the heap's lock held: the record is live in a slab of this heap, and holds on to nothing.
[[gnu::always_inline]] inline Core::Fast Core::fast_push(BlockRecord& record, Slab* slab, unsigned slot, Heap& heap,
                                                         LockSeat& seat, ThreadCache& cache, std::uint64_t word) {
  if (slab->stack.free_count + 1 == slab->stack.slots && (slab->prev != nullptr || slab->next != nullptr))
      [[unlikely]] {  // may have to give its memory back
    BiasedLock::leave(seat);
    return Fast::no;
  }
  record.word.store(BlockRecord::pack(BlockRecord::generation_of(word), Magic::freed), std::memory_order_release);
  heap.push(slab, slot, heap.stream.take_ticket());
  const Bytes size = record.size.load(std::memory_order_relaxed);
  BiasedLock::leave(seat);
  return bank_->on_free(*cache.counters, size, slab->gross, 0) ? Fast::raise : Fast::done;
}

[[gnu::always_inline]] inline Core::Fast Core::fast_free(Address address, driver::StreamHandle stream) {
  ThreadCache& cache = thread_cache();
  if (!at_home(cache, stream)) [[unlikely]]
    return Fast::no;
  Heap& heap = *cache.heap;
  LockSeat& seat = *g_lock_seat;
  if (!heap.stream.lock.enter(seat)) [[unlikely]]
    return Fast::no;
  // The slab of the last free first: it is most often this one too, and is then known without waiting for the page map.
  Slab* slab = cache.slab;
  if (address - slab->base.load(std::memory_order_relaxed) >= slab->bytes) {
    const placement::PageMap::Entry entry = placement::PageMap::find(address);
    if (!entry || entry.tag() != placement::PageMap::Tag::slab) {
      BiasedLock::leave(seat);
      return Fast::no;
    }
    slab = static_cast<Slab*>(entry.pointer());
  }
  const Bytes offset = address - slab->base.load(std::memory_order_relaxed);
  const unsigned slot = slab->slot_at(offset);
  BlockRecord& record = slab->records[slot];
  // The state first, the slab's heap after it: a slab that was cut anew for another stream shows that before its blocks
  // are live again. Only raw blocks: nobody's object can be releasing it meanwhile.
  const std::uint64_t word = slot < slab->stack.slots ? record.word.load(std::memory_order_acquire) : 0;
  if (BlockRecord::magic_of(word) != static_cast<std::uint32_t>(Magic::live) || offset != slot * slab->slot_bytes ||
      slab->heap.load(std::memory_order_relaxed) != &heap || record.layout() != kRawBlock << BlockRecord::kFrontBits)
      [[unlikely]] {
    BiasedLock::leave(seat);
    cache.slab = &g_no_slab;  // it may be what is left of a slab whose memory has gone elsewhere
    return Fast::no;
  }
  cache.slab = slab;
  return fast_push(record, slab, slot, heap, seat, cache, word);
}

// For the block's owner, who alone may release it.
[[gnu::always_inline]] inline Core::Fast Core::fast_free(const BlockRef& block, driver::StreamHandle stream) {
  ThreadCache& cache = thread_cache();
  BlockRecord& record = *block.record;
  const placement::PageMap::Entry container{record.container};
  if (!at_home(cache, stream) || container.tag() != placement::PageMap::Tag::slab) [[unlikely]]
    return Fast::no;
  Heap& heap = *cache.heap;
  LockSeat& seat = *g_lock_seat;
  if (!heap.stream.lock.enter(seat)) [[unlikely]]
    return Fast::no;
  Slab* slab = static_cast<Slab*>(container.pointer());
  const std::uint64_t word = record.word.load(std::memory_order_acquire);
  if (word != BlockRecord::pack(block.generation, Magic::live) || slab->heap.load(std::memory_order_relaxed) != &heap ||
      (record.layout() | kRawBlock << BlockRecord::kFrontBits) != kRawBlock << BlockRecord::kFrontBits) [[unlikely]] {
    BiasedLock::leave(seat);
    return Fast::no;
  }
  return fast_push(record, slab, slab->number_of(&record), heap, seat, cache, word);
}

}  // namespace streampool::pool
