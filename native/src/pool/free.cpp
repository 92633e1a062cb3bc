// Freeing: finding the block, telling misuse from use (R8), and putting the marks on (section 3 of docs/design.md).
#include <algorithm>

#include "core.hpp"
#include "thread_cache.hpp"

namespace streampool::pool {

using order::MarkSet;
using order::Ticket;
using placement::Extent;
using placement::PageMap;

namespace {

// An explicit free of this many bytes on a stream that is not lasting is fenced in the call itself (R6).
constexpr Bytes kFenceBytes = kMiB;
// Smaller ones are fenced in batches.
constexpr std::uint32_t kFenceFrees = 64;

debug::FaultKind fault_of(Errc errc) {
  switch (errc) {
    case Errc::double_free: return debug::FaultKind::double_free;
    case Errc::interior_free: return debug::FaultKind::interior_free;
    case Errc::wrong_pool: return debug::FaultKind::wrong_pool_free;
    case Errc::trampled_record: return debug::FaultKind::trampled_record;
    default: return debug::FaultKind::foreign_free;
  }
}

}  // namespace

// The live large block of any pool that holds `address`; `in_pool`: some pool owns the address. The page map has the start
// of a block only, so this looks page by page towards lower addresses: for interior addresses and errors, not for frees.
LargeBlock* Core::covering(Address address, bool* in_pool) {
  constexpr Bytes kPage = Bytes{1} << PageMap::kPageBits;
  for (const auto& other : all()) {
    std::lock_guard lock(other->extent_lock_);
    const placement::Range* range = other->extents_.range_of(address);
    if (range == nullptr) continue;
    *in_pool = true;
    for (Address page = round_down(address, kPage) + (kPage - 1); page >= range->begin; page -= kPage) {
      const PageMap::Entry e = PageMap::find(page);
      if (!e) continue;
      if (e.tag() == PageMap::Tag::slab) {
        if (static_cast<Slab*>(e.pointer())->retired) continue;
        return nullptr;
      }
      LargeBlock* block = static_cast<LargeBlock*>(e.pointer());
      if (block->extent == nullptr || block->begin > address) continue;  // freed, or it starts behind us in the same page
      return address < block->begin + block->bytes ? block : nullptr;
    }
    return nullptr;
  }
  return nullptr;
}

// Finds the block that starts at `address`, in whatever state it is. Anything else is an error that names what is there, and
// for a free a fault too.
Errc Core::locate(Address address, BlockRef* out, Failure* failure, debug::StackId stack, bool is_free) {
  const auto misuse = [&](Errc errc, std::string text, const BlockRecord* record, Address at) {
    if (debugger_ != nullptr && is_free) {
      debug::Fault fault;
      fault.kind = fault_of(errc);
      fault.address = fault.last = address;
      fault.at = stack;
      fault.note = text;
      if (record != nullptr) fault.block = facts_of(*record, at);
      debugger_->report(std::move(fault));
    }
    return failure->set(errc, std::move(text));
  };

  PageMap::Entry entry = PageMap::find(address);
  BlockRecord* record = nullptr;
  Address begin = 0;
  Bytes bytes = 0;
  Core* core = nullptr;
  // What the entry says may be history: a larger block can have grown over the page since.
  const bool history = !entry || (entry.tag() == PageMap::Tag::slab ? static_cast<Slab*>(entry.pointer())->retired
                                                                    : static_cast<LargeBlock*>(entry.pointer())->page != address);
  bool in_pool = false;
  if (history)
    if (LargeBlock* block = covering(address, &in_pool))
      entry.word = reinterpret_cast<std::uintptr_t>(block) | static_cast<std::uintptr_t>(PageMap::Tag::large);
  if (entry && entry.tag() == PageMap::Tag::slab) {
    Slab* slab = static_cast<Slab*>(entry.pointer());
    core = slab->core;
    const unsigned slot = slab->slot_of(address);
    if (slot < slab->stack.slots) {
      record = &slab->records[slot];
      begin = slab->slot_begin(slot);
      bytes = slab->slot_bytes;
    }
  } else if (entry) {
    LargeBlock* block = static_cast<LargeBlock*>(entry.pointer());
    core = block->core;
    record = &block->record;
    begin = block->begin;
    bytes = block->bytes;
    if (address < begin || address >= begin + bytes) record = nullptr;
  }
  if (record == nullptr && in_pool)
    return misuse(Errc::foreign_free, hex(address) + " is not a block: it lies in free memory of a pool", nullptr, 0);
  if (record == nullptr)
    return misuse(Errc::foreign_free,
                  hex(address) + " was not allocated from this or any other pool of the process; free it where it came from", nullptr,
                  0);
  const std::uint64_t word = record->word.load(std::memory_order_acquire);
  if (!is_magic(BlockRecord::magic_of(word)))
    return misuse(Errc::trampled_record,
                  "the record of the block at " + hex(address) + " was overwritten in host memory (state word " + hex(word) +
                      "); nothing was freed. A stray host write is the likely cause",
                  nullptr, 0);
  const Address user = begin + record->front;
  if (core != this)
    return misuse(Errc::wrong_pool,
                  "the block at " + hex(user) + " belongs to pool '" + core->name() + "' (" + std::string(kind_name(core->kind())) +
                      " memory of " + std::string(core->driver_->name()) + "), not to pool '" + name_ + "'",
                  nullptr, 0);
  if (user != address) {
    const bool live = record->is(Magic::live) || record->is(Magic::released);
    return misuse(Errc::interior_free,
                  hex(address) + " is not the start of a block: it lies " +
                      (address >= user ? std::to_string(address - user) + " bytes into" : std::to_string(user - address) + " bytes before") +
                      " the " + (live ? "" : "freed ") + "block of " + std::to_string(record->size) + " bytes at " + hex(user),
                  record, user);
  }
  *out = BlockRef{address, record, BlockRecord::generation_of(word)};
  return Errc::ok;
}

// The block is not live: say what it is instead.
Errc Core::not_live(const BlockRef& block, std::uint64_t word, Failure* failure, debug::StackId stack, bool is_free) {
  const BlockRecord& record = *block.record;
  if (!is_magic(BlockRecord::magic_of(word)))
    return failure->set(Errc::trampled_record, "the record of the block at " + hex(block.address) +
                                                   " was overwritten in host memory; nothing was freed");
  // With another generation the record speaks of the new owner, who has nothing to do with this.
  const bool reused = BlockRecord::generation_of(word) != block.generation;
  std::string text = reused ? "the block" : "the block of " + std::to_string(record.size) + " bytes";
  text += " at " + hex(block.address) + " of pool '" + name_ + "' ";
  if (reused) text += "was freed before, and its memory has been handed out again since; the new owner is not harmed";
  else if (BlockRecord::magic_of(word) == static_cast<std::uint32_t>(Magic::released)) text += "was released already";
  else text += "is free already";
  if (debugger_ != nullptr && is_free) {
    debug::Fault fault;
    fault.kind = debug::FaultKind::double_free;
    fault.address = fault.last = block.address;
    fault.at = stack;
    fault.note = text;
    if (!reused) fault.block = facts_of(record, block.address);
    debugger_->report(std::move(fault));
  }
  return failure->set(Errc::double_free, std::move(text));
}

Errc Core::free(Address address, const FreeRequest& request, Failure* failure) {
  if (driver::ending() != driver::Ending::no) return Errc::ok;
  BlockRef block;
  const Errc errc = locate(address, &block, failure, request.stack);
  if (errc != Errc::ok) return errc;
  return free_found(block, request, failure);
}

Errc Core::free(const BlockRef& block, const FreeRequest& request, Failure* failure) {
  // Inherited frees of a forked child, and frees while the process ends, are ignored (R22).
  if (driver::ending() != driver::Ending::no) return Errc::ok;
  return free_found(block, request, failure);
}

bool Core::try_free(const BlockRef& block, const FreeRequest& request) {
  if (debugger_ != nullptr || closed() || driver::ending() != driver::Ending::no || !request.stream.has_value()) return false;
  const driver::StreamHandle handle = canonical(*request.stream);
  const ThreadCache& cache = thread_cache();
  if (cache.uid != uid_ || cache.handle != handle || cache.epoch != streams_.epoch() || streams_.capture_known()) return false;
  BlockRecord& record = *block.record;
  const PageMap::Entry container{record.container};
  if (container.tag() != PageMap::Tag::slab || record.extra || record.home != cache.heap) return false;
  // A free of a slot ends at once once the heap's lock is there; who holds it does so for a few dozen instructions.
  if (!record.move(block.generation, Magic::live, Magic::freed)) return false;
  bank_->on_free(counters(), record.size, gross_of(record), guards_of(record));
  Ticket ticket = 0;
  finish_free(record, block.address, *static_cast<Heap*>(cache.heap), 0, &ticket);
  return true;
}

bool Core::try_free(Address address, const FreeRequest& request) {
  if (debugger_ != nullptr) return false;
  const PageMap::Entry entry = PageMap::find(address);
  if (!entry || entry.tag() != PageMap::Tag::slab) return false;
  Slab* slab = static_cast<Slab*>(entry.pointer());
  const unsigned slot = slab->slot_of(address);
  if (slab->core != this || slot >= slab->stack.slots) return false;
  BlockRecord& record = slab->records[slot];
  if (address != slab->slot_begin(slot) + record.front) return false;
  return try_free(BlockRef{address, &record, BlockRecord::generation_of(record.word.load(std::memory_order_acquire))}, request);
}

Errc Core::free_found(const BlockRef& block, const FreeRequest& request, Failure* failure) {
  BlockRecord& record = *block.record;
  Named named;
  if (request.stream.has_value()) {
    // Before the block changes: a stream that cannot be used must leave it live.
    const Errc errc = name_stream(*request.stream, &named, failure);
    if (errc != Errc::ok && !failure->lost) return errc;
    if (failure->lost) {
      // A free on a lost device is harmless (R22): the block is given up without its stream.
      lost_.store(true, std::memory_order_release);
      *failure = {};
    }
  }
  std::shared_lock<std::shared_mutex> gate;
  if (debugger_ != nullptr) gate = std::shared_lock(live_gate_);
  if (!record.move(block.generation, Magic::live, debugger_ != nullptr ? Magic::quarantined : Magic::freed)) {
    gate = {};
    return not_live(block, record.word.load(std::memory_order_acquire), failure, request.stack);
  }
  const Bytes gross = gross_of(record);
  const bool explicit_free = named.heap() != nullptr;
  Heap& by = explicit_free ? *named.heap() : *record.home;
  Ticket ticket = 0;
  bank_->on_free(counters(), record.size, gross, guards_of(record));
  finish_free(record, block.address, by, request.stack, &ticket);
  gate = {};

  if (explicit_free) note_unfenced(named, gross, ticket);
  for (driver::StreamHandle handle : request.fence_too) {
    Named other;
    Failure ignored;
    if (streams_.name(handle, &other, &ignored) == Errc::ok && !other.stream().lasting) fences_.record(other.stream(), other.handle());
  }
  if (released_.load(std::memory_order_relaxed) != nullptr) drain();
  if (debugger_ != nullptr) debugger_->poll();
  if (closed() && bank_->totals().gross == 0) let_go();
  return Errc::ok;
}

// The record is ours (freed or quarantined). After this call it may be anybody's.
void Core::finish_free(BlockRecord& record, Address address, Heap& by, debug::StackId stack, Ticket* ticket) {
  if (debugger_ == nullptr && free_own_slot(record, by, ticket)) return;
  MarkSet marks = make_marks(record, by, ticket);
  forget_users(&record);
  if (debugger_ == nullptr) {
    if (record.extra) record.extra->inherited = {};
    settle(&record, marks);
    return;
  }
  const double now = driver_->now();
  {
    std::lock_guard lock(extra_lock(&record));
    BlockExtra& extra = record.more();
    extra.freed_at = stack;
    extra.freed_thread = thread_id();
    extra.freed_time = now;
    extra.inherited = {};
    extra.marks = std::move(marks);
  }
  debugger_->on_free({&record, facts_of(record, address)});
}

// The fast path: a slot freed on the stream that its slab was cut for, of memory that no host reads.
bool Core::free_own_slot(BlockRecord& record, Heap& by, Ticket* ticket) {
  const PageMap::Entry container{record.container};
  if (container.tag() != PageMap::Tag::slab || record.extra) return false;
  Slab* slab = static_cast<Slab*>(container.pointer());
  if (slab->heap != &by || record.home != &by || host_visible(kind_)) return false;
  bool retire = false;
  {
    std::lock_guard lock(by.stream.lock);
    *ticket = by.stream.take_ticket();
    record.ticket = *ticket;
    slab->last_ticket = *ticket;
    slab->stack.push(slab->number_of(&record));
    if (!slab->listed) list_slab(by, slab);
    // One empty slab a class stays, so that a pair at the edge does not cut and give back each time.
    if (slab->stack.all_free() && slab->waiting == 0 && slab->cls != kZeroClass && (slab->prev != nullptr || slab->next != nullptr)) {
      unlist_slab(by, slab);
      --by.slab_count;
      retire = true;
    }
  }
  if (retire) retire_slab(slab);
  return true;
}

// The slab is nobody's any more: unlisted, all slots free. Its memory keeps the marks of its last life.
void Core::retire_slab(Slab* slab) {
  slab->retired = true;
  MarkSet marks;
  marks.add({&slab->heap->stream, slab->last_ticket});
  Extent* extent = slab->extent;
  slab->extent = nullptr;
  std::lock_guard lock(extent_lock_);
  put_extent(extent, std::move(marks));
}

// A fresh ticket on the freeing stream and on each recorded one; the memory's former marks unless they are covered (R1).
MarkSet Core::make_marks(BlockRecord& record, Heap& by, Ticket* ticket) {
  MarkSet marks;
  const auto mark = [&marks](order::StreamState& s) {
    s.lock.lock();
    const Ticket t = s.take_ticket();
    s.lock.unlock();
    marks.add({&s, t});
    return t;
  };
  *ticket = mark(by.stream);
  const PageMap::Entry container{record.container};
  if (record.extra) {
    for (order::StreamState* s : record.extra->recorded) {
      if (s == &by.stream) continue;
      mark(*s);
      s->owed.store(true, std::memory_order_release);
    }
    for (const order::Mark& m : record.extra->inherited)
      if (!order::may_use(by.stream, m)) marks.add(m);
  }
  if (container.tag() == PageMap::Tag::slab) {
    const Slab* slab = static_cast<Slab*>(container.pointer());
    const order::Mark former{&slab->heap->stream, record.ticket};
    if (!order::may_use(by.stream, former)) marks.add(former);
  }
  return marks;
}

// What the live block held on to.
void Core::forget_users(BlockRecord* record) {
  const PageMap::Entry container{record->container};
  if (container.tag() == PageMap::Tag::large || static_cast<Slab*>(container.pointer())->heap != record->home)
    record->home->users.fetch_sub(1, std::memory_order_release);
  if (!record->extra) return;
  for (order::StreamState* s : record->extra->recorded) Heap::of(s)->users.fetch_sub(1, std::memory_order_release);
  record->extra->recorded.clear();
}

// Puts freed memory where its marks say.
void Core::settle(BlockRecord* record, const MarkSet& marks) {
  const PageMap::Entry container{record->container};
  if (container.tag() == PageMap::Tag::large) {
    settle_extent(static_cast<LargeBlock*>(container.pointer()), marks);
    return;
  }
  Slab* slab = static_cast<Slab*>(container.pointer());
  settle_slot(slab, slab->number_of(record), marks);
}

void Core::settle_extent(LargeBlock* block, MarkSet marks) {
  if (!options_.debug.track) block->record.extra.reset();
  std::lock_guard lock(extent_lock_);
  Extent* extent = block->extent;
  block->extent = nullptr;
  put_extent(extent, std::move(marks));
}

void Core::settle_slot(Slab* slab, unsigned slot, MarkSet marks) {
  Heap& heap = *slab->heap;
  BlockRecord& record = slab->records[slot];
  if (!options_.debug.track) record.extra.reset();
  marks.drop_complete();
  const bool own = marks.empty() || (marks.size() == 1 && marks.begin()->stream == &heap.stream && !host_visible(kind_));
  bool retire = false;
  {
    std::lock_guard lock(heap.stream.lock);
    if (own) {
      record.ticket = marks.ticket_of(heap.stream);
      slab->last_ticket = std::max(slab->last_ticket, record.ticket);
      slab->stack.push(slot);
      if (!slab->listed) list_slab(heap, slab);
      if (slab->stack.all_free() && slab->waiting == 0 && slab->cls != kZeroClass && (slab->prev != nullptr || slab->next != nullptr)) {
        unlist_slab(heap, slab);
        --heap.slab_count;
        retire = true;
      }
    } else {
      ++slab->waiting;
      heap.classes[slab->cls].waiting.push_back({slab, slot, std::move(marks)});
    }
  }
  if (retire) retire_slab(slab);
}

// Under the extent lock: into the index of its owner. Extents of different owners never become one (no mark set grows).
void Core::put_extent(Extent* extent, MarkSet marks) {
  marks.drop_complete();
  if (marks.empty()) {
    extents_.put_free(extent, common_, 0);
  } else if (marks.size() == 1) {
    extents_.put_free(extent, Heap::of(marks.begin()->stream)->extents, marks.begin()->ticket);
  } else {
    extent = extents_.put_free(extent, mixed_, 0);
    extent->note = new MarkSet(std::move(marks));
  }
}

// -- fences that R6 allows in the call that names the stream ---------------------------------------------------------------

void Core::note_unfenced(Named& named, Bytes bytes, Ticket ticket) {
  order::StreamState& s = named.stream();
  if (s.lasting) {
    // Nobody fences a lasting stream on a free; the debugger asks for completion all the time, so here it pays.
    if (debugger_ != nullptr && s.unfenced_frees.fetch_add(1, std::memory_order_relaxed) + 1 >= std::min(kFenceFrees, options_.debug.check_every))
      fences_.record(s, named.handle(), ticket);
    return;
  }
  if (bytes >= kFenceBytes) {
    fences_.record(s, named.handle(), ticket);
    return;
  }
  if (s.unfenced_frees.fetch_add(1, std::memory_order_relaxed) == 0) s.unfenced_since.store(driver_->now(), std::memory_order_relaxed);
  const std::uint64_t total = s.unfenced_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (total >= kFenceBytes || s.unfenced_frees.load(std::memory_order_relaxed) >= kFenceFrees) fences_.record(s, named.handle(), ticket);
}

// A call names a stream that is not lasting: what others put on it, and what is old, gets its fence now.
void Core::fence_owed(Named& named) {
  order::StreamState& s = named.stream();
  const bool owed = s.owed.load(std::memory_order_acquire);
  if (!owed && s.unfenced_frees.load(std::memory_order_relaxed) == 0) return;
  if (owed || s.unfenced_frees.load(std::memory_order_relaxed) >= kFenceFrees ||
      driver_->now() - s.unfenced_since.load(std::memory_order_relaxed) >= options_.fence_age)
    fences_.record(s, named.handle());
}

// -- implicit release --------------------------------------------------------------------------------------------------

void Core::release(const BlockRef& block) noexcept {
  if (driver::ending() != driver::Ending::no) return;
  BlockRecord& record = *block.record;
  if (!record.move(block.generation, Magic::live, Magic::released)) return;
  BlockRecord* head = released_.load(std::memory_order_relaxed);
  do record.link = head;
  while (!released_.compare_exchange_weak(head, &record, std::memory_order_release, std::memory_order_relaxed));
}

// Frees what was released without a stream: it marks the block's own streams and makes no driver call.
void Core::drain(bool may_let_go) {
  BlockRecord* record = released_.exchange(nullptr, std::memory_order_acquire);
  bool drained = false;
  while (record != nullptr) {
    BlockRecord* next = record->link;
    const std::uint32_t generation = BlockRecord::generation_of(record->word.load(std::memory_order_acquire));
    const bool debugging = debugger_ != nullptr;
    std::shared_lock<std::shared_mutex> gate;
    if (debugging) gate = std::shared_lock(live_gate_);
    if (record->move(generation, Magic::released, debugging ? Magic::quarantined : Magic::freed)) {
      bank_->on_free(counters(), record->size, gross_of(*record), guards_of(*record));
      Ticket ticket = 0;
      Heap& by = *record->home;
      // Nobody named the stream: the next call that does will fence it.
      by.stream.owed.store(true, std::memory_order_release);
      finish_free(*record, address_of(*record), by, 0, &ticket);
    }
    record = next;
    drained = true;
  }
  if (drained && may_let_go && !buried_ && closed() && bank_->totals().gross == 0) let_go();
}

// -- declared uses -------------------------------------------------------------------------------------------------------

// The live block that a declared use means: by any address inside it.
Errc Core::declared(Address address, const char* verb, BlockRef* out, Failure* failure) {
  Failure found;
  const Errc errc = locate(address, out, &found, 0, false);
  if (errc == Errc::interior_free) return enclosing(address, out, failure);
  return errc == Errc::ok ? errc : failure->set(errc, std::string(verb) + ": " + found.text);
}

Errc Core::record_stream(Address address, driver::StreamHandle stream, Failure* failure) {
  if (address == 0) return Errc::ok;  // the null pointer of an empty buffer
  BlockRef block;
  const Errc errc = declared(address, "record_stream", &block, failure);
  return errc == Errc::ok ? record_stream(block, stream, failure) : errc;
}

Errc Core::record_stream(const BlockRef& block, driver::StreamHandle stream, Failure* failure) {
  Errc errc = enter(failure);
  if (errc != Errc::ok && errc != Errc::closed) return errc;  // blocks outlive their pool
  Named named;
  errc = name_stream(stream, &named, failure, true);
  if (errc != Errc::ok) return errc;
  BlockRecord& record = *block.record;
  std::lock_guard lock(extra_lock(&record));
  const std::uint64_t word = record.word.load(std::memory_order_acquire);
  if (word != BlockRecord::pack(block.generation, Magic::live)) return not_live(block, word, failure, 0, false);
  if (named.heap() == record.home) return Errc::ok;
  std::vector<order::StreamState*>& recorded = record.more().recorded;
  if (std::find(recorded.begin(), recorded.end(), &named.stream()) == recorded.end()) {
    recorded.push_back(&named.stream());
    named.heap()->users.fetch_add(1, std::memory_order_relaxed);
  }
  return Errc::ok;
}

// The live block that an address inside it belongs to.
Errc Core::enclosing(Address address, BlockRef* out, Failure* failure) {
  const auto missing = [&] { return failure->set(Errc::foreign_free, hex(address) + " lies in no live block of pool '" + name_ + "'"); };
  const PageMap::Entry entry = PageMap::find(address);
  BlockRecord* record = nullptr;
  Address begin = 0;
  if (entry && entry.tag() == PageMap::Tag::slab && !static_cast<Slab*>(entry.pointer())->retired) {
    Slab* slab = static_cast<Slab*>(entry.pointer());
    const unsigned slot = slab->slot_of(address);
    if (slab->core != this || slot >= slab->stack.slots) return missing();
    record = &slab->records[slot];
    begin = slab->slot_begin(slot);
  } else {
    bool in_pool = false;
    LargeBlock* block = covering(address, &in_pool);
    if (block == nullptr || block->core != this) return missing();
    record = &block->record;
    begin = block->begin;
  }
  if (record == nullptr || !record->is(Magic::live)) return missing();
  const Address user = begin + record->front;
  if (address < user || address >= user + std::max<Bytes>(record->size, 1)) return missing();
  *out = BlockRef{user, record, BlockRecord::generation_of(record->word.load(std::memory_order_acquire))};
  return Errc::ok;
}

// A private stream waits for the event and is fenced at once: the block gets a mark that covers what the event covered when
// this was called, and no more, whatever the caller does with the event later.
Errc Core::record_event(Address address, driver::EventHandle event, Failure* failure) {
  if (address == 0) return Errc::ok;
  BlockRef block;
  const Errc errc = declared(address, "record_event", &block, failure);
  return errc == Errc::ok ? record_event(block, event, failure) : errc;
}

Errc Core::record_event(const BlockRef& block, driver::EventHandle event, Failure* failure) {
  Errc errc = enter(failure);
  if (errc != Errc::ok && errc != Errc::closed) return errc;
  // A query of an event that was recorded in a capture would end that capture.
  if (streams_.capture_known())
    return failure->set(Errc::capture, "record_event: a graph capture is under way; use record_stream, or call this before or after it");
  const driver::Status state = driver_->event_query(event);
  if (state.code == driver::Code::capturing)
    return failure->set(Errc::capture, "record_event: the event was recorded in a graph capture");
  if (!state.ok() && state.code != driver::Code::not_ready)
    return failure->set(Errc::driver, "record_event: the event cannot be used: " + driver::describe(state));
  if (state.ok()) return Errc::ok;  // nothing left to wait for

  Heap* relay = nullptr;
  errc = take_relay(&relay, failure);
  if (errc != Errc::ok) return errc;
  order::StreamState& s = relay->stream;
  const driver::Status waits = driver_->stream_wait_event(s.handle, event);
  if (!waits.ok()) return failure->set(Errc::driver, "record_event: " + driver::describe(waits));
  s.lock.lock();
  const Ticket ticket = s.take_ticket();
  s.lock.unlock();
  fences_.record(s, s.handle, ticket);

  BlockRecord& record = *block.record;
  std::lock_guard lock(extra_lock(&record));
  const std::uint64_t word = record.word.load(std::memory_order_acquire);
  if (word != BlockRecord::pack(block.generation, Magic::live)) return not_live(block, word, failure, 0, false);
  record.more().inherited.add({&s, ticket});
  return Errc::ok;
}

// A private stream, idle if there is one, so that a slow event does not hold up a quick one behind it.
Errc Core::take_relay(Heap** out, Failure* failure) {
  constexpr std::size_t kMaxRelays = 8;
  {
    std::lock_guard lock(relay_mutex_);
    for (Heap* heap : relays_)
      if (heap->stream.idle()) return *out = heap, Errc::ok;
  }
  std::size_t count = 0;
  {
    std::lock_guard lock(relay_mutex_);
    count = relays_.size();
  }
  for (std::size_t i = 0; i < count; ++i) {
    Heap* heap = nullptr;
    {
      std::lock_guard lock(relay_mutex_);
      heap = relays_[i];
    }
    fences_.poll(heap->stream);
    if (heap->stream.idle()) return *out = heap, Errc::ok;
  }
  if (count >= kMaxRelays) {
    std::lock_guard lock(relay_mutex_);
    *out = relays_[next_relay_++ % relays_.size()];
    return Errc::ok;
  }
  driver::StreamHandle handle = 0;
  const driver::Status made = driver_->stream_create(&handle);
  if (!made.ok()) return failure->set(Errc::driver, "record_event: " + driver::describe(made));
  Heap* heap = streams_.adopt(handle, failure);
  if (heap == nullptr) {
    driver_->stream_destroy(handle);
    return failure->code;
  }
  std::lock_guard lock(relay_mutex_);
  relays_.push_back(heap);
  *out = heap;
  return Errc::ok;
}

}  // namespace streampool::pool
