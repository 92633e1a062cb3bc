"""``Buffer.__dlpack__``: NumPy reads a block in place; who lets go last releases it, on any thread."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from scene import Scene, scene

import streampool as sp


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


def drain(pool: sp.Pool, stream: Any) -> int:
    """Blocks that live once implicit releases were taken in."""
    pool.free_raw(pool.allocate_raw(1, stream=stream), stream=stream)
    return int(pool.stats().live_blocks)


@pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
def test_numpy_sees_the_blocks_own_bytes(sc: Scene, kind: str) -> None:
    pool = sc.pool(kind)
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)
    assert block.__dlpack_device__() == (1, 0)  # simulated memory is the host's
    array = np.from_dlpack(block)
    assert (array.dtype, array.shape, array.ctypes.data) == (np.uint8, (1000,), block.handle)
    block.fill(9, stream=s)
    s.sync()
    assert (array == 9).all()
    assert np.from_dlpack(pool.allocate(0, stream=s)).shape == (0,)


def test_the_host_is_given_the_block_when_what_is_queued_on_its_stream_is_done(sc: Scene) -> None:
    pool = sc.pool()
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)
    block.fill(7, stream=s)
    assert (np.from_dlpack(block) == 7).all()


def test_a_lent_block_cannot_be_closed_and_outlives_its_buffer(sc: Scene) -> None:
    pool = sc.pool()
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)
    array = np.from_dlpack(block)
    second = np.from_dlpack(block)
    with pytest.raises(BufferError, match="other libraries' arrays of it exist"):
        block.close(s)
    del block
    gc.collect()
    assert drain(pool, s) == 1
    del array
    assert drain(pool, s) == 1
    del second
    assert drain(pool, s) == 0


def test_a_block_that_was_given_back_is_closed_and_released_once(sc: Scene) -> None:
    pool = sc.pool()
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)
    del_me = np.from_dlpack(block)
    del del_me
    block.close(s)
    assert pool.stats().frees == 1
    with pytest.raises(ValueError, match="closed"):
        block.__dlpack__()
    del block
    gc.collect()
    assert drain(pool, s) == 0
    assert pool.audit() == ""


def name_of(capsule: object) -> str:
    get = ctypes.pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return str(get(capsule).decode())


def test_the_capsules_name_follows_the_version_that_is_asked_for(sc: Scene) -> None:
    pool = sc.pool()
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)
    assert name_of(block.__dlpack__()) == "dltensor"
    assert name_of(block.__dlpack__(max_version=(0, 8))) == "dltensor"
    assert name_of(block.__dlpack__(max_version=(1, 0))) == "dltensor_versioned"
    assert name_of(block.__dlpack__(max_version=(2, 5))) == "dltensor_versioned"
    # None of them was taken: each gave its share back.
    block.close(s)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"stream": 0}, ValueError, "the legacy stream"),
        ({"stream": -2}, ValueError, "stream"),
        ({"stream": "x"}, TypeError, "stream"),
        ({"copy": True}, BufferError, "not copied"),
        ({"dl_device": (2, 0)}, BufferError, r"on DLPack's device \(1, 0\), not on \(2, 0\)"),
        ({"dl_device": 2}, TypeError, "dl_device"),
        ({"max_version": (1,)}, ValueError, "max_version"),
    ],
)
def test_what_cannot_be_given_is_refused(
    sc: Scene, arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    pool = sc.pool()
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)
    with pytest.raises(error, match=says):
        block.__dlpack__(**arguments)
    block.close(s)


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


def take(capsule: object) -> Any:
    """Take the record out of a capsule, as a library does."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    record = ctypes.cast(pointer(capsule, b"dltensor_versioned"), ctypes.POINTER(_Versioned))
    rename(capsule, _USED)
    return record


_USED = b"used_dltensor_versioned"


def test_the_record_is_laid_out_as_dlpack_says(sc: Scene) -> None:
    pool = sc.pool()
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)
    record = take(block.__dlpack__(max_version=(1, 1)))
    tensor = record.contents
    assert (tensor.major, tensor.minor, tensor.flags) == (1, 0, 0)
    assert (tensor.data, tensor.device_type, tensor.device_id, tensor.ndim) == (block.handle, 1, 0, 1)
    assert (tensor.code, tensor.bits, tensor.lanes, tensor.offset) == (1, 8, 1, 0)
    assert (tensor.shape[0], tensor.strides[0]) == (1000, 1)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(tensor.deleter)(ctypes.cast(record, ctypes.c_void_p))
    block.close(s)


def test_case_42_a_deleter_in_a_host_callback_makes_no_driver_call_and_needs_no_gil(sc: Scene) -> None:
    """NVIDIA/numba-cuda#317, ml-explore/mlx#2099: a free in a callback deadlocks with a thread that has the GIL."""
    pool = sc.pool()
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)
    record = take(block.__dlpack__(max_version=(1, 0)))
    del block
    gc.collect()
    deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(record.contents.deleter)  # called as it is, GIL or no GIL
    calls = sum(sc.device.calls().values())
    thread = threading.Thread(target=deleter, args=(ctypes.cast(record, ctypes.c_void_p),))
    thread.start()
    thread.join()
    assert sum(sc.device.calls().values()) == calls
    assert drain(pool, s) == 0


def test_the_last_borrower_of_a_pool_that_is_gone_leaves_its_end_to_the_next_slow_path(sc: Scene) -> None:
    """Settling a pool may call the driver, and a deleter must not."""
    other = sc.pool()
    before = sc.device.used_memory
    pool = sp.Pool(sc.device)
    s = sc.device.create_stream()
    array = np.from_dlpack(pool.allocate(1000, stream=s))
    held = sc.device.used_memory
    assert held > before
    del pool
    gc.collect()
    calls = sum(sc.device.calls().values())
    del array
    assert sum(sc.device.calls().values()) == calls
    assert sc.device.used_memory == held
    other.trim()
    assert sc.device.used_memory == before


def wait_until(holds: Callable[[], bool]) -> None:
    """Let other threads go on until something holds."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_buffer_cannot_be_closed_while_another_threads_export_waits_for_its_stream(sc: Scene) -> None:
    pool = sc.pool()
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)
    work = sc.busy(s, block)
    arrays: list[Any] = []
    queries = sc.device.calls().get("event_query", 0)
    thread = threading.Thread(target=lambda: arrays.append(np.from_dlpack(block)))
    thread.start()
    wait_until(lambda: sc.device.calls().get("event_query", 0) > queries + 1)
    try:
        with pytest.raises(BufferError, match="other libraries' arrays of it exist"):
            block.close(s)
    finally:
        sc.open(work)
        thread.join()
    assert len(arrays) == 1
    assert drain(pool, s) == 1
    arrays.clear()
    block.close(s)
    assert drain(pool, s) == 0


def test_a_buffer_that_an_argument_closes_is_not_lent(sc: Scene) -> None:
    pool = sc.pool()
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)

    class Closes:
        def __index__(self) -> int:
            block.close(s)
            return 1

    with pytest.raises(ValueError, match="closed"):
        block.__dlpack__(stream=-1, max_version=(Closes(), 0))
    assert drain(pool, s) == 0


def test_an_export_that_fails_lends_nothing(sc: Scene) -> None:
    pool = sc.pool()
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)
    sc.device.fail_call("event_record")
    with pytest.raises(sp.DriverError, match="event_record"):
        block.__dlpack__()
    block.close(s)
    assert drain(pool, s) == 0


def test_case_12_a_block_of_a_closed_stream_is_not_lent(sc: Scene) -> None:
    """NVIDIA/cuda-python#2627: a closed stream's null handle is another stream."""
    pool = sc.pool()
    s = sc.device.create_stream()
    block = pool.allocate(1000, stream=s)
    s.close()
    with pytest.raises(sp.StreamError, match="closed"):
        block.__dlpack__()


def test_case_40_collections_in_the_middle_of_exports_leave_everything_whole(sc: Scene) -> None:
    """cupy/cupy#2074, #105: the collector runs inside the allocator and frees re-entrantly."""
    pool = sc.pool(mode="debug")
    s = sc.stream(pool)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for size in range(1, 300):
            cycle: list[Any] = [np.from_dlpack(pool.allocate(size, stream=s))]
            cycle.append(cycle)
    finally:
        gc.set_threshold(*before)
    del cycle
    gc.collect()
    assert drain(pool, s) == 0
    assert pool.audit() == ""


# -- whose it is ------------------------------------------------------------------------------------------------------


def test_a_block_that_a_borrower_holds_is_nobodys_leak(sc: Scene) -> None:
    """R18: what is exported is not called a leak; kept by its Buffer alone it is held as any block."""
    pool = sc.pool(mode="debug")
    block = pool.allocate(1000, stream=sc.stream(pool))
    (facts,) = pool.live_blocks()
    assert (facts["exported"], [leak.leak_class for leak in pool.leaks()]) == (False, ["held"])
    first, second = np.from_dlpack(block), np.from_dlpack(block)
    del first
    assert pool.live_blocks()[0]["exported"]
    assert list(pool.leaks()) == []
    with pool.expect_no_leaks():
        lent = np.from_dlpack(pool.allocate(10, stream=sc.stream(pool)))  # whose Buffer is gone
    del second
    assert [leak.bytes for leak in pool.leaks()] == [1000]
    del lent
    assert [facts["exported"] for facts in pool.live_blocks()] == [False]
    block.close()
    block = pool.allocate(1000, stream=sc.stream(pool))
    assert not block.facts()["exported"]
