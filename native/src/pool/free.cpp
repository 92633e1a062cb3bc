// Freeing: the marks that a free puts on, and where the memory goes with them (docs/design.md, "The reuse rule").
#include <algorithm>

#include "../base/spin_wait.hpp"
#include "fast.hpp"

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

}  // namespace

// Under the heap's lock.
template <typename Name>
bool Core::take_large_too(const Name& name, Heap& heap, Freed* freed) {
  return take_back(name, heap, thread_cache(), freed) || (freed->whole != nullptr && put_whole(heap, freed));
}

template <typename Name>
bool Core::lock_and_take_back(const Name& name, const Named& named, Heap& heap, Freed* freed) {
  std::lock_guard lock(heap.stream.lock);
  if (!stands(named) || !take_large_too(name, heap, freed)) return false;
  if (!heap.stream.lasting) heap.stream.count_unfenced(freed->gross);
  return true;
}

// On the stream that this thread used last, as allocate_at_home. Nobody fences it on a free.
template <typename Name>
bool Core::free_at_home(const Name& name, const FreeRequest& request) {
  ThreadCache& cache = thread_cache();
  if (!request.stream.has_value() || request.size.has_value() || !at_home(cache, *request.stream) ||
      !request.fence_too.empty())
    return false;
  Freed freed;
  {
    Heap& heap = *cache.heap;
    std::lock_guard lock(heap.stream.lock);
    if (!at_home(cache, *request.stream) || !take_large_too(name, heap, &freed)) return false;
  }
  if (bank_->on_free(*cache.counters, freed.size, freed.gross, 0)) bank_->raise(*cache.counters);
  return true;
}

Errc Core::free(Address address, const FreeRequest& request, Failure* failure) {
  if (free_at_home(address, request)) return Errc::ok;
  if (driver::ending() != driver::Ending::no) return Errc::ok;
  Named named;
  Failure unnamed;
  const Errc stream = name_for_free(request, &named, &unnamed);
  // The usual case in one step; what it does not take is looked at in full, and with it what is wrong.
  if (Freed freed; ordinary_ && named.heap() != nullptr && !request.size.has_value() &&
                   lock_and_take_back(address, named, *named.heap(), &freed)) {
    freed_now(named, *named.heap(), freed, request);
    return Errc::ok;
  }
  BlockRef block;
  Errc errc = locate(address, &block, failure, request.stack);
  if (errc == Errc::ok) errc = must_have_size(block, request, failure);
  if (errc != Errc::ok) return errc;
  if (stream != Errc::ok) return *failure = std::move(unnamed), stream;
  return free_found(block, named, false, request, failure);
}

Errc Core::free(const BlockRef& block, const FreeRequest& request, Failure* failure) {
  if (free_at_home(block, request)) return Errc::ok;
  // Inherited frees of a forked child, and frees while the process ends, are ignored (R22).
  if (driver::ending() != driver::Ending::no) return Errc::ok;
  Named named;
  const Errc stream = name_for_free(request, &named, failure);
  return stream == Errc::ok ? free_found(block, named, true, request, failure) : stream;
}

// Before the block changes: a stream that cannot be used must leave it live.
Errc Core::name_for_free(const FreeRequest& request, Named* out, Failure* failure) {
  if (!request.stream.has_value()) return Errc::ok;
  const Errc errc = name_stream(*request.stream, out, failure);
  const bool gone = failure->cause.code == driver::Code::gone;
  if (errc == Errc::ok || !(failure->lost || gone)) return errc;
  // A free on a lost device, or while the driver goes down, is harmless (R22): the block is given up without its
  // stream.
  if (!gone) {
    lost_.store(true, std::memory_order_release);
    dissect(failure->cause);
  }
  *failure = {};
  return Errc::ok;
}

bool Core::try_free(const BlockRef& block, const FreeRequest& request) {
  return request.stream.has_value() && finished(fast_free(block, *request.stream));
}

bool Core::try_free(Address address, const FreeRequest& request) {
  return request.stream.has_value() && finished(fast_free(address, *request.stream));
}

// From one state to another, once: of two racing callers one wins.
bool Core::move_record(BlockRecord& record, std::uint32_t generation, Magic from, Magic to) {
  return with_record_lock(record, [&] { return record.move(generation, from, to); });
}

// `named`: no heap where no stream was named. `owner`: nobody else can be releasing the block meanwhile.
Errc Core::free_found(const BlockRef& block, Named& named, bool owner, const FreeRequest& request, Failure* failure) {
  BlockRecord& record = *block.record;
  const bool explicit_free = named.heap() != nullptr;
  Freed freed;
  if (owner && ordinary_) {  // the usual case, in one step
    Heap& own = explicit_free ? *named.heap() : *record.home;
    if ((explicit_free || !own.stream.captured.load(std::memory_order_acquire)) &&
        lock_and_take_back(block, named, own, &freed)) {
      freed_now(named, own, freed, request);
      return Errc::ok;
    }
  }
  if (const Errc errc = hold(&named, failure); errc != Errc::ok) return errc;
  Heap& by = explicit_free ? *named.heap() : *record.home;
  if (!move_record(record, block.generation, Magic::live, debugger_ != nullptr ? Magic::quarantined : Magic::freed))
    return not_live(block, record.word.load(std::memory_order_acquire), failure, request.stack);
  const Bytes gross = gross_of(record);
  Ticket ticket = 0;
  count_free(record);
  const double now = debugger_ != nullptr ? driver_->now() : 0;
  finish_free(record, block.address, by, explicit_free ? nullptr : any_stream_for(by), request.stack, &ticket, now);
  if (explicit_free && !by.stream.lasting) {
    std::lock_guard lock(by.stream.lock);
    by.stream.count_unfenced(gross);
  }
  after_free(named, by, gross, ticket, request, now);
  return Errc::ok;
}

void Core::freed_now(Named& named, Heap& by, const Freed& freed, const FreeRequest& request) {
  observe::ThreadCounters& c = counters();
  if (bank_->on_free(c, freed.size, freed.gross, 0)) bank_->raise(c);
  after_free(named, by, freed.gross, freed.ticket, request);
}

void Core::after_free(Named& named, Heap& by, Bytes gross, Ticket ticket, const FreeRequest& request, double now) {
  if (named.heap() != nullptr)
    note_unfenced(named, gross, ticket);
  else
    by.stream.owed.store(true, std::memory_order_release);  // the next call that names the stream fences it
  for (driver::StreamHandle handle : request.fence_too) {
    Named other;
    Failure ignored;
    if (streams_.name(handle, &other, &ignored) == Errc::ok && !other.stream().lasting)
      fences_.record(other.stream(), other.handle());
  }
  if (work_to_do()) drain();
  if (debugger_ != nullptr) debugger_->poll(now);
  if (closed() && bank_->totals().gross == 0) let_go(0);
}

// The record is ours (freed or quarantined). After this call it may be anybody's. `also`: held for us, is marked too.
void Core::finish_free(BlockRecord& record, Address address, Heap& by, Heap* also, debug::StackId stack, Ticket* ticket,
                       double now) {
  if (debugger_ == nullptr && also == nullptr && free_own(record, by, ticket)) return;
  Held held = take_held(record);
  if (also != nullptr) held.recorded.push_back(&also->stream);
  MarkSet marks = make_marks(record, held, by, ticket);
  if (also != nullptr) any_dropped_.store(true, std::memory_order_release);
  if (debugger_ == nullptr) {
    settle(&record, marks);
    let_go_of(held);  // last: until its memory is filed, its heaps must not become another stream's
    return;
  }
  debug::BlockFacts facts;
  {
    std::lock_guard lock(extra_lock(&record));
    BlockExtra& extra = record.more();
    extra.freed_at = stack;
    extra.freed_thread = thread_id();
    extra.freed_time = now;
    extra.marks = std::move(marks);
    facts = facts_under_lock(record, address);
  }
  if (facts.pages != debug::PageGuard::none) record_freed(*LargeBlock::of(record), facts, held);
  let_go_of(held);
  debugger_->on_free({&record, std::move(facts)});
}

// Of a block that is freed without naming a stream: a graph's may have been used last outside of the graph, on any.
Heap* Core::any_stream_for(const Heap& home) {
  if (!home.stream.captured.load(std::memory_order_acquire)) return nullptr;
  return streams_.any_stream();
}

Core::Held Core::take_held(BlockRecord& record) {
  Held held;
  const PageMap::Entry container{record.container};
  if (container.tag() == PageMap::Tag::large || static_cast<Slab*>(container.pointer())->heap != record.home)
    held.home = record.home;
  if ((record.flags() & kHasExtra) == 0) return held;
  std::lock_guard lock(extra_lock(&record));
  if (!record.extra) return held;
  held.recorded = std::move(record.extra->recorded);
  held.inherited = std::move(record.extra->inherited);
  record.extra->recorded.clear();
  record.extra->inherited = {};
  if (debugger_ == nullptr && !options_.debug.track) record.extra.reset();
  return held;
}

void Core::let_go_of(const Held& held) {
  if (held.home != nullptr) held.home->users.fetch_sub(1, std::memory_order_release);
  for (order::StreamState* s : held.recorded) Heap::of(s)->users.fetch_sub(1, std::memory_order_release);
}

// A block freed on its home stream, of memory that no host reads: a slot goes back to its slab, a large block to the
// quick lists. False: it is filed by its marks.
bool Core::free_own(BlockRecord& record, Heap& by, Ticket* ticket) {
  const PageMap::Entry container{record.container};
  if (record.home != &by || host_visible(kind_)) return false;
  // The flag, not the extra itself: a stale name may be at work there (hold_on).
  if ((record.flags() & kHasExtra) != 0) return false;
  if (container.tag() == PageMap::Tag::large) {
    if (!ordinary_) return false;
    LargeBlock& block = *LargeBlock::of(record);
    {
      std::lock_guard lock(by.stream.lock);
      if (list_quick(by, block, ticket)) return true;
    }
    // There is no room: what lies in its place merges now, and so does this one.
    make_room(by, block.bytes);
    return false;
  }
  Slab* slab = static_cast<Slab*>(container.pointer());
  if (slab->heap != &by) return false;
  bool retire = false;
  {
    std::lock_guard lock(by.stream.lock);
    by.push(slab, slab->number_of(&record), *ticket = by.stream.take_ticket());
    retire = by.take_if_surplus(slab);
  }
  if (retire) retire_slab(slab);
  return true;
}

// The slab is nobody's any more: unlisted, all slots free. Its memory keeps the marks of its last life.
void Core::retire_slab(Slab* slab) {
  slab->retired = true;
  if (slab->cls == kZeroClass) {  // has addresses only, which it keeps
    std::lock_guard lock(extent_lock_);
    spare_slabs_[kZeroClass].push_back(slab);
    return;
  }
  MarkSet marks;
  Ticket last = 0;
  for (unsigned i = 0; i < slab->stack.slots; ++i) last = std::max(last, slab->records[i].ticket);
  marks.add({&slab->heap.load()->stream, last});
  Extent* extent = slab->extent;
  slab->extent = nullptr;
  std::lock_guard lock(extent_lock_);
  put_extent(extent, std::move(marks));
}

// A fresh ticket on the freeing stream and on each recorded one; the memory's former marks unless they are covered
// (R1).
MarkSet Core::make_marks(const BlockRecord& record, const Held& held, Heap& by, Ticket* ticket) {
  MarkSet marks;
  const auto mark = [&marks](order::StreamState& s) {
    s.lock.lock();
    const Ticket t = s.take_ticket();
    s.lock.unlock();
    marks.add({&s, t});
    return t;
  };
  *ticket = mark(by.stream);
  for (order::StreamState* s : held.recorded) {
    if (s == &by.stream) continue;
    mark(*s);
    s->owed.store(true, std::memory_order_release);
  }
  for (const order::Mark& m : held.inherited)
    if (!order::may_use(by.stream, m)) marks.add(m);
  const PageMap::Entry container{record.container};
  Heap* own = container.tag() == PageMap::Tag::slab ? static_cast<Slab*>(container.pointer())->heap.load()
                                                    : record.home.load(std::memory_order_relaxed);
  // What a graph uses stays its own, whoever frees it. And what is freed in a capture was perhaps used before it: the
  // end of a graph that was never launched says nothing about that.
  Heap* home = record.home.load(std::memory_order_relaxed);
  const auto captured = [](const Heap& heap) { return heap.stream.captured.load(std::memory_order_acquire); };
  if (home != &by && (captured(*home) || captured(by))) {
    mark(home->stream);
    home->stream.owed.store(true, std::memory_order_release);
  }
  const order::Mark former{&own->stream, record.ticket};
  if (!order::may_use(by.stream, former)) marks.add(former);
  return marks;
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
  std::lock_guard lock(extent_lock_);
  Extent* extent = block->extent;
  block->extent = nullptr;
  put_extent(extent, std::move(marks));
}

void Core::settle_slot(Slab* slab, unsigned slot, MarkSet marks) {
  Heap& heap = *slab->heap.load();
  marks.drop_complete();
  const bool own =
      marks.empty() || (marks.size() == 1 && marks.begin()->stream == &heap.stream && !host_visible(kind_));
  bool retire = false;
  {
    std::lock_guard lock(heap.stream.lock);
    if (own) {
      slab->records[slot].home.store(&heap, std::memory_order_relaxed);
      heap.push(slab, slot, marks.ticket_of(heap.stream));
      retire = heap.take_if_surplus(slab);
    } else {
      ++slab->waiting;
      heap.count_waiting(1, slab->gross);
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
    const order::Mark mark = *marks.begin();
    const auto [first, last] = order::together(*mark.stream, mark.ticket);
    extents_.put_free(extent, Heap::of(mark.stream)->extents, mark.ticket, {first, last});
  } else {
    extent = extents_.put_free(extent, mixed_, 0);
    extent->note = new MarkSet(std::move(marks));
  }
}

// -- fences that R6 allows in the call that names the stream
// ---------------------------------------------------------------

void Core::note_unfenced(Named& named, Bytes bytes, Ticket ticket) {
  order::StreamState& s = named.stream();
  if (s.lasting) {
    // Nobody fences a lasting stream on a free; the debugger asks for completion all the time, so here it pays.
    if (debugger_ == nullptr) return;
    {
      std::lock_guard lock(s.lock);
      s.count_unfenced(bytes);
    }
    if (is_due(s)) fences_.record(s, named.handle(), ticket);
    return;
  }
  if (bytes >= kFenceBytes) {
    if (keep(&named)) fences_.record(s, named.handle(), ticket);
    return;
  }
  const std::uint32_t frees = s.unfenced_frees.load(std::memory_order_relaxed);
  if (frees <= 1) s.unfenced_since.store(driver_->now(), std::memory_order_relaxed);
  if (frees >= kFenceFrees || s.unfenced_bytes.load(std::memory_order_relaxed) >= kFenceBytes) {
    if (keep(&named)) fences_.record(s, named.handle(), ticket);
  }
}

// Debug mode: so much was freed on a lasting stream that a fence is due.
bool Core::is_due(const order::StreamState& s) const {
  return s.unfenced_frees.load(std::memory_order_relaxed) >= std::min(kFenceFrees, options_.debug.check_every) ||
         s.unfenced_bytes.load(std::memory_order_relaxed) >= options_.debug.check_bytes;
}

// Debug mode: a call names a lasting stream on which others, which did not name it, freed.
void Core::fence_dropped(Named& named) {
  order::StreamState& s = named.stream();
  if (s.lasting && s.owed.load(std::memory_order_acquire) && is_due(s) && keep(&named))
    fences_.record(s, named.handle());
}

// A call names a stream that is not lasting: what others put on it, and what is old, gets its fence now.
void Core::fence_owed(Named& named) {
  order::StreamState& s = named.stream();
  const bool owed = s.owed.load(std::memory_order_acquire);
  const std::uint32_t frees = s.unfenced_frees.load(std::memory_order_relaxed);
  if (!owed && frees == 0) return;
  if ((owed || frees >= kFenceFrees || is_old(s)) && keep(&named)) fences_.record(s, named.handle());
}

// Whether the oldest free that no fence covers has come of age. Asking the clock costs as much as all else here, so
// calls within a microsecond or so share an answer; simulated time may have gone on meanwhile.
bool Core::is_old(order::StreamState& s) const {
  constexpr std::uint64_t kSameMoment = 4096;  // ticks of the processor
  const std::uint64_t ticks = processor_ticks();
  if (ticks - s.age_asked.load(std::memory_order_relaxed) < kSameMoment && !driver_->simulated()) return false;
  s.age_asked.store(ticks, std::memory_order_relaxed);
  return driver_->now() - s.unfenced_since.load(std::memory_order_relaxed) >= options_.fence_age;
}

// -- implicit release
// --------------------------------------------------------------------------------------------------

void Core::release(const BlockRef& block) noexcept {
  if (driver::ending() != driver::Ending::no) return;
  BlockRecord& record = *block.record;
  if (!record.move(block.generation, Magic::live, Magic::released)) return;
  BlockRecord* head = door_.released.load(std::memory_order_relaxed);
  do record.link = head;
  while (!door_.released.compare_exchange_weak(head, &record, std::memory_order_release, std::memory_order_relaxed));
  door_.epoch.fetch_or(kShut, std::memory_order_acq_rel);
}

Errc Core::retire(Address address, debug::StackId stack, BlockRef* out, Failure* failure) {
  const Errc errc = locate(address, out, failure, stack, true);
  if (errc != Errc::ok) return errc;
  BlockRecord& record = *out->record;
  if (!move_record(record, out->generation, Magic::live, Magic::released))
    return not_live(*out, record.word.load(std::memory_order_acquire), failure, stack, true);
  if (debugger_ == nullptr) return Errc::ok;
  // For whoever frees it again.
  std::lock_guard lock(extra_lock(&record));
  BlockExtra& extra = record.more();
  extra.freed_at = stack;
  extra.freed_thread = thread_id();
  extra.freed_time = driver_->now();
  return Errc::ok;
}

// Frees what was released without a stream: it marks the block's own streams and makes no driver call.
void Core::drain(bool may_let_go) {
  // Opened first: what is released from here on shuts the door again.
  if (door_.epoch.load(std::memory_order_relaxed) & kShut) door_.epoch.fetch_and(~kShut, std::memory_order_acq_rel);
  BlockRecord* record = door_.released.exchange(nullptr, std::memory_order_acquire);
  bool drained = false;
  while (record != nullptr) {
    BlockRecord* next = record->link;
    const std::uint32_t generation = BlockRecord::generation_of(record->word.load(std::memory_order_acquire));
    if (record->move(generation, Magic::released, debugger_ != nullptr ? Magic::quarantined : Magic::freed)) {
      count_free(*record);
      const Bytes gross = gross_of(*record);
      Ticket ticket = 0;
      Heap& by = *record->home;
      finish_free(*record, address_of(*record), by, any_stream_for(by), 0, &ticket,
                  debugger_ != nullptr ? driver_->now() : 0);
      // Nobody named the stream: the next call that does will fence it.
      if (debugger_ != nullptr && by.stream.lasting) {
        std::lock_guard lock(by.stream.lock);
        by.stream.count_unfenced(gross);
      }
      by.stream.owed.store(true, std::memory_order_release);
    }
    record = next;
    drained = true;
  }
  if (drained && may_let_go && !buried_ && closed() && bank_->totals().gross == 0) let_go(0);
}

}  // namespace streampool::pool
