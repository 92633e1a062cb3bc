// Finds libcuda at run time and resolves what api.hpp declares. Imports api.hpp and driver.hpp.
#pragma once

#include <string>

#include "../driver.hpp"
#include "api.hpp"

namespace streampool::driver::cuda {

struct Library {
  Api api;
  GetProcAddress get_proc_address = nullptr;
  int version = 0;   // 13000 is CUDA 13.0
  std::string path;  // what was opened
};

// Opens the library (`STREAMPOOL_LIBCUDA` names another one, for tests), initialises the driver and resolves its
// functions; makes no context. Loaded once a path and never unloaded: libcuda does not survive being unloaded.
// Null on failure, with a kind and sentences that do not yet say which device was asked for.
const Library* load_library(OpenError* kind, std::string* error);

std::string version_text(int version);  // "13.0"

// "580.159.04", from the kernel's own files; empty where they cannot be read.
std::string kernel_driver_version();

}  // namespace streampool::driver::cuda
