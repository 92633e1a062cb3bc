// The simulated device's calls for streams, events and waits. See device.hpp.
#include "device.hpp"

namespace streampool::driver::sim {

Status SimDevice::from_wait(Call call, Waited waited) const {
  switch (waited) {
    case Waited::done: return {};
    case Waited::interrupted: return fail(call, Code::failed, kInterrupted);
    case Waited::deadlock: return fail(call, Code::failed, kDeadlock);
    case Waited::lost: break;
  }
  const int number = state_.lost.load();
  return fail(call, Code::lost, number != 0 ? number : kContextDestroyed);
}

// The call touches a capture in a way that loses it.
Status SimDevice::captured_away(Call call, const StreamPtr& stream, int number) {
  machine_->invalidate(stream->capture);
  return fail(call, Code::capturing, number);
}

Status SimDevice::create_stream(bool blocking, std::string name, StreamHandle* out) {
  if (const Status status = enter(Call::stream_create); !status) return status;
  const Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->make_stream(state_, blocking, std::move(name));
  stream->handle = machine_->streams.add(stream);
  ++state_.live_streams;
  *out = stream->handle;
  return {};
}

Status SimDevice::stream_destroy(StreamHandle handle) {
  constexpr Call call = Call::stream_destroy;
  if (const Status status = enter(call); !status) return status;
  Trash trash;
  const Lock lock(machine_->mutex);
  if (is_legacy(handle) || handle == kPerThreadStream) return fail(call, Code::invalid, kInvalidHandle);
  const StreamPtr stream = machine_->find_stream(state_, handle, call);
  if (!stream) return fail(call, Code::failed, kDeadHandle);
  machine_->destroy_stream(handle, stream, trash);
  return {};
}

void SimDevice::drop_stream(StreamHandle handle) {
  if (ending() != Ending::no || machine_->dead()) return;
  count(Call::stream_destroy);
  Trash trash;
  const Lock lock(machine_->mutex);
  if (const StreamPtr* found = machine_->streams.find(handle)) {
    const StreamPtr stream = *found;
    machine_->destroy_stream(handle, stream, trash);
  }
}

Status SimDevice::stream_is_capturing(StreamHandle handle, CaptureState* out) {
  constexpr Call call = Call::stream_is_capturing;
  if (const Status status = enter(call); !status) return status;
  const Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->find_stream(state_, handle, call);
  if (!stream) return fail(call, Code::failed, kDeadHandle);
  if (stream->legacy && machine_->blocking_capture(state_, false)) {
    return fail(call, Code::capturing, kCaptureImplicit);  // harms nothing
  }
  out->capturing = stream->capture != nullptr;
  out->id = stream->capture && stream->capture->valid ? stream->capture->id : 0;
  return {};
}

Status SimDevice::stream_id(StreamHandle handle, std::uint64_t* out) {
  constexpr Call call = Call::stream_id;
  if (const Status status = enter(call); !status) return status;
  const Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->find_stream(state_, handle, call);
  if (!stream) return fail(call, Code::failed, kDeadHandle);
  if (stream->capture) return captured_away(call, stream, kCaptureUnsupported);
  *out = stream->id;
  return {};
}

Status SimDevice::stream_owner(StreamHandle handle, std::shared_ptr<Driver>* out) {
  constexpr Call call = Call::stream_owner;
  if (const Status status = enter(call); !status) return status;
  int ordinal = 0;
  {
    const Lock lock(machine_->mutex);
    const StreamPtr stream = machine_->find_stream(state_, handle, call);
    if (!stream) return fail(call, Code::failed, kDeadHandle);
    ordinal = stream->device->ordinal;
  }
  *out = ordinal == ordinal_ ? shared_from_this() : sim::device(ordinal, nullptr);
  return {};
}

Status SimDevice::stream_wait_event(StreamHandle handle, EventHandle event_handle) {
  constexpr Call call = Call::stream_wait_event;
  if (const Status status = enter(call); !status) return status;
  Trash trash;
  const Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->find_stream(state_, handle, call);
  const std::shared_ptr<Event> event = stream ? machine_->find_event(event_handle, call) : nullptr;
  if (!stream || !event) return fail(call, Code::failed, kDeadHandle);
  const std::shared_ptr<Recording> recording = event->recording;
  if (recording && recording->capture) {
    const CapturePtr& capture = recording->capture;
    if (!capture->valid) return fail(call, Code::capturing, kCapturedEvent);
    if (stream->legacy || (stream->capture && stream->capture != capture)) {
      machine_->invalidate(capture);
      if (stream->capture) machine_->invalidate(stream->capture);
      return fail(call, Code::capturing, stream->legacy ? kCaptureImplicit : kCaptureIsolation);
    }
    machine_->join_capture(stream, capture);
    for (const auto& [id, work] : recording->captured) {
      std::uint64_t& known = stream->captured[id];
      known = std::max(known, work);
    }
    return {};
  }
  if (stream->capture) {
    if (!recording) return {};
    return captured_away(call, stream, kCaptureIsolation);
  }
  if (stream->legacy && machine_->blocking_capture(state_, true)) {
    return fail(call, Code::capturing, kCaptureImplicit);
  }
  if (!recording) return {};
  const NodePtr node = machine_->new_node(*stream->device, stream);
  machine_->enqueue(node);
  machine_->depend(node, recording->node);
  stream->clock.join(recording->clock, machine_->host);
  machine_->start(node, trash);
  return {};
}

Status SimDevice::event_create(EventHandle* out) {
  if (const Status status = enter(Call::event_create); !status) return status;
  const Lock lock(machine_->mutex);
  auto event = std::make_shared<Event>();
  event->device = &state_;
  *out = machine_->events.add(std::move(event));
  ++state_.live_events;
  return {};
}

void SimDevice::destroy_event(EventHandle handle, const std::shared_ptr<Event>& event) {
  machine_->events.remove(handle);
  --event->device->live_events;
}

Status SimDevice::event_destroy(EventHandle handle) {
  constexpr Call call = Call::event_destroy;
  if (const Status status = enter(call); !status) return status;
  const Lock lock(machine_->mutex);
  const std::shared_ptr<Event> event = machine_->find_event(handle, call);
  if (!event) return fail(call, Code::failed, kDeadHandle);
  destroy_event(handle, event);
  return {};
}

void SimDevice::drop_event(EventHandle handle) {
  if (ending() != Ending::no || machine_->dead()) return;
  count(Call::event_destroy);
  const Lock lock(machine_->mutex);
  if (const auto* found = machine_->events.find(handle)) {
    const std::shared_ptr<Event> event = *found;
    destroy_event(handle, event);
  }
}

Status SimDevice::event_record(EventHandle event_handle, StreamHandle handle) {
  constexpr Call call = Call::event_record;
  if (const Status status = enter(call); !status) return status;
  Trash trash;
  const Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->find_stream(state_, handle, call);
  const std::shared_ptr<Event> event = stream ? machine_->find_event(event_handle, call) : nullptr;
  if (!stream || !event) return fail(call, Code::failed, kDeadHandle);
  if (event->device != stream->device) return fail(call, Code::invalid, kInvalidHandle);
  if (stream->legacy && machine_->blocking_capture(state_, true)) {
    return fail(call, Code::capturing, kCaptureImplicit);
  }
  auto recording = std::make_shared<Recording>();
  if (stream->capture) {
    if (!stream->capture->valid) return fail(call, Code::capturing, kCaptureInvalidated);
    recording->capture = stream->capture;
    recording->captured = stream->captured;
    event->recording = std::move(recording);
    return {};
  }
  const NodePtr node = machine_->new_node(*stream->device, stream);
  machine_->enqueue(node);
  stream->clock.prune(machine_->host);
  recording->node = node;
  recording->clock = stream->clock;
  event->recording = std::move(recording);
  machine_->start(node, trash);
  return {};
}

Status SimDevice::context_event_record(EventHandle event_handle) {
  constexpr Call call = Call::context_event_record;
  if (const Status status = enter(call); !status) return status;
  if (!capabilities_.context_events) return fail(call, Code::not_supported, kNotSupported);
  Trash trash;
  const Lock lock(machine_->mutex);
  const std::shared_ptr<Event> event = machine_->find_event(event_handle, call);
  if (!event) return fail(call, Code::failed, kDeadHandle);
  if (event->device != &state_) return fail(call, Code::invalid, kInvalidHandle);
  if (machine_->kill_captures(state_)) return fail(call, Code::capturing, kCaptureUnsupported);
  auto recording = std::make_shared<Recording>();
  recording->node = machine_->new_node(state_, nullptr);
  machine_->order_after_all(recording->node, state_, &recording->clock, false);
  machine_->start(recording->node, trash);
  event->recording = std::move(recording);
  return {};
}

Status SimDevice::query(EventHandle handle, bool foreign) {
  constexpr Call call = Call::event_query;
  if (const Status status = enter(call); !status) return status;
  Lock lock(machine_->mutex);
  const std::shared_ptr<Event> event = machine_->find_event(handle, call);
  if (!event) return fail(call, Code::failed, kDeadHandle);
  const std::shared_ptr<Recording> recording = event->recording;
  machine_->run_some(lock, foreign);
  if (!recording) return {};
  if (recording->capture) {
    machine_->invalidate(recording->capture);
    return fail(call, Code::capturing, kCapturedEvent);
  }
  if (event->device->lost.load() != 0) return from_wait(call, Waited::lost);
  if (!recording->node->done) return fail(call, Code::not_ready, kNotReady);
  recording->clock.give_to(machine_->host);
  return {};
}

Status SimDevice::event_synchronize(EventHandle handle, const Interrupt& interrupt) {
  constexpr Call call = Call::event_synchronize;
  if (const Status status = enter(call); !status) return status;
  Lock lock(machine_->mutex);
  const std::shared_ptr<Event> event = machine_->find_event(handle, call);
  if (!event) return fail(call, Code::failed, kDeadHandle);
  const std::shared_ptr<Recording> recording = event->recording;
  if (!recording) return {};
  if (recording->capture) {
    machine_->invalidate(recording->capture);
    return fail(call, Code::capturing, kCapturedEvent);
  }
  const Waited waited = machine_->wait(lock, &state_, interrupt, [&] { return recording->node->done; });
  if (waited == Waited::done) recording->clock.give_to(machine_->host);
  return from_wait(call, waited);
}

Status SimDevice::query_stream(StreamHandle handle, bool run_foreign) {
  constexpr Call call = Call::stream_query;
  if (const Status status = enter(call); !status) return status;
  Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->find_stream(state_, handle, call);
  if (!stream) return fail(call, Code::failed, kDeadHandle);
  if (stream->capture) return captured_away(call, stream, kCaptureUnsupported);
  machine_->run_some(lock, run_foreign);
  if (state_.lost.load() != 0) return from_wait(call, Waited::lost);
  if (stream->tail) return fail(call, Code::not_ready, kNotReady);
  stream->clock.give_to(machine_->host);
  return {};
}

Status SimDevice::stream_synchronize(StreamHandle handle, const Interrupt& interrupt) {
  constexpr Call call = Call::stream_synchronize;
  if (const Status status = enter(call); !status) return status;
  Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->find_stream(state_, handle, call);
  if (!stream) return fail(call, Code::failed, kDeadHandle);
  if (stream->capture) return captured_away(call, stream, kCaptureUnsupported);
  Clock clock = stream->clock;
  const NodePtr tail = stream->tail;
  const Waited waited = machine_->wait(lock, &state_, interrupt, [&] { return !tail || tail->done; });
  if (waited == Waited::done) clock.give_to(machine_->host);
  return from_wait(call, waited);
}

Status SimDevice::synchronize(const Interrupt& interrupt) {
  constexpr Call call = Call::stream_synchronize;
  if (const Status status = enter(call); !status) return status;
  {
    const Lock lock(machine_->mutex);
    if (machine_->kill_captures(state_)) return fail(call, Code::capturing, kCaptureUnsupported);
  }
  return wait_for_all(call, interrupt);
}

Status SimDevice::wait_for_all(Call call, const Interrupt& interrupt) {
  Trash trash;
  Lock lock(machine_->mutex);
  const NodePtr node = machine_->new_node(state_, nullptr);
  Clock clock;
  machine_->order_after_all(node, state_, &clock, false);
  machine_->start(node, trash);
  const Waited waited = machine_->wait(lock, &state_, interrupt, [&] { return node->done; });
  if (waited == Waited::done) clock.give_to(machine_->host);
  return from_wait(call, waited);
}

std::uint64_t SimDevice::live_streams() {
  const Lock lock(machine_->mutex);
  return state_.live_streams;
}

std::uint64_t SimDevice::live_events() {
  const Lock lock(machine_->mutex);
  return state_.live_events;
}

std::uint64_t SimDevice::pending_work() {
  const Lock lock(machine_->mutex);
  return state_.pending;
}

}  // namespace streampool::driver::sim
