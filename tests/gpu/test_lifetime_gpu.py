"""Programs that end with pools and buffers on a GPU alive: quietly, whichever way they end; and children by fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

TIMEOUT = 50  # seconds
TESTS = Path(__file__).resolve().parents[1]
Record = Callable[[str, object], None]

GLOBALS = """
import sys
import streampool as sp

device = sp.Device("cuda:0")
stream = device.create_stream()
raw = 1
pools = [sp.Pool(device, kind=kind, mode=MODE) for kind in ("device", "pinned", "managed")]
pools[0].register_stream(stream)
buffers = [pool.allocate(size, stream=s) for pool in pools for size in (0, 100, 5000, 3 << 20) for s in (stream, raw)]
pointers = [pools[0].allocate_raw(1000, stream=stream)]
for buffer in buffers:
    buffer.fill(1, stream=stream)     # nobody waits for it
buffers[1].record_stream(raw)
buffers.pop().close(stream)
cycle = [buffers, pools]
cycle.append(cycle)
print("made", flush=True)
"""


def python(*arguments: object, record: Record, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python; whether it used the GPU the program itself must show."""
    names = {name: value for name, value in os.environ.items() if name != "STREAMPOOL_OPTIONS"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=names | (env or {}),
        timeout=TIMEOUT,
    )
    record("device", "cuda:0")
    return done


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError('over')", 1),
        ("del pools; buffers.clear()", 0),
        ("pools[0].close(); del buffers", 0),
        ("stream.close()", 0),
        ("import threading; threading.Thread(target=lambda: pools[1].allocate(10, stream=stream)).start()", 0),
    ],
)
def test_a_program_ends_as_it_would_without_us(end: str, code: int, mode: str, record_property: Record) -> None:
    done = python("-c", f"MODE = {mode!r}\n{GLOBALS}\n{end}\n", record=record_property)
    assert done.stdout == "made\n", done.stderr
    assert done.returncode == code, done.stderr
    if "raise" in end:
        assert done.stderr.startswith("Traceback (most recent call last):")
        assert done.stderr.rstrip().endswith("RuntimeError: over")
        assert done.stderr.count("Traceback") == 1
    else:
        assert done.stderr == ""


FORK = """
import gc, os, signal, sys, warnings
warnings.simplefilter("ignore")
import streampool as sp

pool = sp.Pool("cuda:0")
buffers = [pool.allocate(4096, stream=1) for _ in range(4)]
pointer = pool.allocate_raw(4096, stream=1)
child = os.fork()
if child == 0:
    signal.alarm(20)
    for what in (lambda: pool.allocate(1, stream=1), lambda: sp.Pool("cuda:0"), lambda: pool.allocate_raw(1, stream=1)):
        try:
            what()
        except sp.StreamPoolError as error:
            if "spawn" not in str(error):
                print("no advice:", error, flush=True)
        else:
            print("not refused", flush=True)
    pool.free_raw(pointer, stream=1)      # inherited: ignored
    buffers.pop().close(1)
    del buffers
    gc.collect()
    END
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 5, status
for buffer in buffers:
    buffer.fill(1, stream=1)
device = sp.Device("cuda:0")
device.sync()
for buffer in buffers:
    buffer.close(1)
pool.free_raw(pointer, stream=1)
assert pool.stats().live_blocks == 0
pool.close()
print("parent is well", flush=True)
"""


@pytest.mark.parametrize("end", ["os._exit(5)", "sys.exit(5)"])
def test_a_forked_child_is_told_to_spawn_and_ends_cleanly(end: str, record_property: Record) -> None:
    done = python("-c", FORK.replace("END", end), record=record_property)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "parent is well\n"
    assert done.stderr == ""


CLEAN = """
import sys
from cuda import core
import streampool as sp

device = sp.Device()
assert type(device) is core.Device
stream = device.create_stream()
with sp.Pool(device) as pool:
    for size in (1, 255, 4096, 3 << 20):
        block = pool.allocate(size, stream=stream)
        block.fill(7, stream=stream)
        block.close(stream)
    pool.forget_stream(stream)
stream.close()
"""


def test_a_clean_program_gets_a_clean_report_and_code_0(tmp_path: Path, record_property: Record) -> None:
    script, report = tmp_path / "clean.py", tmp_path / "report.json"
    script.write_text(CLEAN)
    done = python("-m", "streampool", "run", "--mode", "debug", "--report", report, script, record=record_property)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert (found["faults"], found["leaks"]) == ([], [])
    assert "cuda:0" in report.read_text()


BUGGY = """
import sys
sys.path.insert(0, TESTS)
from gpu.kernels import Kernels
import streampool as sp

device = sp.Device()
kernels = Kernels(device)
stream = device.create_stream()
with sp.Pool(device, name="buggy") as pool:
    block = pool.allocate(1000, stream=stream)
    kernels.write_byte(stream, block.handle + 1000, 0)
    block.close(stream)
"""


def test_a_program_whose_kernel_writes_too_far_gets_code_1_and_its_lines(
    tmp_path: Path, record_property: Record
) -> None:
    script, report = tmp_path / "buggy.py", tmp_path / "report.json"
    script.write_text(f"TESTS = {str(TESTS)!r}\n{BUGGY}")
    done = python("-m", "streampool", "run", "--mode", "debug", "--report", report, script, record=record_property)
    assert done.returncode == 1, done.stderr
    (fault,) = json.loads(report.read_text())["faults"]
    assert (fault["kind"], fault["pool"], fault["device"]) == ("overrun", "buggy", "cuda:0")
    lines = script.read_text().splitlines()
    for stack, text in (("allocated_at", "pool.allocate(1000"), ("freed_at", "block.close(")):
        top = fault["block"][stack][0]
        assert top["file"] == str(script)
        assert text in lines[top["line"] - 1]


POISONED = """
import sys
sys.path.insert(0, TESTS)
from gpu.kernels import Kernels
import streampool as sp

device = sp.Device("cuda:0")
kernels = Kernels(device)
stream = device.create_stream()
pool, debug = sp.Pool(device), sp.Pool(device, mode="debug", name="debug")
pool.register_stream(stream)
block, kept = pool.allocate(4096, stream=stream), debug.allocate(100, stream=stream)
pointer = pool.allocate_raw(3 << 20, stream=stream)
unmapped = pool.allocate_raw(64 << 20, stream=stream)
pool.free_raw(unmapped, stream=stream)
stream.sync()
assert pool.trim()["released"] > 32 << 20
kernels.write_byte(stream, unmapped + (32 << 20), 0)  # its first bytes may share a piece with a live block
try:
    stream.sync()
except Exception:
    print("the device is lost")
calls = {
    "allocate": lambda: pool.allocate(64 << 20, stream=stream),
    "allocate again": lambda: pool.allocate(64 << 20, stream=stream),
    "reserve": lambda: pool.reserve(1 << 30),
    "new pool": lambda: sp.Pool(device, initial="2MiB"),
    "check": lambda: debug.check(timeout=0.1),
}
for name, call in calls.items():
    try:
        call()
        print(name, "was not refused")
    except sp.DriverError as error:
        print(name, "refused:", error)
# Frees are harmless, and so is the end.
pool.free_raw(pointer, stream=stream)
block.close(stream)
kept.close(stream)
pool.trim()
pool.close()
debug.close()
print("over")
"""


def test_after_a_fault_of_the_device_calls_fail_clearly_and_the_process_ends(record_property: Record) -> None:
    """R22: noticed at the next driver call, one clear error; frees are harmless, and nothing crashes on the way out."""
    done = python("-c", f"TESTS = {str(TESTS)!r}\n{POISONED}", record=record_property)
    record_property("said", done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *refused, last = done.stdout.splitlines()
    assert (first, last) == ("the device is lost", "over"), done.stdout + done.stderr
    assert [line.partition(" refused:")[0] for line in refused] == [
        "allocate",
        "allocate again",
        "reserve",
        "new pool",
        "check",
    ]
    for line in refused:
        assert "700" in line or "fault" in line or "illegal" in line.lower(), line
