"""cuda.core from streampool: a ``MemoryResource`` over a pool.

>>> mr = memory_resource(pool)
>>> cuda.core.Device().memory_resource = mr
>>> buffer = device.allocate(1 << 20, stream=stream)
"""

from __future__ import annotations

from typing import Any

from streampool.attach._coverage import Usage
from streampool.attach._pools import Pools
from streampool.pool import Pool

__all__ = ["make", "memory_resource"]


def memory_resource(pool: Pool) -> Any:
    """Give a ``cuda.core.MemoryResource`` over a pool. Its buffers keep it, and the pool, alive."""
    return _resource_class()(pool)


_class: Any = None


def _resource_class() -> Any:
    global _class
    if _class is not None:
        return _class
    from cuda.core import Buffer, MemoryResource

    class StreampoolMemoryResource(MemoryResource):  # type: ignore[misc]
        """Memory of a pool, allocated and freed in stream order."""

        def __init__(self, pool: Pool) -> None:
            self.pool = pool

        def allocate(self, size: int, *, stream: Any) -> Any:
            """Allocate `size` bytes on `stream`, where the buffer will be freed too."""
            address = self.pool.allocate_owned(size, stream=_handle(stream))
            return Buffer.from_handle(address, size, mr=self, stream=stream)

        def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
            """Free in the order of `stream`."""
            self.pool.free_raw_sized(int(ptr), size, stream=_handle(stream))

        @property
        def is_device_accessible(self) -> bool:
            """Always: all kinds of a pool's memory are."""
            return True

        @property
        def is_host_accessible(self) -> bool:
            """Whether the host may touch it."""
            return self.pool.kind != "device"

        @property
        def is_managed(self) -> bool:
            """Whether it is managed memory."""
            return self.pool.kind == "managed"

        @property
        def device_id(self) -> int:
            """The pool's device."""
            return self.pool.driver.ordinal

    _class = StreampoolMemoryResource
    return _class


def _handle(stream: Any) -> int:
    """Give the handle, and keep the rule of closed streams: their handle is 0, which is another stream."""
    if getattr(stream, "is_closed", False):
        from streampool.errors import StreamError

        raise StreamError("the stream object is closed; nothing was done. Use a live stream, or its replacement")
    return int(stream.__cuda_stream__()[1])


def make(pools: Pools) -> CudaCoreAdapter:
    """Give the adapter; cuda.core is imported."""
    return CudaCoreAdapter(pools)


class CudaCoreAdapter:
    """Sets the default resource of each device."""

    def __init__(self, pools: Pools) -> None:
        self.notes = [
            "cuda.core keeps its Device objects by thread: in another thread set Device().memory_resource yourself",
            "buffers of memory resources that the program makes itself are theirs",
        ]
        self._pools = pools
        self._resources: list[Any] = []

    def install(self) -> None:
        """Set the resource of each device, for ``Device.allocate`` in this thread."""
        from streampool.attach import AttachError

        if self._pools.family == "sim":
            raise AttachError("cuda.core works on CUDA devices only; on the simulated device there is nothing to serve")
        given = self._pools.given
        from cuda.core import Device

        ordinals = range(len(Device.get_all_devices())) if given is None else [given.driver.ordinal]
        for ordinal in ordinals:
            resource = _lazy_class()(self._pools, ordinal)
            Device(ordinal).memory_resource = resource
            self._resources.append(resource)

    def uninstall(self) -> None:
        """Give each device cuda.core's default resource."""
        from cuda.core import Device, DeviceMemoryResource

        for resource in self._resources:
            Device(resource.device_id).memory_resource = DeviceMemoryResource(resource.device_id)

    def usage(self) -> Usage:
        """Count the pools; cuda.core does not count what it takes beside them."""
        return Usage(self._pools.peak())


_lazy: Any = None


def _lazy_class() -> Any:
    """Give the class whose pool is made when it is first asked for memory."""
    global _lazy
    if _lazy is None:

        class LazyResource(_resource_class()):  # type: ignore[misc]
            def __init__(self, pools: Pools, ordinal: int) -> None:
                self._pools = pools
                self._ordinal = ordinal

            @property
            def pool(self) -> Pool:
                return self._pools.on(self._ordinal)

            @property
            def is_host_accessible(self) -> bool:
                return False

            @property
            def is_managed(self) -> bool:
                return False

            @property
            def device_id(self) -> int:
                return self._ordinal

        _lazy = LazyResource
    return _lazy
