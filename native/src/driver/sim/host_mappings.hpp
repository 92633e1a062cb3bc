// How many mappings of the host the machine may make. See memory.cpp. Imports nothing.
#pragma once

#include <cstdint>

namespace streampool::driver::sim {

// Counts `n` mappings more (or less), shared by all generations in the process. False, and nothing counted: too many.
bool add_mappings(std::int64_t n);

}  // namespace streampool::driver::sim
