"""What an allocation and its free cost through each library: on its own pool, and on streampool's after ``sp.install``.

Each library has one or two calls, and for each there are processes that differ only in whose memory it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from streampool._bench import loops
from streampool._bench.call import Call, Loop, ordinal_of, settings_of

__all__ = ["CALLS"]


def _serve(library: str, device: str, options: str) -> None:
    import streampool as sp

    sp.device.override_default(device)
    if all(one.library != library for one in sp.installed()):  # another call of this process has
        settings: dict[str, Any] = {**settings_of(options)}
        sp.install(library, **settings)


# -- whose memory it is ------------------------------------------------------------------------------------------------


def _served(library: str, loop: Callable[[str], Loop], device: str, options: str) -> Loop:
    _serve(library, device, options)
    return loop(device)


def _rmm_own(device: str, options: str) -> Loop:
    import rmm

    rmm.mr.set_per_device_resource(ordinal_of(device), loops.rmm_pool())
    return loops.rmm_buffer(device)


def _rmm_callback(device: str, options: str) -> Loop:
    """Call Python back as streampool's resource does, but for RMM's own pool: what the way itself costs."""
    import rmm

    from streampool.attach.rmm import callback_resource

    pool = loops.rmm_pool()
    resource = callback_resource(lambda size, stream, alignment: pool.allocate(size, stream), pool.deallocate)
    rmm.mr.set_per_device_resource(ordinal_of(device), resource)
    return loops.rmm_buffer(device)


# As install names it, its module, as --peers names it, a word for the call, the call, its loop.
_CALLS: tuple[tuple[str, str, str, str, str, Callable[[str], Loop]], ...] = (
    ("torch", "torch", "torch", "torch-empty", "torch.empty", loops.torch_empty),
    ("torch", "torch", "torch", "torch-raw", "PyTorch, raw alloc + delete", loops.torch_raw),
    ("cupy", "cupy", "cupy", "cupy-empty", "cupy.empty", loops.cupy_empty),
    ("cupy", "cupy", "cupy", "cupy-alloc", "cupy.cuda.alloc", loops.cupy_alloc),
    ("numba", "numba", "numba", "numba-array", "numba.cuda.device_array", loops.numba_array),
    ("rmm", "rmm", "rmm-pool", "rmm-buffer", "rmm.DeviceBuffer", loops.rmm_buffer),
    ("cuda.core", "cuda.core", "cuda-core", "cuda-core-buffer", "cuda.core allocate + close", loops.cuda_core_buffer),
)


def _rows() -> Iterator[Call]:
    for library, module, peer, word, how, loop in _CALLS:
        ways: list[tuple[str, str, Callable[[str, str], Loop]]] = [
            ("own", "its own pool", _rmm_own if library == "rmm" else loops.own(loop)),
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
