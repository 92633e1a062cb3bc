// What ordering needs of the driver (order::Events).
#include "core.hpp"

namespace streampool::pool {

bool Core::create(std::uintptr_t* event) { return driver_->event_create(event).ok(); }
void Core::destroy(std::uintptr_t event) { driver_->event_destroy(event); }

bool Core::record(std::uintptr_t event, std::uintptr_t stream) {
  if (!driver_->event_record(event, stream).ok()) return false;
  // A record that a capture swallowed would query as done: only what was surely not capturing counts (R3).
  driver::CaptureState capture;
  return driver_->stream_is_capturing(stream, &capture).ok() && !capture.capturing;
}

bool Core::record_context(std::uintptr_t event) {
  return driver_->capabilities().context_events && driver_->context_event_record(event).ok();
}

bool Core::done(std::uintptr_t event) {
  const driver::Status status = driver_->event_query(event);
  // Nothing on a lost device will ever be done: waits end at once.
  if (status.code == driver::Code::lost) lost_.store(true, std::memory_order_release);
  return status.ok();
}
bool Core::wait(std::uintptr_t stream, std::uintptr_t event) { return driver_->stream_wait_event(stream, event).ok(); }

}  // namespace streampool::pool
