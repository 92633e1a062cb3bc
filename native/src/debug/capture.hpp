// How a call stack is taken is known to whoever runs the program's frames: the Python extension says so. Calls that
// come through the C ABI ask here. Imports fault.
#pragma once

#include "fault.hpp"

namespace streampool::debug {

// The stack of the calling thread: so many frames of Python, where it runs Python, and so many native ones. Never
// raises; 0: there is none.
using Capture = StackId (*)(int depth, int native_depth) noexcept;
void set_capture(Capture capture);
StackId capture(int depth, int native_depth) noexcept;

}  // namespace streampool::debug
