"""compute-sanitizer names the instruction of an access inside the pool's memory that is nobody's.

Needs compute-sanitizer: of a CUDA toolkit, on PATH, under CUDA_HOME or in /usr/local/cuda*/bin.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]

CELL = Path(__file__).parent / "sanitizer_cell.py"


def sanitizer() -> str:
    places = [os.environ.get("CUDA_HOME", "/nowhere"), *sorted(glob.glob("/usr/local/cuda*"), reverse=True)]
    found = shutil.which("compute-sanitizer") or next(
        (path for place in places if (path := shutil.which(f"{place}/bin/compute-sanitizer"))), None
    )
    assert found is not None, "compute-sanitizer is not here: put a CUDA toolkit's bin folder on PATH"
    return found


def run(cell: str, record_property: Callable[[str, object], None]) -> tuple[str, str]:
    """Give the address that was written, and what the tool says."""
    record_property("device", "cuda:0")
    # Errors of API calls are left out: functions that a driver lacks are asked for too.
    options = ["--nvtx=yes", "--destroy-on-device-error=kernel", "--report-api-errors=no"]
    done = subprocess.run(
        [sanitizer(), *options, sys.executable, "-P", str(CELL), cell],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    said = done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("writes 0x")] or [said]
    return line.removeprefix("writes "), said


@pytest.mark.parametrize("cell", ["past", "before", "after_free"])
def test_the_instruction_of_a_stray_access_inside_the_pool_is_named(
    cell: str, record_property: Callable[[str, object], None]
) -> None:
    address, said = run(cell, record_property)
    assert "Invalid __global__ write of size 1" in said, said
    assert "write_byte" in said, said  # the kernel
    assert address in said.lower().replace("0x0", "0x"), said


@pytest.mark.parametrize("cell", ["clean", "before_its_marks"])
def test_what_is_allowed_is_not_reported(cell: str, record_property: Callable[[str, object], None]) -> None:
    _, said = run(cell, record_property)
    assert "ERROR SUMMARY: 0 errors" in said, said
