// Declared uses: streams and events that may touch a block until it is freed.
#include <algorithm>

#include "core.hpp"

namespace streampool::pool {

using order::Ticket;

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
  errc = name_any(stream, &named, failure);
  if (errc == Errc::ok) errc = hold_any(&named, failure);
  if (errc != Errc::ok) return errc;
  return hold_on(block, &named.stream(), {}, failure);
}

// Writes down what a live block holds on to until it is freed: a stream, or a mark. A free looks for it where the state
// and the flag are seen together: for a slot under its heap's lock. All under the record's extra lock, so that a name
// that has become stale meanwhile leaves nothing behind that the next owner's declarations could meet.
Errc Core::hold_on(const BlockRef& block, order::StreamState* stream, order::Mark mark, Failure* failure) {
  BlockRecord& record = *block.record;
  const std::uint64_t live = BlockRecord::pack(block.generation, Magic::live);
  std::lock_guard lock(extra_lock(&record));
  std::uint64_t word = record.word.load(std::memory_order_acquire);
  if (word != live) return not_live(block, word, failure, 0, false);
  const bool fresh = !record.extra;
  BlockExtra& extra = record.more();
  std::vector<order::StreamState*>& recorded = extra.recorded;
  const bool add = stream != nullptr && std::find(recorded.begin(), recorded.end(), stream) == recorded.end();
  if (add) {
    recorded.push_back(stream);
    Heap::of(stream)->users.fetch_add(1, std::memory_order_relaxed);
  }
  if (mark.stream != nullptr) extra.inherited.add(mark);
  if (with_record_lock(record, [&] {
        word = record.word.load(std::memory_order_acquire);
        if (word == live) record.origin.fetch_or(BlockRecord::pack_origin(0, kHasExtra, 0), std::memory_order_relaxed);
        return word == live;
      })) {
    if (stream != nullptr && page_guards_ != nullptr) {
      note_named(*Heap::of(stream));
      if (add && guard_records_.is_open()) guard_records_.used_on(extra.serial, stream->id.load());
    }
    return Errc::ok;
  }
  // Freed meanwhile. Nothing of this may be left for the memory's next owner.
  if (add && record.extra && std::erase(record.extra->recorded, stream) != 0)
    Heap::of(stream)->users.fetch_sub(1, std::memory_order_release);
  if (fresh) record.extra.reset();
  return not_live(block, word, failure, 0, false);
}

// A private stream waits for the event and is fenced at once: the block gets a mark that covers what the event covered
// when this was called, and no more, whatever the caller does with the event later.
Errc Core::record_event(Address address, driver::EventHandle event, Failure* failure) {
  if (address == 0) return Errc::ok;
  BlockRef block;
  const Errc errc = declared(address, "record_event", &block, failure);
  return errc == Errc::ok ? record_event(block, event, failure) : errc;
}

Errc Core::record_event(const BlockRef& block, driver::EventHandle event, Failure* failure) {
  Errc errc = enter(failure);
  if (errc != Errc::ok && errc != Errc::closed) return errc;
  if (!live(block)) return not_live(block, block.record->word.load(std::memory_order_acquire), failure, 0, false);
  // A query of an event that was recorded in a capture would end that capture.
  if (streams_.capture_known())
    return failure->set(
        Errc::capture,
        "record_event: a graph capture is under way; use record_stream, or call this before or after it");
  const driver::Status state = driver_->event_query(event);
  if (state.code == driver::Code::capturing)
    return failure->set(Errc::capture, "record_event: the event was recorded in a graph capture");
  if (!state.ok() && state.code != driver::Code::not_ready)
    return failure->set(Errc::driver, "record_event: the event cannot be used: " + driver::describe(state));
  if (state.ok()) return Errc::ok;  // nothing left to wait for

  const std::shared_lock gate(private_gate_);
  Heap* relay = nullptr;
  errc = take_relay(&relay, failure);
  if (errc != Errc::ok) return errc;
  order::StreamState& s = relay->stream;
  const driver::Status waits = driver_->stream_wait_event(s.handle, event);
  if (!waits.ok()) return failure->set(Errc::driver, "record_event: " + driver::describe(waits));
  s.lock.lock();
  const Ticket ticket = s.take_ticket();
  s.lock.unlock();
  fences_.record(s, s.handle);  // never exact: a wait edge on it could wait for what stands before it in the queue

  return hold_on(block, nullptr, {&s, ticket}, failure);
}

Errc Core::record_everything(Address address, Failure* failure) {
  if (address == 0) return Errc::ok;
  Errc errc = enter(failure);
  if (errc != Errc::ok && errc != Errc::closed) return errc;
  driver::EventHandle event = 0;
  driver::Status status = driver_->event_create(&event);
  if (status.ok()) {
    std::shared_lock gate(streams_.capture_gate());
    // A context event ends every capture that is under way.
    if (streams_.capture_known()) {
      driver_->event_destroy(event);
      return failure->set(Errc::capture, "record_everything: a graph capture is under way; call this after it");
    }
    status = driver_->context_event_record(event);
  }
  errc = status.ok() ? record_event(address, event, failure)
                     : failure->set(Errc::driver, "record_everything: " + driver::describe(status));
  if (event != 0) driver_->event_destroy(event);
  return errc;
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
