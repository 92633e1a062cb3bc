"""CuPy from streampool: device memory in the order of CuPy's current stream, pinned memory, hooks, CuPy's own error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from streampool.attach._coverage import Usage
from streampool.attach._owners import objects_at
from streampool.attach._pools import Pools
from streampool.errors import OutOfMemoryError

__all__ = ["make"]


def make(pools: Pools) -> CupyAdapter:
    """Give the adapter; CuPy is imported."""
    return CupyAdapter(pools)


class _Watched:
    """The owner of a block that CuPy's memory hooks are told of when it goes."""

    def __init__(self, buffer: Any, facts: dict[str, Any], hooks: Any) -> None:
        self._buffer = buffer
        self._facts = facts
        self._hooks = hooks

    def __del__(self) -> None:
        hooks = self._hooks()
        for hook in hooks:
            hook.free_preprocess(**self._facts)
        self._buffer = None
        for hook in hooks:
            hook.free_postprocess(**self._facts)


class _Pinned:
    """What CuPy wants of pinned memory: an address and a size. The Buffer goes with it."""

    def __init__(self, buffer: Any) -> None:
        self.ptr = buffer.handle
        self.size = buffer.size
        self._buffer = buffer


class CupyAdapter:
    """Stands in for CuPy's pools of device and of pinned memory."""

    def __init__(self, pools: Pools) -> None:
        self.notes = [
            "CuPy's alloc_preprocess and alloc_postprocess hooks are not called: our pools do not grow by request",
            "memory allocated under cupy.cuda.using_allocator(...) is that allocator's",
        ]
        self._pools = pools
        self._cupy: Any = sys.modules["cupy"]
        cuda = self._cupy.cuda
        self._memory = cuda.memory
        self._device = cuda.runtime.getDevice
        self._stream = cuda.get_current_stream
        self._by_object = hasattr(cuda.Stream, "__cuda_stream__")
        self._hooks = cuda.memory_hook.get_memory_hooks
        self._before: Any = None
        pools.find_objects = self._arrays

    def install(self) -> None:
        """Take over both kinds of memory. CuPy's blocks of before stay its pools'."""
        cuda = self._cupy.cuda
        self._before = self._memory.get_allocator() if hasattr(self._memory, "get_allocator") else None
        cuda.set_allocator(self.allocate)
        cuda.set_pinned_memory_allocator(self.allocate_pinned)

    def uninstall(self) -> None:
        """Give CuPy the allocator that it had, and its pool of pinned memory."""
        cuda = self._cupy.cuda
        cuda.set_allocator(self._before or self._cupy.get_default_memory_pool().malloc)
        cuda.set_pinned_memory_allocator(self._cupy.get_default_pinned_memory_pool().malloc)

    def allocate(self, nbytes: int) -> Any:
        """Give a ``cupy.cuda.MemoryPointer`` of memory on CuPy's current device and stream."""
        device = self._device()
        stream = self._stream()
        hooks = list(self._hooks().values())
        for hook in hooks:
            hook.malloc_preprocess(device_id=device, size=nbytes, mem_size=nbytes)
        try:
            buffer: Any = self._pools.on(device).allocate(nbytes, stream=stream if self._by_object else stream.ptr)
        except OutOfMemoryError as error:
            raise self._out_of_memory(error) from error
        address = buffer.handle
        if hooks:
            facts = {"device_id": device, "mem_size": nbytes, "mem_ptr": address, "pmem_id": id(buffer)}
            for hook in hooks:
                hook.malloc_postprocess(size=nbytes, **facts)
            buffer = _Watched(buffer, facts, lambda: list(self._hooks().values()))
        # The device is named: CuPy would ask the driver for it.
        memory = self._memory.UnownedMemory(address, nbytes, buffer, device)
        return self._memory.MemoryPointer(memory, 0)

    def allocate_pinned(self, nbytes: int) -> Any:
        """Give a ``cupy.cuda.PinnedMemoryPointer``. CuPy keeps it until copies with it are done."""
        device = self._device()
        try:
            buffer = self._pools.on(device, "pinned").allocate(nbytes, stream=self._stream().ptr)
        except OutOfMemoryError as error:
            raise self._out_of_memory(error) from error
        return self._cupy.cuda.PinnedMemoryPointer(_Pinned(buffer), 0)

    def _arrays(self, serials: Mapping[int, int]) -> dict[int, object]:
        return objects_at(self._cupy.ndarray, lambda array: int(array.data.mem.ptr), serials)

    def _out_of_memory(self, error: OutOfMemoryError) -> Exception:
        fields = error.fields
        theirs: Exception = self._memory.OutOfMemoryError(
            fields.get("request") or 0, fields.get("in_use") or 0, fields.get("limit") or 0
        )
        theirs.args = (str(error),)
        return theirs

    def usage(self) -> Usage:
        """Count what CuPy's own pool still holds, from before, or where the program chose it again."""
        elsewhere = 0
        own = getattr(self._cupy, "get_default_memory_pool", None)
        if own is not None:
            elsewhere = int(own().total_bytes())
        why = "CuPy's own pool holds memory, from before or by the program's choice" if elsewhere else ""
        if getattr(self._memory, "get_allocator", lambda: self.allocate)() != self.allocate:
            why = "the program chose another allocator (cupy.cuda.set_allocator)"
        return Usage(self._pools.peak(), elsewhere, why)
