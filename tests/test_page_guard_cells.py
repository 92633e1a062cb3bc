"""The cells of the fault matrix that end a context, each in a process of its own: on a GPU, and simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streampool.page_guards import read_records

CELL = Path(__file__).parent / "gpu" / "page_guard_cell.py"


@pytest.fixture(params=["sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> str:
    if request.param == "cuda:0":  # the work is done in children, where the GPU suite's report cannot see it
        record_property("device", "cuda:0")
    return str(request.param)


def run(device: str, cell: str, size: int, records: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(CELL), cell, str(size), "--device", device, "--records", str(records)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == device
    return found


@pytest.mark.parametrize(
    ("cell", "size"),
    [
        ("past", 1),
        ("past", 1013),
        ("past", 4097),
        ("past", 3 << 20),
        ("before", 256),
        ("before", 1013),
        ("far", 4096),
        ("after_free", 257),
        ("after_free", 3 << 20),
        ("eight_streams", 1000),
    ],
)
def test_one_sticky_error_and_the_planted_block_is_among_the_candidates(
    device: str, cell: str, size: int, tmp_path: Path
) -> None:
    found = run(device, cell, size, tmp_path / "guards.jsonl")
    assert len(found["errors"]) == 2  # sticky
    assert found["faults"] == ["illegal_access"]
    assert found["planted"] in found["candidates"], found["note"]
    assert found["idle_named"] == 0, found["note"]
    if cell == "eight_streams":
        assert len(found["candidates"]) == 125
        assert "875 more are left out" in found["note"]
    # What the file says is what the process said.
    records = read_records(tmp_path / "guards.jsonl")
    assert {candidate.block.serial for candidate in records.candidates} == set(found["candidates"])
    assert records.candidates[0].block.allocated_at[0].function.startswith("main")
