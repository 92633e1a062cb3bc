// How the short locks wait: spin, then yield; and the clock they do it by.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace streampool {

// Goes on with the processor's clock; where it has none that is cheap to read, in large steps.
inline std::uint64_t processor_ticks() noexcept {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  std::uint64_t ticks = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks << 5;  // it counts at tens of megahertz
#else
  static std::atomic<std::uint64_t> calls{0};
  return calls.fetch_add(1, std::memory_order_relaxed) << 13;
#endif
}

// Lets about so many cycles of the processor pass, and a bit more or less, so that two who wait do not look together.
inline void pause_for(std::uint32_t cycles) noexcept {
  const std::uint64_t begin = processor_ticks();
  cycles += static_cast<std::uint32_t>(begin) % (cycles / 2 + 1);
  do {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  } while (processor_ticks() - begin < cycles);
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
