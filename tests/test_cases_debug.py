"""Public bug reports about leak reports, histories, guards and counters, as tests of debug mode.

Numbers are those of the project's list of cases; the docstrings name the reports. Cases 6, 18 and 25 run in debug mode
in test_cases.py.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scene import KIB, MIB, Scene, becomes, scene

import streampool as sp
from streampool import _core, logs, session
from streampool.faults import FaultKind
from streampool.leaks import LeakClass
from streampool.page_guards import read_records
from streampool.report import Report

KINDS = pytest.mark.parametrize("kind", ["device", "pinned", "managed"])


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


# -- case 1: a use that a second stream still makes -------------------------------------------------------------------
@KINDS
@pytest.mark.parametrize("size", [1, 4 * KIB, 700 * KIB, 5 * MIB])
@pytest.mark.parametrize("declared", [True, False])
def test_case_1_in_debug_mode_a_declared_use_is_never_disturbed_and_an_undeclared_one_is_caught(
    sc: Scene, kind: str, size: int, declared: bool
) -> None:
    """meta-pytorch/torchrec#4231, pytorch/pytorch#23729, #58384: a source freed under a copy on a side stream."""
    pool = sc.pool(kind=kind, mode="debug")
    s, t = sc.stream(pool), sc.stream(pool)
    block = pool.allocate(size, stream=s)
    address = block.handle
    seen: list[bytes] = []

    def use(data: Any) -> None:
        seen.append(bytes(data[:16]))
        data[:] = 0

    s.launch(lambda out: out.fill(0x5A), writes=[block])
    t.wait(s)
    gate = sp.sim.Gate()
    t.launch(use, writes=[(address, size)], gate=gate, label="use")
    if declared:
        block.record_stream(t)
    block.close(s)
    s.sync()
    result = pool.check(timeout=0)
    if declared:
        assert [facts["address"] for facts in result.not_checked] == [address]
    else:
        assert result.not_checked == []
        sc.device.races()  # the pool's own fill may race with what nobody declared
    gate.open()
    t.sync()
    result = pool.check()
    faults = pool.faults()
    if declared:
        assert seen == [b"\x5a" * min(16, size)], "the debugger wrote into a block that was still used"
        assert faults == []
        sc.assert_no_race()
        return
    (fault,) = faults
    assert fault.kind is FaultKind.WRITE_AFTER_FREE
    assert (fault.address, fault.last) == (address, address + size - 1)
    assert fault.block is not None
    assert fault.block.freed_at[0].file == __file__


# -- case 57: counters ------------------------------------------------------------------------------------------------
def assert_counted(pool: sp.Pool, blocks: dict[int, int]) -> None:
    """Hold the counters to the list of blocks (address: size), and to what the pool finds when it counts anew."""
    stats = pool.stats()
    assert stats.in_use == sum(blocks.values())
    assert stats.live_blocks == len(blocks)
    parts = [stats[name] for name in ("in_use", "rounding", "guards", "quarantined", "pending", "cached")]
    assert sum(parts) == stats.reserved
    assert min(parts) >= 0
    assert stats.in_use <= stats.in_use_peak
    assert stats.reserved <= stats.reserved_peak
    assert stats.allocations - stats.frees == len(blocks)
    assert pool.audit() == ""


@KINDS
@pytest.mark.parametrize("mode", ["production", "debug"])
def test_case_57_counters_are_those_of_the_blocks_at_every_step(sc: Scene, kind: str, mode: str) -> None:
    """pytorch/pytorch#135726, #179380, NVIDIA/cub#328, cupy/cupy#3008, LLNL/Umpire#491: counters drift."""
    limit = 64 * MIB
    pool = sc.pool(kind=kind, mode=mode, limit=limit, quarantine_bytes="1MiB")
    s = sc.stream(pool)
    sizes = [300 * KIB, 1, 2 * MIB, 70 * KIB]
    for order in itertools.permutations(range(len(sizes))):  # neighbours are freed in all orders
        blocks: dict[int, int] = {}
        pointers = []
        for size in sizes:
            pointers.append(pool.allocate_raw(size, stream=s))
            blocks[pointers[-1]] = size
            assert_counted(pool, blocks)
        with pytest.raises(sp.OutOfMemoryError):
            pool.allocate_raw(limit + 1, stream=s)
        assert_counted(pool, blocks)
        for number, at in enumerate(order):
            pool.free_raw(pointers[at], stream=s)
            del blocks[pointers[at]]
            assert_counted(pool, blocks)
            with pytest.raises(sp.DoubleFreeError):
                pool.free_raw(pointers[at], stream=s)
            if number % 2:
                pool.trim()
            assert_counted(pool, blocks)
    sp.sim.settle()
    pool.check()
    pool.trim()
    assert becomes(lambda: pool.stats().reserved, 0)
    # The limit counts the true figure: all of it can be had again.
    whole = pool.allocate_raw(limit // 2, stream=s)
    assert_counted(pool, {whole: limit // 2})
    pool.free_raw(whole, stream=s)
    pool.close()
    sp.sim.settle()
    assert becomes(lambda: pool.stats().reserved, 0)
    assert (pool.stats().in_use, pool.stats().live_blocks) == (0, 0)


# -- case 63: leak noise ----------------------------------------------------------------------------------------------
def one_line(pool: sp.Pool, stream: Any, count: int) -> list[int]:
    return [pool.allocate_raw(100, stream=stream) for _ in range(count)]


def watched_report(sc: Scene) -> tuple[sp.Pool, Any]:
    watching = session.begin()
    return sc.pool(mode="debug"), watching


def test_case_63_what_the_library_keeps_is_no_leak(sc: Scene) -> None:
    """opencv/opencv#8725, VulkanMemoryAllocator#276: memory that the library itself keeps was reported."""
    pool, watching = watched_report(sc)
    try:
        assert pool.stats().reserved == 0, "making a pool allocates nothing"
        s, t = sc.stream(pool), sc.stream(pool)
        for pointer in one_line(pool, s, 100):  # quarantined, and cached
            pool.free_raw(pointer, stream=s)
        block = pool.allocate(MIB, stream=s)  # pending
        block.record_stream(t)
        sc.busy(t, block)
        block.close(s)
        released = pool.allocate(MIB, stream=s)
        sc.busy(s, released)
        del released
        assert len(pool.leaks()) == 0
        pool.check(timeout=0)
        report = Report.from_findings(watching.finish(), leaks="all")
    finally:
        session.end()
    assert len(report.leaks) == 0
    assert report.counts == 0, report.to_text()
    assert "no faults, no leaks that count" in report.to_text()
    sc.open()


def test_case_63_one_leak_among_ten_thousand_blocks_is_one_entry_at_its_line(sc: Scene) -> None:
    """kokkos/kokkos#1559: the same line, hundreds of times, at exit."""
    pool, watching = watched_report(sc)
    try:
        s = sc.stream(pool)
        for _ in range(10):
            for pointer in one_line(pool, s, 1000):
                pool.free_raw(pointer, stream=s)
        lost = pool.allocate_raw(77, stream=s)
        many = one_line(pool, s, 500)
        report = Report.from_findings(watching.finish())
    finally:
        session.end()
    first, second = report.leaks
    assert (first.leak_class, first.blocks, first.bytes) == (LeakClass.LOST, 500, 50_000)
    assert "one_line" in first.allocated_at[0].function
    assert (second.leak_class, second.blocks, second.bytes) == (LeakClass.LOST, 1, 77)
    assert report.to_text().count("LEAK: lost") == 2
    for pointer in (lost, *many):
        pool.free_raw(pointer, stream=s)


def test_case_63_blocks_from_before_tracking_are_no_leaks(sc: Scene) -> None:
    """opencv/opencv#8725: what nobody followed from its birth is not called a leak."""
    pool = sc.pool()  # production: blocks are not tracked
    s = sc.stream(pool)
    pointer = pool.allocate_raw(1000, stream=s)
    assert len(pool.leaks()) == 0
    pool.free_raw(pointer, stream=s)


# -- case 65: histories and logs --------------------------------------------------------------------------------------
def test_case_65_what_is_kept_of_faults_and_events_is_bounded_and_the_rest_is_counted(sc: Scene) -> None:
    """pytorch/pytorch#129674: a history without a default limit ate the host's memory."""
    pool = sc.pool(mode="debug")
    s = sc.stream(pool)
    pointer = pool.allocate_raw(64, stream=s)
    count = 20_000
    _core.drain_events()
    before = _core.read_pulse()[3]
    for _ in range(count):
        with pytest.raises(sp.InteriorFreeError):
            pool.free_raw(pointer + 1, stream=s)
    totals = pool.debug_totals()
    assert totals["faults"] == count
    kept = pool.take_faults()
    assert len(kept) == 11
    assert sum(fault["count"] for fault in kept) == count
    events = _core.drain_events()
    assert len(events) <= 1024
    assert _core.read_pulse()[3] - before >= 2 * count - 1024
    pool.free_raw(pointer, stream=s)


def test_case_65_a_log_that_cannot_be_written_breaks_no_allocation(sc: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """rapidsai/rmm#41, #419: logging slowed everything, and its lines lacked what was needed to use them."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left on device")

    logger = logging.getLogger("streampool")
    broken = Broken()
    logger.addHandler(broken)
    try:
        pool = sc.pool(mode="debug", name="logged")
        s = sc.stream(pool)
        with pytest.raises(sp.ForeignFreeError):
            pool.free_raw(0x1234500, stream=s)
        logs.drain()
        pool.allocate(1000, stream=s).close(s)
        assert pool.check().faults == 0
        assert pool.audit() == ""
    finally:
        logger.removeHandler(broken)
    with pytest.raises(sp.ForeignFreeError):
        pool.free_raw(0x1234500, stream=s)
    logs.drain()
    (line,) = [record for record in caplog.records if getattr(record, "event", "") == "fault.found"][-1:]
    assert (line.device, line.pool, line.memory_kind) == ("sim:0", "logged", "device")  # type: ignore[attr-defined]
    assert line.reason == "foreign_free"  # type: ignore[attr-defined]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full disk is played by /dev/full")
def test_case_65_records_on_a_full_disk_break_no_allocation(sc: Scene) -> None:
    """rapidsai/rmm#41: a write that fails is not the allocation's business."""
    pool = sc.pool(mode="debug", page_guards="all", page_guard_records="/dev/full")
    s = sc.stream(pool)
    for block in [pool.allocate(1000, stream=s) for _ in range(300)]:
        block.close(s)
    assert pool.check().faults == 0
    assert pool.debug_totals()["page_guarded"] == 300
    assert pool.audit() == ""


def test_case_65_each_line_of_the_records_has_thread_stream_device_and_size(sc: Scene, tmp_path: Path) -> None:
    """rapidsai/rmm#419: log lines lacked the thread, useless with per-thread streams."""
    path = tmp_path / "guards.jsonl"
    pool = sc.pool(mode="debug", page_guards="all", page_guard_records=str(path))
    s = sc.stream(pool)
    threads: set[int] = set()
    kept: list[sp.Buffer] = []

    def work() -> None:
        kept.append(pool.allocate(1000 + len(kept), stream=s))
        threads.add(threading.get_native_id())

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    records = read_records(path)
    blocks = {candidate.block.size: candidate.block for candidate in records.candidates}
    assert set(blocks) == {1000, 1001}
    assert {block.allocated_thread for block in blocks.values()} <= threads
    assert all(block.allocated_thread and block.allocated_time >= 0 for block in blocks.values())
    assert {block.stream for block in blocks.values()} == {s.id}
    assert records.device == "sim:0"


# -- case 66: guards --------------------------------------------------------------------------------------------------
@KINDS
@pytest.mark.parametrize("guard", [0, 1, 3, 4, 16, 255])
@pytest.mark.parametrize("size", [1, 4, 255, 1000, 4096])
def test_case_66_every_configured_guard_byte_and_all_slack_is_checked_by_bytes(
    sc: Scene, kind: str, guard: int, size: int
) -> None:
    """flashinfer-ai/flashinfer#5344, VulkanMemoryAllocator#69: margins that check nothing, NaN that equals nothing."""
    pool = sc.pool(kind=kind, mode="debug", guard_bytes=guard)
    s = sc.stream(pool)
    block = pool.allocate(size, stream=s)
    facts = block.facts()
    first, end = facts["begin"], facts["begin"] + facts["reserved"]
    assert block.handle - first >= guard
    assert end - block.handle - size >= guard
    places = {
        block.handle + size,
        block.handle + size + guard - 1,
        end - 1,
        block.handle - guard,
        block.handle - 1,
        first,
    }
    for at in sorted(places):
        if not first <= at < end or block.handle <= at < block.handle + size:
            continue
        # Half of a NaN, an infinity, a zero: whatever it reads as, it is another byte.
        s.launch(lambda out: out.__ixor__(0xFF), writes=[(at, 1)])
        s.sync()
        assert pool.check().faults == 1
        (fault,) = pool.faults()
        assert (fault.address, fault.last) == (at, at)
        assert fault.kind is (FaultKind.UNDERRUN if at < block.handle else FaultKind.OVERRUN)
        assert fault.block is not None
        assert (fault.block.address, fault.block.size, fault.block.stream) == (block.handle, size, s.id)
        assert fault.block.allocated_at[0].file == __file__
        assert pool.check().faults == 0
    block.close(s)


def test_case_66_a_body_full_of_nan_or_of_the_pattern_is_no_fault(sc: Scene) -> None:
    """flashinfer-ai/flashinfer#3978: NaN in the user's own data gave false alarms."""
    pool = sc.pool(mode="debug")
    s = sc.stream(pool)
    nans = [struct.pack("<f", float("nan")), struct.pack("<d", float("nan")), b"\xff", b"\x7f\xc0", b"\x00"]
    block = pool.allocate(4096, stream=s)
    pattern = ctypes.string_at(block.handle + 4096, 256)  # the guard's own bytes
    for data in [*nans, pattern]:
        s.launch(lambda out, data=data: _tile(out, data), writes=[block])
        s.sync()
        assert pool.check().faults == 0
    block.close(s)
    pool.check()
    assert pool.take_faults() == []


def _tile(out: Any, data: bytes) -> None:
    out[:] = bytearray((data * (len(out) // len(data) + 1))[: len(out)])


@KINDS
def test_case_66_a_block_that_gated_work_still_writes_is_not_checked_and_is_listed(sc: Scene, kind: str) -> None:
    """openjdk/jdk#5952, openxla/xla#46078: checks that were only safe after a synchronisation."""
    pool = sc.pool(kind=kind, mode="debug")
    s = sc.stream(pool)
    block, done = pool.allocate(1000, stream=s), pool.allocate(1000)
    gate = sp.sim.Gate()
    s.launch(lambda out: out.fill(1), writes=[block], gate=gate)
    calls = sc.device.calls()
    result = pool.check(timeout=0)
    assert block.facts()["address"] in [facts["address"] for facts in result.not_checked]
    assert result.faults == 0
    assert sc.device.calls().get("context_synchronize", 0) == calls.get("context_synchronize", 0)
    gate.open()
    s.sync()
    assert pool.check().not_checked == []
    assert pool.take_faults() == []
    for one in (block, done):
        one.close(s)


def test_case_66_a_hundred_thousand_live_blocks_are_checked_in_few_driver_calls(sc: Scene) -> None:
    """openxla/xla#46078: a check a block, each with a synchronisation. Here a check is a few jobs, whatever is live."""
    pool = sc.pool(mode="debug", guard_bytes=16, stack_depth=1)
    s = sc.stream(pool)
    count = 100_000
    pointers = [pool.allocate_raw(16, stream=s) for _ in range(count)]
    before = sc.device.calls()
    result = pool.check()
    after = sc.device.calls()
    made = sum(value - before.get(name, 0) for name, value in after.items())
    assert result.checked_blocks == count
    assert result.not_checked == []
    assert made < count // 100
    for pointer in pointers:
        pool.free_raw(pointer, stream=s)
