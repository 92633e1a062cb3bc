"""How each library allocates 4 KiB and frees it, as a tight loop.

Made once it is known whose memory the library hands out: its own, or streampool's. Nothing is imported before that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from streampool._bench.call import SIZE, Loop, ordinal_of

__all__ = [
    "cuda_core_buffer", "cupy_alloc", "cupy_empty", "cupy_on", "numba_array", "own", "repeat", "rmm_buffer", "rmm_pool",
    "torch_empty", "torch_on", "torch_raw",
]  # fmt: skip

_FIRST_BYTES = 1 << 28  # that RMM's pool begins with, as in the other kinds


def own(loop: Callable[[str], Loop]) -> Callable[[str, str], Loop]:
    """Give what makes the loop where the library's memory is its own: options are for pools of streampool's."""
    return lambda device, options: loop(device)


def repeat(pair: Callable[[], Any]) -> Loop:
    """Call it again and again; what it gives is dropped, which frees it."""

    def loop(n: int) -> None:
        for _ in range(n):
            pair()

    return loop


def torch_on(device: str) -> Any:
    """Give PyTorch with its current device set."""
    import torch

    torch.cuda.set_device(ordinal_of(device))
    torch.cuda.init()
    return torch


def torch_empty(device: str) -> Loop:
    """Make a tensor, which goes at once."""
    torch = torch_on(device)
    return repeat(partial(torch.empty, SIZE, dtype=torch.uint8, device=torch.device(device)))


def torch_raw(device: str) -> Loop:
    """Call the caching allocator alone."""
    torch = torch_on(device)
    stream = torch.cuda.current_stream().cuda_stream
    allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
    delete = torch._C._cuda_cudaCachingAllocator_raw_delete

    def loop(n: int) -> None:
        for _ in range(n):
            delete(allocate(SIZE, stream))

    return loop


def cupy_on(device: str) -> Any:
    """Give CuPy with its current device set."""
    import cupy

    cupy.cuda.Device(ordinal_of(device)).use()
    return cupy


def cupy_alloc(device: str) -> Loop:
    """Call the current allocator, which is the pool by default."""
    return repeat(partial(cupy_on(device).cuda.alloc, SIZE))


def cupy_empty(device: str) -> Loop:
    """Make an array, which goes at once."""
    return repeat(partial(cupy_on(device).empty, SIZE, dtype="u1"))


def numba_array(device: str) -> Loop:
    """Make an array, which goes at once."""
    from numba import cuda

    cuda.select_device(ordinal_of(device))
    return repeat(partial(cuda.device_array, SIZE, dtype="u1"))


def rmm_pool() -> Any:
    """Give RMM's pool over cudaMalloc."""
    import rmm

    return rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=_FIRST_BYTES)


def rmm_buffer(device: str) -> Loop:
    """Make a buffer of the current resource, which goes at once."""
    import rmm

    return repeat(partial(rmm.DeviceBuffer, size=SIZE))


def cuda_core_buffer(device: str) -> Loop:
    """Make a buffer of the device's current memory resource, closed at once."""
    from cuda.core import Device

    made = Device(ordinal_of(device))
    made.set_current()
    stream = made.create_stream()

    def loop(n: int, allocate: Any = made.allocate) -> None:
        for _ in range(n):
            allocate(SIZE, stream=stream).close()

    return loop
