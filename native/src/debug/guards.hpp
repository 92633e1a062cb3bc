// Which bytes of a block hold the pattern, and when: pure arithmetic over a block's facts. Imports base/, and
// driver/ for Range.
//
//   begin ......... address ........... address + size ......... begin + reserved
//   |  front guard  |       body        |  slack and back guard  |
//
// Two regimes:
//  * whole  (fill without fill_edge_bytes): all memory that nobody owns holds the pattern, so everything outside the
//           body is guard, to the byte, and nothing is written when a block is handed out;
//  * edges  (bodies filled only at their edges, or no fill at all): guards are written when a block is handed out, and
//           reach guard_bytes before the address and at most kEdgeBackBytes (or guard_bytes, if more) behind the size.
// A block with pages of its own is watched as in the second regime, and its body is neither filled nor verified.
#pragma once

#include <vector>

#include "../driver/driver.hpp"
#include "fault.hpp"
#include "options.hpp"

namespace streampool::debug {

// Slack is watched up to here where guards are written at allocation: rounding of a large block is not worth a fill.
inline constexpr Bytes kEdgeBackBytes = 4096;

class Guards {
 public:
  explicit Guards(const Options& options) : options_(options) {}

  bool whole() const { return options_.fill && options_.fill_edge_bytes == 0; }

  Bytes front_bytes(Bytes alignment) const;
  Bytes back_bytes() const { return options_.guard_bytes; }

  // The guard bytes of a block. Size 0 where there are none.
  driver::Range front(const BlockFacts& block) const;
  driver::Range back(const BlockFacts& block) const;

  // Appends what is to be filled once the block was freed: of its body, and its guards where they were never written.
  void fill_after_free(const BlockFacts& block, bool unguarded, std::vector<driver::Range>* out) const;
  // Appends everything of a freed and filled block that holds the pattern.
  void quarantined(const BlockFacts& block, std::vector<driver::Range>* out) const;

 private:
  Bytes near_body() const;
  void body(const BlockFacts& block, std::vector<driver::Range>* out) const;

  Options options_;
};

}  // namespace streampool::debug
