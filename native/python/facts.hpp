// Facts, faults and totals as dictionaries, field by field as in debug/fault.hpp.
#pragma once

#include <nanobind/nanobind.h>

#include "debug/debugger.hpp"

namespace streampool::python {

namespace nb = nanobind;

nb::dict facts_dict(const debug::BlockFacts& facts);
nb::dict fault_dict(const debug::Fault& fault);
nb::dict totals_dict(const debug::Totals& totals);

}  // namespace streampool::python
