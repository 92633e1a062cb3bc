from __future__ import annotations

import types

import streampool as sp

from torch import _C

from . import memory


def init():
    pass


def set_device(device):
    pass


def current_stream():
    return types.SimpleNamespace(cuda_stream=0)


def is_initialized():
    return _C._initialized


def _allocate(size, stream):
    _C._initialized = True
    return _C._allocator.alloc(size, 0, stream)


class Stream:
    def __new__(cls, device=None, priority=0, **kwargs):
        self = object.__new__(cls)
        self.own = sp.sim.Device(0).create_stream()
        self.device_index = 0
        self.cuda_stream = kwargs.get("stream_ptr") or int(self.own.handle)
        return self


def memory_stats(device=0):
    return _C._cuda_memoryStats(device)


def memory_allocated(device=0):
    return memory_stats(device)["allocated_bytes"]["all"]["current"]


def max_memory_allocated(device=0):
    return memory_stats(device)["allocated_bytes"]["all"]["peak"]


def reset_peak_memory_stats(device=0):
    _C._cuda_resetPeakMemoryStats(device)


def memory_snapshot():
    return _C._cuda_memorySnapshot(None)


def empty_cache():
    _C._cuda_emptyCache()


def set_per_process_memory_fraction(fraction, device=0):
    _C._allocator.set_fraction(fraction, device)
