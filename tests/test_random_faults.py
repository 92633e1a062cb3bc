"""Random programs with everything on: a clean one is told of nothing, and of planted faults each is found, by seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from random_faults import PLANTED, RandomProgram

import streampool as sp

LONG = pytest.mark.slow
MILLION = 1_000_000


@pytest.fixture
def device() -> Iterator[sp.sim.Device]:
    sp.sim.reset()
    sp.sim.configure(scheduler="seeded", seed=0, memory="8GiB")
    device = sp.Device("sim:0")
    assert isinstance(device, sp.sim.Device)
    yield device
    sp.sim.reset()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("operations", "seed", "kind"),
    [
        (20_000, 1, "device"),
        (10_000, 2, "pinned"),
        (10_000, 3, "managed"),
        pytest.param(MILLION, 4, "device", marks=LONG),
    ],
)
def test_a_clean_program_is_told_of_nothing(device: sp.sim.Device, operations: int, seed: int, kind: str) -> None:
    program = RandomProgram(device, seed, kind)
    program.run(operations)
    assert program.found == {}, f"seed {seed}"
    assert device.races() == []
    totals = program.pool.debug_totals()
    assert totals["blocks_freed"] > operations // 4
    assert totals["blocks_checked"] > totals["blocks_freed"] - totals["page_guarded"]
    assert kind != "device" or totals["page_guarded"] > 0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("operations", "every", "seed", "kind"),
    [
        (20_000, 200, 11, "device"),
        (10_000, 200, 12, "pinned"),
        (10_000, 200, 13, "managed"),
        pytest.param(MILLION, 10_000, 14, "device", marks=LONG),
    ],
)
def test_of_faults_planted_among_clean_operations_each_is_found_once(
    device: sp.sim.Device, operations: int, every: int, seed: int, kind: str
) -> None:
    program = RandomProgram(device, seed, kind)
    program.run(operations, plant_every=every)
    assert program.planted.total() == operations // every
    assert {planted for planted, _ in program.planted} == set(PLANTED)
    assert program.found == program.planted, f"seed {seed}"
