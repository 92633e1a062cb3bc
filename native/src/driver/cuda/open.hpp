// The door to CUDA devices. Finds libcuda at run time, so that it is compiled in everywhere and needed nowhere.
// Imports driver.hpp only.
#pragma once

#include <memory>
#include <string>

#include "../driver.hpp"

namespace streampool::driver::cuda {

// The driver of device `ordinal`: one a device and process, kept for the process's life (a device that was lost is
// opened anew). On failure null, with a kind and a sentence. Retains the device's primary context and loads our kernels
// into it.
std::shared_ptr<Driver> open(int ordinal, OpenError* kind, std::string* error);

class CudaDriver;
// The driver of a device in CUDA's own numbering, without its kernels unless open() was called for it: for events on
// streams of a peer. Null when it cannot be had.
std::shared_ptr<CudaDriver> device_driver(int device);

// How many devices there are; makes no context. 0 with `no_library` or `no_device`, which callers may take for "no GPU
// here"; 0 with any other kind is a fault that must be shown.
int device_count(OpenError* kind, std::string* error);

}  // namespace streampool::driver::cuda
