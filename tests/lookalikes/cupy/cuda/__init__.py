from __future__ import annotations

import threading
import types

import streampool as sp

from . import memory, memory_hook
from .memory import (
    MemoryPointer,
    PinnedMemoryPointer,
    UnownedMemory,
    alloc,
    set_allocator,
    set_pinned_memory_allocator,
)

runtime = types.SimpleNamespace(getDevice=lambda: 0)
_current = threading.local()


class Device:
    def __init__(self, ordinal=0):
        pass

    def use(self):
        pass


class Stream:
    def __init__(self):
        self._stream = sp.sim.Device(0).create_stream()

    @property
    def ptr(self):
        return int(self._stream.handle)

    def __cuda_stream__(self):
        return (0, self.ptr)

    def use(self):
        _current.stream = self
        return self

    def synchronize(self):
        self._stream.sync()

    def launch(self, *args, **kwargs):
        self._stream.launch(*args, **kwargs)


class _Null:
    ptr = 0

    def __cuda_stream__(self):
        return (0, 0)


def get_current_stream():
    return getattr(_current, "stream", None) or _Null()
