#include "captures.hpp"

#include <algorithm>
#include <utility>

#include "driver.hpp"

namespace streampool::driver {

std::uint64_t capture_key(std::uintptr_t stream) {
  constexpr std::uint64_t kThread = std::uint64_t{1} << 63;
  static std::atomic<std::uint64_t> threads{0};
  thread_local const std::uint64_t mine = kThread | ++threads;
  return stream == kPerThreadStream ? mine : stream;
}

void Captures::listen(const void* who, std::function<void()> changed) {
  const std::lock_guard lock(mutex_);
  listeners_[who] = std::move(changed);
}

void Captures::leave(const void* who) {
  const std::lock_guard lock(mutex_);
  listeners_.erase(who);
}

// Under the mutex.
void Captures::tell() {
  for (const auto& [who, changed] : listeners_) changed();
}

void Captures::begin() {
  // Counted first, so that nobody comes to the gate any more: whoever fences without a stream's owner has either
  // finished once it is ours, or sees the capture.
  declared_.fetch_add(1, std::memory_order_seq_cst);
  {
    const std::unique_lock gate(gate_);
  }
  const std::lock_guard lock(mutex_);
  tell();
}

bool Captures::end(std::uint64_t key) {
  std::uint32_t open = declared_.load(std::memory_order_relaxed);
  do {
    if (open == 0) return false;
  } while (!declared_.compare_exchange_weak(open, open - 1, std::memory_order_acq_rel));
  if (key == 0) return true;
  const std::lock_guard lock(mutex_);
  const auto own = std::find_if(seen_.begin(), seen_.end(), [&](const Seen& seen) { return seen.key == key; });
  if (own == seen_.end()) return true;
  forget([capture = own->capture](const Seen& seen) { return seen.capture == capture; });
  return true;
}

void Captures::saw(std::uint64_t key, std::uint64_t capture, double now) {
  constexpr double kSeenFor = 1.0;
  const std::lock_guard lock(mutex_);
  const auto same = [&](const Seen& seen) { return seen.key == key && seen.until > now; };
  const bool known = std::any_of(seen_.begin(), seen_.end(), same);
  forget([&](const Seen& seen) { return seen.key == key || seen.until <= now; });
  seen_.push_back({key, capture, now + kSeenFor});
  seen_until_.store(now + kSeenFor, std::memory_order_release);  // the latest
  if (!known) tell();
}

void Captures::saw_none(std::uint64_t key, double now) {
  if (!any_seen()) return;
  const std::lock_guard lock(mutex_);
  forget([&](const Seen& seen) { return seen.key == key || seen.until <= now; });
}

std::vector<std::uint64_t> Captures::seen_keys() {
  std::vector<std::uint64_t> keys;
  const std::lock_guard lock(mutex_);
  for (const Seen& seen : seen_) keys.push_back(seen.key);
  return keys;
}

// Under the mutex.
void Captures::forget(const std::function<bool(const Seen&)>& over) {
  std::erase_if(seen_, over);
  double until = 0;
  for (const Seen& seen : seen_) until = std::max(until, seen.until);
  seen_until_.store(until, std::memory_order_release);
}

}  // namespace streampool::driver
