"""Programs for tests of `streampool.attach`: each in a process of its own, since libraries are taken over for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOKALIKES = Path(__file__).parent / "lookalikes"


@dataclass
class Ended:
    """What a program left."""

    code: int
    out: str
    err: str
    report_at: Path | None = None

    @property
    def report(self) -> dict[str, Any]:
        """The report, as data."""
        assert self.report_at is not None
        loaded: dict[str, Any] = json.loads(self.report_at.read_text())
        return loaded

    def library(self, name: str) -> dict[str, Any]:
        """What the report says of a library's coverage."""
        (found,) = [entry for entry in self.report["coverage"]["libraries"] if entry["library"] == name]
        return dict(found)


def environment(*, lookalikes: bool, **more: str) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("STREAMPOOL_OPTIONS", "STREAMPOOL_WATCHED_BY", "NUMBA_CUDA_MEMORY_MANAGER", "PYTHONSAFEPATH")
    }
    if lookalikes:
        rest = env.get("PYTHONPATH")
        env["PYTHONPATH"] = os.pathsep.join([str(LOOKALIKES), rest] if rest else [str(LOOKALIKES)])
    return {**env, **more}


def python(source: str, *arguments: object, lookalikes: bool = True, **more: str) -> Ended:
    """Run a program with python."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(source), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=environment(lookalikes=lookalikes, **more),
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def watched(
    folder: Path, source: str, *options: object, lookalikes: bool = True, device: str = "sim", **more: str
) -> Ended:
    """Run a program under ``streampool run``."""
    script, report = folder / "program.py", folder / "report.json"
    script.write_text(textwrap.dedent(source))
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "streampool", "run", "--device", device, "--report", report),
            *map(str, options),
            script,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=folder,
        env=environment(lookalikes=lookalikes, **more),
    )
    return Ended(done.returncode, done.stdout, done.stderr, report)


# A native library of the program's that has a pool of its own: `{device}` is the pool's, `{mode}` what it asks for.
NATIVE_POOL = """
import ctypes
import streampool as sp
lib = ctypes.CDLL(str(sp.library_path()))
device, pool, stream, p, q = (ctypes.c_void_p() for _ in range(5))
assert lib.sp_device_open(b"{device}", ctypes.byref(device)) == 0
assert lib.sp_stream_create(device, ctypes.byref(stream)) == 0
assert lib.sp_pool_create(device, b"device", b"native", b"mode={mode}", ctypes.byref(pool)) == 0
def allocate(size, out):
    assert lib.sp_alloc(pool, ctypes.c_size_t(size), ctypes.c_size_t(0), stream, ctypes.byref(out)) == 0
allocate(1000, p)  # the block
allocate(2000, q)  # the leak
print(lib.sp_free(pool, p, stream))  # the free
print(lib.sp_free(pool, p, stream))  # the second
{end}
"""


def lines_of(frames: list[dict[str, Any]], source: str) -> set[str]:
    """The lines of a program that a stack of its report names."""
    lines = textwrap.dedent(source).splitlines()
    return {lines[f["line"] - 1].strip() for f in frames if f["file"].endswith("program.py")}
