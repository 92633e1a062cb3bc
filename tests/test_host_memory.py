"""R2 for memory that the host can touch: pinned and managed blocks are handed out only when all their work is done.

The host is one more reader that no stream orders. A caller that touches the memory in stream order only says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scene import KIB, MIB, Busy, Scene, becomes, fill_up, scene

import streampool as sp

KINDS = pytest.mark.parametrize("kind", ["pinned", "managed"])
MODES = pytest.mark.parametrize("mode", ["production", "debug"])
SIZES = pytest.mark.parametrize("size", [1, 4 * KIB, 700 * KIB, 5 * MIB])
STREAMS = pytest.mark.parametrize("lane", ["lasting", "raw", "legacy", "per_thread"])


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


def lane_of(sc: Scene, pool: sp.Pool, what: str) -> Any:
    if what == "legacy":
        return sc.device.default_stream
    if what == "per_thread":
        return sc.device.per_thread_default_stream
    return sc.stream(pool, lasting=what == "lasting")


def take(pool: sp.Pool, stream: Any, size: int, count: int = 5, **options: Any) -> list[sp.Buffer]:
    return [pool.allocate(size, stream=stream, **options) for _ in range(count)]


def touches(blocks: list[sp.Buffer], work: Busy) -> bool:
    return any(work.overlaps(block.handle, block.size) for block in blocks)


def take_until(pool: sp.Pool, stream: Any, size: int, work: Busy, **options: Any) -> list[sp.Buffer]:
    """Take blocks until the work's memory is reached. Pools here have limits: out of memory means it never is."""
    blocks = take(pool, stream, size, 1, **options)
    while not touches(blocks[-1:], work):
        blocks += take(pool, stream, size, 1, **options)
    return blocks


@KINDS
@MODES
@SIZES
@STREAMS
@pytest.mark.parametrize("freed", ["explicitly", "implicitly"])
def test_not_even_its_own_stream_gets_a_block_back_before_its_work_is_done(
    sc: Scene, kind: str, mode: str, size: int, lane: str, freed: str
) -> None:
    """cupy/cupy#8789, LMCache/LMCache#4830: a pinned source was recycled while an asynchronous copy still read it."""
    pool = sc.pool(kind, mode, quarantine_bytes=0, limit=max(8 * MIB, 24 * size))
    s = lane_of(sc, pool, lane)
    block = pool.allocate(size, stream=s)
    work = sc.busy(s, block)
    block.close(s if freed == "explicitly" else None)
    del block
    held = take(pool, s, size) + take(pool, sc.stream(pool), size)
    assert not touches(held, work)

    sc.open()
    pool.check()
    for other in take_until(pool, s, size, work):
        sc.device.host_write(other)  # nothing orders the host with the stream: it must all be done
    sc.assert_no_race()
    held.clear()
    assert pool.audit() == ""


@KINDS
@MODES
@SIZES
@pytest.mark.parametrize("promised", ["by the pool", "by the call"])
def test_a_caller_that_touches_it_in_stream_order_only_gets_it_back_at_once(
    sc: Scene, kind: str, mode: str, size: int, promised: str
) -> None:
    limit = max(4 * MIB, 16 * size)
    pool = sc.pool(
        kind, mode, quarantine_bytes=0, stream_ordered=promised == "by the pool", limit=limit, wait_timeout=0
    )
    option: dict[str, Any] = {"stream_ordered": True} if promised == "by the call" else {}
    s, t = sc.stream(pool), sc.stream(pool)
    block = pool.allocate(size, stream=s, **option)
    work = sc.busy(s, block)
    block.close(s)
    strangers = take(pool, t, size, **option)
    assert not touches(strangers, work), "in stream order means on that stream"
    if mode == "debug":  # keeps freed memory back until its guards could be checked, which is when the work is done
        sc.open()
        pool.check()
    for other in take_until(pool, s, size, work, **option):
        sc.use(s, other)
    sc.open()
    sc.assert_no_race()


@KINDS
@SIZES
def test_a_caller_without_the_promise_gets_nothing_that_one_with_it_left_pending(
    sc: Scene, kind: str, size: int
) -> None:
    pool = sc.pool(kind, limit=max(8 * MIB, 24 * size))
    s = sc.stream(pool)
    block = pool.allocate(size, stream=s, stream_ordered=True)
    work = sc.busy(s, block)
    block.close(s)
    # One takes it over while the work is pending, and frees it.
    middle = take_until(pool, s, size, work, stream_ordered=True)
    middle.pop().close(s)
    middle.clear()
    assert not touches(take(pool, s, size), work)
    sc.open()
    for other in take_until(pool, s, size, work):
        sc.device.host_write(other)
    sc.assert_no_race()


@KINDS
@SIZES
def test_a_declared_second_stream_and_event_hold_it_too(sc: Scene, kind: str, size: int) -> None:
    pool = sc.pool(kind, limit=max(8 * MIB, 24 * size))
    s, t, u = sc.stream(pool), sc.stream(pool), sc.stream()
    block = pool.allocate(size, stream=s)
    block.record_stream(t)
    first = sc.busy(t, block)
    u.wait(t)
    second = sc.busy(u, block)
    block.record_event(u.record())
    block.close(s)
    for left in (second, first):
        held = take(pool, s, size, 2)
        assert not touches(held, left)
    sc.open(first)
    assert not touches(take(pool, s, size, 2), second)
    sc.open(second)
    for other in take_until(pool, s, size, second):
        sc.device.host_write(other)
    sc.assert_no_race()


@KINDS
def test_an_asynchronous_copy_sees_the_old_bytes_of_a_source_that_was_dropped(sc: Scene, kind: str) -> None:
    """cupy/cupy#8789 (fix #8845), LMCache/LMCache#4830, by the bytes themselves; also with the pinned pool full."""
    size = 64 * KIB
    pool, device_pool = sc.pool(kind, limit=2 * MIB, wait_timeout=0.01), sc.pool()
    s = sc.stream(device_pool)
    pool.register_stream(s)
    target = device_pool.allocate(size, stream=s)
    source = pool.allocate(size, stream=s)
    source.numpy()[:] = 7
    gate = sp.sim.Gate()
    s.launch(gate=gate)
    source.copy_to(target, stream=s)
    del source
    others, error = fill_up(pool, size, s)
    assert error.fields["reason"] == "pending"
    for other in others:
        other.numpy()[:] = 9
    gate.open()
    s.sync()
    assert np.all(target.numpy() == 7)
    others.append(pool.allocate(size, stream=s))  # now it is there
    sc.assert_no_race()


@KINDS
@MODES
def test_the_host_sees_what_work_wrote_and_work_sees_what_the_host_wrote(sc: Scene, kind: str, mode: str) -> None:
    pool = sc.pool(kind, mode)
    s = sc.stream(pool)
    with pool.allocate(1000, stream=s) as block:
        assert (block.is_host_accessible, block.is_device_accessible, block.kind) == (True, True, kind)
        view = block.numpy("float32")
        view[:] = 1.5

        def double(data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
            data.view("float32")[:] *= 2

        s.launch(double, writes=[block])
        s.sync()
        assert view.shape == (250,)
        assert np.all(view == 3.0)
        with pytest.raises(BufferError, match="cannot be closed"):
            block.close()
        del view


@KINDS
def test_memory_of_the_host_counts_against_the_host_and_goes_back_at_close(kind: str) -> None:
    with scene(memory="32MiB", host_memory="32MiB") as sc:
        calls = {"pinned": "mem_free_host", "managed": "mem_free_managed"}[kind]
        pool = sc.pool(kind)
        s = sc.stream(pool)
        blocks = take(pool, s, 7 * MIB, 3)
        with pytest.raises(sp.OutOfMemoryError) as caught:
            take(pool, s, 7 * MIB, 3)
        assert caught.value.fields["reason"] == "driver"
        assert sc.device.used_memory == 0, "of the device's own memory"
        for block in blocks:
            block.close(s)
        pool.close()
        assert becomes(lambda: pool.stats().reserved, 0)
        assert sc.device.calls()[calls] >= 3
        take(sc.pool(kind), s, 7 * MIB, 4)  # all of it is there again


def test_a_device_without_managed_memory_says_so() -> None:
    with scene(managed_memory=False) as sc:
        with pytest.raises(sp.DriverError, match=r"no managed memory.*pinned"):
            sp.Pool(sc.device, kind="managed")
        sc.pool("pinned").allocate(10, stream=sc.stream())


def test_device_memory_is_not_affected_by_the_promise(sc: Scene) -> None:
    pool = sc.pool("device")
    s = sc.stream(pool)
    for option in (None, False, True):
        block = pool.allocate(4 * KIB, stream=s, stream_ordered=option)
        work = sc.busy(s, block)
        block.close(s)
        assert touches(take(pool, s, 4 * KIB), work), "on its own stream at once, in any case"


@KINDS
def test_numpys_arrays_of_a_buffer_are_views_that_keep_it_until_they_and_its_work_are_done(
    sc: Scene, kind: str
) -> None:
    pool = sc.pool(kind)
    stream = sc.stream(pool)
    block = pool.allocate(4 * KIB, stream=stream)
    array = np.asarray(block)
    assert (array.dtype, array.shape, array.ctypes.data) == (np.uint8, (4 * KIB,), block.handle)
    array[:] = 3
    with pytest.raises(BufferError, match="while NumPy arrays or memoryviews of it exist"):
        block.close(stream)
    assert np.array(block, dtype="f4", copy=True).sum() == 3 * 4 * KIB
    work = sc.busy(stream, block)
    del block
    assert not touches(take(pool, stream, 4 * KIB), work), "a view lives"
    del array
    assert not touches(take(pool, stream, 4 * KIB), work), "its work is not done"
    sc.open(work)
    assert touches(take_until(pool, stream, 4 * KIB, work), work)
    sc.assert_no_race()


@pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
@pytest.mark.parametrize(
    "ask", [np.asarray, np.array, lambda block: block.__array__()], ids=["asarray", "array", "own"]
)
def test_numpy_is_refused_a_buffer_that_is_gone_and_makes_no_array_of_the_object(
    sc: Scene, kind: str, ask: Any
) -> None:
    """``np.asarray`` took what gave it no view for an object, and said nothing."""
    pool = sc.pool(kind)
    stream = sc.stream(pool)
    closed, freed = (pool.allocate(1000, stream=stream) for _ in range(2))
    closed.close(stream)
    with pytest.raises(BufferError, match="the buffer is closed"):
        ask(closed)
    pool.free_raw(freed.handle, stream=stream)
    with pytest.raises(BufferError, match="freed by its address"):
        ask(freed)
