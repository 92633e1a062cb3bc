// What ordering needs of a driver (order::Events), in the driver's own context.
#pragma once

#include <atomic>
#include <memory>

#include "../driver/driver.hpp"
#include "../order/fences.hpp"

namespace streampool::pool {

class DriverEvents final : public order::Events {
 public:
  // `lost` is set when a call finds the device lost: nothing on it will ever be done, so waits end at once.
  DriverEvents(driver::Driver& driver, std::atomic<bool>* lost) : driver_(driver), lost_(lost) {}
  // Of a peer, which is kept. When it is lost, its work is never done; the pool's own device lives on.
  explicit DriverEvents(std::shared_ptr<driver::Driver> peer) : kept_(std::move(peer)), driver_(*kept_) {}

  bool create(std::uintptr_t* event) override;
  void destroy(std::uintptr_t event) override;
  bool record(std::uintptr_t event, std::uintptr_t stream) override;
  bool record_context(std::uintptr_t event) override;
  bool done(std::uintptr_t event) override;
  bool wait(std::uintptr_t stream, std::uintptr_t event) override;
  bool idle(std::uintptr_t stream) override;

  const driver::Driver& driver() const { return driver_; }
  // Whether a call went well; remembers that the device was found lost.
  bool noted(const driver::Status& status);
  // The call that failed last; "event_query" where none did, for what is just not done.
  const char* failed_call() const { return failed_.load(std::memory_order_relaxed); }

 private:
  const std::shared_ptr<driver::Driver> kept_;
  driver::Driver& driver_;
  std::atomic<bool>* const lost_ = nullptr;
  std::atomic<const char*> failed_{"event_query"};
};

}  // namespace streampool::pool
