"""Kernels that write where they must not: each write is found, to the byte, with the lines that own the block."""

from __future__ import annotations

from typing import Any

import pytest

import streampool as sp
from gpu.gpu_scene import KIB, MIB, GpuScene, line_of
from streampool.faults import Fault, FaultKind

pytestmark = pytest.mark.gpu

SIZES = [1, 255, 256, 257, 1013, 4096, 4097, 64 * KIB, 3 * MIB]
KINDS = ["device", "pinned", "managed"]
WRONG = 0  # no byte of the pattern is 0


@pytest.fixture(params=KINDS)
def pool(gpu: GpuScene, request: pytest.FixtureRequest) -> sp.Pool:
    return gpu.pool(kind=request.param, mode="debug")


def the_fault(pool: sp.Pool) -> Fault:
    """Check, and give the only fault that there may be."""
    result = pool.check()
    assert result.not_checked == []
    found = pool.faults()
    assert [str(fault.kind) for fault in found] != []
    (fault,) = found
    assert result.faults == 1
    assert (fault.pool, fault.device) == ("default", "cuda:0")
    return fault


def assert_one_byte(fault: Fault, kind: FaultKind, at: int) -> None:
    assert fault.kind is kind
    assert (fault.address, fault.last, fault.bad_bytes) == (at, at, 1)
    assert fault.found[at - fault.shown_from] == WRONG
    assert fault.expected[at - fault.shown_from] != WRONG


def assert_block(fault: Fault, address: int, size: int) -> None:
    assert fault.block is not None
    assert (fault.block.address, fault.block.size) == (address, size)


def assert_lines(fault: Fault, *, allocated: int, freed: int | None) -> None:
    """Both stacks begin at the lines of this file that allocated and freed the block."""
    assert fault.block is not None
    top = fault.block.allocated_at[0]
    assert (top.file, top.line) == (__file__, allocated)
    if freed is None:
        assert fault.block.freed_at == ()
        return
    top = fault.block.freed_at[0]
    assert (top.file, top.line) == (__file__, freed)


@pytest.mark.parametrize("size", SIZES)
def test_one_byte_past_a_block_is_found_after_its_free(gpu: GpuScene, pool: sp.Pool, size: int) -> None:
    stream = gpu.stream(pool)
    block = pool.allocate(size, stream=stream)  # past: allocated
    address = block.handle
    gpu.write_pattern(stream, block, 7)
    gpu.kernels.write_byte(stream, address + size, WRONG)
    block.close(stream)  # past: freed
    fault = the_fault(pool)
    here = test_one_byte_past_a_block_is_found_after_its_free
    assert_one_byte(fault, FaultKind.OVERRUN, address + size)
    assert_block(fault, address, size)
    assert_lines(fault, allocated=line_of(here, "past: allocated"), freed=line_of(here, "past: freed"))


@pytest.mark.parametrize("size", SIZES)
def test_one_byte_before_a_block_is_found_after_its_free(gpu: GpuScene, pool: sp.Pool, size: int) -> None:
    stream = gpu.stream(pool)
    block = pool.allocate(size, stream=stream)  # before: allocated
    address = block.handle
    gpu.write_pattern(stream, block, 7)
    gpu.kernels.write_byte(stream, address - 1, WRONG)
    block.close(stream)  # before: freed
    fault = the_fault(pool)
    here = test_one_byte_before_a_block_is_found_after_its_free
    assert_one_byte(fault, FaultKind.UNDERRUN, address - 1)
    assert_block(fault, address, size)
    assert_lines(fault, allocated=line_of(here, "before: allocated"), freed=line_of(here, "before: freed"))


@pytest.mark.parametrize("size", SIZES)
def test_a_byte_written_into_a_freed_block_is_found(gpu: GpuScene, pool: sp.Pool, size: int) -> None:
    stream = gpu.stream(pool)
    here = test_a_byte_written_into_a_freed_block_is_found
    for offset in sorted({0, size // 2, size - 1}):
        block = pool.allocate(size, stream=stream)  # into: allocated
        address = block.handle
        gpu.write_pattern(stream, block, 7)
        block.close(stream)  # into: freed
        pool.check()  # from here on the freed block holds the pattern
        gpu.kernels.write_byte(stream, address + offset, WRONG)
        stream.sync()
        fault = the_fault(pool)
        assert_one_byte(fault, FaultKind.WRITE_AFTER_FREE, address + offset)
        assert_block(fault, address, size)
        assert_lines(fault, allocated=line_of(here, "into: allocated"), freed=line_of(here, "into: freed"))


@pytest.mark.parametrize("where", ["past", "before"])
def test_a_block_that_is_still_in_use_is_checked_too(gpu: GpuScene, pool: sp.Pool, where: str) -> None:
    stream = gpu.stream(pool)
    block = pool.allocate(1000, stream=stream)  # live: allocated
    at = block.handle + 1000 if where == "past" else block.handle - 1
    gpu.kernels.write_byte(stream, at, WRONG)
    stream.sync()
    fault = the_fault(pool)
    assert_one_byte(fault, FaultKind.OVERRUN if where == "past" else FaultKind.UNDERRUN, at)
    assert_block(fault, block.handle, 1000)
    allocated = line_of(test_a_block_that_is_still_in_use_is_checked_too, "live: allocated")
    assert_lines(fault, allocated=allocated, freed=None)
    block.close(stream)


def test_every_byte_of_a_block_may_be_written_and_nothing_is_reported(gpu: GpuScene, pool: sp.Pool) -> None:
    a, b = gpu.stream(pool), gpu.raw_stream()
    for seed, size in enumerate(SIZES * 3):
        stream = (a, b)[seed % 2]
        block = pool.allocate(size, stream=stream)
        gpu.write_pattern(stream, block, seed)
        block.close(stream)
    assert pool.check().not_checked == []
    assert pool.take_faults() == []


def test_what_a_check_cannot_see_yet_is_said(gpu: GpuScene) -> None:
    pool = gpu.pool(mode="debug")
    stream = gpu.stream(pool)
    block = pool.allocate(4096, stream=stream)
    address = block.handle
    gpu.gate(stream)
    gpu.kernels.write_byte(stream, address + 4096, WRONG)
    block.close(stream)
    result = pool.check(timeout=0.05)
    gpu.assert_held()
    assert result.faults == 0
    assert [facts["address"] for facts in result.not_checked] == [address]
    gpu.open()
    assert_one_byte(the_fault(pool), FaultKind.OVERRUN, address + 4096)


def test_a_fault_is_raised_where_that_was_asked_for(gpu: GpuScene) -> None:
    pool = gpu.pool(mode="debug", on_fault="raise")
    stream = gpu.stream(pool)
    block = pool.allocate(1000, stream=stream)
    gpu.kernels.write_byte(stream, block.handle + 1000, WRONG)
    block.close(stream)
    with pytest.raises(sp.FaultError, match="1 byte, 0 bytes behind the end of a 1000-byte block"):
        pool.check()


def test_misuse_at_the_call_is_refused_in_production_mode(gpu: GpuScene) -> None:
    pool, other = gpu.pool(), gpu.pool(name="other")
    stream = gpu.stream(pool)
    address: Any = pool.allocate_raw(4096, stream=stream)
    for pointer, error in ((address + 256, sp.InteriorFreeError), (0x1234500, sp.ForeignFreeError)):
        with pytest.raises(error):
            pool.free_raw(pointer, stream=stream)
    with pytest.raises(sp.WrongPoolError):
        other.free_raw(address, stream=stream)
    pool.free_raw(address, stream=stream)
    with pytest.raises(sp.DoubleFreeError):
        pool.free_raw(address, stream=stream)
    assert pool.stats().live_blocks == 0
