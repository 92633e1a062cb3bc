/* Entry points for PyTorch's CUDAPluggableAllocator, which loads libstreampool.so and finds them by name:
 *
 *   torch.cuda.memory.CUDAPluggableAllocator(path, "sp_torch_alloc", "sp_torch_free")
 *
 * and by address for the rest. `streampool.install("torch")` does all of it. Each device has a pool, made when PyTorch
 * first allocates there (or given by install). None of these functions calls Python, but a new call stack is noted, and
 * garbage is collected before an allocation fails, where the process runs Python.
 */
#ifndef STREAMPOOL_TORCH_H_
#define STREAMPOOL_TORCH_H_

#include "streampool.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Throws when there is no memory: c10::OutOfMemoryError where the PyTorch that is loaded has what it takes, else
 * std::runtime_error; the text has the whole account. */
SP_API void* sp_torch_alloc(size_t size, int device, sp_stream stream);

/* Ordered by the stream of the allocation, as PyTorch frees, if that is the default stream or one of PyTorch's own; the
 * handle of any other may be dead by now, and is not touched. Never throws: what is wrong is counted. */
SP_API void sp_torch_free(void* ptr, size_t size, int device, sp_stream stream);

SP_API void sp_torch_record_stream(void* ptr, sp_stream stream);
SP_API void sp_torch_init(int device_count);
SP_API void sp_torch_reset(void); /* torch.cuda.empty_cache() */
SP_API void sp_torch_memory_fraction(double fraction, int device);
/* The start of the segment that `ptr` lies in, and its size: what PyTorch makes an IPC handle of. */
SP_API void* sp_torch_base_alloc(void* ptr, size_t* size);

/* Graph pools: sp_torch_begin_allocate_to_pool, sp_torch_end_allocate_to_pool and sp_torch_release_pool have arguments
 * of C++ (native/src/attach/torch.hpp), as PyTorch wants them. */

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* STREAMPOOL_TORCH_H_ */
