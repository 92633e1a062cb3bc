"""The cells of the fault matrix that end a context, each in a process of its own: on a GPU, and simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from page_guard_cells import assert_one_sticky_error_and_the_planted_block, run


@pytest.fixture(params=["sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> str:
    if request.param == "cuda:0":  # the work is done in children, where the GPU suite's report cannot see it
        record_property("device", "cuda:0")
    return str(request.param)


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
    assert_one_sticky_error_and_the_planted_block(found, tmp_path / "guards.jsonl")
    if cell == "eight_streams":
        assert len(found["candidates"]) == 125
        assert "875 more are left out" in found["note"]
