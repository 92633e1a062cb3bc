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
  // `waiting`: how many wait for the lock, where that is known. After a first short look each looks the less often the
  // more they are: whoever has the lock can then go on with it many times, instead of losing its cache lines to the
  // next one after each.
  void operator()(std::uint32_t waiting = 0) noexcept {
    constexpr std::uint32_t kMostWaiting = 32, kShare = 8000, kFirst = 64, kLongest = 2000;
    if (spent_ >= kPatience) sched_yield();
    const std::uint32_t cycles =
        waiting != 0 && spent_ != 0 ? std::min(waiting, kMostWaiting) * kShare : std::clamp(spent_, kFirst, kLongest);
    if (spent_ < kPatience) spent_ += cycles;
    if (waiting != 0 || spent_ < kPatience) pause_for(cycles);
  }

 private:
  static constexpr std::uint32_t kPatience = 20000;  // cycles, before others get the processor
  std::uint32_t spent_ = 0;
};

}  // namespace streampool
