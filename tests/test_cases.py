"""Public bug reports of other allocators, as tests of ours: the whole kind of fault, each with its control.

Numbers are those of the project's list of cases; the docstrings name the reports.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scene import KIB, MIB, Busy, Scene, fill_up, scene

import streampool as sp
from streampool.faults import FaultKind

SIZES = pytest.mark.parametrize("size", [1, 4 * KIB, 700 * KIB, MIB, 5 * MIB])
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


def take(pool: sp.Pool, stream: Any, size: int, count: int = 5) -> list[sp.Buffer]:
    return [pool.allocate(size, stream=stream) for _ in range(count)]


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


def in_thread(function: Callable[[], Any]) -> Any:
    out: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            out.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    return out[0]


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


# -- D. bad frees -----------------------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("mode", ["production", "debug"])
def test_case_18_a_second_free_names_the_block_and_changes_nothing(sc: Scene, size: int, mode: str) -> None:
    """NVIDIA/cub#329: a second free really freed a cached block, which was then handed out."""
    pool = sc.pool(mode=mode)
    s, t = sc.stream(pool), sc.stream(pool)
    pointer = pool.allocate_raw(size, stream=s)
    pool.free_raw(pointer, stream=s)
    stats, calls = pool.stats(), sc.device.calls()
    for stream in (s, t, None):
        with pytest.raises(sp.DoubleFreeError, match=f"{hex(pointer)}.*free already"):
            pool.free_raw(pointer, stream=stream)
    assert pool.stats() == stats
    assert {k: v - calls[k] for k, v in sc.device.calls().items() if v != calls[k]} == {}
    # The block is one block: two takers get different memory.
    a, b = take(pool, s, size, 2)
    assert abs(a.handle - b.handle) >= size
    if mode == "debug":
        faults = pool.faults()
        assert [fault.kind for fault in faults] == [FaultKind.DOUBLE_FREE] * 3
        assert all(fault.block is not None and fault.block.freed_at for fault in faults)
    assert pool.audit() == ""


@SIZES
@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_case_18_a_stale_buffer_never_harms_the_new_owner(sc: Scene, size: int, mode: str, how: str) -> None:
    """NVIDIA/cub#329 with the block reallocated in between (a stale handle)."""
    pool = sc.pool(mode=mode, quarantine_bytes=0)
    s = sc.stream(pool)
    stale = pool.allocate(size, stream=s)
    address = stale.handle
    pool.free_raw(address, stream=s)
    pool.check()
    owners = take(pool, s, size, 70)
    assert any(owner.handle == address for owner in owners), "somebody has the memory now"
    stats = pool.stats()
    if how == "close":
        with pytest.raises(sp.DoubleFreeError, match="new owner"):
            stale.close(s)
    del stale
    assert pool.stats().live_blocks == stats.live_blocks == 70
    assert pool.stats().in_use == stats.in_use
    new = take(pool, s, size, 70)
    assert len({block.handle for block in owners + new}) == 140
    assert pool.audit() == ""


# -- E. sizes and alignment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
def test_case_21_an_alignment_is_the_pointers_or_the_call_raises(sc: Scene, mode: str, kind: str) -> None:
    """rapidsai/rmm#2116, #2342: rounding the size was taken for aligning the pointer."""
    pool = sc.pool(kind=kind, mode=mode)
    s = sc.stream(pool)
    hold = [pool.allocate(size, stream=s) for size in (1, 300, 4097, 70_000)]  # odd places first
    for power in range(22):
        alignment = 1 << power
        for size in (1, 255, alignment, 4097):
            block = pool.allocate(size, stream=s, alignment=alignment)
            assert block.handle % max(alignment, 256) == 0
            pointer = pool.allocate_raw(size, stream=s, alignment=alignment)
            assert pointer % max(alignment, 256) == 0
            pool.free_raw(pointer, stream=s)
            if power % 3:
                hold.append(block)
    stats = pool.stats()
    for nonsense in (0, 3, -1, -4096, 384, 1 << 22, 1 << 63, 1 << 64):
        with pytest.raises(ValueError, match="power of two from 1 to 2097152"):
            pool.allocate(64, stream=s, alignment=nonsense)
    no_numbers: list[Any] = [True, 256.0, "256", None]
    for no_number in no_numbers:
        with pytest.raises(TypeError):
            pool.allocate(64, stream=s, alignment=no_number)
    assert pool.stats() == stats
    hold.clear()
    assert pool.audit() == ""


HUGE = [2**64 - 1, 2**64 - 4, 2**64 - 256, 2**64 - 512, 2**64 - 2 * MIB, 2**63, 2**63 - 1, 2**48, 2**47]


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("mode", ["production", "debug", "paranoid"])
@pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
def test_case_23_sizes_near_the_top_are_out_of_memory_at_once_and_change_nothing(
    sc: Scene, size: int, mode: str, kind: str
) -> None:
    """rapidsai/rmm#1156, tensorflow/tensorflow#126877, openxla/xla#48533, sonots/cumo#170, NVIDIA/cub#54: they wrap."""
    pool = sc.pool(kind=kind, mode=mode)
    s = sc.stream(pool)
    block = pool.allocate(1000, stream=s)
    stats = pool.stats()
    for alignment in (1, 256, 2 * MIB):
        with pytest.raises(sp.OutOfMemoryError) as caught:
            pool.allocate(size, stream=s, alignment=alignment)
        assert caught.value.fields["request"] == size
        with pytest.raises(MemoryError):
            pool.allocate_raw(size, stream=s, alignment=alignment)
    with pytest.raises(sp.OutOfMemoryError):
        pool.reserve(size)
    after = pool.stats()
    assert (after.in_use, after.live_blocks, after.reserved) == (stats.in_use, stats.live_blocks, stats.reserved)
    block.close(s)
    assert pool.audit() == ""


@pytest.mark.parametrize(
    ("size", "error"),
    [
        (-1, ValueError),
        (-(2**63), ValueError),
        (-(2**70), ValueError),
        (2**64, ValueError),
        (2**70, ValueError),
        (True, TypeError),
        (False, TypeError),
        (1.5, TypeError),
        (4096.0, TypeError),
        (float("inf"), TypeError),
        ("4096", TypeError),
        (None, TypeError),
        (b"\x01", TypeError),
    ],
)
def test_case_23_sizes_that_are_no_sizes_are_value_and_type_errors(
    sc: Scene, size: Any, error: type[Exception]
) -> None:
    """NVIDIA/cub#54 and kin: nonsense is no allocation."""
    pool = sc.pool()
    stats = pool.stats()
    for call in (pool.allocate, pool.allocate_raw):
        with pytest.raises(error):
            call(size)
    assert pool.stats() == stats


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
@pytest.mark.parametrize("state", ["empty", "full"])
def test_case_25_a_block_of_no_bytes_is_a_block(sc: Scene, mode: str, kind: str, state: str) -> None:
    """milvus-io/milvus#5100, numba/numba#4140, cupy/cupy#2104, rapidsai/rmm#210, NVIDIA/cuda-python#1516."""
    pool = sc.pool(kind=kind, mode=mode, limit=8 * MIB)
    s, t = sc.stream(pool), sc.stream(pool)
    hold: list[sp.Buffer] = []
    if state == "full" and mode == "production":
        for size in (MIB, 64 * KIB, 256):
            hold += fill_up(pool, size, s)[0]
    before = pool.stats()
    empty = [pool.allocate(0, stream=s) for _ in range(300)]
    pointers = [pool.allocate_raw(0, stream=s, alignment=1) for _ in range(300)]
    addresses = [block.handle for block in empty] + pointers
    assert 0 not in addresses
    assert len(set(addresses)) == 600
    assert not any(b.handle <= a < b.handle + b.size for a in addresses for b in hold)
    stats = pool.stats()
    assert (stats.in_use, stats.live_blocks) == (before.in_use, before.live_blocks + 600)
    if mode == "production":
        assert (stats.reserved, stats.rounding, stats.cached) == (before.reserved, before.rounding, before.cached)
    for block in empty:
        block.record_stream(t)
        assert (block.size, len(block), block.numpy().size, bytes(memoryview(block))) == (0, 0, 0, b"")
        block.fill(1)
        block.copy_from(b"")
        block.close(s)
        assert block.is_closed
    for pointer in pointers:
        pool.free_raw(pointer, stream=s)
    with pytest.raises(sp.DoubleFreeError):
        pool.free_raw(pointers[-1], stream=s)
    assert pool.stats().live_blocks == before.live_blocks
    assert pool.audit() == ""


def test_case_25_no_bytes_on_a_closed_and_on_a_capturing_pool_are_as_any_size_is(sc: Scene) -> None:
    """NVIDIA/cuda-python#1516: zero is not a case of its own."""
    pool = sc.pool()
    raw = sc.stream()
    raw.begin_capture()
    captured = pool.allocate(0, stream=raw)
    assert raw.end_capture() is not None, "the capture is still valid"
    captured.close(raw)
    live = pool.allocate(0, stream=raw)
    pool.close()
    with pytest.raises(sp.PoolClosedError):
        pool.allocate(0, stream=raw)
    live.close(raw)
    assert pool.audit() == ""


# -- H. lifetime, shutdown, fork (more in test_lifetime.py) -----------------------------------------------------------


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("kind", ["device", "pinned"])
@pytest.mark.parametrize("end", ["closed", "dropped", "closed and dropped"])
@pytest.mark.parametrize("order", ["first in first out", "last in first out", "other thread"])
def test_case_36_buffers_outlive_their_pool_and_are_released_in_any_order(
    sc: Scene, mode: str, kind: str, end: str, order: str
) -> None:
    """rapidsai/rmm#943, opencv/opencv#21939: a buffer destroyed after its pool crashed; only stack order worked."""
    before = sc.device.used_memory
    pool = sp.Pool(sc.device, kind=kind, mode=mode)
    s = sc.device.create_stream()
    buffers = [pool.allocate(size, stream=s) for size in (0, 1, 4 * KIB, 700 * KIB, 5 * MIB)]
    view = memoryview(buffers[2])
    if "closed" in end:
        pool.close()
    if "dropped" in end:
        del pool
        gc.collect()
    view[:3] = b"abc"
    for block in buffers:
        sc.use(s, block)
    del block
    sp.sim.settle()
    assert bytes(view[:3]) == b"abc"
    assert sc.device.fault == ""
    view.release()

    def release() -> None:
        while buffers:
            block = buffers.pop(-1 if order == "last in first out" else 0)
            if len(buffers) % 2:
                block.close(s)
            del block

    if order == "other thread":
        in_thread(lambda: release())
    else:
        release()
    pool = None  # type: ignore[assignment]
    gc.collect()
    assert sc.device.used_memory == before
    assert sc.device.fault == ""
    sc.assert_no_race()


EXIT_PROGRAM = """
import atexit, gc, sys, threading
import streampool as sp
def late(): print("late handler", flush=True)
atexit.register(late)
how, mode, kind = sys.argv[1:4]
dev = sp.Device("sim:0")
pool = sp.Pool(dev, mode=mode, kind=kind)
stream = dev.create_stream()
pool.register_stream(stream)
event = stream.record()
blocks = [pool.allocate(n, stream=stream) for n in (0, 100, 1 << 20, 5 << 20)]
pointer = pool.allocate_raw(1000, stream=stream)
cycle = [blocks[1]]; cycle.append(cycle)
class Kept:
    static = pool.allocate(64, stream=stream)
    def __del__(self): Kept.static.close(stream)
kept = Kept()
atexit.register(lambda: (blocks[0].close(stream), pool.free_raw(pointer, stream=stream)))
print("ready", flush=True)
if how == "exit": sys.exit(7)
if how == "raise": raise ValueError("the program's own")
if how == "thread": threading.Thread(target=lambda: pool.allocate(10, stream=stream)).start()
"""


@pytest.mark.parametrize("how", ["return", "exit", "raise", "thread"])
@pytest.mark.parametrize(("mode", "kind"), [("production", "device"), ("debug", "device"), ("debug", "pinned")])
def test_case_37_leaving_everything_in_globals_ends_the_process_as_asked_and_silently(
    how: str, mode: str, kind: str
) -> None:
    """rapidsai/rmm#2366, #2203, LBANN/lbann#380, MrNeRF/LichtFeld-Studio#1419: crashes and error floods at exit."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT_PROGRAM, how, mode, kind], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == {"exit": 7, "raise": 1}.get(how, 0), done.stderr
    assert done.stdout == "ready\nlate handler\n"
    if how == "raise":
        assert done.stderr.startswith("Traceback")
        assert done.stderr.endswith("ValueError: the program's own\n")
        assert done.stderr.count("Traceback") == 1
    else:
        assert done.stderr == ""


FORK_PROGRAM = """
import os, sys, threading
import streampool as sp
dev = sp.Device("sim:0")
pool = sp.Pool(dev, mode=sys.argv[1])
stream = dev.create_stream()
pool.register_stream(stream)
block, gone = pool.allocate(4096, stream=stream), pool.allocate(4096, stream=stream)
pointer = pool.allocate_raw(4096, stream=stream)
before = dict(pool.stats())
child = os.fork()
if child == 0:
    calls = [lambda: pool.allocate(1, stream=stream), lambda: pool.allocate_raw(1), lambda: pool.stats(),
             lambda: pool.reserve(1), lambda: pool.trim(), lambda: pool.check(), lambda: block.record_stream(stream),
             lambda: pool.register_stream(stream), lambda: sp.Pool(dev),
             lambda: pool.begin_capturing(stream), lambda: pool.end_capturing(stream)]
    for i, call in enumerate(calls):
        try:
            call()
        except sp.ForkedProcessError as error:
            assert "spawn" in str(error), (i, error)
        else:
            print("call", i, "did not raise", flush=True)
    block.close(stream)      # inherited frees are ignored
    pool.free_raw(pointer, stream=stream)
    gone = None
    pool.close()
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert dict(pool.stats()) == before
assert pool.audit() == ""
block.close(stream); gone.close(stream); pool.free_raw(pointer, stream=stream)
pool.close()
print("parent done", flush=True)
"""


@pytest.mark.parametrize("mode", ["production", "debug"])
def test_case_39_a_forked_child_ignores_inherited_frees_and_use_raises_and_names_spawn(mode: str) -> None:
    """PaddlePaddle/Paddle#78171, NVIDIA/cudf#5515, gabrieldemarmiesse/torch-mojo-backend#460: memory and fork."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK_PROGRAM, mode], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent done\n", "")
