#include "streams.hpp"

#include <algorithm>

namespace streampool::pool {

using driver::Code;
using driver::StreamHandle;

StreamTable::StreamTable(driver::Driver& driver, std::atomic<std::uint64_t>& epoch)
    : driver_(driver), captures_(driver.captures()), epoch_(epoch) {
  captures_.listen(this, [this] { change_epoch(); });
}

StreamTable::~StreamTable() {
  if (driver::ending() == driver::Ending::forked) return;  // the parent's lock may be held for ever here
  captures_.leave(this);
}

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
  const auto found = by_id_.find(id);
  Heap* entry = found != by_id_.end() ? found->second : nullptr;
  if (entry == nullptr) {
    entry = take_entry(id);
    entry->stream.id = id;
    entry->stream.events = events;
    entry->known = true;
  }
  if (count) entry->users.fetch_add(1, std::memory_order_acquire);
  return entry;
}

// Under the mutex: a heap, new or of a stream that is gone. Tickets go on from where they were: marks of its former
// stream stay complete.
Heap* StreamTable::take_entry(std::uint64_t key) {
  Heap*& entry = by_id_[key];
  if (!spare_.empty()) {
    entry = spare_.back();
    spare_.pop_back();
  } else {
    entry = &store_.emplace_back();
    entry->made_before = made_.load(std::memory_order_relaxed);
    made_.store(entry, std::memory_order_release);
  }
  entry->stream.lasting = false;
  entry->stream.legacy = false;
  entry->stream.handle = 0;
  entry->stream.events = nullptr;
  entry->stream.captured = false;
  entry->graph = nullptr;
  known_.fetch_add(1, std::memory_order_relaxed);
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

Errc StreamTable::must_capture(StreamHandle handle, Failure* failure) {
  if (driver::is_legacy(handle))
    return failure->set(Errc::stream,
                        "the legacy default stream captures no graph: name the stream that the capture begins on");
  driver::CaptureState capture;
  const driver::Status status = driver_.stream_is_capturing(handle, &capture);
  return status.ok() ? Errc::ok : refuse(handle, status, failure);
}

bool StreamTable::end_capture(StreamHandle handle) {
  if (!captures_.end(handle == 0 ? 0 : driver::capture_key(handle))) return false;
  // Streams that joined it. Those that are lasting may be asked.
  for (const std::uint64_t key : captures_.seen_keys()) {
    {
      std::lock_guard lock(mutex_);
      if (!lasting_.contains(key)) continue;
    }
    driver::CaptureState capture;
    if (driver_.stream_is_capturing(key, &capture).ok() && !capture.capturing) captures_.saw_none(key, driver_.now());
  }
  return true;
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
  if (captures_.any_seen()) return false;
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
    captures_.saw(driver::capture_key(handle), capture.id, driver_.now());
    if (!promised)
      return failure->set(Errc::capture, "stream " + hex(handle) +
                                             " is capturing a graph: register it before the capture begins, or after "
                                             "it ends; the capture is still valid");
    return name_captured(handle, capture.id, out, failure);
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
  captures_.saw_none(driver::capture_key(handle), driver_.now());
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

// R23: what a stream allocates, frees and declares while it captures belongs to the graph, by capture and stream. Its
// memory is reused in the captured order, and by nobody else until the graph is gone.
Errc StreamTable::name_captured(StreamHandle handle, std::uint64_t capture, Named* out, Failure* failure) {
  if (capture == 0)
    return failure->set(Errc::capture, "the capture of stream " + hex(handle) +
                                           " was invalidated by another call: end it, and capture again");
  std::shared_ptr<const GraphLife> life;
  const std::uint64_t key = driver::capture_key(handle);
  const auto found = [&] {
    const auto it = captured_.find({capture, key});
    if (it == captured_.end()) return false;
    it->second->users.fetch_add(1, std::memory_order_acquire);
    *out = Named(it->second, handle, true);
    return true;
  };
  {
    std::lock_guard lock(mutex_);
    if (found()) return Errc::ok;
    // Of another stream of the same capture.
    const auto it = captured_.lower_bound({capture, 0});
    if (it != captured_.end() && it->first.first == capture) life = it->second->graph;
  }
  if (life == nullptr) {
    auto fresh = std::make_shared<GraphLife>();
    fresh->capture = capture;
    auto held = std::make_unique<std::shared_ptr<GraphLife>>(fresh);
    const driver::Status status = driver_.graph_retain(
        handle, capture,
        [](void* object) {
          const std::unique_ptr<std::shared_ptr<GraphLife>> ours(static_cast<std::shared_ptr<GraphLife>*>(object));
          (*ours)->ended.store(true, std::memory_order_release);
        },
        held.get());
    if (!status.ok()) {
      failure->cause = status;
      failure->lost = status.code == Code::lost;
      return failure->set(Errc::capture, "stream " + hex(handle) +
                                             " is capturing a graph, which cannot be given memory of its own: " +
                                             driver::describe(status) +
                                             ". Allocate before the capture begins; the capture is still valid");
    }
    (void)held.release();
    life = std::move(fresh);
  }
  std::lock_guard lock(mutex_);
  if (found()) return Errc::ok;  // another thread was quicker; what was retained here ends with the graph
  Heap* entry = take_entry(kCapturedId | ++captured_heaps_);
  entry->stream.id = kCapturedId | capture;
  entry->stream.captured = true;
  entry->graph = std::move(life);
  entry->captured_on = key;
  entry->users.fetch_add(1, std::memory_order_acquire);
  entry->known = true;
  captured_[{capture, key}] = entry;
  *out = Named(entry, handle, true);
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
  std::unique_lock gate(capture_gate());
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
  std::unique_lock gate(capture_gate());
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
  std::unique_lock gate(capture_gate());
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
    if (heap.graph != nullptr) captured_.erase({heap.graph->capture, heap.captured_on});
    heap.stream.unfenced_frees = 0;
    heap.stream.unfenced_bytes = 0;
    heap.stream.owed = false;
    spare_.push_back(&heap);
    it = by_id_.erase(it);
    known_.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace streampool::pool
