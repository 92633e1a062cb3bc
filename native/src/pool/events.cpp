// See events.hpp.
#include "events.hpp"

namespace streampool::pool {

bool DriverEvents::noted(const driver::Status& status) {
  if (status.code == driver::Code::lost && lost_ != nullptr) lost_->store(true, std::memory_order_release);
  if (!status.ok() && status.code != driver::Code::not_ready && status.call != nullptr)
    failed_.store(status.call, std::memory_order_relaxed);
  return status.ok();
}

bool DriverEvents::create(std::uintptr_t* event) { return noted(driver_.event_create(event)); }
void DriverEvents::destroy(std::uintptr_t event) { driver_.event_destroy(event); }

bool DriverEvents::record(std::uintptr_t event, std::uintptr_t stream) {
  if (!noted(driver_.event_record(event, stream))) return false;
  // A record that a capture swallowed would query as done: only what was surely not capturing counts (R3).
  driver::CaptureState capture;
  return noted(driver_.stream_is_capturing(stream, &capture)) && !capture.capturing;
}

bool DriverEvents::record_context(std::uintptr_t event) {
  return driver_.capabilities().context_events && noted(driver_.context_event_record(event));
}

bool DriverEvents::done(std::uintptr_t event) { return noted(driver_.event_query(event)); }
bool DriverEvents::idle(std::uintptr_t stream) { return noted(driver_.stream_query(stream)); }
bool DriverEvents::wait(std::uintptr_t stream, std::uintptr_t event) {
  return noted(driver_.stream_wait_event(stream, event));
}

}  // namespace streampool::pool
