"""Random programs with everything on: a clean one is told of nothing, and of planted faults each is found, by seed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from random_faults import PLANTED, RandomProgram, make_pool

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
@pytest.mark.parametrize("operations", [3_000, pytest.param(200_000, marks=LONG)])
@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_clean_programs_of_several_threads_on_one_pool_are_told_of_nothing(operations: int, kind: str) -> None:
    sp.sim.reset()
    sp.sim.configure(scheduler="threads", memory="8GiB")
    device = sp.Device("sim:0")
    assert isinstance(device, sp.sim.Device)
    pool = make_pool(device, kind, 0)
    programs = [RandomProgram(device, seed, kind, pool) for seed in range(4)]
    errors: list[BaseException] = []

    def work(program: RandomProgram) -> None:
        try:
            program.run(operations)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    sp.sim.settle()
    pool.check()
    assert pool.audit() == ""
    pool.close()
    assert [program.found for program in programs] == [{}] * 4
    assert pool.take_faults() == []
    assert device.races() == []
    assert pool.debug_totals()["blocks_freed"] > operations
    sp.sim.reset()


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
