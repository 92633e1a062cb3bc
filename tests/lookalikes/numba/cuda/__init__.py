from __future__ import annotations

import collections
import os
import types

from . import cudadrv

MemoryInfo = collections.namedtuple("MemoryInfo", "free,total")


class GetIpcHandleMixin:
    def get_ipc_handle(self, memory):
        return ("ipc", memory)


class _Deallocations:
    cleared = 0

    def clear(self):
        self.cleared += 1


class HostOnlyCUDAMemoryManager:
    def __init__(self, *, context):
        self.context = context
        self.allocations = {}
        self.deallocations = _Deallocations()

    def reset(self):
        self.allocations.clear()


class MemoryPointer:
    def __init__(self, context, pointer, size, finalizer=None):
        self.handle, self.size, self._finalizer = pointer, size, finalizer

    def free(self):
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer()

    def __del__(self):
        self.free()


class _OwnManager(HostOnlyCUDAMemoryManager):
    """The library's own memory."""

    interface_version = 1

    def initialize(self):
        pass

    def memalloc(self, size):
        return MemoryPointer(self.context, 0xDEAD0000, size)


_manager = None
_context = None


class _Context:
    device = types.SimpleNamespace(id=0)


def set_memory_manager(manager):
    global _manager
    assert manager(context=None).interface_version == 1
    _manager = manager


def current_context():
    global _context
    if _context is None:
        if _manager is None:
            import importlib

            name = os.environ.get("NUMBA_CUDA_MEMORY_MANAGER", "")
            set_memory_manager(importlib.import_module(name)._numba_memory_manager if name else _OwnManager)
        _context = _Context()
        _context.memory_manager = _manager(context=_context)
        _context.memory_manager.initialize()
    return _context


def select_device(ordinal):
    pass


def device_array(size, dtype=None):
    return current_context().memory_manager.memalloc(size)


def close():
    global _context
    _context = None
