"""Numba from streampool: an External Memory Management plugin.

``NUMBA_CUDA_MEMORY_MANAGER=streampool.attach.numba`` makes Numba take it by itself.

Numba's interface names no stream, and may use a block on any stream at once: so a block is handed out when nothing
queued touches its memory any more, and a free waits for everything that is queued on the device by then.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import Any

from streampool import _core, _fork
from streampool.attach._coverage import Usage
from streampool.attach._pools import Pools

__all__ = ["make"]


def make(pools: Pools) -> NumbaAdapter:
    """Give the adapter; ``numba.cuda`` is imported."""
    return NumbaAdapter(pools)


def __getattr__(name: str) -> Any:
    # What Numba looks for in the module that the environment variable names.
    if name == "_numba_memory_manager":
        from streampool import attach
        from streampool.attach._table import find, version_of

        row = find("numba")
        served = attach._served.get(row.name)
        if served is None:
            pools = Pools(row.name, None, {})
            adapter = NumbaAdapter(pools)
            served = attach._served[row.name] = attach._Served(row, version_of(row), pools, adapter)
        return served.adapter.manager  # type: ignore[attr-defined]  # it is ours
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class NumbaAdapter:
    """Makes the class that Numba makes an instance of for each context."""

    def __init__(self, pools: Pools) -> None:
        self.notes = ["pinned, mapped and managed memory stay Numba's own"]
        self._pools = pools
        self._lock = _fork.lock()
        self._memory: dict[int, Any] = {}
        self.manager = _manager_class(self)

    def install(self) -> None:
        """Set the manager, for contexts made from here on."""
        from streampool.attach import AttachError

        cuda = sys.modules["numba.cuda"]
        devices = getattr(getattr(cuda, "cudadrv", None), "devices", None)
        runtime = getattr(devices, "_runtime", None)
        if getattr(getattr(runtime, "_tls", None), "attached_context", None) is not None or any(
            getattr(gpu, "_context", None) is not None or getattr(gpu, "primary_context", None) is not None
            for gpu in getattr(getattr(devices, "gpus", None), "__dict__", {}).get("lst", ())
        ):
            raise AttachError(
                "Numba has made a CUDA context already, which keeps its own memory manager: install before its first "
                "use, or call numba.cuda.close() first"
            )
        if not _frees_can_be_ordered(self._pools):
            raise AttachError(
                "Numba's interface names no stream, so its frees wait for all that is queued on the device, and this "
                "driver cannot tell when that is done (cuCtxRecordEvent): use a driver of CUDA 12.5 or newer"
            )
        cuda.set_memory_manager(self.manager)

    def uninstall(self) -> None:
        """Give Numba its own manager, for contexts made from here on (``numba.cuda.close()`` ends those there are)."""
        cuda = sys.modules["numba.cuda"]
        cuda.set_memory_manager(cuda.cudadrv.driver.NumbaCUDAMemoryManager)

    def memory(self, ordinal: int) -> Any:
        """Give the memory of a device without the order of a stream."""
        with self._lock:
            if ordinal not in self._memory:
                made = _core.UnorderedMemory(self._pools.on(ordinal))
                self._memory.setdefault(ordinal, made)  # a signal's handler may have been here meanwhile
            return self._memory[ordinal]

    def info(self, ordinal: int) -> tuple[int, int]:
        """Give the free and the total bytes of a device: what lies idle in the pool is free."""
        pool = self._pools.on(ordinal)
        free, total = pool.driver.memory_info()
        return free + pool.stats().cached, total

    def check_ipc(self, ordinal: int) -> None:
        """Raise where the pool's memory has no IPC handles of the old kind."""
        pool = self._pools.on(ordinal)
        if pool.stats().source != "malloc":
            raise RuntimeError(
                f"memory of pool {pool.name!r} has no legacy IPC handle: it comes from segments={pool.stats().source}. "
                "Use segments=malloc (sp.install('numba', segments='malloc'))"
            )

    def usage(self) -> Usage:
        """Count the pools; Numba does not count what it takes beside them."""
        return Usage(self._pools.peak())


def _frees_can_be_ordered(pools: Pools) -> bool:
    """Ask without making a context: no device is used yet."""
    if pools.given is not None:
        return bool(pools.given.driver.capabilities()["context_events"])
    if pools.family == "sim":
        return bool(_core.open_device("sim:0").capabilities()["context_events"])
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "cuCtxRecordEvent")
    except OSError:  # no driver: the first use says so
        return True


def _manager_class(adapter: NumbaAdapter) -> Any:
    from numba import cuda

    class StreampoolManager(cuda.GetIpcHandleMixin, cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
        """Numba's device memory from a pool."""

        def initialize(self) -> None:
            """Nothing to do: the pool comes with the first allocation."""

        def memalloc(self, size: int) -> Any:
            """Allocate device memory; Numba's own deferred frees are done before the error."""
            memory = adapter.memory(self.context.device.id)
            try:
                address = memory.allocate(size)
            except MemoryError:
                self.deallocations.clear()
                address = memory.allocate(size)
            allocations = self.allocations
            allocations[address] = memory

            def free() -> None:
                # After a reset, at exit: the table is empty, and the memory is free.
                if allocations.pop(address, None) is not None:
                    memory.free(address)

            context = weakref.proxy(self.context)
            return cuda.MemoryPointer(context, _pointer(address), size, finalizer=free)

        def get_memory_info(self) -> Any:
            """Give free and total bytes, the pool's idle memory counted as free."""
            return cuda.MemoryInfo(*adapter.info(self.context.device.id))

        def get_ipc_handle(self, memory: Any) -> Any:
            """Give an IPC handle with the block's offset in its segment."""
            adapter.check_ipc(self.context.device.id)
            return super().get_ipc_handle(memory)

        def reset(self) -> None:
            """Free what the context holds: its finalizers come later, and find nothing to do."""
            for address, memory in list(self.allocations.items()):
                if isinstance(memory, _core.UnorderedMemory) and self.allocations.pop(address, None) is not None:
                    memory.free(address)
            super().reset()

        @property
        def interface_version(self) -> int:
            """The version of Numba's interface."""
            return 1

    return StreampoolManager


def _pointer(address: int) -> Any:
    try:
        from cuda.bindings.driver import CUdeviceptr
    except ImportError:
        return address
    return CUdeviceptr(address)
