"""R8: in every mode a bad free is a distinct error that names the block, and changes nothing."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scene import KIB, MIB, Scene, scene
from trampling import FREED, LIVE, records, trample

import streampool as sp
from streampool.faults import FaultKind

KINDS = pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
MODES = pytest.mark.parametrize("mode", ["off", "observe", "production", "debug", "paranoid"])
SIZES = pytest.mark.parametrize("size", [0, 1, 4 * KIB, 900 * KIB, 5 * MIB])
DEBUGGING = ("debug", "paranoid")


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


def counters(pool: sp.Pool) -> dict[str, Any]:
    """Give all counters but those of the look-ups that an explicit call makes of its stream."""
    return {**pool.stats(), "stream_lookups": 0, "polls": 0, "fences": 0}


def assert_refused(
    pool: sp.Pool, free: Callable[[], object], error: type[sp.InvalidFreeError], match: str, fault: FaultKind
) -> None:
    """Make a bad free, on whatever stream: the right error, counters unchanged, one fault where faults are kept."""
    pool.take_faults()
    stats = counters(pool)
    with pytest.raises(error, match=match) as caught:
        free()
    assert type(caught.value) is error
    assert counters(pool) == stats
    assert pool.audit() == ""
    assert [found.kind for found in pool.faults()] == ([fault] if pool.mode in DEBUGGING else [])


@KINDS
@MODES
@SIZES
@pytest.mark.parametrize("on", ["own stream", "other stream", "no stream", "raw stream"])
def test_every_bad_free_is_an_error_of_its_own_and_changes_nothing(
    sc: Scene, kind: str, mode: str, size: int, on: str
) -> None:
    pool, other = sc.pool(kind, mode, name="mine"), sc.pool(kind, mode, name="theirs")
    s, t = sc.stream(pool), sc.stream(pool)
    stream = {"own stream": s, "other stream": t, "no stream": None, "raw stream": sc.stream()}[on]
    pointer, foreign = pool.allocate_raw(size, stream=s), other.allocate_raw(size, stream=s)
    if stream is not None:
        pool.free_raw(pool.allocate_raw(1, stream=stream), stream=stream)  # the pool knows the stream from here on

    def free(address: int) -> Callable[[], object]:
        return lambda: pool.free_raw(address, stream=stream)

    mine = rf"{hex(pointer)}"
    for inside in {1, size // 2, size - 1} - {0, -1} if size > 1 else set():
        assert_refused(
            pool, free(pointer + inside), sp.InteriorFreeError, f"{inside} bytes into .*{mine}", FaultKind.INTERIOR_FREE
        )
    assert_refused(
        pool, free(foreign), sp.WrongPoolError, f"{hex(foreign)}.*'theirs'.*'mine'", FaultKind.WRONG_POOL_FREE
    )
    for address in (1, 4096, id(pool) & ~255, 2**47, 2**48 + 4096, 2**63, 2**64 - 256):
        assert_refused(pool, free(address), sp.ForeignFreeError, hex(address), FaultKind.FOREIGN_FREE)
    pool.free_raw(pointer, stream=s)
    assert_refused(
        pool, free(pointer), sp.DoubleFreeError, f"{size} bytes at {mine}.*free already", FaultKind.DOUBLE_FREE
    )
    other.free_raw(foreign, stream=s)
    assert pool.stats().live_blocks == other.stats().live_blocks == 0


@MODES
def test_a_null_pointer_is_no_block(sc: Scene, mode: str) -> None:
    pool = sc.pool(mode=mode)
    assert_refused(pool, lambda: pool.free_raw(0), sp.ForeignFreeError, "0x0", FaultKind.FOREIGN_FREE)


@pytest.mark.parametrize(
    ("pointer", "error"),
    [
        (-1, ValueError),
        (2**64, ValueError),
        (True, TypeError),
        (1.5, TypeError),
        ("0x10", TypeError),
        (None, TypeError),
    ],
)
def test_what_is_no_address_is_a_value_or_type_error(sc: Scene, pointer: Any, error: type[Exception]) -> None:
    pool = sc.pool()
    stats = pool.stats()
    with pytest.raises(error):
        pool.free_raw(pointer)
    assert pool.stats() == stats


@MODES
def test_addresses_of_memory_that_is_nobodys_are_foreign(sc: Scene, mode: str) -> None:
    pool = sc.pool(mode=mode, quarantine_bytes=0)
    s = sc.stream(pool)
    first, last = pool.allocate_raw(5 * MIB, stream=s), pool.allocate_raw(5 * MIB, stream=s)
    pool.free_raw(last, stream=s)
    sp.sim.settle()
    pool.check()
    pool.trim()  # its address range is the pool's, its memory is not there any more
    for address in (last + 3 * MIB, last + 1, 64 * MIB):  # the third is no pool's
        stats = pool.stats()
        with pytest.raises((sp.ForeignFreeError, sp.DoubleFreeError, sp.InteriorFreeError), match=hex(address)):
            pool.free_raw(address, stream=s)
        assert pool.stats() == stats
    pool.free_raw(first, stream=s)
    assert pool.audit() == ""


@KINDS
@MODES
@SIZES
def test_a_buffer_whose_block_was_freed_by_address_is_stale_and_harms_nobody(
    sc: Scene, kind: str, mode: str, size: int
) -> None:
    # Addresses between page guards are nobody else's for long.
    pool = sc.pool(kind, mode, quarantine_bytes=0, stream_ordered=kind != "device", limit=32 * MIB, page_guards="off")
    s, t = sc.stream(pool), sc.stream(pool)
    closed, dropped, recorded = (pool.allocate(size, stream=s) for _ in range(3))
    stale = {block.handle for block in (closed, dropped, recorded)}
    for address in stale:
        pool.free_raw(address, stream=s)
    sp.sim.settle()
    pool.check()
    new_size = size - 1 if size > 1 else size
    owners: list[sp.Buffer] = []
    while stale and len(owners) < 20_000:  # until their memory has new owners
        owners.append(pool.allocate(new_size, stream=s))
        stale.discard(owners[-1].handle)
    assert not stale
    live = pool.stats().live_blocks
    pool.take_faults()
    with pytest.raises(sp.DoubleFreeError, match=rf"{hex(closed.handle)}.*freed before.*new owner is not harmed"):
        closed.close(t)
    with pytest.raises(ValueError, match="freed by its address"):
        recorded.record_stream(t)
    for found in pool.faults():
        assert found.kind is FaultKind.DOUBLE_FREE
        assert found.block is None or found.block.size == size, "the new owner's block was not freed twice"
    del dropped
    assert closed.facts() is None
    stats = pool.stats()
    assert (stats.live_blocks, stats.in_use) == (live, new_size * live)
    for owner in owners:
        owner.close(s)
    assert pool.audit() == ""


@MODES
@SIZES
def test_closing_a_buffer_twice_is_harmless_and_using_it_says_that_it_is_closed(
    sc: Scene, mode: str, size: int
) -> None:
    pool = sc.pool(mode=mode)
    s = sc.stream(pool)
    for first in (None, s):
        block = pool.allocate(size, stream=s)
        block.close(first)
        stats = pool.stats()
        block.close()
        block.close(s)
        with pytest.raises(ValueError, match="closed"), block:
            pass
        with pytest.raises(ValueError, match="closed"):
            block.record_stream(s)
        with pytest.raises(ValueError, match="closed"):
            block.fill(0)
        with pytest.raises(ValueError, match="closed"):
            block.copy_to(bytearray(size))
        with pytest.raises(ValueError, match="closed"):
            block.numpy()
        with pytest.raises(BufferError, match="closed"):
            memoryview(block)
        assert (block.handle, block.size, block.is_closed) == (0, size, True)
        assert pool.stats() == stats
    assert pool.audit() == ""


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("size", [64, 900 * KIB, 5 * MIB])
@pytest.mark.parametrize("same_stream", [True, False])
def test_of_threads_that_race_to_free_a_block_one_wins(mode: str, size: int, same_stream: bool) -> None:
    """NVIDIA/cub#329 from two threads at once."""
    with scene(seed=None) as sc:
        pool = sc.pool(mode=mode)
        streams = [sc.stream(pool)] * 4 if same_stream else [sc.stream(pool) for _ in range(4)]
        rounds = 100
        outcomes: list[list[bool]] = [[] for _ in streams]
        pointers = [0] * rounds
        buffers: list[Any] = [None] * rounds
        for i in range(rounds):
            if i % 2:
                pointers[i] = pool.allocate_raw(size, stream=streams[0])
            else:  # by address and through its object at once
                buffers[i] = pool.allocate(size, stream=streams[0])
                pointers[i] = buffers[i].handle
        barrier = threading.Barrier(len(streams))

        def run(me: int) -> None:
            for i in range(rounds):
                barrier.wait(30)
                try:
                    if me == 0 and buffers[i] is not None:
                        buffers[i].close(streams[me])
                    else:
                        pool.free_raw(pointers[i], stream=streams[me])
                    outcomes[me].append(True)
                except sp.DoubleFreeError:
                    outcomes[me].append(False)

        threads = [threading.Thread(target=run, args=(me,)) for me in range(len(streams))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [sum(column) for column in zip(*outcomes, strict=True)] == [1] * rounds
        stats = pool.stats()
        assert (stats.live_blocks, stats.frees, stats.in_use) == (0, rounds, 0)
        buffers.clear()
        pool.check()
        assert pool.audit() == ""


# -- frees that name a size -------------------------------------------------------------------------------------------
@MODES
def test_a_free_that_names_another_size_is_refused_and_changes_nothing(sc: Scene, mode: str) -> None:
    pool = sc.pool(mode=mode)
    s = sc.stream(pool)
    for size in (0, 1, 1000, 3 * MIB):
        block = pool.allocate_raw(size, stream=s)
        stats = pool.stats()
        for wrong in {0, size + 1, 2 * size} - {size}:
            with pytest.raises(
                sp.SizeMismatchError,
                match=f"has {size} bytes, and the free says {wrong} \\(docs/faults/size_mismatch\\.md\\)$",
            ):
                pool.free_raw_sized(block, wrong, stream=s)
        assert pool.stats() == stats
        found = [fault.kind for fault in pool.faults()]
        assert set(found) <= {FaultKind.SIZE_MISMATCH}
        assert bool(found) == (mode in DEBUGGING)
        pool.free_raw_sized(block, size, stream=s)
        with pytest.raises(sp.DoubleFreeError):
            pool.free_raw_sized(block, size + 1, stream=s)
        pool.take_faults()
    assert pool.audit() == ""


# -- trampled records -------------------------------------------------------------------------------------------------

_odd = itertools.count(1, 2)  # added to sizes: memory that was freed in earlier tests still holds their records


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="records are found through /proc")
@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("size", [1237, 900 * KIB + 77, 5 * MIB + 77])
@pytest.mark.parametrize("garbage", [b"\0" * 8, b"\xff" * 64, b"\x10\xeb\0\0"])
def test_a_trampled_record_is_named_as_that_and_never_followed(sc: Scene, mode: str, size: int, garbage: bytes) -> None:
    pool = sc.pool(mode=mode)
    s = sc.stream(pool)
    size += next(_odd)
    neighbours = [pool.allocate_raw(64, stream=s) for _ in range(3)]
    pointer = pool.allocate_raw(size, stream=s)
    found = records(LIVE, size)
    assert len(found) == 1, "the record of a block of this size is the only one"
    whole = trample(found[0], garbage)
    for stream in (s, sc.stream(pool), None):
        with pytest.raises(sp.TrampledRecordError, match=f"{hex(pointer)}.*overwritten"):
            pool.free_raw(pointer, stream=stream)
    if mode == "debug":
        assert FaultKind.TRAMPLED_RECORD in {fault.kind for fault in pool.faults()}
    for neighbour in neighbours:  # life goes on
        pool.free_raw(neighbour, stream=s)
    pool.free_raw(pool.allocate_raw(size, stream=s), stream=s)
    trample(found[0], whole)
    pool.free_raw(pointer, stream=s)
    assert pool.audit() == ""


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="records are found through /proc")
def test_a_buffer_with_a_trampled_record_says_so_and_its_drop_is_silent(sc: Scene) -> None:
    pool = sc.pool()
    s = sc.stream(pool)
    size = 1237 + next(_odd)
    block = pool.allocate(size, stream=s)
    (record,) = records(LIVE, size)
    whole = trample(record, b"\xee" * 8)
    with pytest.raises(sp.TrampledRecordError, match="overwritten"):
        block.close(s)
    trample(record, whole)
    assert not block.is_closed
    block.close(s)
    assert pool.audit() == ""


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="records are found through /proc")
@pytest.mark.parametrize("size", [1259, 5 * MIB + 79])
def test_a_free_slot_or_extent_whose_record_was_trampled_is_not_handed_out(sc: Scene, size: int) -> None:
    pool = sc.pool(limit=48 * MIB)
    s = sc.stream(pool)
    size += next(_odd)
    pointer = pool.allocate_raw(size, stream=s)
    pool.free_raw(pointer, stream=s)
    (record,) = records(FREED, size)
    trample(record, b"\xab" * 8)
    taken = [pool.allocate_raw(size, stream=s) for _ in range(4)]
    assert len(set(taken)) == 4
    for address in taken:
        pool.free_raw(address, stream=s)
    if size < MIB:
        assert pointer not in taken, "the slot is lost; nothing in its record is followed"
        assert pool.stats().trampled == 1
