from __future__ import annotations

import ctypes

from torch import _C


class CUDAPluggableAllocator:
    def __init__(self, path, alloc_name, free_name):
        library = ctypes.CDLL(path)
        address = lambda name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value  # noqa: E731
        self._allocator = _C._cuda_customAllocator(address(alloc_name), address(free_name))

    def allocator(self):
        return self._allocator


def change_current_allocator(allocator):
    _C._cuda_changeCurrentAllocator(allocator.allocator())
