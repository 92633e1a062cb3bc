// A heap: a pool's free extents and slabs that belong to one stream.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "../order/stream_state.hpp"
#include "../placement/extent_map.hpp"
#include "../placement/size_class.hpp"
#include "record.hpp"

namespace streampool::pool {

// A slot freed on a foreign stream, with recorded streams, or of memory that the host can touch: it waits for its
// marks.
struct WaitingSlot {
  Slab* slab = nullptr;
  unsigned slot = 0;
  order::MarkSet marks;
};

// Blocks of no bytes have a class of their own: addresses without memory behind them.
inline constexpr unsigned kZeroClass = placement::kClassCount;
inline constexpr unsigned kClassLists = placement::kClassCount + 1;

struct ClassList {
  Slab* head = nullptr;  // slabs with free slots; the head is allocated from
  std::vector<WaitingSlot> waiting;
};

// `stream.lock` guards the slabs and the waiting slots; the core's extent lock guards `extents`. Aligned so that
// threads on different streams share no cache line, nor a pair of lines that is fetched together.
struct alignas(128) Heap {
  order::StreamState stream;
  placement::FreeIndex extents;
  std::array<ClassList, kClassLists> classes;
  std::uint32_t slab_count = 0;
  std::size_t look_from = 0;  // where the next bounded look through a long list of waiting slots starts
  // Calls and live blocks that hold a pointer to this heap beyond its own slabs: it must not become another stream's.
  std::atomic<std::uint32_t> users{0};
  order::Ticket check_ticket = 0;  // taken by the check() under way
  bool known = false;              // in the stream table; else spare
  bool own = false;                // a relay stream of the pool itself

  static Heap* of(order::StreamState* stream) { return reinterpret_cast<Heap*>(stream); }

  // All under the heap's lock: its slabs with free slots, class by class.
  void list(Slab* slab) {
    ClassList& list = classes[slab->cls];
    slab->prev = nullptr;
    slab->next = list.head;
    if (list.head != nullptr) list.head->prev = slab;
    list.head = slab;
    slab->listed = true;
  }
  void unlist(Slab* slab) {
    (slab->prev != nullptr ? slab->prev->next : classes[slab->cls].head) = slab->next;
    if (slab->next != nullptr) slab->next->prev = slab->prev;
    slab->prev = slab->next = nullptr;
    slab->listed = false;
  }
  // A slot comes back, with the mark of the heap's own stream.
  void push(Slab* slab, unsigned slot, order::Ticket ticket) {
    slab->records[slot].ticket = ticket;
    slab->stack.push(slot);
    if (!slab->listed) list(slab);
  }
  // An empty slab that may go. One a class stays, so that a pair at the edge does not cut and give back each time.
  static bool surplus(const Slab* slab) {
    return slab->stack.all_free() && slab->waiting == 0 && slab->cls != kZeroClass &&
           (slab->prev != nullptr || slab->next != nullptr);
  }
  // Takes it out, to be retired once the lock is free.
  bool take_if_surplus(Slab* slab) {
    if (!surplus(slab)) return false;
    unlist(slab);
    --slab_count;
    return true;
  }
};

}  // namespace streampool::pool
