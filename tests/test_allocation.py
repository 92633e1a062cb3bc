"""What an allocation gives: sizes and alignments (R10), the out-of-memory error (R12), trim (R13), counters (R19)."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scene import GIB, KIB, MIB, Busy, Scene, becomes, scene

import streampool as sp

KINDS = pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
MODES = pytest.mark.parametrize("mode", ["production", "debug"])
PARTS = ("in_use", "rounding", "guards", "quarantined", "pending", "cached")


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


def assert_apart(blocks: list[sp.Buffer]) -> None:
    """No two blocks share a byte, and no two an address."""
    spans = sorted((block.handle, block.size) for block in blocks)
    for (first, size), (second, _) in itertools.pairwise(spans):
        assert first + max(size, 1) <= second, f"{size} bytes at {first:#x} reach into {second:#x}"


# -- R10 --------------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("guards", [0, 1, 3, 255, 256, 5000])
def test_blocks_of_every_size_and_alignment_lie_apart_whatever_was_split_before(
    sc: Scene, kind: str, guards: int
) -> None:
    """NVIDIA/cccl#585 and rapidsai/rmm#2116: sizes in random order, freed in random order, with and without guards."""
    pool = sc.pool(kind, "debug" if guards else "production", guard_bytes=guards, quarantine_bytes=0)
    streams = [sc.stream(pool), sc.stream(pool), sc.stream()]
    choice = random.Random(guards)
    sizes = [0, 1, 255, 256, 257, 4095, 4097, 65_536, 65_537, MIB - 1, MIB, MIB + 1, 2 * MIB + 513, 5 * MIB]
    live: list[sp.Buffer] = []
    for round_ in range(220):
        alignment = 1 << choice.randrange(22)
        block = pool.allocate(choice.choice(sizes), stream=choice.choice(streams), alignment=alignment)
        assert block.handle % max(alignment, 256) == 0
        live.append(block)
        if len(live) > 40:
            choice.shuffle(live)
            for block in live[25:]:
                block.close(choice.choice([None, *streams]))
            del live[25:]
        if round_ % 20 == 0:
            assert_apart(live)
            assert pool.audit() == ""
            pool.trim(choice.choice([0, 16 * MIB, GIB]))
    assert_apart(live)
    for block in live:
        view = block.numpy()
        if block.size:
            view[0] = view[-1] = 7
    del block, view
    live.clear()
    assert pool.check().faults == 0
    assert (pool.stats().in_use, pool.audit()) == (0, "")


@MODES
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_large_blocks_come_back_in_any_order(sc: Scene, mode: str, order: tuple[int, ...]) -> None:
    """NVIDIA/cccl#585 (fix #1232): the list broke when large blocks were returned in another order than taken."""
    pool = sc.pool(mode=mode, quarantine_bytes=0)
    s = sc.stream(pool)
    first = [pool.allocate(5 * MIB, stream=s), pool.allocate(3 * MIB, stream=s)]
    for block in first:
        block.close(s)
    blocks = [pool.allocate(size * MIB, stream=s) for size in (2, 4, 1, 7)]
    assert_apart(blocks)
    for index in order:
        blocks[index].close(s)
        assert pool.audit() == ""
    pool.check()
    assert pool.stats().cached + pool.stats().pending == pool.stats().reserved


@KINDS
def test_a_sizes_rounding_is_at_most_an_eighth_up_to_a_mebibyte_and_512_bytes_above(sc: Scene, kind: str) -> None:
    pool = sc.pool(kind)
    s = sc.stream(pool)
    for size in (257, 1000, 3000, 4097, 33_000, 65_537, 300_001, 900_001, MIB + 1, 3 * MIB + 1, 11 * MIB + 513):
        with pool.allocate(size, stream=s):
            stats = pool.stats()
            assert stats.in_use == size
            assert stats.rounding <= max(size // 8 if size <= MIB else 511, 255)


@MODES
@KINDS
def test_many_blocks_of_no_bytes_are_all_different(sc: Scene, kind: str, mode: str) -> None:
    pool = sc.pool(kind, mode)
    streams = [sc.stream(pool), sc.stream()]
    seen = [pool.allocate(0, stream=streams[i % 2]) for i in range(1000)]
    seen += [pool.allocate(0, stream=streams[0], alignment=2 * MIB) for _ in range(3)]
    assert_apart(seen)
    seen.clear()
    assert pool.stats().live_blocks == 0
    again = [pool.allocate(0, stream=streams[0]) for _ in range(10)]
    assert_apart(again)
    assert pool.audit() == ""


def test_a_tag_an_owner_and_a_stream_are_kept_with_the_block(sc: Scene) -> None:
    pool = sc.pool(mode="debug")
    s = sc.stream(pool)
    block = pool.allocate(10, stream=s, tag="weights")
    pointer = pool.allocate_raw(20, stream=s)
    assert block.stream is s
    assert {(b["size"], b["tag"], b["owner"]) for b in pool.live_blocks()} == {
        (10, "weights", "buffer"),
        (20, "", "raw"),
    }
    block.close(s)
    pool.free_raw(pointer, stream=s)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"size": 10, "alignment": 3}, ValueError),
        ({"size": 10, "alignment": 0}, ValueError),
        ({"size": 10, "alignment": -256}, ValueError),
        ({"size": 10, "alignment": 4 * MIB}, ValueError),
        ({"size": 10, "alignment": 2**70}, ValueError),
        ({"size": 10, "alignment": 256.0}, TypeError),
        ({"size": 10, "alignment": True}, TypeError),
        ({"size": 10, "stream": 1.5}, TypeError),
        ({"size": 10, "stream": True}, TypeError),
        ({"size": 10, "stream": "s"}, TypeError),
        ({"size": 10, "stream": object()}, TypeError),
        ({"size": 10, "stream": -1}, ValueError),
        ({"size": 10, "stream": 2**64}, ValueError),
        ({"size": 10, "nonsense": 1}, TypeError),
        ({"size": []}, TypeError),
        ({}, TypeError),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_happens(
    sc: Scene, arguments: dict[str, Any], error: type[Exception]
) -> None:
    pool = sc.pool()
    stats, calls = pool.stats(), sc.device.calls()
    for allocate in (pool.allocate, pool.allocate_raw):
        with pytest.raises(error):
            allocate(**arguments)
    assert (pool.stats(), sc.device.calls()) == (stats, calls)


@pytest.mark.parametrize("size", [-1, 1.5, True, "lots", "-1", "2^10", None, "", "1e30GiB", 2**64])
def test_a_reserve_and_a_trim_of_nonsense_are_refused(sc: Scene, size: Any) -> None:
    pool = sc.pool()
    for call in (pool.reserve, pool.trim):
        with pytest.raises((ValueError, TypeError)):
            call(size)


# -- growth in advance ------------------------------------------------------------------------------------------------


@KINDS
def test_reserve_pays_growth_in_advance(sc: Scene, kind: str) -> None:
    pool = sc.pool(kind)
    s = sc.stream(pool)
    assert pool.reserve("64MiB") >= 64 * MIB
    calls = sc.device.calls()
    blocks = [pool.allocate(15 * MIB, stream=s) for _ in range(4)]
    growing = ("mem_create", "mem_map", "mem_alloc", "mem_alloc_host", "mem_alloc_managed")
    assert [sc.device.calls()[name] - calls[name] for name in growing] == [0] * len(growing)
    assert pool.reserve(MIB) == pool.stats().reserved, "there is more than that already"
    blocks.clear()


@KINDS
def test_a_pool_can_be_filled_up_to_its_limit(sc: Scene, kind: str) -> None:
    pool = sc.pool(kind, limit=32 * MIB)
    assert pool.reserve(32 * MIB) == pool.stats().reserved == 32 * MIB
    pool.trim()
    pool.allocate(32 * MIB, stream=sc.stream(pool)).close()


# -- R12 --------------------------------------------------------------------------------------------------------------

FIELDS = {
    "request", "alignment", "stream", "device", "pool", "kind", "limit", "reserved", "in_use", "pending", "cached",
    "quarantined", "largest_free", "device_free", "device_total", "missing", "reason", "driver_error", "holders",
    "sample_bytes", "capture",
}  # fmt: skip


def assert_tells_all(error: sp.OutOfMemoryError, pool: sp.Pool, stream: Any, *, size: int, reason: str) -> None:
    """Check an out-of-memory error: every field, and the same in its text."""
    fields, stats, text = error.fields, pool.stats(), str(error)
    assert set(fields) == FIELDS
    assert (fields["request"], fields["reason"], fields["alignment"]) == (size, reason, 512)
    assert (fields["device"], fields["pool"], fields["kind"]) == (pool.driver.name, pool.name, pool.kind)
    assert fields["limit"] == stats.limit
    for name in ("reserved", "in_use", "pending", "cached", "quarantined", "largest_free"):
        assert fields[name] == stats[name], name
    assert fields["stream"] == stream.id
    held = sum(bytes_ for bytes_, _, _ in fields["holders"])
    if fields["sample_bytes"] == 0:
        assert held == stats.in_use
    elif fields["holders"]:
        assert "estimated" in text
    for shown in (
        str(size),
        f"reason: {reason}",
        pool.name,
        pool.driver.name,
        str(stats.reserved),
        "largest free",
        "try: ",
    ):
        assert shown in text
    assert isinstance(error, MemoryError)


@dataclass
class Full:
    """A pool that cannot serve `size` on `stream`, for one reason."""

    pool: sp.Pool
    stream: Any
    size: int
    keep: list[Any]


def full_by_driver(sc: Scene, kind: str, mode: str) -> Full:
    pool = sc.pool(kind, mode, wait_timeout=2)
    s = sc.stream(pool)
    return Full(pool, s, 200 * MIB, [pool.allocate(MIB, stream=s)])


def full_by_limit(sc: Scene, kind: str, mode: str) -> Full:
    pool = sc.pool(kind, mode, wait_timeout=2, limit=32 * MIB)
    s = sc.stream(pool)
    return Full(pool, s, 20 * MIB, [pool.allocate(15 * MIB, stream=s)])


def full_by_fragmentation(sc: Scene, kind: str, mode: str) -> Full:
    pool = sc.pool(kind, mode, wait_timeout=2, limit=34 * MIB, initial=32 * MIB, quarantine_bytes=0)
    s = sc.stream(pool)
    blocks = [pool.allocate(2 * MIB - 64 * KIB, stream=s) for _ in range(15)]
    for block in blocks[::2]:
        block.close(s)
    sp.sim.settle()
    pool.check()
    return Full(pool, s, 12 * MIB, blocks)


def full_by_pending(sc: Scene, kind: str, mode: str) -> Full:
    pool = sc.pool(kind, mode, wait_timeout=2, limit=32 * MIB, quarantine_bytes=0)
    s, t = sc.stream(pool), sc.stream(pool)
    block = pool.allocate(25 * MIB, stream=t)
    work = sc.busy(t, block)
    block.close(t)
    return Full(pool, s, 20 * MIB, [work])


def full_by_others(sc: Scene, kind: str, mode: str) -> Full:
    pool = sc.pool(kind, mode, wait_timeout=2)
    s = sc.stream(pool)
    keep = [pool.allocate(MIB, stream=s)]
    sc.device.set_occupied(120 * MIB)
    return Full(pool, s, 64 * MIB, keep)


REASONS = {
    "driver": full_by_driver,
    "limit": full_by_limit,
    "fragmentation": full_by_fragmentation,
    "pending": full_by_pending,
    "others": full_by_others,
}


@MODES
@pytest.mark.parametrize(
    ("kind", "why"),
    [(kind, why) for kind in ("device", "pinned", "managed") for why in REASONS if kind == "device" or why != "others"],
)
@pytest.mark.parametrize("query_fails", [False, True])
def test_an_out_of_memory_error_says_everything_in_fields_and_text(
    kind: str, mode: str, why: str, query_fails: bool
) -> None:
    """pytorch/pytorch#126766, #29554, #32101, rapidsai/rmm#1827, JuliaGPU/CUDA.jl#2292: no reason, no end."""
    with scene(memory=128 * MIB, host_memory=128 * MIB) as sc:
        full = REASONS[why](sc, kind, mode)
        if query_fails:
            sc.device.fail_call("mem_info", times=100, code="failed")
        before = full.pool.stats()
        with pytest.raises(sp.OutOfMemoryError) as caught:
            full.pool.allocate(full.size, stream=full.stream, alignment=512)
        reason = "driver" if why == "others" else why
        assert_tells_all(caught.value, full.pool, full.stream, size=full.size, reason=reason)
        if query_fails:
            assert (caught.value.fields["device_free"], caught.value.fields["device_total"]) == (None, None)
        else:
            assert (caught.value.fields["device_free"], caught.value.fields["device_total"]) == sc.device.memory_info()
        if reason == "driver":
            assert "OUT_OF_MEMORY" in caught.value.fields["driver_error"]
            assert caught.value.fields["driver_error"] in str(caught.value)
        after = full.pool.stats()
        assert (after.in_use, after.live_blocks, after.out_of_memory) == (before.in_use, before.live_blocks, 1)
        full.pool.allocate(100, stream=full.stream).close(full.stream)  # a small request works all the same
        assert full.pool.audit() == ""
        # The control: once the reason is gone the same request succeeds.
        sc.device.set_occupied(0)
        if why != "driver":
            sc.open()
            full.keep.clear()
            full.pool.allocate(full.size, stream=full.stream, alignment=512).close(full.stream)
        sc.device.clear_failures()


@MODES
def test_an_out_of_memory_error_lists_the_top_holders_by_call_site(mode: str) -> None:
    with scene(memory=64 * MIB) as sc:
        pool = sc.pool(mode=mode, stack_depth=5)
        s = sc.stream(pool)
        big = [pool.allocate(5 * MIB, stream=s) for _ in range(3)]
        small = [pool.allocate(KIB, stream=s) for _ in range(7)]
        with pytest.raises(sp.OutOfMemoryError) as caught:
            pool.allocate(500 * MIB, stream=s)
        holders = caught.value.fields["holders"]
        assert [(size, blocks) for size, blocks, _ in holders] == [(15 * MIB, 3), (7 * KIB, 7)]
        for _, _, stack in holders:
            file, line, function = sp._core.resolve_stack(stack)[0]
            assert (file, function) == (__file__, "<listcomp>") or function.startswith("test_an_out_of_memory")
            assert line > 0
        del big, small


@KINDS
@pytest.mark.parametrize("where", ["limit", "driver"])
def test_a_reserve_that_cannot_be_had_tells_all_too(kind: str, where: str) -> None:
    with scene(memory=64 * MIB, host_memory=64 * MIB) as sc:
        pool = sc.pool(kind, limit=32 * MIB if where == "limit" else 0)
        with pytest.raises(sp.OutOfMemoryError) as caught:
            pool.reserve(100 * MIB)
        assert set(caught.value.fields) == FIELDS
        assert caught.value.fields["reason"] == where
        assert pool.stats().reserved == 0
        with pytest.raises(sp.OutOfMemoryError):
            sp.Pool(sc.device, kind=kind, initial="100MiB")
        assert sc.device.used_memory == 0


def test_memory_that_becomes_complete_during_the_wait_is_found_by_the_same_call(sc: Scene) -> None:
    """pytorch/pytorch#189504, #19222, cupy/cupy#7679: out of memory though a fitting block was back in the pool."""
    for limit in (1 * GIB, 0):
        with scene(memory=1 * GIB) as here:
            pool = here.pool(limit=limit)
            s, t = here.stream(pool), here.stream(pool)
            block = pool.allocate(700 * MIB, stream=s)
            block.record_stream(t)
            work = here.busy(t, block)
            block.close(s)
            asked: list[int] = []

            def in_the_retry(size: int, asked: list[int] = asked, work: Busy = work) -> bool:
                asked.append(size)
                work.gate.open()
                return True

            pool.set_oom_callback(in_the_retry)
            again = pool.allocate(600 * MIB, stream=s)
            assert asked == [600 * MIB]
            here.use(s, again)
            here.assert_no_race()
            pool.set_oom_callback(None)


@KINDS
@MODES
def test_garbage_in_cycles_is_collected_before_every_out_of_memory_error(sc: Scene, kind: str, mode: str) -> None:
    pool = sc.pool(kind, mode, limit=32 * MIB)
    s = sc.stream(pool)
    for _ in range(6):
        cycle: list[Any] = [pool.allocate(20 * MIB, stream=s)]
        cycle.append(cycle)
        del cycle
    assert pool.audit() == ""


def test_the_out_of_memory_callback_is_asked_a_bounded_number_of_times_and_its_error_is_not_lost(sc: Scene) -> None:
    pool = sc.pool(limit=4 * MIB, oom_retries=3, wait_timeout=0)
    asked: list[int] = []

    def ask_again(size: int) -> bool:
        asked.append(size)
        return True

    pool.set_oom_callback(ask_again)
    with pytest.raises(sp.OutOfMemoryError):
        pool.allocate(64 * MIB, stream=sc.stream(pool))
    assert 3 <= len(asked) <= 4
    assert pool.audit() == ""
    pool.set_oom_callback(None)


# -- R13 --------------------------------------------------------------------------------------------------------------


@KINDS
def test_trim_says_what_it_released_what_live_blocks_pin_and_what_is_pending(sc: Scene, kind: str) -> None:
    """cupy/cupy#4171, microsoft/onnxruntime#22297, rapidsai/rmm#144: users saw memory not coming back."""
    pool = sc.pool(kind)
    s, t = sc.stream(pool), sc.stream(pool)
    blocks = [pool.allocate(MIB, stream=s) for _ in range(64)]
    kept = blocks.pop(32)
    for block in blocks:
        block.close(s)
    sp.sim.settle()
    reserved = pool.stats().reserved
    first = pool.trim()
    assert first["released"] + first["reserved"] == reserved
    assert first["pending"] == 0
    assert kept.size <= first["pinned_by_live"] == first["reserved"] <= 8 * MIB + (56 * MIB if kind != "device" else 0)

    pending = pool.allocate(20 * MIB, stream=t)
    work = sc.busy(t, pending)
    pending.close(t)
    pool.set_oom_callback(None)
    second = pool.trim() if kind == "device" else None  # pieces go back only when the device is idle
    if second is not None:
        assert second["pending"] == 20 * MIB
        assert second["reserved"] >= 20 * MIB
    sc.open(work)
    third = pool.trim()
    assert third["pending"] == 0
    kept.close(s)
    sp.sim.settle()
    last = pool.trim()
    assert (last["reserved"], last["pinned_by_live"], last["pending"]) == (0, 0, 0)
    assert pool.stats().reserved == sc.device.used_memory == 0
    assert pool.audit() == ""


@KINDS
def test_trim_keeps_what_it_is_asked_to_keep(sc: Scene, kind: str) -> None:
    pool = sc.pool(kind)
    s = sc.stream(pool)
    for block in [pool.allocate(8 * MIB, stream=s) for _ in range(8)]:
        block.close(s)
    del block
    sp.sim.settle()
    for keep in ("48MiB", 20 * MIB, 20 * MIB, 5 * MIB, 0):
        before = pool.stats().reserved
        result = pool.trim(keep)
        keep_bytes = sp.parse_size(keep)
        assert result["released"] == before - result["reserved"]
        assert keep_bytes <= result["reserved"]
        assert result["reserved"] <= keep_bytes + 16 * MIB if keep_bytes else result["reserved"] == 0
        assert pool.audit() == ""


@MODES
@KINDS
def test_with_nothing_live_and_all_work_done_trim_gives_the_driver_everything_back(
    sc: Scene, kind: str, mode: str
) -> None:
    pool = sc.pool(kind, mode)
    lanes = [sc.stream(pool), sc.stream(), sc.device.default_stream, sc.device.per_thread_default_stream]
    for size in (0, 1, 4 * KIB, 700 * KIB, 3 * MIB):
        for stream in lanes:
            block = pool.allocate(size, stream=stream)
            sc.use(stream, block)
            block.close(stream)
    del block
    for stream in lanes[1::2]:  # each raw stream is named again
        pool.forget_stream(stream)
    sp.sim.settle()
    result = pool.trim()
    assert result["reserved"] == pool.stats().reserved == sc.device.used_memory == 0
    assert pool.audit() == ""


def test_the_release_threshold_bounds_what_lies_idle_after_a_check(sc: Scene) -> None:
    pool = sc.pool(release_threshold=16 * MIB)
    s = sc.stream(pool)
    for block in [pool.allocate(10 * MIB, stream=s) for _ in range(10)]:
        block.close(s)
    del block
    sp.sim.settle()
    pool.check()
    assert pool.stats().reserved <= 16 * MIB + 10 * MIB
    assert pool.audit() == ""


# -- R19 --------------------------------------------------------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(
        st.just("take"),
        st.sampled_from([0, 1, 300, 4 * KIB, 70 * KIB, 900 * KIB, MIB + 1, 3 * MIB, 7 * MIB]),
        st.integers(0, 3),
        st.sampled_from([1, 256, 4096, 2 * MIB]),
    ),
    st.tuples(st.just("free"), st.integers(0, 99), st.integers(-1, 3)),
    st.tuples(st.just("drop"), st.integers(0, 99)),
    st.tuples(st.just("record"), st.integers(0, 99), st.integers(0, 3)),
    st.tuples(st.just("work"), st.integers(0, 99), st.integers(0, 3)),
    st.tuples(st.sampled_from(["open", "settle", "check", "collect", "too much", "bad free"])),
    st.tuples(st.just("trim"), st.sampled_from([0, 4 * MIB, 32 * MIB])),
    st.tuples(st.just("reserve"), st.sampled_from([MIB, 40 * MIB])),
)


@KINDS
@MODES
@given(steps=st.lists(STEPS, max_size=40), limit=st.sampled_from([0, 48 * MIB]))
def test_the_parts_add_up_to_reserved_after_every_step(kind: str, mode: str, steps: list[Any], limit: int) -> None:
    """pytorch/pytorch#135726, #179380, NVIDIA/cub#328, cupy/cupy#3008, LLNL/Umpire#491: counters that drift."""
    with scene(memory="256MiB", host_memory="256MiB") as sc:
        pool = sc.pool(kind, mode, limit=limit, wait_timeout=0.01, quarantine_bytes=4 * MIB)
        lanes = [sc.stream(pool), sc.stream(pool), sc.stream(), sc.device.default_stream]
        live: list[sp.Buffer] = []
        peak = in_use = 0
        for step in steps:
            match step:
                case ["take", size, lane, alignment]:
                    try:
                        live.append(pool.allocate(size, stream=lanes[lane], alignment=alignment))
                        in_use += size
                    except sp.OutOfMemoryError:
                        pass
                case ["free", index, lane] if live:
                    block = live.pop(index % len(live))
                    in_use -= block.size
                    block.close(None if lane < 0 else lanes[lane])
                    del block
                case ["drop", index] if live:
                    in_use -= live.pop(index % len(live)).size
                case ["record", index, lane] if live:
                    live[index % len(live)].record_stream(lanes[lane])
                case ["work", index, lane] if live:
                    sc.busy(lanes[lane], live[index % len(live)])
                    live[index % len(live)].record_stream(lanes[lane])
                case ["open"]:
                    sc.open()
                case ["settle"]:
                    sp.sim.settle()
                case ["check"]:
                    pool.check(timeout=0)
                case ["collect"]:
                    in_use -= sum(block.size for block in live[::2])
                    del live[::2]
                case ["too much"]:
                    with pytest.raises(sp.OutOfMemoryError):
                        pool.allocate(GIB, stream=lanes[0])
                case ["bad free"]:
                    with pytest.raises(sp.InvalidFreeError):
                        pool.free_raw(live[0].handle + 1 if live and live[0].size > 1 else 77)
                case ["trim", keep]:
                    if kind == "device" or not sc.work:  # pieces wait for the device
                        pool.trim(keep)
                case ["reserve", size]:
                    with contextlib.suppress(sp.OutOfMemoryError):
                        pool.reserve(size)
            stats = pool.stats()
            peak = max(peak, in_use)
            assert sum(stats[part] for part in PARTS) == stats.reserved
            assert min(stats[part] for part in PARTS) >= 0
            assert (stats.in_use, stats.live_blocks) == (in_use, len(live))
            assert stats.in_use_peak == peak
            assert stats.reserved <= stats.reserved_peak
            assert limit == 0 or stats.reserved_peak <= limit
            assert becomes(pool.audit, "")
        sc.open()
        live.clear()
        assert pool.check().not_checked == []
        for lane in lanes:
            pool.allocate(1, stream=lane).close(lane)
        sp.sim.settle()
        pool.close()
        assert becomes(lambda: (pool.stats().reserved, pool.stats().in_use, pool.audit()), (0, 0, ""))
        assert sc.device.fault == ""


def test_an_out_of_memory_error_in_production_names_the_lines_of_its_holders_from_samples() -> None:
    with scene(memory=64 * MIB) as sc:
        pool = sc.pool(mode="production", sample_bytes=16 * KIB)
        s = sc.stream(pool)
        held = [pool.allocate(40 * KIB, stream=s) for _ in range(500)]
        with pytest.raises(sp.OutOfMemoryError) as caught:
            pool.allocate(500 * MIB, stream=s)
        fields = caught.value.fields
        assert fields["sample_bytes"] == 16 * KIB
        ((size, blocks, _),) = [h for h in fields["holders"] if h[0] > 10 * MIB]
        assert size == pytest.approx(500 * 40 * KIB, rel=0.15)  # nearly each block of that size is a sample
        assert blocks == pytest.approx(500, rel=0.15)
        assert "estimated: one call stack in 16.00 KiB is kept" in str(caught.value)
        assert f"{__file__}:" in str(caught.value), "the line that allocated"
        del held


def test_without_samples_an_untracked_pool_says_that_it_knows_no_call_site() -> None:
    with scene(memory=64 * MIB) as sc:
        pool = sc.pool(mode="off")
        s = sc.stream(pool)
        held = pool.allocate(MIB, stream=s)
        with pytest.raises(sp.OutOfMemoryError) as caught:
            pool.allocate(500 * MIB, stream=s)
        assert [(size, stack) for size, _, stack in caught.value.fields["holders"]] == [(MIB, 0)]
        assert "call site unknown" in str(caught.value)
        held.close(s)


def test_an_out_of_memory_error_stays_one_where_a_holder_lies_in_a_file_whose_name_is_no_text() -> None:
    with scene(memory=64 * MIB) as sc:
        pool = sc.pool(mode="production", sample_bytes=4 * KIB)
        s = sc.stream(pool)
        names: dict[str, Any] = {"pool": pool, "stream": s}
        program = "held = [pool.allocate(64 * 1024, stream=stream) for _ in range(50)]"
        exec(compile(program, "\udc80.py", "exec"), names)
        with pytest.raises(sp.OutOfMemoryError) as caught:
            pool.allocate(500 * MIB, stream=s)
        assert caught.value.fields["holders"][0][0] > MIB
        assert "call site" in str(caught.value)
        names.clear()


def test_a_callback_that_runs_short_itself_is_not_called_again_inside(sc: Scene) -> None:
    pool = sc.pool(limit=4 * MIB, wait_timeout=0)
    calls = []

    def callback(size: int) -> bool:
        calls.append(size)
        with contextlib.suppress(sp.OutOfMemoryError):
            pool.allocate(8 * MIB, stream=0)
        return False

    pool.set_oom_callback(callback)
    with pytest.raises(sp.OutOfMemoryError):
        pool.allocate(6 * MIB, stream=0)
    assert calls == [6 * MIB]
