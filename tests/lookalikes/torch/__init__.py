from __future__ import annotations

import types

from . import _C, cuda

__version__ = "2.14.0"
version = types.SimpleNamespace(cuda="13.0", hip=None)


class Tensor:
    """Device memory from the current allocator, with the life of the object, as a tensor's storage has it."""

    def __init__(self, size, stream=0):
        self.size, self.stream = size, stream
        self.ptr = cuda._allocate(size, stream)

    def data_ptr(self):
        return self.ptr

    def record_stream(self, stream):
        _C._allocator.record_stream(self.ptr, stream.cuda_stream)

    def __del__(self):
        if hasattr(self, "ptr"):
            _C._allocator.free(self.ptr, self.size, 0, self.stream)


uint8 = "uint8"
device = str


def empty(size, stream=0, device=None, dtype=None):
    return Tensor(size, stream)
