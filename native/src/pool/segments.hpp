// Memory taken from the driver: a reserved range with handles mapped into it, or one piece of a driver allocation.
#pragma once

#include <map>
#include <vector>

#include "../driver/driver.hpp"
#include "../placement/extent_map.hpp"

namespace streampool::pool {

// Invariant (mapped): every byte of the range that is not `unmapped` lies in exactly one handle.
struct Segment {
  struct Handle {
    Address begin = 0;
    Bytes bytes = 0;
    driver::MemoryHandle handle = 0;
  };
  placement::Range* range = nullptr;
  bool mapped = false;                // virtual memory; else one piece
  std::map<Address, Handle> handles;  // mapped only
};

// A handle that lies wholly in memory that is free and complete. Once held, its extent is its own and busy.
struct IdleHandle {
  placement::Extent* extent = nullptr;
  Segment* segment = nullptr;
  Segment::Handle handle;
};

// What growth may do with memory that lies idle elsewhere: leave it; move what is above the slack; move all it needs.
enum class Moving : std::uint8_t { none, slack, all };

// A handle is given back or moved only whole, and costs by count: growth is cut into handles, each at most this part of
// what the pool holds, or this part of the growth itself where that is more, and never larger than kLargestHandle. The
// last one is as small as it must be.
inline constexpr Bytes kHandleShare = 64;
inline constexpr Bytes kHandleCount = 16;
// Under a limit what can neither move nor go back may be what is missing: there a handle is at most this part of it.
inline constexpr Bytes kLimitShare = 512;
inline constexpr Bytes kLargestHandle = 32 * kMiB;
// Growth tolerates one part in so many of idle memory beside the live blocks before it moves idle memory instead.
inline constexpr Bytes kIdleSlack = 24;
// Pieces are multiples of this, and this large at least: a driver allocation costs a hundred microseconds and more, and
// device memory comes by this much. Where memory is short, host memory comes by the small unit.
inline constexpr Bytes kPieceSize = 2 * kMiB;
inline constexpr Bytes kSmallPieceUnit = 64 * kKiB;
// A piece for a small request is this part of what the pool holds, up to the largest such piece.
inline constexpr Bytes kPieceShare = 64;
inline constexpr Bytes kLargestSharedPiece = 32 * kMiB;

}  // namespace streampool::pool
