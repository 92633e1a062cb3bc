"""What an allocation and its free cost through each library: on its own pool, and on streampool's after ``sp.install``.

Each library has one or two calls, and for each there are processes that differ only in whose memory it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from streampool._bench.call import SIZE, Call, Loop, ordinal_of, settings_of

__all__ = ["CALLS"]

_LARGEST_POOL = 1 << 28  # bytes that RMM's pool begins with, as in the other kinds


def _serve(library: str, device: str, options: str) -> None:
    import streampool as sp

    sp.device.override_default(device)
    if all(one.library != library for one in sp.installed()):  # another call of this process has
        settings: dict[str, Any] = {**settings_of(options)}
        sp.install(library, **settings)


def _repeat(pair: Callable[[], Any]) -> Loop:
    """Call it again and again; what it gives is dropped, which frees it."""

    def loop(n: int) -> None:
        for _ in range(n):
            pair()

    return loop


# -- how each library allocates and frees; called when it is known whose memory it is ----------------------------------


def _torch(device: str) -> Any:
    import torch

    torch.cuda.set_device(ordinal_of(device))
    return torch


def _torch_empty(device: str) -> Loop:
    torch = _torch(device)
    return _repeat(partial(torch.empty, SIZE, dtype=torch.uint8, device=torch.device(device)))


def _torch_raw(device: str) -> Loop:
    torch = _torch(device)
    stream = torch.cuda.current_stream().cuda_stream
    allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
    delete = torch._C._cuda_cudaCachingAllocator_raw_delete

    def loop(n: int) -> None:
        for _ in range(n):
            delete(allocate(SIZE, stream))

    return loop


def _cupy(device: str) -> Any:
    import cupy

    cupy.cuda.Device(ordinal_of(device)).use()
    return cupy


def _cupy_alloc(device: str) -> Loop:
    return _repeat(partial(_cupy(device).cuda.alloc, SIZE))


def _cupy_empty(device: str) -> Loop:
    return _repeat(partial(_cupy(device).empty, SIZE, dtype="u1"))


def _numba_array(device: str) -> Loop:
    from numba import cuda

    cuda.select_device(ordinal_of(device))
    return _repeat(partial(cuda.device_array, SIZE, dtype="u1"))


def _rmm_buffer(device: str) -> Loop:
    import rmm

    return _repeat(partial(rmm.DeviceBuffer, size=SIZE))


def _cuda_core_buffer(device: str) -> Loop:
    from cuda.core import Device

    made = Device(ordinal_of(device))
    made.set_current()
    stream = made.create_stream()

    def loop(n: int, allocate: Any = made.allocate) -> None:
        for _ in range(n):
            allocate(SIZE, stream=stream).close()

    return loop


# -- whose memory it is ------------------------------------------------------------------------------------------------


def _own(loop: Callable[[str], Loop], device: str, options: str) -> Loop:
    return loop(device)


def _served(library: str, loop: Callable[[str], Loop], device: str, options: str) -> Loop:
    _serve(library, device, options)
    return loop(device)


def _rmm_pool(device: str) -> Any:
    import rmm

    return rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=_LARGEST_POOL)


def _rmm_own(device: str, options: str) -> Loop:
    import rmm

    rmm.mr.set_per_device_resource(ordinal_of(device), _rmm_pool(device))
    return _rmm_buffer(device)


def _rmm_callback(device: str, options: str) -> Loop:
    """Call Python back as streampool's resource does, but for RMM's own pool: what the way itself costs."""
    import rmm

    from streampool.attach.rmm import callback_resource

    pool = _rmm_pool(device)
    resource = callback_resource(lambda size, stream, alignment: pool.allocate(size, stream), pool.deallocate)
    rmm.mr.set_per_device_resource(ordinal_of(device), resource)
    return _rmm_buffer(device)


# As install names it, its module, as --peers names it, a word for the call, the call, its loop.
_CALLS: tuple[tuple[str, str, str, str, str, Callable[[str], Loop]], ...] = (
    ("torch", "torch", "torch", "torch-empty", "torch.empty", _torch_empty),
    ("torch", "torch", "torch", "torch-raw", "PyTorch, raw alloc + delete", _torch_raw),
    ("cupy", "cupy", "cupy", "cupy-empty", "cupy.empty", _cupy_empty),
    ("cupy", "cupy", "cupy", "cupy-alloc", "cupy.cuda.alloc", _cupy_alloc),
    ("numba", "numba", "numba", "numba-array", "numba.cuda.device_array", _numba_array),
    ("rmm", "rmm", "rmm-pool", "rmm-buffer", "rmm.DeviceBuffer", _rmm_buffer),
    ("cuda.core", "cuda.core", "cuda-core", "cuda-core-buffer", "cuda.core allocate + close", _cuda_core_buffer),
)


def _rows() -> Iterator[Call]:
    for library, module, peer, word, how, loop in _CALLS:
        ways: list[tuple[str, str, Callable[[str, str], Loop]]] = [
            ("own", "its own pool", _rmm_own if library == "rmm" else partial(_own, loop)),
            ("streampool", "streampool", partial(_served, library, loop)),
        ]
        if library == "numba":
            ways[0] = ("own", "cuMemAlloc", ways[0][2])  # it has no pool
        if library == "rmm":
            ways.append(("callback", "its own pool by way of Python", _rmm_callback))
        for memory, label, make in ways:
            yield Call(
                f"{word}-{memory}", f"{how}, {label}", "libraries", peer, f"{library}-{memory}", module, make,
                served=memory == "streampool", facts={"how": how, "memory": memory},
            )  # fmt: skip


CALLS: tuple[Call, ...] = tuple(_rows())
