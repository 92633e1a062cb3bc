// The exceptions that PyTorch expects of an allocator.
#pragma once

#include <string>

namespace streampool::attach {

// Throws what PyTorch turns into torch.OutOfMemoryError, with `text`. Its class is found in the libc10.so or
// libc10_cuda.so that the process has loaded; where it is not found, std::runtime_error, which PyTorch turns into
// RuntimeError.
[[noreturn]] void throw_torch_out_of_memory(const std::string& text);

}  // namespace streampool::attach
