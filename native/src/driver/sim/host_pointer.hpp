// Where the machine's memory is in the host: at the same address. Imports base/types.hpp.
#pragma once

#include "../../base/types.hpp"

namespace streampool::driver::sim {

inline std::uint8_t* host_pointer(Address address) { return reinterpret_cast<std::uint8_t*>(address); }  // NOLINT

}  // namespace streampool::driver::sim
