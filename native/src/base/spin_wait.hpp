// How the short locks wait: spin a little, then yield.
#pragma once

#include <sched.h>

namespace streampool {

// One step of a wait; `spins` begins at 0.
inline void spin_wait(int* spins) noexcept {
  constexpr int kSpins = 64;
  if (++*spins < kSpins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    return;
  }
  *spins = 0;
  sched_yield();
}

}  // namespace streampool
