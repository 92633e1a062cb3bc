// One short lock: spins a little, then yields. Never fair: a ticket lock stalls everybody behind a descheduled waiter.
// Guards a few dozen instructions, never a driver call, a host allocation of unbounded size, a wait or a callback (R9).
#pragma once

#include <atomic>

#include "spin_wait.hpp"

namespace streampool {

class SpinLock {
 public:
  void lock() noexcept {
    if (!taken_.exchange(true, std::memory_order_acquire)) return;
    lock_slow();
  }
  bool try_lock() noexcept {
    return !taken_.load(std::memory_order_relaxed) && !taken_.exchange(true, std::memory_order_acquire);
  }
  void unlock() noexcept { taken_.store(false, std::memory_order_release); }

 private:
  // Out of line: the contended case must not cost the other one its registers.
  __attribute__((noinline)) void lock_slow() noexcept {
    for (SpinWait wait; !try_lock();) wait();
  }

  std::atomic<bool> taken_{false};
};

}  // namespace streampool
