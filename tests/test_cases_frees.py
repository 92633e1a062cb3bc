"""Public bug reports of other allocators about bad frees, sizes and alignment, as tests of ours; see test_cases.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases_scene import SIZES, take
from scene import KIB, MIB, Scene, fill_up, scene

import streampool as sp
from streampool.faults import FaultKind


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


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
