"""The three sources of segments on a GPU: real bytes through each, and memory that moves while kernels run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import streampool as sp
from gpu import driver
from gpu.gpu_scene import KIB, MIB, GpuScene
from gpu.kernels import pattern
from streampool.replay import replay

pytestmark = pytest.mark.gpu

TRACES = Path(__file__).parent.parent.parent / "examples" / "traces"
SOURCES = ["vmm", "malloc", "driver"]
SLACK = 8 * MIB  # what the driver may take for itself meanwhile


def spin(gpu: GpuScene, pool: sp.Pool, seconds: float) -> Any:
    """Start a kernel that runs for so long, and give its stream."""
    stream = gpu.stream(pool)
    cell = pool.allocate(4 * KIB, stream=stream)
    cell.fill(0, stream=stream)
    gpu.kernels.count_wrong(stream, cell.handle, 256, 0, cell.handle + 1024, int(seconds * 1e9))
    return stream


def is_running(stream: Any) -> bool:
    """Whether a stream's work is not done."""
    from cuda.bindings import driver as cuda

    return int(cuda.cuStreamQuery(driver.handle_of(stream))[0]) == int(cuda.CUresult.CUDA_ERROR_NOT_READY)


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("source", SOURCES)
def test_bytes_go_through_memory_of_each_source(gpu: GpuScene, source: str, mode: str) -> None:
    pool = gpu.pool(mode=mode, segments=source)
    assert pool.stats().source == source
    a, b = gpu.stream(pool), gpu.stream(pool)
    sizes = [300, 4 * KIB, 100 * KIB, 3 * MIB, 40 * MIB, 70 * MIB]
    for round_ in range(3):
        blocks = [pool.allocate(size, stream=a) for size in sizes]
        copies = [pool.allocate(size, stream=b) for size in sizes]
        for i, block in enumerate(blocks):
            gpu.write_pattern(a, block, i + round_)
        gpu.order(b, a)
        for block, copy in zip(blocks, copies, strict=True):
            gpu.copy(b, copy, block)
            block.record_stream(b)
            block.close(a)
        b.sync()
        for i, copy in enumerate(copies):
            assert gpu.read(copy) == pattern(copy.size, i + round_)
            copy.close(b)
    assert pool.check().faults == 0
    assert pool.audit() == ""
    gpu.device.sync()
    pool.trim()
    assert pool.stats().reserved == 0


@pytest.mark.parametrize("source", SOURCES)
def test_the_driver_has_everything_back_from_each_source(gpu: GpuScene, source: str) -> None:
    def use() -> None:
        pool = sp.Pool(gpu.device, segments=source)
        stream = gpu.stream(pool)
        for size in (3 * MIB, 200 * MIB, 64 * MIB):
            block = pool.allocate(size, stream=stream)
            gpu.write_pattern(stream, block, 1)
            block.close(stream)
        stream.sync()
        pool.trim()
        assert pool.stats().reserved == 0
        pool.forget_stream(stream)
        pool.close()

    use()
    gpu.device.sync()
    before = driver.memory_free()
    use()
    gpu.device.sync()
    assert abs(driver.memory_free() - before) <= SLACK


def test_a_block_is_stitched_out_of_free_pieces_while_a_kernel_runs(gpu: GpuScene) -> None:
    pool = gpu.pool(limit=15 * 32 * MIB)
    stream = gpu.stream(pool)
    # Every second one is freed: nothing fits that is larger than one.
    teeth = [pool.allocate(32 * MIB, stream=stream) for _ in range(15)]
    for i, tooth in enumerate(teeth):
        gpu.write_pattern(stream, tooth, i)
    stream.sync()
    for tooth in teeth[1::2]:
        tooth.close(stream)
    spinning = spin(gpu, sp.Pool(gpu.device, name="of the kernel"), 2.0)
    calls = pool.driver.calls()
    large = pool.allocate(7 * 32 * MIB, stream=stream)
    gpu.write_pattern(stream, large, 99)
    stream.sync()
    assert is_running(spinning), "growth waited for a kernel"
    after = pool.driver.calls()
    assert pool.stats().handles_moved > 0
    assert after["mem_create"] == calls["mem_create"]
    assert pool.stats().reserved == 15 * 32 * MIB
    assert gpu.read(large) == pattern(large.size, 99)
    for i, tooth in list(enumerate(teeth))[::2]:
        assert gpu.read(tooth) == pattern(tooth.size, i)
    spinning.sync()
    assert pool.audit() == ""
    large.close(stream)
    for tooth in teeth[::2]:
        tooth.close(stream)


@pytest.mark.parametrize("keep", [0, 100 * MIB, 333 * MIB])
def test_handles_go_back_from_the_middle_while_a_kernel_runs(gpu: GpuScene, keep: int) -> None:
    pool = gpu.pool()
    stream = gpu.stream(pool)
    low, middle, high = (pool.allocate(size * MIB, stream=stream) for size in (2, 1024, 2))
    for seed, block in enumerate((low, middle, high)):
        gpu.write_pattern(stream, block, seed)
    stream.sync()
    middle.close(stream)
    spinning = spin(gpu, sp.Pool(gpu.device, name="of the kernel"), 2.0)
    before = driver.memory_free()
    trimmed = pool.trim(keep)
    assert is_running(spinning), "giving back waited for a kernel"
    assert abs(driver.memory_free() - before - trimmed["released"]) <= SLACK
    wanted = max(keep, 4 * MIB)
    assert wanted <= trimmed["reserved"] < wanted + 2 * MIB
    again = pool.allocate(512 * MIB, stream=stream)
    gpu.write_pattern(stream, again, 7)
    stream.sync()
    assert is_running(spinning), "growth waited for a kernel"
    for seed, block in ((0, low), (2, high), (7, again)):
        assert gpu.read(block) == pattern(block.size, seed)
    spinning.sync()
    assert pool.audit() == ""


def test_pieces_of_the_drivers_pool_come_and_go_while_a_kernel_runs(gpu: GpuScene) -> None:
    pool = gpu.pool(segments="driver", limit=400 * MIB)
    stream = gpu.stream(pool)
    held = pool.allocate(64 * MIB, stream=stream)
    gpu.write_pattern(stream, held, 3)
    stream.sync()
    spinning = spin(gpu, sp.Pool(gpu.device, name="of the kernel"), 2.0)
    for size in (100, 200, 300, 320):  # what is idle makes way for the next
        block = pool.allocate(size * MIB, stream=stream)
        gpu.write_pattern(stream, block, size % 251)
        stream.sync()
        assert is_running(spinning), "growth waited for a kernel"
        if size < 320:
            block.close(stream)
    spinning.sync()
    for owned, seed in ((held, 3), (block, 320 % 251)):
        assert gpu.read(owned) == pattern(owned.size, seed)
    block.close(stream)
    stream.sync()
    before = driver.memory_free()
    spinning = spin(gpu, sp.Pool(gpu.device, name="of the kernel"), 2.0)
    assert pool.trim()["reserved"] == 64 * MIB
    assert is_running(spinning), "trim waited for a kernel"
    assert driver.memory_free() - before >= 320 * MIB - SLACK
    assert pool.audit() == ""
    spinning.sync()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["resnet50_train", "gnn_train"])
def test_a_trace_replays_verified_from_each_source(gpu: GpuScene, name: str, source: str) -> None:
    result = replay(
        TRACES / f"{name}.csv.gz", "cuda:0", "production", verify=True, passes=1, options={"segments": source}
    )
    assert result.device == "cuda:0"
    assert result.is_clean, result.verdict


@pytest.mark.parametrize("name", ["resnet50_train", "gnn_train"])
def test_a_trace_completes_in_little_more_than_it_needs(gpu: GpuScene, name: str) -> None:
    trace = sp.traces.read_trace(TRACES / f"{name}.csv.gz")
    limit = int(trace.peak_live_bytes * 1.02)
    result = replay(trace, "cuda:0", "production", passes=1, options={"limit": limit})
    assert result.is_clean, result.verdict
    assert result.peak_reserved_bytes <= limit


def test_memory_is_made_with_what_the_device_says_it_can(gpu: GpuScene) -> None:
    can = sp.Pool(gpu.device).driver.capabilities()
    for options, able in (
        ({"export": "posix_fd"}, can["export_posix_fd"]),
        ({"rdma": True}, can["rdma"]),
        ({"peers": "all"}, True),
    ):
        if not able:
            with pytest.raises(sp.DriverError):
                gpu.pool(**options)
            continue
        pool = gpu.pool(**options)
        stream = gpu.stream(pool)
        block = pool.allocate(6 * MIB, stream=stream)
        gpu.write_pattern(stream, block, 11)
        stream.sync()
        assert gpu.read(block) == pattern(block.size, 11)
        block.close(stream)
    with pytest.raises(sp.DriverError, match="option 'peers'"):
        gpu.pool(peers="0")


@pytest.mark.parametrize("part", [0.001, "0.1%"])
def test_a_limit_is_a_part_of_the_gpus_memory(gpu: GpuScene, part: Any) -> None:
    pool = gpu.pool(limit=part)
    total = pool.driver.memory_info()[1]
    assert abs(pool.stats().limit - total * 0.001) <= total * 0.00005
    with pytest.raises(sp.OutOfMemoryError) as caught:
        pool.allocate(pool.stats().limit + MIB, stream=gpu.stream(pool))
    assert 0 <= caught.value.fields["missing"] - MIB < 512  # sizes are rounded to that


def test_growth_from_each_source_is_timed(gpu: GpuScene, record_property: Any) -> None:
    """What a growth and its way back cost, for the reader of the report: nothing is asserted about it."""
    for source in SOURCES:
        pool = gpu.pool(segments=source)
        stream = gpu.stream(pool)
        spent = []
        for _ in range(5):
            begin = time.perf_counter()
            pool.allocate(256 * MIB, stream=stream).close(stream)
            spent.append(time.perf_counter() - begin)
            stream.sync()
            pool.trim()
        print(f"{source}: 256 MiB in {min(spent) * 1e6:.0f} us at best")
        record_property(f"{source}_us", min(spent) * 1e6)
        assert pool.stats().reserved == 0
