// The last events, whoever has read them and whether or not anybody does: for a post-mortem. Writers never wait; a
// reader takes nothing away, and passes over a slot that is being written.
//
// Each slot is a seqlock (C. Lameter, "Effective synchronization on Linux/NUMA systems", 2005): its number is odd while
// somebody writes, and tells which event is in it else. Two writers meet in a slot only when one of them was overtaken
// by all the others; then the second leaves it alone. The words are atomics, stored with release and loaded with
// acquire: who reads a word of a newer event sees that event's odd number after it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "event_ring.hpp"

namespace streampool::observe {

class EventTail {
 public:
  static constexpr std::size_t kSlots = 256;

  // Any thread.
  void push(const Event& event) {
    const std::uint64_t ticket = next_.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = slots_[ticket % kSlots];
    std::uint64_t number = slot.number.load(std::memory_order_relaxed);
    if (number % 2 != 0 || number > written(ticket)) return;
    if (!slot.number.compare_exchange_strong(number, written(ticket) - 1, std::memory_order_acquire)) return;
    std::array<std::uint64_t, kWords> words{};
    std::memcpy(words.data(), &event, sizeof event);
    for (std::size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_release);
    slot.number.store(written(ticket), std::memory_order_release);
  }

  // Oldest first.
  std::vector<Event> read() const {
    std::vector<Event> out;
    const std::uint64_t end = next_.load(std::memory_order_acquire);
    for (std::uint64_t ticket = end - (end < kSlots ? end : kSlots); ticket < end; ++ticket) {
      const Slot& slot = slots_[ticket % kSlots];
      if (slot.number.load(std::memory_order_acquire) != written(ticket)) continue;
      std::array<std::uint64_t, kWords> words{};
      for (std::size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_acquire);
      if (slot.number.load(std::memory_order_relaxed) != written(ticket)) continue;
      std::memcpy(static_cast<void*>(&out.emplace_back()), words.data(), sizeof(Event));
    }
    return out;
  }

 private:
  static_assert(std::is_trivially_copyable_v<Event>);
  static constexpr std::size_t kWords = (sizeof(Event) + 7) / 8;
  // A slot's number when the event of that ticket is in it; one less while it is written.
  static constexpr std::uint64_t written(std::uint64_t ticket) { return 2 * ticket + 2; }

  struct Slot {
    std::atomic<std::uint64_t> number{0};
    std::array<std::atomic<std::uint64_t>, kWords> words{};
  };
  std::array<Slot, kSlots> slots_;
  alignas(64) std::atomic<std::uint64_t> next_{0};
};

}  // namespace streampool::observe
