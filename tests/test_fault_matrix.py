"""The fault matrix, planted by simulated work: each cell is reported once, as what it is, with its bytes and stacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fault_matrix
import pytest
from fault_cells import PLANT, names, take, take_at
from fault_matrix import CELLS, ON_GPU, ROWS, SIMULATED, Cell
from scene import Scene, scene

import streampool as sp
from streampool import session
from streampool.faults import FaultKind
from streampool.leaks import LeakClass


class Simulated(Scene):
    """A simulated machine that cells are planted on."""

    def poke(self, stream: Any, address: int, count: int) -> None:
        stream.launch(lambda out: out.fill(0), writes=[(address, count)])
        stream.sync()


@pytest.fixture
def machine() -> Iterator[Simulated]:
    with scene() as plain:
        yield Simulated(plain.device, plain.pools)


def test_the_matrix_has_every_kind_of_finding_and_its_page_is_up_to_date() -> None:
    kinds = {row.partition(" ")[0] for row in ROWS}
    assert kinds == {*map(str, FaultKind), *map(str, LeakClass)}
    assert len(CELLS) == len({str(cell) for cell in CELLS}) == len(ROWS) * 3 * 10
    assert all(cell.not_on_gpu for cell in CELLS if cell.not_simulated)
    assert {cell.row for cell in SIMULATED} == set(ROWS)
    assert set(ON_GPU) <= set(SIMULATED)
    assert fault_matrix.PAGE.read_text(encoding="utf-8") == fault_matrix.page()


@pytest.mark.parametrize("cell", [cell for cell in SIMULATED if cell.row in PLANT], ids=str)
def test_a_planted_fault_is_reported_once_with_its_kind_bytes_and_stacks(machine: Simulated, cell: Cell) -> None:
    PLANT[cell.row](machine, cell)
    machine.assert_no_race()


@pytest.mark.parametrize("cell", [cell for cell in SIMULATED if cell.row == "race"], ids=str)
def test_a_race_is_reported_once_with_both_places(machine: Simulated, cell: Cell) -> None:
    def first_use() -> None:
        one.launch(writes=[block], label="first")

    def second_use() -> None:
        two.launch(writes=[block], label="second")

    watching = session.begin()
    try:
        pool = machine.pool(kind=cell.kind, mode="debug")
        one, two = machine.stream(pool), machine.stream(pool)
        block, others = take_at(pool, cell.size, one)
        first_use()
        second_use()
        (findings,) = watching.finish()
    finally:
        session.end()
    (facts,) = findings.faults
    fault = sp.faults.Fault.from_dict(facts)
    assert fault.kind is FaultKind.RACE
    assert (fault.address, fault.last) == (block.handle, block.handle + cell.size.bytes - 1)
    assert fault.block is not None
    assert (fault.block.address, fault.block.size) == (block.handle, cell.size.bytes)
    assert names(fault.block.allocated_at)[0] == "take"
    assert names(fault.at)[0] == "second_use"
    assert names(fault.other_at)[0] == "first_use"
    assert "write by second on stream" in fault.note
    assert "that nothing orders" in fault.sentence
    machine.device.sync()
    for used in (block, *others):
        used.close(two)


@pytest.mark.parametrize("cell", [cell for cell in SIMULATED if cell.row.startswith("illegal_access")], ids=str)
def test_an_access_that_stops_the_device_names_the_planted_block_among_the_candidates(
    machine: Simulated, cell: Cell
) -> None:
    after_free = cell.row.endswith("after free")
    pool = machine.pool(kind=cell.kind, mode="debug", page_guards="all", check_every=1)
    stream, idle = machine.stream(pool), machine.stream(pool)
    drained = take(pool, cell.size, idle)
    block = take(pool, cell.size, stream)
    machine.poke(stream, block.handle, 1)
    facts = block.facts()
    assert pool.check().faults == 0
    right = facts["pages"] == "right"
    address = facts["begin"] + facts["reserved"] if right else facts["begin"] - 1
    if after_free:
        address = block.handle
        block.close(stream)
        pool.check()
        take(pool, cell.size, stream).close(stream)  # the stream is named again: work may come
    else:
        block.record_stream(stream)  # the pool is called for it, then it works
    stream.launch(writes=[(address, 1)])
    with pytest.raises(sp.DriverError):
        stream.sync()
    with pytest.raises(sp.DriverError):
        pool.check()
    (fault,) = pool.faults()
    assert fault.kind is FaultKind.ILLEGAL_ACCESS
    named = {candidate.block.serial: candidate.block for candidate in fault.candidates}
    assert facts["serial"] in named
    assert drained.facts()["serial"] not in named
    planted = named[facts["serial"]]
    assert (planted.address, planted.size) == (facts["address"], cell.size.bytes)
    assert names(planted.allocated_at)[0] == "take"
