from __future__ import annotations

import ctypes

_p, _n, _i = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class _Own:
    """The library's own allocator."""

    def alloc(self, size, device, stream):
        return 0xDEAD0000

    def free(self, ptr, size, device, stream):
        pass

    def record_stream(self, ptr, stream):
        pass


class _Custom:
    def __init__(self, alloc, free):
        self.alloc = ctypes.CFUNCTYPE(_p, _n, _i, _p)(alloc)
        self.free = ctypes.CFUNCTYPE(None, _p, _n, _i, _p)(free)
        self.functions = {}

    def __getattr__(self, name):
        if name.startswith("set_"):
            return lambda address: self.functions.__setitem__(name, address)
        raise AttributeError(name)

    def record_stream(self, ptr, stream):
        ctypes.CFUNCTYPE(None, _p, _p)(self.functions["set_record_stream_fn"])(ptr, stream)

    def empty_cache(self):
        ctypes.CFUNCTYPE(None)(self.functions["set_reset_fn"])()

    def set_fraction(self, fraction, device):
        ctypes.CFUNCTYPE(None, ctypes.c_double, _i)(self.functions["set_memory_fraction_fn"])(fraction, device)


_allocator = _Own()
_initialized = False


def _cuda_customAllocator(alloc, free):
    return _Custom(alloc, free)


def _cuda_changeCurrentAllocator(allocator):
    global _allocator
    if _initialized:
        raise RuntimeError("Can't swap an already initialized allocator")
    _allocator = allocator


def _cuda_memoryStats(device):
    raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")


def _cuda_resetPeakMemoryStats(device):
    raise RuntimeError("CUDAPluggableAllocator does not yet support resetPeakStats.")


def _cuda_memorySnapshot(_):
    raise RuntimeError("CUDAPluggableAllocator does not yet support snapshot.")


def _cuda_emptyCache():
    _allocator.empty_cache()


def _cuda_cudaCachingAllocator_raw_alloc(size, stream):
    return _allocator.alloc(size, 0, stream)


def _cuda_cudaCachingAllocator_raw_delete(ptr):
    _allocator.free(ptr, 4096, 0, 0)


def _set_cudnn_benchmark(on):
    pass
