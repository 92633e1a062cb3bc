"""`streampool run --mode observe`; observing the real PyTorch and CuPy, as far as they go without a GPU, and on one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from libraries import MIB, Torch

from streampool import report
from streampool.cli import _watch

# -- the command -------------------------------------------------------------------------------------------------------

PROGRAM = """
import time
import torch
losses, step = [], torch.it.allocate

def train():
    losses.append(step(1 << 20))

def load():
    return step(30 << 20)

model = load()
for _ in range(int({steps})):
    train()
    time.sleep(0.02)
"""


def run(folder: Path, steps: int, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "torch.py").write_text(
        "import libraries\nit = libraries.Torch(); cuda, _C, __file__ = it.cuda, it._C, it.__file__\n"
    )
    (folder / "train.py").write_text(PROGRAM.format(steps=steps))
    path = os.pathsep.join([str(Path(__file__).parent), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-P", "-m", "streampool", "run", "--mode", "observe", *options, str(folder / "train.py")],
        capture_output=True, text=True, check=False, timeout=100, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip


def test_run_in_observe_mode_reports_what_a_library_holds_with_its_lines(tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    done = run(tmp_path, 3, "--leaks", "all", "--report", str(saved))
    assert done.returncode == 1, done.stderr
    read = report.Report.from_json(saved.read_text())
    (model,) = [leak for leak in read.leaks if leak.bytes == 30 * MIB]
    assert model.allocated_at[0].function == "load"
    assert (model.pool, model.device, model.leak_class) == ("torch", "cuda:0", "held")
    (losses,) = [leak for leak in read.leaks if leak.bytes == 3 * MIB]
    assert (losses.allocated_at[0].function, losses.blocks) == ("train", 3)
    device, pinned = read.pools
    assert (device.mode, device.stats["allocations"], device.stats["reserved"]) == ("observe", 4, 34 * MIB)
    assert pinned.kind == "pinned"
    assert "overruns, underruns, writes after free" in [gap.what for gap in read.coverage.not_checked]
    assert "'torch' (device memory, cuda:0, observe mode)" in read.to_text()


def test_run_in_observe_mode_names_a_line_that_only_grows(tmp_path: Path) -> None:
    done = run(tmp_path, 160)
    assert done.returncode == 1, done.stderr
    assert "growing" in done.stderr
    assert "in train" in done.stderr
    assert "under 1 s" not in done.stderr, "PyTorch does not say when"
    assert "in load" not in done.stderr.partition("growing")[2].partition("held")[0]


def test_an_epoch_that_takes_long_by_itself_keeps_nobody_from_seeing_growth() -> None:
    pause_after = _watch._EpochClock.pause_after
    assert pause_after(2.0, 0.0) == pause_after(0.001, 2.0) == pause_after(0.001, 0.001)
    assert pause_after(2.0, 2.0) >= 20


def test_run_in_observe_mode_ends_well_where_nothing_grows_and_with_3_where_nothing_was_seen(tmp_path: Path) -> None:
    assert run(tmp_path, 1).returncode == 0
    (tmp_path / "train.py").write_text("")
    script = tmp_path / "nothing.py"
    script.write_text("import torch\n")
    path = os.pathsep.join([str(Path(__file__).parent), str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "streampool", "run", "--mode", "observe", str(script)],
        capture_output=True, text=True, check=False, timeout=100, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 3
    assert "NO ALLOCATION WAS OBSERVED" in done.stderr


# -- the real libraries, as far as they go without a GPU ---------------------------------------------------------------


def alone(code: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_observing_the_real_pytorch_starts_no_cuda_and_is_there_when_it_starts() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    code = (
        "import streampool as sp; from streampool import _observe\n"
        "sp.observe('torch', stacks=True)\n"
        "import torch\n"
        "assert torch.cuda.memory._record_memory_history and not torch.cuda.is_initialized()\n"
        "assert _observe.pools() == [] and _observe.blocks() == {} and _observe.failures()['torch'] == 0\n"
        "print([call.__qualname__ for call, _ in torch.cuda._queued_calls if 'Torch' in call.__qualname__])\n"
        # What it would say, of all that we ask for by name, is there.
        "import inspect; print('include_traces' in inspect.signature(torch.cuda.memory_snapshot).parameters)\n"
        "print([hasattr(torch.cuda, n) for n in ('memory_stats', 'host_memory_stats', 'device_count')])\n"
        "print(hasattr(torch._C, '_cuda_isHistoryEnabled') or not torch.backends.cuda.is_built())\n"
    )
    assert alone(code).splitlines() == ["['Torch._record']", "True", "[True, True, True]", "True"]


def test_the_small_librarys_snapshot_is_one_that_pytorchs_own_reader_takes() -> None:
    torch = Torch()
    torch.start()
    torch.recording = True
    torch.allocate(MIB)
    viz = pytest.importorskip("torch.cuda._memory_viz", reason="PyTorch is not installed")
    snapshot = {"segments": torch._memory_snapshot(include_traces=False), "device_traces": []}
    text = viz.segsum(snapshot)
    assert "segments: 1\ntotal_reserved: 2.0MiB\ntotal_allocated: 1.0MiB\n" in text


def test_observing_the_real_cupy_without_a_gpu_sees_nothing_and_fails_nowhere() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    code = (
        "import streampool as sp; from streampool import _observe\n"
        "sp.observe('cupy')\nimport cupy\n"
        "assert all(hasattr(cupy.get_default_memory_pool(), n) for n in "
        "('used_bytes', 'total_bytes', 'get_limit', 'n_free_blocks'))\n"
        "print(_observe.pools(), _observe.failures()['cupy'])\n"
    )
    assert alone(code) == "[] 0\n"


def test_importing_streampool_and_observing_import_no_library() -> None:
    code = "import sys, streampool as sp; sp.observe(); print([n for n in ('torch', 'cupy') if n in sys.modules])"
    assert alone(code) == "[]\n"


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_pytorch_is_observed_on_a_gpu_and_outside_is_what_the_driver_says(record_property: Any) -> None:
    """Within 2 %: what is in no pool, against the driver's own figure less what was allocated here."""
    record_property("device", "cuda:0")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    code = """
import ctypes, json, streampool as sp
sp.observe("torch", stacks=True)
import torch
from streampool import _observe
from streampool.metrics import _devices

def in_use():
    free, total = torch.cuda.mem_get_info(0)
    return total - free

kept = [torch.empty(256 << 20, dtype=torch.uint8, device="cuda:0") for _ in range(4)]
pool = sp.Pool("cuda:0", initial="512MiB")
cuda = ctypes.CDLL("libcuda.so.1")
hidden = ctypes.c_uint64()
assert cuda.cuMemAlloc_v2(ctypes.byref(hidden), ctypes.c_size_t(1 << 30)) == 0
_devices.sample()
samples = _devices.samples()
memory = samples.devices["cuda:0"]
(held,) = [p for p in samples.libraries if p.kind == "device"]
(key,) = [k for k in _observe.blocks() if k[1] == "torch"]
stacks = [_observe._model.resolve(b.stack) for b in _observe.blocks()[key] if b.stack]
lines = {stack[0].line for stack in stacks}
print(json.dumps({
    "reserved": held.reserved, "torch": torch.cuda.memory_reserved(0), "used": held.used,
    "allocated": torch.cuda.memory_allocated(0), "pool": pool.stats().reserved, "basis": memory.process.basis,
    "process": memory.process.bytes, "outside": memory.outside, "in_use": in_use(), "stacks": len(stacks),
    "lines": len(lines),
    "failures": _observe.failures()["torch"],
}))
"""
    found = json.loads(alone(code).splitlines()[-1])
    assert found["failures"] == 0
    assert found["reserved"] == found["torch"]
    assert found["used"] == found["allocated"]
    assert (found["stacks"], found["lines"]) == (4, 1)
    # The driver's figure of the device, where nobody else is on it, says how much is outside.
    truth = found["in_use"] - found["reserved"] - found["pool"]
    assert truth >= 1 << 30
    assert abs(found["outside"] - truth) <= 0.02 * found["in_use"]
    assert found["process"] == found["outside"] + found["reserved"] + found["pool"]


@pytest.mark.gpu
def test_cupy_is_observed_on_a_gpu(record_property: Any) -> None:
    record_property("device", "cuda:0")
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    code = """
import streampool as sp
from streampool import _observe
from streampool._contexts import in_use
sp.observe("cupy")
import cupy
assert _observe.pools() == [] and not in_use(0)
kept = cupy.empty(100 << 20, dtype="u1")
assert in_use(0)
import threading
found = []
thread = threading.Thread(target=lambda: found.extend(_observe.pools()))  # as the sampling thread does
thread.start(); thread.join()
device = [p for p in found if p.kind == "device"][0]
pool = cupy.get_default_memory_pool()
assert (device.device, device.used, device.reserved) == ("cuda:0", pool.used_bytes(), pool.total_bytes())
assert _observe.failures()["cupy"] == 0
print("ok")
"""
    assert alone(code) == "ok\n"
