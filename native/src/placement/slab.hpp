// A slab: an extent cut into equal slots of one class. Which slots are free, and nothing about streams.
#pragma once

#include <cstdint>

#include "size_class.hpp"

namespace streampool::placement {

// Stack of free slot numbers. Invariant: free_count <= slots; free_slots[0 .. free_count) are distinct and < slots.
struct SlotStack {
  std::uint16_t slots = 0;
  std::uint16_t free_count = 0;
  std::uint16_t free_slots[kMaxSlots];

  void fill(unsigned count) {
    // The same for a slab's whole life: those who list slabs read it without the heap's lock.
    if (slots != count) slots = static_cast<std::uint16_t>(count);
    free_count = slots;
    // Lowest address on top: neighbours in time are neighbours in memory.
    for (unsigned i = 0; i < count; ++i) free_slots[i] = static_cast<std::uint16_t>(count - 1 - i);
  }
  bool empty() const { return free_count == 0; }
  bool all_free() const { return free_count == slots; }
  unsigned top() const { return free_slots[free_count - 1]; }
  unsigned pop() { return free_slots[--free_count]; }
  void push(unsigned slot) { free_slots[free_count++] = static_cast<std::uint16_t>(slot); }
  void remove_at(unsigned position) { free_slots[position] = free_slots[--free_count]; }
};

}  // namespace streampool::placement
