"""Public bug reports of other allocators about reuse and streams, as tests of ours: the whole kind, with its control.

Numbers are those of the project's list of cases; the docstrings name the reports. test_cases_frees.py,
test_cases_lifetime.py, test_cases_memory.py and test_cases_debug.py have the others.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cases_scene import SIZES, in_thread, take
from scene import KIB, MIB, Busy, Scene, scene

import streampool as sp

STREAMS = pytest.mark.parametrize("user", ["lasting", "raw", "legacy", "per_thread"])


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


def stream_of(sc: Scene, pool: sp.Pool, what: str) -> Any:
    if what == "legacy":
        return sc.device.default_stream
    if what == "per_thread":
        return sc.device.per_thread_default_stream
    return sc.stream(pool, lasting=what == "lasting")


def touches(blocks: list[sp.Buffer], work: Busy) -> bool:
    return any(work.overlaps(block.handle, block.size) for block in blocks)


def limit_for(size: int) -> int:
    """Give a limit under which memory of a size is soon used again."""
    return max(2 * MIB, 16 * size)


def name_again(pool: sp.Pool, *streams: Any) -> None:
    """Make a call that names each stream, so that what the pool owes it (a fence) is done; then let the fences pass."""
    for stream in streams:
        pool.allocate(1, stream=stream).close(stream)
    sp.sim.settle()


def take_until(pool: sp.Pool, stream: Any, size: int, *work: Busy) -> list[sp.Buffer]:
    """Take blocks until each piece of work was reached; fails when the pool is full before. Pools here have limits."""
    blocks: list[sp.Buffer] = []
    left = list(work)
    try:
        while left:
            blocks.append(pool.allocate(size, stream=stream))
            left = [piece for piece in left if not touches(blocks[-1:], piece)]
    except sp.OutOfMemoryError:
        pytest.fail("late reuse happens: the work is done, its memory is there, and nobody gets it")
    return blocks


# -- A. reuse across streams ------------------------------------------------------------------------------------------


@SIZES
@STREAMS
@pytest.mark.parametrize("declared", ["before the work", "after the work", "by address"])
@pytest.mark.parametrize("freed", ["on its stream", "implicitly"])
def test_case_1_a_block_used_on_a_declared_second_stream_is_reused_only_after_that_work(
    sc: Scene, size: int, user: str, declared: str, freed: str
) -> None:
    """meta-pytorch/torchrec#4231, pytorch/pytorch#23729, #58384: a source freed under a copy on a side stream."""
    pool = sc.pool(limit=limit_for(size))
    s = sc.stream(pool)
    t = stream_of(sc, pool, user)
    block = pool.allocate(size, stream=s)
    t.wait(s)
    if declared == "before the work":
        block.record_stream(t)
    work = sc.busy(t, block)
    if declared == "after the work":
        block.record_stream(t)
    elif declared == "by address":
        pool.record_stream_raw(block.handle, t)
    if freed == "on its stream":
        block.close(s)
    del block
    held = take(pool, s, size)
    assert not touches(held, work)

    sc.open()
    name_again(pool, t)
    for other in held:
        sc.use(s, other)
    held += take_until(pool, s, size, work)
    sc.use(s, held[-1])
    sp.sim.settle()
    sc.assert_no_race()


@SIZES
def test_case_1_an_undeclared_use_on_a_second_stream_is_a_race_that_the_simulated_device_shows(
    sc: Scene, size: int
) -> None:
    """meta-pytorch/torchrec#4231 without the declaration: the documented hazard, seen by the happens-before check."""
    pool = sc.pool()
    s, t = sc.stream(pool), sc.stream(pool)
    block = pool.allocate(size, stream=s)
    t.wait(s)
    work = sc.busy(t, block)
    block.close(s)
    held = take(pool, s, size, 1)
    assert touches(held, work), "the pool was never told"
    sc.use(s, held[0])
    sc.open()
    (race,) = sc.device.races()
    assert race.address <= work.address < race.address + race.size
    assert {race.first.label, race.second.label} == {"busy", "use"}


@SIZES
@pytest.mark.parametrize("raw", [False, True])
def test_case_3_a_block_that_names_no_stream_belongs_to_the_current_one_and_not_to_everybody(
    sc: Scene, size: int, raw: bool
) -> None:
    """microsoft/onnxruntime#32342, #4829: "no stream tag" was read as "safe for everyone"."""
    pool = sc.pool(limit=2 * limit_for(size))
    s, t = sc.stream(pool), sc.stream(pool)

    def one_without_a_stream() -> tuple[int, Callable[[], object]]:
        if raw:
            pointer = pool.allocate_raw(size)
            return pointer, lambda: pool.free_raw(pointer)
        block = pool.allocate(size)
        return block.handle, block.close

    legacy = sc.device.default_stream
    address, free = one_without_a_stream()
    first = sc.busy(legacy, address, size=size)
    free()
    with sp.stream(s):
        address, free = one_without_a_stream()
        second = sc.busy(s, address, size=size)
    free()  # outside the `with`: a free that names none means the block's own stream

    held = in_thread(lambda: take(pool, t, size, 10))
    assert not touches(held, first)
    assert not touches(held, second)

    sc.open()
    name_again(pool, legacy, s)
    held += in_thread(lambda: take_until(pool, t, size, first, second))
    for block in held:
        sc.use(t, block)
    sp.sim.settle()
    sc.assert_no_race()


class Holder:
    """Something that can be part of a reference cycle."""


RELEASES: dict[str, Callable[[list[Any]], object]] = {
    "last reference": lambda box: box.clear(),
    "close": lambda box: box.pop().close(),
    "with": lambda box: box[0].__exit__(None, None, None),
    "collector": lambda box: leave_to_the_collector(box),
    "weak reference's callback": lambda box: drop_in_callback(box),
}


def leave_to_the_collector(box: list[Any]) -> None:
    holder = Holder()
    holder.me = holder  # type: ignore[attr-defined]
    holder.block = box.pop()  # type: ignore[attr-defined]
    del holder
    gc.collect()


def drop_in_callback(box: list[Any]) -> None:
    holder = Holder()
    kept = [weakref.ref(holder, lambda _: box.clear())]
    del holder
    kept.clear()
    assert not box


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("where", ["same thread", "other thread"])
@pytest.mark.parametrize("size", [4 * KIB, 5 * MIB])
@pytest.mark.parametrize("mode", ["production", "debug"])
def test_case_5_an_implicit_release_is_ordered_by_the_blocks_own_streams_whoever_runs_it(
    sc: Scene, release: str, where: str, size: int, mode: str
) -> None:
    """NVIDIA/cuda-python#779, JuliaGPU/CUDA.jl#778: a finaliser freed on its own thread's idle stream."""
    pool = sc.pool(mode=mode, quarantine_bytes=0, limit=128 * MIB if size > MIB else 2 * MIB)
    s, recorded, current = sc.stream(pool), sc.stream(pool), sc.stream(pool)
    box = [pool.allocate(size, stream=s)]
    address = box[0].handle
    box[0].record_stream(recorded)
    works = [sc.busy(s, address, size=size)]
    recorded.wait(s)
    works.append(sc.busy(recorded, address, size=size))
    calls = sc.device.calls()

    def act() -> list[sp.Buffer]:
        with sp.stream(current):
            RELEASES[release](box)
            assert sc.device.calls() == calls, "an implicit release makes no driver call"
            return take(pool, None, size)

    held = act() if where == "same thread" else in_thread(act)
    assert not any(touches(held, work) for work in works)
    sc.open(works[0])
    held += take(pool, s, size) + take(pool, current, size)
    assert not touches(held, works[1]), "the recorded stream still uses it"
    sc.open(works[1])
    pool.check()
    held += take_until(pool, s, size, works[1])
    for block in held:
        sc.use(block.stream if block.stream is not None else current, block)
    sp.sim.settle()
    sc.assert_no_race()


@pytest.mark.parametrize("size", [4 * KIB, 700 * KIB, 9 * MIB])
@pytest.mark.parametrize("inside", ["1", "64", "middle", "last", "view"])
@pytest.mark.parametrize("mode", ["production", "debug"])
def test_case_6_a_use_declared_by_an_address_inside_a_block_is_a_use_of_the_block(
    sc: Scene, size: int, inside: str, mode: str
) -> None:
    """pytorch/pytorch#27366: the look-up matched starts of blocks only, and ignored a miss."""
    pool = sc.pool(mode=mode, quarantine_bytes=0, limit=limit_for(size))
    s, t = sc.stream(pool), sc.stream(pool)
    block = pool.allocate(size, stream=s)
    work = sc.busy(t, block)
    offset = {"1": 1, "64": 64, "middle": size // 2, "last": size - 1, "view": 0}[inside]
    if inside == "view":
        pool.record_stream_raw(block.numpy()[64:].ctypes.data, t)
    else:
        pool.record_stream_raw(block.handle + offset, t)
    block.close(s)
    held = take(pool, s, size)
    assert not touches(held, work)
    sc.open()
    pool.check()
    take_until(pool, s, size, work)


@pytest.mark.parametrize("size", [4 * KIB, 9 * MIB])
@pytest.mark.parametrize("mode", ["production", "debug"])
def test_case_6_a_use_declared_by_an_address_outside_any_block_raises(sc: Scene, size: int, mode: str) -> None:
    """pytorch/pytorch#27366: never silent. pytorch/pytorch#20658: the null pointer of an empty buffer is a no-op."""
    pool, other = sc.pool(mode=mode), sc.pool(mode=mode)
    s, t = sc.stream(pool), sc.stream(pool)
    block, foreign = pool.allocate(size, stream=s), other.allocate(size, stream=s)
    freed = pool.allocate(size, stream=s)
    at_freed = freed.handle
    freed.close(s)
    stats = pool.stats()
    for address in (
        block.handle - 1,
        block.handle + size + 4 * KIB + 1,
        foreign.handle,
        foreign.handle + 5,
        at_freed,
        at_freed + 5,
        12345,
        2**63,
        id(block),
    ):
        with pytest.raises(sp.InvalidFreeError, match=r"0x[0-9a-f]+"):
            pool.record_stream_raw(address, t)
    pool.record_stream_raw(0, t)
    empty = pool.allocate(0, stream=s)
    empty.record_stream(t)
    empty.close(s)
    assert (pool.stats().in_use, pool.stats().live_blocks) == (stats.in_use, stats.live_blocks)
    block.close(s)
    foreign.close(s)
    assert pool.audit() == other.audit() == ""


# -- B. which stream is it? -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4 * KIB, 700 * KIB, 2 * MIB])
@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("busy", [True, False])
def test_case_8_memory_of_destroyed_streams_is_used_by_others_and_their_handles_never(
    sc: Scene, size: int, lasting: bool, busy: bool
) -> None:
    """rapidsai/rmm#510 (NVIDIA/cuml#2632): a crash when stealing from the free list of a destroyed stream."""
    pool = sc.pool(limit=48 * MIB)
    for _ in range(20):
        stream = sc.stream(pool, lasting=lasting)
        block = pool.allocate(size, stream=stream)
        if busy:
            sc.busy(stream, block)
        block.close(stream)
        if lasting:
            pool.forget_stream(stream)
        stream.close()
    sc.open()
    receiver = sc.stream(pool)
    with pool.allocate(47 * MIB, stream=receiver) as block:  # needs all that the dead streams left
        sc.use(receiver, block)
    sp.sim.settle()
    assert pool.stats().reserved <= 48 * MIB
    sc.assert_no_race()
    assert pool.audit() == ""


def test_case_8_what_the_pool_remembers_of_streams_does_not_grow_with_streams_ever_seen(sc: Scene) -> None:
    """rapidsai/rmm#510: state per stream outlived the stream."""
    pool = sc.pool()
    seen = []
    for round_ in range(1500):
        stream = sc.stream()
        block = pool.allocate(4 * KIB, stream=stream)
        sc.use(stream, block)
        block.close(stream)
        stream.close()
        if round_ % 50 == 49:
            sp.sim.settle()
        if round_ % 500 == 499:
            seen.append((pool.stats().streams, pool.stats().reserved, sc.device.live_events))
    assert max(streams for streams, _, _ in seen) <= 300
    assert max(reserved for _, reserved, _ in seen) <= 16 * MIB
    assert max(events for _, _, events in seen) <= 300
    sc.assert_no_race()


def recycled(sc: Scene, handle: int, device: Any = None) -> Any:
    """Make streams until one has a given handle."""
    others = []
    for _ in range(64):
        stream = (device or sc.device).create_stream()
        if stream.handle == handle:
            return stream
        others.append(stream)
    pytest.fail("the simulated device uses handle values again")


@SIZES
@pytest.mark.parametrize("first", ["raw", "lasting"])
@pytest.mark.parametrize("second", ["raw", "lasting"])
@pytest.mark.parametrize("as_int", [True, False])
def test_case_10_a_new_stream_with_a_dead_streams_handle_is_a_stranger_to_its_memory(
    sc: Scene, size: int, first: str, second: str, as_int: bool
) -> None:
    """rapidsai/rmm#2251, #2394, #649, NVIDIA/DALI#5348: maps keyed by raw handle, which CUDA uses again at once."""
    pool = sc.pool()
    s1 = sc.stream(pool, lasting=first == "lasting")
    block = pool.allocate(size, stream=s1)
    work = sc.busy(s1, block)
    handle = s1.handle
    block.close(handle if as_int else s1)
    if first == "lasting":
        pool.forget_stream(s1)
    s1.close()
    s2 = recycled(sc, handle)
    if second == "lasting":
        pool.register_stream(s2)
    held = take(pool, handle if as_int else s2, size)
    assert not touches(held, work)
    for other in held:
        sc.use(s2, other)
    sc.open()
    sc.assert_no_race()
    small = sc.pool(limit=16 * MIB)
    assert small.audit() == pool.audit() == ""


def test_case_10_a_stream_of_another_device_with_the_same_handle_is_refused_by_its_object() -> None:
    """rapidsai/rmm#649: stream handles of two devices are not comparable."""
    with scene(devices=2) as sc:
        pool = sc.pool()
        s1 = sc.stream(pool, lasting=False)
        block = pool.allocate(4 * KIB, stream=s1)
        work = sc.busy(s1, block)
        handle = s1.handle
        block.close(s1)
        s1.close()
        s2 = recycled(sc, handle, sp.sim.Device(1))
        before = pool.stats()
        with pytest.raises(sp.StreamError, match="device 1"):
            pool.allocate(4 * KIB, stream=s2)
        assert pool.stats().allocations == before.allocations
        sc.open(work)
        with sp.Pool(sp.sim.Device(1)) as there:
            there.allocate(4 * KIB, stream=s2).close(s2)
            assert there.audit() == ""
        sc.assert_no_race()


class Wrapper:
    """A stream object of some other library."""

    def __init__(self, handle: int, *, closed: bool | None = None, error: BaseException | None = None) -> None:
        self._handle = handle
        self._error = error
        if closed is not None:
            self.is_closed = closed

    def __cuda_stream__(self) -> tuple[int, int]:
        if self._error is not None:
            raise self._error
        return 0, self._handle


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("closed", ["ours", "with handle 0", "that raises"])
def test_case_12_a_closed_stream_is_an_error_before_any_driver_call_and_changes_nothing(
    sc: Scene, mode: str, closed: str
) -> None:
    """NVIDIA/cuda-python#2627: work aimed at a closed stream silently ran on the default stream."""
    pool = sc.pool(mode=mode)
    live = sc.stream(pool)
    if closed == "ours":
        dead = sc.stream()
        dead.close()
    elif closed == "with handle 0":
        dead = Wrapper(0, closed=True)
    else:
        dead = Wrapper(0, error=RuntimeError("Stream is closed"))
    block = pool.allocate(4 * KIB, stream=live)
    pointer = pool.allocate_raw(4 * KIB, stream=live)
    calls, stats = sc.device.calls(), pool.stats()

    def uses_current() -> object:
        with sp.stream(dead):
            return pool.allocate(1)

    for call in (
        lambda: pool.allocate(1, stream=dead),
        lambda: pool.allocate_raw(1, stream=dead),
        lambda: block.close(dead),
        lambda: pool.free_raw(pointer, stream=dead),
        lambda: block.record_stream(dead),
        lambda: pool.record_stream_raw(pointer, dead),
        lambda: block.fill(1, stream=dead),
        lambda: block.copy_from(bytes(4 * KIB), stream=dead),
        lambda: pool.register_stream(dead),
        lambda: pool.forget_stream(dead),
        uses_current,
    ):
        with pytest.raises(sp.StreamError, match=r"closed|gives no handle"):
            call()
    assert sc.device.calls() == calls
    assert pool.stats() == stats
    assert not block.is_closed
    assert sp.sim.traps() == []
    block.close(live)
    pool.free_raw(pointer, stream=live)
    assert pool.audit() == ""


def test_case_12_closing_twice_and_repr_are_harmless_and_an_open_wrapper_of_handle_0_works(sc: Scene) -> None:
    """NVIDIA/cuda-python#2627: a null handle is the default stream, if it comes from an open object."""
    pool = sc.pool()
    stream = sc.stream()
    stream.close()
    stream.close()
    assert "closed" in repr(stream)
    for wrapper in (Wrapper(0), Wrapper(0, closed=False), sp.sim.Stream.from_handle(0, device=sc.device), 0, 1):
        block = pool.allocate(4 * KIB, stream=wrapper)
        work = sc.busy(sc.device.default_stream, block)
        block.close(wrapper)
        assert not touches(take(pool, sc.stream(pool), 4 * KIB), work)
        assert touches(take(pool, sc.device.default_stream, 4 * KIB), work), "it is the legacy stream"
    sc.open()


@pytest.mark.parametrize("mode", ["production", "debug"])
def test_case_12_a_destroyed_raw_handle_is_an_error_and_the_block_stays(sc: Scene, mode: str) -> None:
    """NVIDIA/cuda-python#2627 by handle: the simulated device knows a dead one."""
    pool = sc.pool(mode=mode)
    live = sc.stream(pool)
    gone = sc.device.create_stream()
    handle = gone.handle
    gone.close()
    pointer = pool.allocate_raw(4 * KIB, stream=live)
    for call in (
        lambda: pool.allocate_raw(1, stream=handle),
        lambda: pool.free_raw(pointer, stream=handle),
        lambda: pool.record_stream_raw(pointer, handle),
        lambda: pool.register_stream(handle),
    ):
        with pytest.raises(sp.StreamError, match=hex(handle)):
            call()
    assert len(sp.sim.traps()) == 4
    assert pool.stats().live_blocks == 1
    pool.free_raw(pointer, stream=live)
    assert pool.audit() == ""
