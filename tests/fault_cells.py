"""Plants a cell of the fault matrix on any machine, and holds what is reported to what was planted."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import pytest
from fault_matrix import MIB, Cell, Size
from trampling import LIVE, records, trample

import streampool as sp
from streampool.faults import Fault, FaultKind, Frame
from streampool.leaks import Leak, LeakClass

NO_BYTE_OF_THE_PATTERN = 0


class Machine(Protocol):
    """What a cell needs of a simulated device or a GPU."""

    def pool(self, kind: str = "device", mode: str = "production", **options: Any) -> sp.Pool: ...
    def stream(self, pool: sp.Pool | None = None) -> Any: ...

    def poke(self, stream: Any, address: int, count: int) -> None:
        """Write bytes that are not the pattern's by work on a stream, and wait for it."""


# -- the program: its functions are what the stacks must name ---------------------------------------------------------
def take(pool: sp.Pool, size: Size, stream: Any) -> sp.Buffer:
    return pool.allocate(size.bytes, stream=stream, alignment=size.alignment)


def take_raw(pool: sp.Pool, size: Size, stream: Any) -> int:
    return pool.allocate_raw(size.bytes, stream=stream, alignment=size.alignment)


def give(block: sp.Buffer, stream: Any) -> None:
    block.close(stream)


def give_raw(pool: sp.Pool, pointer: int, stream: Any) -> None:
    pool.free_raw(pointer, stream=stream)


def misuse(pool: sp.Pool, pointer: int, stream: Any, size: int | None = None) -> None:
    if size is None:
        pool.free_raw(pointer, stream=stream)
    else:
        pool.free_raw_sized(pointer, size, stream=stream)


def names(stack: tuple[Frame, ...]) -> list[str]:
    return [frame.function.rpartition(".")[2] for frame in stack[:2]]


# -- what was found ---------------------------------------------------------------------------------------------------
def the_fault(pool: sp.Pool) -> Fault:
    """Give the only fault there is, now and after two more looks."""
    result = pool.check()
    assert result.not_checked == []
    (fault,) = pool.faults()
    assert fault.count == 1
    for look in (pool.check, pool.close):
        look()
        assert pool.faults() == []
    return fault


def assert_bytes(fault: Fault, first: int, last: int) -> None:
    assert (fault.address, fault.last, fault.bad_bytes) == (first, last, last - first + 1)
    for at in (first, last):
        assert fault.found[at - fault.shown_from] == NO_BYTE_OF_THE_PATTERN
        assert fault.expected[at - fault.shown_from] != NO_BYTE_OF_THE_PATTERN


def assert_block(fault: Fault, address: int, size: Size) -> None:
    assert fault.block is not None
    assert (fault.block.address, fault.block.size) == (address, size.bytes)


def take_raw_at(pool: sp.Pool, size: Size, stream: Any) -> tuple[int, list[int]]:
    """Take a raw block, at the end of a slab where the cell says so; gives it, and others that had to be taken."""
    if not size.edge:
        return take_raw(pool, size, stream), []
    pointers = [take_raw(pool, size, stream) for _ in range(_TO_AN_EDGE)]
    at = _edge({block["begin"]: block["address"] for block in pool.live_blocks()}, pool, last=True)
    return at, [pointer for pointer in pointers if pointer != at]


def take_at(pool: sp.Pool, size: Size, stream: Any, *, last: bool = True) -> tuple[sp.Buffer, list[sp.Buffer]]:
    """Take a block, the last or the first one of a slab where the cell says so; gives it, and the others."""
    if not size.edge:
        return take(pool, size, stream), []
    blocks = {block.handle: block for block in (take(pool, size, stream) for _ in range(_TO_AN_EDGE))}
    at = _edge({block.facts()["begin"]: address for address, block in blocks.items()}, pool, last=last)
    return blocks[at], [block for address, block in blocks.items() if address != at]


_TO_AN_EDGE = 64


def _edge(address_of: dict[int, int], pool: sp.Pool, *, last: bool) -> int:
    """Give the address of the block that ends, or starts, a run of slots side by side."""
    step = pool.live_blocks()[0]["reserved"]
    for begin, address in address_of.items():
        beyond, inside = (begin + step, begin - step) if last else (begin - step, begin + step)
        if beyond not in address_of and inside in address_of:
            return address
    raise AssertionError(f"no slab has an edge among {_TO_AN_EDGE} blocks")


# -- damage -----------------------------------------------------------------------------------------------------------
def outside(machine: Machine, cell: Cell) -> None:
    behind = cell.row == "overrun"
    pool = machine.pool(kind=cell.kind, mode="debug")
    stream = machine.stream(pool)
    block, others = take_at(pool, cell.size, stream, last=behind)
    facts = block.facts()
    address = block.handle
    first = address + cell.size.bytes if behind else address - 2
    if cell.size.edge:
        first = facts["begin"] + facts["reserved"] - 2 if behind else facts["begin"]
    machine.poke(stream, first, 2)
    give(block, stream)
    for other in others:
        give(other, stream)
    fault = the_fault(pool)
    assert fault.kind is (FaultKind.OVERRUN if behind else FaultKind.UNDERRUN)
    assert_bytes(fault, first, first + 1)
    assert_block(fault, address, cell.size)
    assert fault.block is not None
    assert names(fault.block.allocated_at)[0] == "take"
    assert names(fault.block.freed_at) == ["give", "outside"]


def write_after_free(machine: Machine, cell: Cell) -> None:
    pool = machine.pool(kind=cell.kind, mode="debug")
    stream = machine.stream(pool)
    block, others = take_at(pool, cell.size, stream)
    address = block.handle
    machine.poke(stream, address, min(64, cell.size.bytes))  # allowed
    give(block, stream)
    assert pool.check().faults == 0  # from here on the freed block holds the pattern
    count = min(2, cell.size.bytes)
    first = address + (cell.size.bytes - count) // 2
    machine.poke(stream, first, count)
    for other in others:
        give(other, stream)
    fault = the_fault(pool)
    assert fault.kind is FaultKind.WRITE_AFTER_FREE
    assert_bytes(fault, first, first + count - 1)
    assert_block(fault, address, cell.size)
    assert fault.block is not None
    assert names(fault.block.allocated_at)[0] == "take"
    assert names(fault.block.freed_at) == ["give", "write_after_free"]


# -- misuse at the call -----------------------------------------------------------------------------------------------
def wrong_free(machine: Machine, cell: Cell) -> None:
    pool = machine.pool(kind=cell.kind, mode="debug")
    other = machine.pool(kind=cell.kind, mode="debug", name="other")
    stream = machine.stream(pool)
    other.register_stream(stream)
    pointer, others = take_raw_at(pool, cell.size, stream)
    wrong, error, where, size = pointer, sp.InvalidFreeError, pool, None
    match cell.row:
        case "double_free":
            give_raw(pool, pointer, stream)
            error = sp.DoubleFreeError
        case "foreign_free":
            elsewhere = ctypes.create_string_buffer(cell.size.bytes)
            wrong, error = ctypes.addressof(elsewhere), sp.ForeignFreeError
        case "interior_free":
            wrong, error = pointer + max(1, cell.size.bytes // 2), sp.InteriorFreeError
        case "wrong_pool_free":
            where, error = other, sp.WrongPoolError
        case "size_mismatch":
            size, error = cell.size.bytes + 1, sp.SizeMismatchError
    with pytest.raises(error, match=rf"\(docs/faults/{cell.row}\.md\)$"):
        misuse(where, wrong, stream, size)
    if cell.row != "double_free":  # nothing was changed
        give_raw(pool, pointer, stream)
    for one in others:
        give_raw(pool, one, stream)
    fault = the_fault(where)
    assert pool.faults() == []
    assert fault.kind == cell.row
    assert (fault.address, fault.last, fault.bad_bytes) == (wrong, wrong, 0)
    assert names(fault.at) == ["misuse", "wrong_free"]
    if cell.row == "foreign_free":
        assert fault.block is None
        return
    assert_block(fault, pointer, cell.size)
    assert fault.block is not None
    assert names(fault.block.allocated_at)[0] == "take_raw"
    freed = ["give_raw", "wrong_free"] if cell.row == "double_free" else []
    assert names(fault.block.freed_at) == freed


def trampled_record(machine: Machine, cell: Cell) -> None:
    pool = machine.pool(kind=cell.kind, mode="debug")
    stream = machine.stream(pool)
    before = set(records(LIVE, cell.size.bytes))
    pointer = take_raw(pool, cell.size, stream)
    (record,) = set(records(LIVE, cell.size.bytes)) - before
    whole = trample(record, b"\xee" * 8)
    with pytest.raises(sp.TrampledRecordError, match=r"\(docs/faults/trampled_record\.md\)$"):
        misuse(pool, pointer, stream)
    trample(record, whole)
    give_raw(pool, pointer, stream)
    fault = the_fault(pool)
    assert fault.kind is FaultKind.TRAMPLED_RECORD
    assert (fault.address, fault.block) == (pointer, None)
    assert names(fault.at) == ["misuse", "trampled_record"]


# -- leaks ------------------------------------------------------------------------------------------------------------
def the_leak(pool: sp.Pool) -> Leak:
    (leak,) = pool.leaks()
    (again,) = pool.leaks()
    assert again == leak
    return leak


def lost(machine: Machine, cell: Cell) -> None:
    pool = machine.pool(kind=cell.kind, mode="debug")
    stream = machine.stream(pool)
    pointer, others = take_raw_at(pool, cell.size, stream)
    for one in others:
        give_raw(pool, one, stream)
    leak = the_leak(pool)
    assert (leak.leak_class, leak.blocks, leak.bytes) == (LeakClass.LOST, 1, cell.size.bytes)
    assert names(leak.allocated_at)[0] == "take_raw"
    give_raw(pool, pointer, stream)
    assert len(pool.leaks()) == 0
    assert pool.faults() == []


def held(machine: Machine, cell: Cell) -> None:
    pool = machine.pool(kind=cell.kind, mode="debug")
    stream = machine.stream(pool)
    block, others = take_at(pool, cell.size, stream)
    for one in others:
        give(one, stream)
    others.clear()
    leak = the_leak(pool)
    assert (leak.leak_class, leak.blocks, leak.bytes) == (LeakClass.HELD, 1, cell.size.bytes)
    assert names(leak.allocated_at)[0] == "take"
    give(block, stream)
    assert len(pool.leaks()) == 0
    assert pool.faults() == []


def growing(machine: Machine, cell: Cell) -> None:
    pool = machine.pool(kind=cell.kind, mode="debug", quarantine_bytes=0)
    stream = machine.stream(pool)
    each = MIB // 4 // cell.size.bytes + 1
    kept: list[sp.Buffer] = []
    for _ in range(6):
        kept += [take(pool, cell.size, stream) for _ in range(each)]
        pool.check()
    leak = the_leak(pool)
    assert (leak.leak_class, leak.blocks) == (LeakClass.GROWING, 6 * each)
    assert names(leak.allocated_at)[0] == "take"
    for block in kept:
        give(block, stream)
    assert len(pool.leaks()) == 0
    assert pool.faults() == []


PLANT: dict[str, Callable[[Machine, Cell], None]] = {
    "overrun": outside,
    "underrun": outside,
    "write_after_free": write_after_free,
    "double_free": wrong_free,
    "foreign_free": wrong_free,
    "interior_free": wrong_free,
    "wrong_pool_free": wrong_free,
    "trampled_record": trampled_record,
    "size_mismatch": wrong_free,
    "lost": lost,
    "growing": growing,
    "held": held,
}
"""Rows that any machine can have planted in this process."""
