// Memory taken from the driver: a reserved range with handles mapped into it, or one piece of a driver allocation.
#pragma once

#include <map>

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

// A handle is given back only whole, and costs by count: growth is cut into handles, each at most this part of what the
// pool holds, or this part of the growth itself where that is more, and never larger than kLargestHandle. The last one
// is as small as it must be.
inline constexpr Bytes kHandleShare = 128;
inline constexpr Bytes kHandleCount = 16;
inline constexpr Bytes kLargestHandle = 32 * kMiB;
// Growth tolerates one part in so many of idle memory beside the live blocks before it moves idle memory instead.
inline constexpr Bytes kIdleSlack = 16;
// Pieces are this large at least: a driver allocation costs a hundred microseconds and more.
inline constexpr Bytes kPieceSize = 2 * kMiB;

}  // namespace streampool::pool
