"""What a call does that is told of a fault: `on_fault` as a word, as a function, in Python and in C; and repeats."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest

import streampool as sp
from streampool.faults import Fault, FaultKind
from streampool.report import Report


def overrun(device: sp.sim.Device, pool: sp.Pool, *, times: int = 1) -> None:
    """Write one byte behind a block, and free it; from the same lines each time."""
    stream = device.create_stream()
    for _ in range(times):
        block = pool.allocate(1000, stream=stream)
        stream.launch(lambda out: out.fill(0x41), writes=[(block.handle, 1001)])
        stream.sync()
        block.close(stream)


# -- a function -------------------------------------------------------------------------------------------------------
def test_a_function_is_told_of_each_fault_on_the_thread_whose_call_is(device: sp.sim.Device) -> None:
    told: list[tuple[Fault, int]] = []
    pool = sp.Pool(device, mode="debug", on_fault=lambda fault: told.append((fault, threading.get_ident())))
    assert pool.options["on_fault"] == "callback"
    overrun(device, pool)
    assert told == []  # nothing has looked yet
    pool.check()
    ((fault, thread),) = told
    assert thread == threading.get_ident()
    assert fault.kind is FaultKind.OVERRUN
    assert fault.block is not None
    assert fault.block.allocated_at[0].function == "overrun"
    assert pool.faults() == []  # who was told has it
    pool.close()
    assert len(told) == 1


@pytest.mark.parametrize("call", ["allocate", "allocate_raw", "free_raw", "close"])
def test_a_function_is_told_before_the_pools_next_call_does_anything(device: sp.sim.Device, call: str) -> None:
    told: list[tuple[FaultKind, int]] = []
    pool = sp.Pool(device, mode="debug", on_fault="callback")
    stream = device.create_stream()
    raw = pool.allocate_raw(8, stream=stream)
    overrun(device, pool)
    pool.check()  # found, and nobody to tell
    pool.set_fault_callback(lambda fault: told.append((fault.kind, pool.stats().live_blocks)))
    calls: dict[str, Callable[[], object]] = {
        "allocate": lambda: pool.allocate(8, stream=stream),
        "allocate_raw": lambda: pool.allocate_raw(8, stream=stream),
        "free_raw": lambda: pool.free_raw(raw, stream=stream),
        "close": pool.close,
    }
    calls[call]()
    assert told == [(FaultKind.OVERRUN, 1)]


def test_a_wrong_free_is_told_in_the_free_itself_after_it_was_refused(device: sp.sim.Device) -> None:
    told: list[Fault] = []
    with sp.Pool(device, mode="debug", on_fault=told.append) as pool:
        stream = device.create_stream()
        pointer = pool.allocate_raw(100, stream=stream)
        pool.free_raw(pointer, stream=stream)
        with pytest.raises(sp.DoubleFreeError, match=r"\(docs/faults/double_free\.md\)$"):
            pool.free_raw(pointer, stream=stream)
        assert [fault.kind for fault in told] == [FaultKind.DOUBLE_FREE]
        with pytest.raises(sp.ForeignFreeError):
            pool.free_raw_sized(0x1234500, 8, stream=stream)
        assert [fault.kind for fault in told] == [FaultKind.DOUBLE_FREE, FaultKind.FOREIGN_FREE]


def test_a_function_may_use_the_pool_and_what_is_found_meanwhile_is_told_when_it_has_returned(
    device: sp.sim.Device,
) -> None:
    told: list[FaultKind] = []
    inside = 0

    def on_fault(fault: Fault) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1, "told of another fault while it was told of one"
        told.append(fault.kind)
        if len(told) == 1:
            pool.allocate(64).close()
            with pytest.raises(sp.ForeignFreeError):
                pool.free_raw(0x1234500)
            overrun(device, pool)
            pool.check()
        inside -= 1

    pool = sp.Pool(device, mode="debug", on_fault=on_fault)
    overrun(device, pool)
    pool.check()
    assert told == [FaultKind.OVERRUN, FaultKind.FOREIGN_FREE, FaultKind.OVERRUN]
    pool.close()
    assert len(told) == 3


def test_what_a_function_raises_comes_out_of_the_call_and_the_rest_is_told_by_the_next(device: sp.sim.Device) -> None:
    told: list[Fault] = []

    def on_fault(fault: Fault) -> None:
        told.append(fault)
        raise LookupError(fault.kind)

    pool = sp.Pool(device, mode="debug", on_fault=on_fault)
    overrun(device, pool, times=2)
    for number in (1, 2):
        with pytest.raises(LookupError, match="overrun"):
            pool.check()
        assert len(told) == number
    pool.check()
    assert pool.audit() == ""
    pool.close()
    assert pool.is_closed


def test_a_pool_that_is_closed_by_a_raising_function_is_closed_all_the_same(device: sp.sim.Device) -> None:
    def on_fault(fault: Fault) -> None:
        raise LookupError

    pool = sp.Pool(device, mode="debug", on_fault=on_fault)
    overrun(device, pool)
    with pytest.raises(LookupError):
        pool.close()
    assert pool.is_closed
    pool.close()


def test_without_a_function_faults_are_kept_until_there_is_one(device: sp.sim.Device) -> None:
    told: list[Fault] = []
    with sp.Pool(device, mode="debug", on_fault="callback") as pool:
        overrun(device, pool)
        pool.check()
        pool.set_fault_callback(told.append)
        pool.allocate(8).close()
        assert len(told) == 1
        pool.set_fault_callback(None)
        overrun(device, pool)
        pool.check()
        assert len(told) == 1
        assert [fault.kind for fault in pool.faults()] == [FaultKind.OVERRUN]


@pytest.mark.parametrize("what", ["report", "raise", "abort"])
def test_a_pool_made_for_something_else_calls_no_function(device: sp.sim.Device, what: str) -> None:
    with (
        sp.Pool(device, mode="debug", on_fault=what) as pool,
        pytest.raises(ValueError, match=f"on_fault={what}: a pool that is to call a function is made with"),
    ):
        pool.set_fault_callback(print)


def test_a_function_that_cannot_be_called_is_refused(device: sp.sim.Device) -> None:
    with sp.Pool(device, mode="debug", on_fault="callback") as pool, pytest.raises(TypeError, match=r"to call.*not 3"):
        pool.set_fault_callback(3)  # type: ignore[arg-type]


def test_a_word_that_is_none_is_refused(device: sp.sim.Device) -> None:
    with pytest.raises(ValueError, match=r"report\|raise\|abort\|callback, not 'explode'"):
        sp.Pool(device, on_fault="explode")


def test_threads_are_told_each_of_what_its_call_finds(device: sp.sim.Device) -> None:
    told: list[Fault] = []
    with sp.Pool(device, mode="debug", on_fault=told.append, max_repeats=0, max_faults=1000) as pool:

        def work() -> None:
            for _ in range(25):
                overrun(device, pool)
                pool.check()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pool.check()
    assert sorted(fault.number for fault in told) == sorted({fault.number for fault in told})
    assert len(told) == 100


# -- abort ------------------------------------------------------------------------------------------------------------
ABORTING = """
import streampool as sp

def make(pool, stream):
    return pool.allocate(1000, stream=stream)

device = sp.Device("sim:0")
pool = sp.Pool(device, mode="debug", on_fault="abort")
stream = device.create_stream()
block = make(pool, stream)
if {wrong_free}:
    try:
        pool.free_raw(block.handle + 256, stream=stream)
    finally:
        print("after the free", flush=True)
stream.launch(lambda out: out.fill(0), writes=[(block.handle, 1001)])
stream.sync()
print("before the check", flush=True)
pool.check()
print("after the check", flush=True)
"""


def run(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(source)], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(("wrong_free", "says"), [(False, "overrun"), (True, "interior_free")])
def test_abort_ends_the_process_where_it_is_told_and_prints_the_report(wrong_free: bool, says: str) -> None:
    done = run(ABORTING.format(wrong_free=wrong_free))
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert done.stdout == ("" if wrong_free else "before the check\n")
    assert f"FAULT 1 of 1: {says}" in done.stderr
    assert "in make" in done.stderr
    assert f"docs/faults/{says}.md" in done.stderr
    assert done.stderr.rstrip().endswith("streampool: aborting (on_fault=abort)")


def test_abort_in_c_writes_one_line_a_fault() -> None:
    done = run(
        """
        import ctypes, streampool as sp
        lib = ctypes.CDLL(str(sp.library_path()))
        device, pool, stream, out = (ctypes.c_void_p() for _ in range(4))
        ref = ctypes.byref
        assert lib.sp_device_open(b"sim:0", ref(device)) == 0
        assert lib.sp_stream_create(device, ref(stream)) == 0
        assert lib.sp_pool_create(device, b"device", b"mine", b"mode=debug:on_fault=abort", ref(pool)) == 0
        assert lib.sp_alloc(pool, ctypes.c_size_t(1000), ctypes.c_size_t(0), stream, ref(out)) == 0
        lib.sp_free(pool, ctypes.c_void_p(out.value + 8), stream)
        print("after")
        """
    )
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert done.stdout == ""
    assert "streampool: pool 'mine' on sim:0: interior_free, a free of an address inside a block" in done.stderr
    assert "(docs/faults/interior_free.md)" in done.stderr


# -- C ----------------------------------------------------------------------------------------------------------------
class CFault(ctypes.Structure):
    """`sp_fault_t`."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("kind", ctypes.c_char_p),
        ("text", ctypes.c_char_p),
        ("note", ctypes.c_char_p),
        *[
            (name, ctypes.c_uint64)
            for name in ("number", "count", "first", "last", "bad_bytes", "block", "block_size", "block_serial")
        ],
    ]


FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(CFault), ctypes.c_void_p)


class CPool:
    """A pool on the simulated device through the C ABI."""

    def __init__(self, options: bytes) -> None:
        self.lib = ctypes.CDLL(str(sp.library_path()))
        self.lib.sp_last_error.restype = ctypes.c_char_p
        self.device, self.pool, self.stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        assert self.lib.sp_device_open(b"sim:0", ctypes.byref(self.device)) == 0
        assert self.lib.sp_stream_create(self.device, ctypes.byref(self.stream)) == 0
        assert self.lib.sp_pool_create(self.device, b"device", b"c", options, ctypes.byref(self.pool)) == 0

    def alloc(self, size: int) -> int:
        out = ctypes.c_void_p()
        size_t = ctypes.c_size_t
        assert self.lib.sp_alloc(self.pool, size_t(size), size_t(0), self.stream, ctypes.byref(out)) == 0
        return int(out.value or 0)

    def free(self, pointer: int) -> int:
        return int(self.lib.sp_free(self.pool, ctypes.c_void_p(pointer), self.stream))

    def check(self) -> int:
        return int(self.lib.sp_check(self.pool, ctypes.c_double(5), None))

    def call(self, function: Any) -> int:
        return int(self.lib.sp_set_fault_function(self.pool, function, ctypes.c_void_p(42)))

    def end(self) -> None:
        assert self.lib.sp_pool_destroy(self.pool) == 0
        assert self.lib.sp_stream_destroy(self.device, self.stream) == 0
        assert self.lib.sp_device_close(self.device) == 0


def test_a_function_in_c_is_told_with_all_that_its_struct_says() -> None:
    pool = CPool(b"mode=debug:on_fault=callback")
    told: list[dict[str, Any]] = []

    @FUNCTION
    def function(handle: int, fault: Any, user: int) -> None:
        assert (handle, user) == (pool.pool.value, 42)
        told.append({name: getattr(fault.contents, name) for name, *_ in CFault._fields_})
        pool.free(pool.alloc(8))  # no lock is held

    block = pool.alloc(1000)
    ctypes.memset(block + 1000, 0, 3)
    assert pool.check() == 0  # kept: there is no function yet
    assert pool.call(function) == 0
    other = pool.alloc(16)
    (overrun,) = told
    assert overrun["struct_size"] == ctypes.sizeof(CFault)
    assert (overrun["kind"], overrun["count"]) == (b"overrun", 1)
    assert (overrun["first"], overrun["last"], overrun["bad_bytes"]) == (block + 1000, block + 1002, 3)
    assert (overrun["block"], overrun["block_size"]) == (block, 1000)
    assert overrun["text"].startswith(b"overrun, a write behind the end of a block, at 0x")
    assert overrun["text"].endswith(b"(docs/faults/overrun.md)")
    assert pool.free(other + 8) != 0
    assert b"(docs/faults/interior_free.md)" in pool.lib.sp_last_error()
    assert [fault["kind"] for fault in told] == [b"overrun", b"interior_free"]
    assert b"inside" in told[1]["text"]
    assert b"not the start" in told[1]["note"]
    assert pool.call(None) == 0
    assert pool.free(other) == 0
    assert pool.free(block) == 0
    pool.end()


def test_a_function_in_c_needs_a_pool_that_was_made_for_it() -> None:
    pool = CPool(b"mode=debug")
    assert pool.call(FUNCTION(lambda *_: None)) == 1
    assert b"option on_fault=callback" in pool.lib.sp_last_error()
    assert pool.call(None) == 0
    pool.end()


# -- how many ---------------------------------------------------------------------------------------------------------
def test_faults_from_the_same_lines_are_kept_so_often_and_then_counted(device: sp.sim.Device) -> None:
    faults: list[Fault] = []
    with sp.Pool(device, mode="debug", max_repeats=3) as pool:
        counts = []
        for times in (50, 20):
            overrun(device, pool, times=times)
            pool.check()
            found = pool.faults()
            counts.append([fault.count for fault in found])
            faults = faults or found
        # What comes after these were taken is told again, once.
        assert counts == [[1, 1, 1, 47], [20]]
        totals = pool.debug_totals()
        assert (totals["faults"], totals["faults_repeated"], totals["faults_dropped"]) == (70, 65, 0)
        overrun(device, pool)  # another line is another fault
        pool.check()
        assert [fault.count for fault in pool.faults()] == [1]
    report = Report(faults=tuple(faults))
    assert report.counts == 50
    assert "50 times from the same lines" in report.to_text()
    assert "SUMMARY: streampool: 50 faults (50 overrun)" in report.to_text()
    assert report.to_dict()["summary"]["faults"] == 50
    assert Report.from_json(report.to_json()).faults == report.faults
    assert "50 times" in report.to_html()


def test_beyond_max_faults_faults_are_counted_and_the_report_says_so(device: sp.sim.Device) -> None:
    with sp.Pool(device, mode="debug", max_faults=2, max_repeats=0) as pool:
        overrun(device, pool, times=5)
        pool.check()
        assert len(pool.faults()) == 2
        totals = pool.debug_totals()
        assert (totals["faults"], totals["faults_dropped"]) == (5, 3)
