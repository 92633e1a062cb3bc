"""RMM from streampool: a memory resource for each device, behind which cuDF, cuML and others work unchanged.

RMM calls back into Python for each allocation, so this is meant for debugging. Without Python on the path, and without
our checks, ``CudaAsyncViewMemoryResource`` takes the driver's pool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from streampool import _core
from streampool.attach._coverage import Usage
from streampool.attach._pools import Pools
from streampool.pool import Pool

__all__ = ["callback_resource", "make", "memory_resource"]

_ALIGNMENT = 256  # bytes: RMM's

_kept: list[Any] = []  # RMM's C++ copies hold borrowed pointers to the callables


def memory_resource(pool: Pool) -> Any:
    """Give an ``rmm.mr.DeviceMemoryResource`` over a pool."""
    return _resource(lambda: pool)


def _resource(pool_of: Any) -> Any:
    def allocate(nbytes: int, stream: Any, alignment: int) -> int:
        address: int = pool_of().allocate_owned(nbytes, stream=_handle(stream), alignment=alignment)
        return address

    def deallocate(ptr: int, nbytes: int, stream: Any) -> None:
        pool_of().free_raw_sized(ptr, nbytes, stream=_handle(stream))

    return callback_resource(allocate, deallocate)


def callback_resource(allocate: Callable[[int, Any, int], int], deallocate: Callable[[int, int, Any], object]) -> Any:
    """Give a resource that calls ``allocate(bytes, stream, alignment)`` and ``deallocate(address, bytes, stream)``.

    RMM to 26.10 calls with (bytes, stream) and (address, bytes, stream), later ones with the stream first and an
    alignment last. The functions are kept for good.
    """
    import rmm.mr

    def allocates(*given: Any) -> int:
        return allocate(*given, _ALIGNMENT) if len(given) == 2 else allocate(given[1], given[0], given[2])

    def deallocates(*given: Any) -> None:
        deallocate(*(given if len(given) == 3 else (given[1], given[2], given[0])))

    resource = rmm.mr.CallbackMemoryResource(allocates, deallocates)
    _kept.append(resource)
    return resource


def _handle(stream: Any) -> int:
    protocol = getattr(stream, "__cuda_stream__", None)
    return int(protocol()[1] if protocol is not None else stream.value())


def make(pools: Pools) -> RmmAdapter:
    """Give the adapter; RMM is imported."""
    return RmmAdapter(pools)


class RmmAdapter:
    """Sets the resource of each device."""

    def __init__(self, pools: Pools) -> None:
        self.notes = [
            "a program that sets a memory resource of its own, as rmm.reinitialize() does, is not watched from there on"
        ]
        self._pools = pools
        self._before: dict[int, Any] = {}
        self._ours: dict[int, Any] = {}

    def install(self) -> None:
        """Set the resource of every device. No pool is made before it is asked for memory."""
        mr = sys.modules["rmm"].mr
        for ordinal in range(_device_count(self._pools.family)):
            self._before[ordinal] = mr.get_per_device_resource(ordinal)
            self._ours[ordinal] = _resource(lambda ordinal=ordinal: self._pools.on(ordinal))
            mr.set_per_device_resource(ordinal, self._ours[ordinal])

    def uninstall(self) -> None:
        """Give each device the resource that it had."""
        mr = sys.modules["rmm"].mr
        for ordinal, before in self._before.items():
            mr.set_per_device_resource(ordinal, before)

    def usage(self) -> Usage:
        """Say whether the program set other resources since; RMM does not count their bytes."""
        mr = sys.modules["rmm"].mr
        changed = [o for o, ours in self._ours.items() if mr.get_per_device_resource(o) is not ours]
        why = f"the program set another memory resource on device {changed[0]}" if changed else ""
        return Usage(self._pools.peak(), 0, why)


def _device_count(family: str) -> int:
    if family == "sim":
        return _core.sim.device_count()
    from cuda.core import Device

    return len(Device.get_all_devices())
