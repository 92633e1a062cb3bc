"""Public bug reports about guards and freed memory, in debug mode on a GPU. Numbers: the project's list of cases."""

from __future__ import annotations

import pytest

from gpu.gpu_scene import KIB, GpuScene
from gpu.kernels import pattern
from streampool.faults import FaultKind

pytestmark = pytest.mark.gpu

KINDS = pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
SIZE = 64 * KIB
NO_BYTE_OF_THE_PATTERN = 0


@KINDS
@pytest.mark.parametrize("declared", [True, False])
def test_case_1_in_debug_mode_a_declared_use_is_never_disturbed_and_an_undeclared_one_is_caught(
    gpu: GpuScene, kind: str, declared: bool
) -> None:
    """meta-pytorch/torchrec#4231, pytorch/pytorch#23729, #58384: a source freed under a copy on a side stream."""
    pool, plain = gpu.pool(kind, mode="debug", check_every=1), gpu.pool()
    s, t = gpu.stream(pool), gpu.stream(pool)
    plain.register_stream(t)
    seen = plain.allocate(SIZE, stream=t)
    block = pool.allocate(SIZE, stream=s)
    address = block.handle
    gpu.write_pattern(s, block, 7)
    gpu.order(t, s)
    gpu.gate(t)
    gpu.kernels.copy(t, seen.handle, address, SIZE)
    gpu.kernels.write_byte(t, address, NO_BYTE_OF_THE_PATTERN)
    if declared:
        block.record_stream(t)
    block.close(s)
    s.sync()
    result = pool.check(timeout=0.05)
    gpu.assert_held()
    assert result.faults == 0
    assert (address in [facts["address"] for facts in result.not_checked]) == declared
    gpu.open()
    pool.check()
    faults = pool.faults()
    if declared:
        assert gpu.read(seen) == pattern(SIZE, 7), "the debugger wrote into a block that was still used"
        assert faults == []
        return
    (fault,) = faults
    assert fault.kind is FaultKind.WRITE_AFTER_FREE
    assert (fault.address, fault.last) == (address, address)
    assert fault.block is not None
    assert fault.block.freed_at[0].file == __file__


@KINDS
@pytest.mark.parametrize("guard", [0, 1, 3, 4, 16, 255])
@pytest.mark.parametrize("size", [4, 1000])
def test_case_66_every_configured_guard_byte_and_all_slack_is_checked_by_bytes(
    gpu: GpuScene, kind: str, guard: int, size: int
) -> None:
    """flashinfer-ai/flashinfer#5344, VulkanMemoryAllocator#69: margins that check nothing, NaN that equals nothing."""
    pool = gpu.pool(kind, mode="debug", guard_bytes=guard)
    stream = gpu.stream(pool)
    block = pool.allocate(size, stream=stream)
    facts = block.facts()
    first, end = facts["begin"], facts["begin"] + facts["reserved"]
    address = block.handle
    behind = {address + size, address + size + max(0, guard - 1), end - 1}
    for at in sorted(behind | {address - 1, address - guard, first}):
        if not first <= at < end or address <= at < address + size:
            continue
        gpu.kernels.write_byte(stream, at, NO_BYTE_OF_THE_PATTERN)
        stream.sync()
        assert pool.check().faults == 1
        (fault,) = pool.faults()
        assert (fault.address, fault.last) == (at, at)
        assert fault.kind is (FaultKind.UNDERRUN if at < address else FaultKind.OVERRUN)
        assert pool.check().faults == 0
    block.close(stream)


@KINDS
def test_case_66_a_body_full_of_nan_is_no_fault(gpu: GpuScene, kind: str) -> None:
    """flashinfer-ai/flashinfer#3978: NaN in the user's own data gave false alarms."""
    pool = gpu.pool(kind, mode="debug")
    stream = gpu.stream(pool)
    block = pool.allocate(SIZE, stream=stream)
    block.fill(0xFF, stream=stream)  # NaN in every floating-point type
    stream.sync()
    assert pool.check().faults == 0
    block.close(stream)
    assert pool.check().not_checked == []
    assert pool.take_faults() == []
