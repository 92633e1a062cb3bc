// How the short locks wait: spin, longer each time, then yield.
#pragma once

#include <sched.h>

namespace streampool {

// One step of a wait each call. The pauses double: where many wait, whoever has the lock can go on with it, instead of
// losing its cache line to each waiter's look. The longest takes about a microsecond.
class SpinWait {
 public:
  void operator()() noexcept {
    if (steps_ == kSpins) {
      sched_yield();
      return;
    }
    const int pauses = 1 << (steps_ < kDoublings ? steps_ : kDoublings);
#if defined(__x86_64__)
    for (int i = 0; i < pauses; ++i) __builtin_ia32_pause();
#else
    for (int i = 0; i < pauses; ++i) asm volatile("" ::: "memory");
#endif
    ++steps_;
  }

 private:
  static constexpr int kDoublings = 5, kSpins = 12;
  int steps_ = 0;
};

}  // namespace streampool
