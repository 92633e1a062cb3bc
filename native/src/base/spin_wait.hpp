// How the short locks wait: spin, then yield.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>

namespace streampool {

// Lets about so many cycles of the processor pass, and a bit more or less, so that two who wait do not look together.
inline void pause_for(std::uint32_t cycles) noexcept {
#if defined(__x86_64__)
  const std::uint64_t begin = __builtin_ia32_rdtsc();
  cycles += static_cast<std::uint32_t>(begin) % (cycles / 2 + 1);
  do __builtin_ia32_pause();
  while (__builtin_ia32_rdtsc() - begin < cycles);
#else
  for (std::uint32_t i = 0; i < cycles / 4; ++i) asm volatile("" ::: "memory");
#endif
}

// One step of a wait each call.
class SpinWait {
 public:
  // `others`: how many wait too. Each looks the less often the more they are: whoever has the lock can then go on with
  // it many times, instead of losing its cache lines to the next one after each.
  void operator()(std::uint32_t others = 0) noexcept {
    constexpr std::uint32_t kMostOthers = 31, kCycles = 2000;
    if (steps_ == kSpins) {
      sched_yield();
      return;
    }
    const std::uint32_t first = std::min(std::uint32_t{64} << steps_, kCycles);
    ++steps_;
    pause_for(first + std::min(others, kMostOthers) * kCycles);
  }

 private:
  static constexpr std::uint32_t kSpins = 12;
  std::uint32_t steps_ = 0;
};

}  // namespace streampool
