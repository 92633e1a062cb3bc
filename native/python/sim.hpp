// The submodule _core.sim: the simulated machine's controls, wrapped by streampool/sim.py.
#pragma once

#include <nanobind/nanobind.h>

namespace streampool::python {

void bind_sim(nanobind::module_& core);

}  // namespace streampool::python
