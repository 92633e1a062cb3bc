// What ordering needs of the driver (order::Events).
#include "core.hpp"

namespace streampool::pool {

// Nothing on a lost device will ever be done: waits end at once.
bool Core::noted(const driver::Status& status) {
  if (status.code == driver::Code::lost) lost_.store(true, std::memory_order_release);
  return status.ok();
}

bool Core::create(std::uintptr_t* event) { return noted(driver_->event_create(event)); }
void Core::destroy(std::uintptr_t event) { driver_->event_destroy(event); }

bool Core::record(std::uintptr_t event, std::uintptr_t stream) {
  if (!noted(driver_->event_record(event, stream))) return false;
  // A record that a capture swallowed would query as done: only what was surely not capturing counts (R3).
  driver::CaptureState capture;
  return noted(driver_->stream_is_capturing(stream, &capture)) && !capture.capturing;
}

bool Core::record_context(std::uintptr_t event) {
  return driver_->capabilities().context_events && noted(driver_->context_event_record(event));
}

bool Core::done(std::uintptr_t event) { return noted(driver_->event_query(event)); }
bool Core::wait(std::uintptr_t stream, std::uintptr_t event) {
  return noted(driver_->stream_wait_event(stream, event));
}

}  // namespace streampool::pool
