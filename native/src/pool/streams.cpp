#include "streams.hpp"

#include <algorithm>

namespace streampool::pool {

using driver::Code;
using driver::StreamHandle;

StreamTable::StreamTable(driver::Driver& driver, std::atomic<std::uint64_t>& epoch) : driver_(driver), epoch_(epoch) {}

std::uint64_t new_epoch() {
  static std::atomic<std::uint64_t> next{2};
  return next.fetch_add(2, std::memory_order_relaxed);
}

void StreamTable::change_epoch() {
  const std::uint64_t fresh = new_epoch();
  std::uint64_t now = epoch_.load(std::memory_order_relaxed);
  while (!epoch_.compare_exchange_weak(now, fresh | (now & kShut), std::memory_order_seq_cst)) {
  }
}

Heap* StreamTable::find_or_make(std::uint64_t id, bool count, order::Events* events) {
  std::lock_guard lock(mutex_);
  Heap*& entry = by_id_[id];
  if (entry == nullptr) {
    if (!spare_.empty()) {
      entry = spare_.back();
      spare_.pop_back();
    } else {
      entry = &store_.emplace_back();
      entry->made_before = made_.load(std::memory_order_relaxed);
      made_.store(entry, std::memory_order_release);
    }
    // Tickets go on from where they were: marks of the entry's former stream stay complete.
    entry->stream.id = id;
    entry->stream.lasting = false;
    entry->stream.legacy = false;
    entry->stream.handle = 0;
    entry->stream.events = events;
    entry->known = true;
    known_.fetch_add(1, std::memory_order_relaxed);
  }
  if (count) entry->users.fetch_add(1, std::memory_order_acquire);
  return entry;
}

Heap* StreamTable::find(std::uint64_t id, bool count) {
  std::lock_guard lock(mutex_);
  const auto it = by_id_.find(id);
  if (it == by_id_.end()) return nullptr;
  if (count) it->second->users.fetch_add(1, std::memory_order_acquire);
  return it->second;
}

order::Events* StreamTable::events_of(std::shared_ptr<driver::Driver> peer) {
  std::lock_guard lock(mutex_);
  for (const auto& known : peers_)
    if (&known->driver() == peer.get()) return known.get();
  return peers_.emplace_back(std::make_unique<DriverEvents>(std::move(peer))).get();
}

Errc StreamTable::refuse(StreamHandle handle, const driver::Status& status, Failure* failure) const {
  failure->cause = status;
  failure->lost = status.code == Code::lost;
  if (failure->lost)
    return failure->set(
        Errc::driver,
        "device " + std::string(driver_.name()) + " is lost (" + driver::describe(status) +
            "): its memory is gone with its context. Freeing blocks is harmless; start a new process, or make "
            "a new context and a new pool");
  return failure->set(Errc::stream, "stream " + hex(handle) + " cannot be used: " + driver::describe(status));
}

bool StreamTable::capture_known() const {
  if (captures_.load(std::memory_order_acquire) != 0) return true;
  const double until = seen_until_.load(std::memory_order_acquire);
  return until != 0 && driver_.now() < until;
}

void StreamTable::note_capture(StreamHandle handle, bool capturing) {
  if (!capturing && seen_until_.load(std::memory_order_acquire) == 0) return;
  constexpr double kSeenFor = 1.0;
  const double now = driver_.now();
  std::lock_guard lock(mutex_);
  std::erase_if(seen_, [&](const auto& seen) { return seen.first == handle || seen.second <= now; });
  if (capturing) seen_.emplace_back(handle, now + kSeenFor);
  double until = 0;
  for (const auto& [h, t] : seen_) until = std::max(until, t);
  seen_until_.store(until, std::memory_order_release);
  if (capturing) change_epoch();
}

void StreamTable::begin_capture() {
  // Whoever fences without a stream's owner has either finished, or will see the capture.
  std::unique_lock gate(gate_);
  captures_.fetch_add(1, std::memory_order_acq_rel);
  change_epoch();
}

bool StreamTable::end_capture() {
  std::uint32_t open = captures_.load(std::memory_order_relaxed);
  while (open != 0)
    if (captures_.compare_exchange_weak(open, open - 1, std::memory_order_acq_rel)) return true;
  return false;
}

Errc StreamTable::name(StreamHandle handle, Named* out, Failure* failure) {
  handle = canonical(handle);
  if (handle != driver::kPerThreadStream && !capture_known()) {
    std::lock_guard lock(mutex_);
    const auto it = lasting_.find(handle);
    if (it != lasting_.end()) {
      it->second->users.fetch_add(1, std::memory_order_acquire);
      *out = Named(it->second, handle, true);
      return Errc::ok;
    }
  }
  return identify(handle, true, out, failure);
}

bool StreamTable::is_still(StreamHandle handle, std::uint64_t id) {
  if (seen_until_.load(std::memory_order_acquire) != 0) return false;
  driver::CaptureState capture;
  std::uint64_t now = 0;
  return driver_.stream_identity(handle, &capture, &now).ok() && !capture.capturing && now == id;
}

// Asks the driver. `promised`: a handle that was registered is taken at its word once it is known not to capture.
Errc StreamTable::identify(StreamHandle handle, bool promised, Named* out, Failure* failure) {
  lookups_.fetch_add(1, std::memory_order_relaxed);
  // In this order: asking the id of a capturing stream would kill its capture.
  driver::CaptureState capture;
  driver::Status status = driver_.stream_is_capturing(handle, &capture);
  // 906 on the legacy stream: some blocking stream captures, not this one.
  const bool other_captures = driver::is_legacy(handle) && status.code == Code::capturing;
  if (!status.ok() && !other_captures) return refuse(handle, status, failure);
  if (capture.capturing) {
    note_capture(handle, true);
    return failure->set(Errc::capture, "stream " + hex(handle) +
                                           " is capturing a graph; this pool does not serve captures yet. Allocate "
                                           "before the capture begins and free after it ends; the capture itself is "
                                           "still valid");
  }
  if (promised) {
    std::lock_guard lock(mutex_);
    const auto it = lasting_.find(handle);
    if (it != lasting_.end()) {
      it->second->users.fetch_add(1, std::memory_order_acquire);
      *out = Named(it->second, handle, true);
      return Errc::ok;
    }
  }
  if (other_captures)
    return failure->set(Errc::capture,
                        "the legacy default stream cannot be used while a blocking stream captures a graph");
  std::uint64_t id = 0;
  status = driver_.stream_id(handle, &id);
  if (!status.ok()) return refuse(handle, status, failure);
  note_capture(handle, false);
  if (driver::is_legacy(handle)) {
    // The legacy default stream lives as long as its context: lasting without anybody's promise.
    Heap* heap = find_or_make(id, false);
    std::lock_guard lock(mutex_);
    heap->stream.legacy = true;
    heap->stream.handle = driver::kLegacyStream;
    heap->stream.lasting = true;
    lasting_[driver::kLegacyStream] = heap;
    *out = Named(heap, handle, false);
    return Errc::ok;
  }
  Heap* heap = find(id, true);
  if (heap == nullptr) {
    std::shared_ptr<driver::Driver> owner;
    status = driver_.stream_owner(handle, &owner);
    if (!status.ok()) return refuse(handle, status, failure);
    if (owner == nullptr)
      return failure->set(Errc::stream, "stream " + hex(handle) +
                                            " belongs to a context that is not the primary one of its device. For its "
                                            "work record an event there and give it to record_event");
    heap = find_or_make(id, true, owner.get() == &driver_ ? nullptr : events_of(std::move(owner)));
  }
  *out = Named(heap, handle, true);
  return Errc::ok;
}

Errc StreamTable::register_stream(StreamHandle handle, Named* out, Failure* failure) {
  handle = canonical(handle);
  if (handle == driver::kPerThreadStream)
    return failure->set(Errc::stream,
                        "the per-thread default stream cannot be registered: it is another stream in each thread");
  // Asked afresh: the handle may have been registered for a stream that is gone, without forget_stream.
  const Errc errc = identify(handle, false, out, failure);
  if (errc != Errc::ok) return errc;
  std::unique_lock gate(gate_);
  std::lock_guard lock(mutex_);
  const auto it = lasting_.find(handle);
  if (it != lasting_.end() && it->second != out->heap()) {
    it->second->stream.lasting = false;
    it->second->stream.handle = 0;
  }
  out->heap()->stream.handle = handle;
  out->heap()->stream.lasting = true;
  lasting_[handle] = out->heap();
  change_epoch();
  return Errc::ok;
}

Errc StreamTable::forget_stream(StreamHandle handle, Failure* failure) {
  handle = canonical(handle);
  // Whoever fences the stream without its owner has finished, or will see that it may not.
  std::unique_lock gate(gate_);
  std::lock_guard lock(mutex_);
  auto it = lasting_.find(handle);
  if (it == lasting_.end() || driver::is_legacy(handle))
    return failure->set(Errc::stream, "stream " + hex(handle) + " is not registered with this pool");
  it->second->stream.lasting = false;
  it->second->stream.handle = 0;
  lasting_.erase(it);
  change_epoch();
  return Errc::ok;
}

void StreamTable::forget_all() {
  std::unique_lock gate(gate_);
  std::lock_guard lock(mutex_);
  std::erase_if(lasting_, [](const auto& entry) {
    Heap& heap = *entry.second;
    if (heap.own || heap.stream.legacy) return false;
    heap.stream.lasting = false;
    heap.stream.handle = 0;
    return true;
  });
  change_epoch();
}

Heap* StreamTable::adopt(StreamHandle handle, Failure* failure) {
  Named named;
  if (register_stream(handle, &named, failure) != Errc::ok) return nullptr;
  named.heap()->own = true;
  return named.heap();
}

void StreamTable::for_each(const std::function<void(Heap&)>& function) {
  std::vector<Heap*> all;
  {
    std::lock_guard lock(mutex_);
    all.reserve(by_id_.size());
    for (auto& [id, heap] : by_id_) {
      heap->users.fetch_add(1, std::memory_order_acquire);
      all.push_back(heap);
    }
  }
  for (Heap* heap : all) {
    function(*heap);
    heap->users.fetch_sub(1, std::memory_order_release);
  }
}

std::vector<order::StreamState*> StreamTable::states() {
  std::lock_guard lock(mutex_);
  std::vector<order::StreamState*> all;
  for (auto& [id, heap] : by_id_) all.push_back(&heap->stream);
  return all;
}

void StreamTable::sweep(const std::function<bool(Heap&)>& empty) {
  std::lock_guard lock(mutex_);
  for (auto it = by_id_.begin(); it != by_id_.end();) {
    Heap& heap = *it->second;
    bool gone = false;
    if (!heap.stream.lasting && !heap.own && !heap.used() && heap.stream.idle()) {
      heap.stream.lock.lock();
      heap.known.store(false, std::memory_order_seq_cst);  // before its users are counted: see Core::keep
      gone = !heap.used() && empty(heap);
      if (!gone) heap.known.store(true, std::memory_order_seq_cst);
      heap.stream.lock.unlock();
    }
    if (!gone) {
      ++it;
      continue;
    }
    heap.stream.fence_lock.lock();
    heap.stream.waited.clear();
    heap.stream.fence_lock.unlock();
    heap.stream.unfenced_frees = 0;
    heap.stream.unfenced_bytes = 0;
    heap.stream.owed = false;
    spare_.push_back(&heap);
    it = by_id_.erase(it);
    known_.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace streampool::pool
