// A heap: a pool's free extents and slabs that belong to one stream.
#pragma once

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

// `stream.lock` guards the slabs and the waiting slots; the core's extent lock guards `extents`.
struct Heap {
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
};

}  // namespace streampool::pool
