"""Runs a cell of the matrix that ends a context in a process of its own, and holds what it says to what was planted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from streampool.page_guards import read_records

CELL = Path(__file__).parent / "gpu" / "page_guard_cell.py"


def run(device: str, cell: str, size: int, records: Path, *, alignment: int = 256) -> dict[str, Any]:
    """Give what the process printed."""
    place = ["--device", device, "--records", str(records), "--alignment", str(alignment)]
    done = subprocess.run(
        [sys.executable, str(CELL), cell, str(size), *place], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == device
    return found


def assert_one_sticky_error_and_the_planted_block(found: dict[str, Any], records: Path) -> None:
    assert len(found["errors"]) == 2  # sticky
    assert found["faults"] == ["illegal_access"]
    assert found["planted"] in found["candidates"], found["note"]
    assert found["idle_named"] == 0, found["note"]
    # What the file says is what the process said.
    read = read_records(records)
    assert {candidate.block.serial for candidate in read.candidates} == set(found["candidates"])
    assert read.candidates[0].block.allocated_at[0].function.startswith("main")
