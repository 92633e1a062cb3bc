// CUDA's error numbers: their names and texts (also where no driver is loaded) and what a caller may do about each.
// Imports driver.hpp only.
#pragma once

#include "../driver.hpp"

namespace streampool::driver::cuda {

// "CUDA_ERROR_OUT_OF_MEMORY"; "CUDA error N" for numbers we have no row for (valid until this thread's next call).
const char* error_name(int number);

// "out of memory"; "unknown error" where we have no row.
const char* error_text(int number);

// What to do when the driver cannot start because of this error; empty where there is nothing special to say.
const char* error_advice(int number);

Code code_of(int number);

}  // namespace streampool::driver::cuda
