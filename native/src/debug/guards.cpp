#include "guards.hpp"

#include <algorithm>

namespace streampool::debug {

namespace {

driver::Range between(Address begin, Address end) { return {begin, end > begin ? end - begin : 0}; }

void append(driver::Range range, std::vector<driver::Range>* out) {
  if (range.size != 0) out->push_back(range);
}

}  // namespace

Bytes Guards::front_bytes(Bytes alignment) const {
  if (options_.guard_bytes == 0) return 0;
  Bytes rounded = 0;
  // A guard that cannot be rounded fits nowhere: the request fails by its size, as any that is too large does.
  if (!round_up_checked(options_.guard_bytes, std::max(alignment, kMinAlignment), &rounded)) return ~Bytes{0};
  return rounded;
}

driver::Range Guards::front(const BlockFacts& block) const {
  const driver::Range all = between(block.begin, block.address);
  if (whole() && block.pages == PageGuard::none) return all;
  const Bytes most = options_.regions ? 0 : block.pages == PageGuard::none ? options_.guard_bytes : near_body();
  const Bytes size = std::min(all.size, most);
  return {block.address - size, size};
}

driver::Range Guards::back(const BlockFacts& block) const {
  const driver::Range all = between(block.address + block.size, block.begin + block.reserved);
  if (whole() && block.pages == PageGuard::none) return all;
  if ((options_.guard_bytes == 0 || options_.regions) && block.pages == PageGuard::none) return {all.begin, 0};
  return {all.begin, std::min(all.size, near_body())};
}

// Of a slack that is written at allocation: none where nothing is checked.
Bytes Guards::near_body() const { return options_.checks() ? std::max(options_.guard_bytes, kEdgeBackBytes) : 0; }

void Guards::body(const BlockFacts& block, std::vector<driver::Range>* out) const {
  if (!options_.fill || block.size == 0) return;
  const Bytes edge = options_.fill_edge_bytes;
  if (edge == 0 || block.size / 2 <= edge) {
    out->push_back({block.address, block.size});
    return;
  }
  out->push_back({block.address, edge});
  out->push_back({block.address + block.size - edge, edge});
}

void Guards::fill_after_free(const BlockFacts& block, bool unguarded, std::vector<driver::Range>* out) const {
  body(block, out);
  if (!unguarded) return;
  append(front(block), out);
  append(back(block), out);
}

void Guards::quarantined(const BlockFacts& block, std::vector<driver::Range>* out) const {
  if (whole()) {
    append({block.begin, block.reserved}, out);
    return;
  }
  append(front(block), out);
  body(block, out);
  append(back(block), out);
}

}  // namespace streampool::debug
