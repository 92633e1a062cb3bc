// The pattern of pattern.hpp over host memory: gigabytes at a time, so eight bytes a step. Imports driver.hpp,
// pattern.hpp.
#pragma once

#include "../driver.hpp"

namespace streampool::driver::sim {

void write_pattern(const Range& range, std::uint64_t key);
// False, with first, last, count and sample of `found` set, when some byte of the range differs.
bool check_pattern(const Range& range, std::uint64_t key, Mismatch* found);

}  // namespace streampool::driver::sim
