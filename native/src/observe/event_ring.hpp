// What happened, for logs: a ring of fixed size that any thread writes without a lock, and one reader empties. The core
// never calls anybody to log. What finds no room is dropped and counted.
//
// After D. Vyukov's bounded queue: each slot has a number that says whose turn it is. A writer takes a ticket, and may
// use its slot when the slot's number is the ticket; it then makes it ticket + 1, which the reader waits for, and the
// reader makes it ticket + kSlots.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "../base/types.hpp"

namespace streampool::observe {

// One row an event: its word, and what `number` and `more` are. The reason is a word of a closed set, or empty.
// clang-format off
#define STREAMPOOL_EVENTS(X) \
  X(pool_created, "pool.created", "limit_bytes", "") \
  X(pool_closed, "pool.closed", "live_allocations", "reserved_bytes") \
  X(pool_grown, "pool.grown", "bytes", "reserved_bytes") \
  X(pool_trimmed, "pool.trimmed", "bytes", "reserved_bytes") \
  X(growth_refused, "growth.refused", "bytes", "reserved_bytes") \
  X(alloc_failed, "alloc.failed", "requested_bytes", "reserved_bytes") \
  X(free_invalid, "free.invalid", "", "") \
  X(fault_found, "fault.found", "address", "bad_bytes")
// clang-format on
enum class EventKind : std::uint8_t {
#define STREAMPOOL_ROW(name, word, number, more) name,
  STREAMPOOL_EVENTS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
      count_
};

struct Event {
  EventKind kind = EventKind::pool_created;
  Kind memory = Kind::device;
  std::array<char, 16> device{};
  std::array<char, 48> pool{};
  std::array<char, 24> reason{};
  std::uint64_t number = 0, more = 0;
  double at = 0;  // Unix time, seconds

  template <std::size_t kSize>
  static void put(std::array<char, kSize>& to, std::string_view text) {
    std::copy_n(text.begin(), std::min(text.size(), kSize - 1), to.begin());  // the rest is zero
  }
};

class EventRing {
 public:
  static constexpr std::size_t kSlots = 1024;

  EventRing() {
    for (std::size_t i = 0; i < kSlots; ++i) slots_[i].turn.store(i, std::memory_order_relaxed);
  }

  // Any thread, also in a destructor; never waits.
  void push(const Event& event) {
    std::uint64_t ticket = write_.load(std::memory_order_relaxed);
    for (;;) {
      Slot& slot = slots_[ticket % kSlots];
      const std::uint64_t turn = slot.turn.load(std::memory_order_acquire);
      if (turn == ticket) {
        if (!write_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_relaxed)) continue;
        slot.event = event;
        slot.turn.store(ticket + 1, std::memory_order_release);
        return;
      }
      if (turn < ticket) {  // not read yet: full
        dropped_.fetch_add(1, std::memory_order_relaxed);
        return;
      }
      ticket = write_.load(std::memory_order_relaxed);
    }
  }

  // All events so far, oldest first. One reader at a time: others wait.
  std::vector<Event> drain() {
    std::lock_guard lock(reader_);
    std::vector<Event> out;
    for (;; ++read_) {
      Slot& slot = slots_[read_ % kSlots];
      if (slot.turn.load(std::memory_order_acquire) != read_ + 1) return out;
      out.push_back(slot.event);
      slot.turn.store(read_ + kSlots, std::memory_order_release);
    }
  }
  // So many were dropped since the process began.
  std::uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  struct Slot {
    std::atomic<std::uint64_t> turn{0};
    Event event;
  };
  std::array<Slot, kSlots> slots_;
  alignas(64) std::atomic<std::uint64_t> write_{0};
  std::atomic<std::uint64_t> dropped_{0};
  std::mutex reader_;
  std::uint64_t read_ = 0;
};

}  // namespace streampool::observe
