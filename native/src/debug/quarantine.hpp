// The queues of freed blocks: those waiting for their marks, and those held in quarantine. Bookkeeping only: no driver,
// no lock. Imports the other headers of debug/.
#pragma once

#include <cstddef>
#include <utility>

#include "debugger.hpp"
#include "evidence.hpp"
#include "fifo.hpp"

namespace streampool::debug {

struct Item {
  FreedBlock freed;
  Good good;
  bool at_rest = false;          // its work is done, and the Host knows
  bool guards_verified = false;  // a check got this far and failed afterwards: not to be reported again
  bool unguarded = false;        // its guards could not be written: they are not verified, only filled
};

// What may stay in quarantine.
struct Bounds {
  Bytes bytes = 0;
  std::size_t blocks = 0;    // 0: any number
  double freed_before = -1;  // what was freed before this has stayed long enough

  bool exceeded(Bytes held_bytes, std::size_t held_blocks, double oldest) const {
    return held_bytes > bytes || (blocks != 0 && held_blocks > blocks) || oldest < freed_before;
  }
};

// Invariant: held_bytes() is the sum of `reserved` over the blocks held.
class Quarantine {
 public:
  // Those whose marks are not known to be complete.
  Fifo<Item> waiting;

  const Fifo<Item>& held() const { return held_; }
  Fifo<Item>& held() { return held_; }
  Bytes held_bytes() const { return held_bytes_; }

  void hold(Item item) {
    held_bytes_ += item.freed.facts.reserved;
    held_.push_back(std::move(item));
  }

  Item release_oldest() {
    Item item = held_.pop_front();
    held_bytes_ -= item.freed.facts.reserved;
    return item;
  }

  // How many of the oldest must leave once `incoming` more blocks are in, so that what stays keeps to the bounds and at
  // least `at_least` bytes leave. May be more than are held: then incoming ones leave too.
  std::size_t leaving(Bytes incoming_bytes, std::size_t incoming, const Bounds& bounds, Bytes at_least) const {
    Bytes stay = held_bytes_ + incoming_bytes, gone = 0;
    std::size_t count = 0;
    for (; count < held_.size(); ++count) {
      const Item& item = held_[count];
      const bool exceeded = bounds.exceeded(stay, held_.size() + incoming - count, item.freed.facts.freed_time);
      if (!exceeded && gone >= at_least) break;
      stay -= item.freed.facts.reserved;
      gone += item.freed.facts.reserved;
    }
    return count;
  }
  bool oldest_must_leave(const Bounds& bounds) const {
    return !held_.empty() && bounds.exceeded(held_bytes_, held_.size(), held_.front().freed.facts.freed_time);
  }

 private:
  Fifo<Item> held_;  // oldest first
  Bytes held_bytes_ = 0;
};

}  // namespace streampool::debug
