// Facts, faults, totals and counters as dictionaries, field by field as in debug/fault.hpp and pool/core.hpp.
#pragma once

#include <nanobind/nanobind.h>

#include "debug/debugger.hpp"
#include "pool/core.hpp"

namespace streampool::python {

namespace nb = nanobind;

nb::dict facts_dict(const debug::BlockFacts& facts);
nb::dict fault_dict(const debug::Fault& fault);
nb::dict totals_dict(const debug::Totals& totals);
nb::dict stats_dict(const pool::Stats& stats);

}  // namespace streampool::python
