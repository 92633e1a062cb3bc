// Vector clocks of the race check. One component a stream ("slot"); the host is one clock that everything queued later
// inherits, so a clock need not hold what the host's clock covers. Imports nothing of ours.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace streampool::driver::sim {

using Slot = std::uint32_t;
using Tick = std::uint64_t;

// What the host has seen done: every piece of work of `slot` up to tick `at(slot)`.
class HostClock {
 public:
  Tick at(Slot slot) const { return slot < ticks_.size() ? ticks_[slot] : 0; }
  void raise(Slot slot, Tick tick) {
    if (slot >= ticks_.size()) ticks_.resize(slot + 1, 0);
    ticks_[slot] = std::max(ticks_[slot], tick);
  }

 private:
  std::vector<Tick> ticks_;
};

// Invariant: entries are sorted by slot; an absent entry means "what the host's clock says".
class Clock {
 public:
  using Entry = std::pair<Slot, Tick>;

  Tick at(Slot slot) const {
    const auto found = find(slot);
    return found != entries_.end() && found->first == slot ? found->second : 0;
  }
  void raise(Slot slot, Tick tick) {
    const auto index = find(slot) - entries_.begin();
    const auto found = entries_.begin() + index;
    if (found != entries_.end() && found->first == slot) {
      found->second = std::max(found->second, tick);
    } else {
      entries_.insert(found, {slot, tick});
    }
  }
  void join(const Clock& other, const HostClock& host) {
    if (other.entries_.empty() || &other == this) return;
    std::vector<Entry> merged;
    merged.reserve(entries_.size() + other.entries_.size());
    auto a = entries_.begin();
    auto b = other.entries_.begin();
    while (a != entries_.end() || b != other.entries_.end()) {
      Entry next;
      if (b == other.entries_.end() || (a != entries_.end() && a->first < b->first)) {
        next = *a++;
      } else if (a == entries_.end() || b->first < a->first) {
        next = *b++;
      } else {
        next = {a->first, std::max(a->second, b->second)};
        ++a, ++b;
      }
      if (next.second > host.at(next.first)) merged.push_back(next);
    }
    entries_ = std::move(merged);
  }
  void prune(const HostClock& host) {
    std::erase_if(entries_, [&](const Entry& e) { return e.second <= host.at(e.first); });
  }
  void give_to(HostClock& host) const {
    for (const auto& [slot, tick] : entries_) host.raise(slot, tick);
  }
  std::size_t size() const { return entries_.size(); }

 private:
  std::vector<Entry>::const_iterator find(Slot slot) const {
    return std::lower_bound(entries_.begin(), entries_.end(), slot, [](const Entry& e, Slot s) { return e.first < s; });
  }

  std::vector<Entry> entries_;
};

}  // namespace streampool::driver::sim
