// Facts, faults, totals and counters as dictionaries, field by field as in debug/fault.hpp and pool/core.hpp.
#pragma once

#include <nanobind/nanobind.h>

#include "debug/debugger.hpp"
#include "debug/page_guards.hpp"
#include "pool/core.hpp"

namespace streampool::python {

namespace nb = nanobind;

void put_stream(nb::dict d, std::uint64_t id);
nb::dict facts_dict(const debug::BlockFacts& facts);
// What Pool.live_blocks() gives: with who it belongs to.
nb::dict live_block_dict(const debug::BlockFacts& facts);
nb::dict fault_dict(const debug::Fault& fault);
nb::dict totals_dict(const debug::Totals& totals, const debug::PageGuardTotals& pages);
nb::list holders_list(const std::vector<pool::Holder>& holders);
nb::dict stats_dict(const pool::Stats& stats);

}  // namespace streampool::python
