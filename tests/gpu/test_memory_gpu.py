"""Memory of each kind on a GPU: growth and trim while work is stuck, everything back at the end, clear errors."""

from __future__ import annotations

import gc
import threading

import pytest

import streampool as sp
from gpu import driver
from gpu.gpu_scene import KIB, MIB, GpuScene, overlap
from gpu.kernels import pattern

pytestmark = pytest.mark.gpu

# What the driver may take for itself meanwhile; the pools of these tests take several times that.
DRIVERS_OWN = 8 * MIB
PAIRED_CALLS = [
    ("mem_create", "mem_release"),
    ("mem_map", "mem_unmap"),
    ("address_reserve", "address_free"),
    ("mem_alloc", "mem_free"),
    ("mem_alloc_host", "mem_free_host"),
    ("mem_alloc_managed", "mem_free_managed"),
    ("event_create", "event_destroy"),
]


def busy(gpu: GpuScene) -> None:
    """Hold back a kernel that the pool at hand does not know of, for as long as the scene's gates are shut."""
    stream = gpu.stream()
    memory = gpu.pool(name="of the kernel").allocate_raw(4096, stream=stream)
    gpu.gate(stream)
    gpu.kernels.write_pattern(stream, memory, 4096, 0)


def test_growth_and_trim_do_not_wait_for_running_work(gpu: GpuScene) -> None:
    pool = gpu.pool()
    stream = gpu.stream(pool)
    busy(gpu)
    blocks = [pool.allocate(64 * MIB, stream=stream) for _ in range(4)]
    assert pool.reserve(512 * MIB) >= 512 * MIB
    for block in blocks:
        gpu.write_pattern(stream, block, 1)
        block.close(stream)
    stream.sync()
    result = pool.trim()
    gpu.assert_held()
    assert result["released"] >= 512 * MIB
    assert result["reserved"] == pool.stats().reserved == 0
    pool.close()
    gpu.assert_held()
    gpu.open()


def test_trim_leaves_what_a_kernel_may_still_touch(gpu: GpuScene) -> None:
    pool = gpu.pool()
    a, b = gpu.stream(pool), gpu.stream(pool)
    keeps, goes = pool.allocate(32 * MIB, stream=a), pool.allocate(32 * MIB, stream=b)
    result = pool.allocate(32 * MIB, stream=b)
    gpu.write_pattern(a, keeps, 5)
    gpu.gate(a)
    gpu.copy(a, result, keeps)
    keeps.close(a)
    goes.close(b)
    trimmed = pool.trim()
    gpu.assert_held()
    assert trimmed["pending"] == 32 * MIB
    assert trimmed["released"] == 32 * MIB
    gpu.open()
    assert gpu.read(result) == pattern(32 * MIB, 5)
    assert pool.trim()["released"] == 32 * MIB
    result.close(b)


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("segments", ["vmm", "malloc"])
@pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
def test_everything_goes_back_to_the_driver(gpu: GpuScene, kind: str, segments: str, mode: str) -> None:
    def use() -> None:
        pool = sp.Pool(gpu.device, kind=kind, mode=mode, segments=segments)
        a, b = gpu.device.create_stream(), gpu.raw_stream()
        pool.register_stream(a)
        blocks = []
        for i, size in enumerate([1, 4096, 100 * KIB, 3 * MIB, 40 * MIB] * 3):
            block = pool.allocate(size, stream=(a, b)[i % 2])
            gpu.write_pattern((a, b)[i % 2], block, i)
            blocks.append(block)
        blocks[0].record_stream(b)
        blocks[1].record_event(a.record())
        for i, block in enumerate(blocks):
            if i % 3:
                block.close((a, b)[i % 2])
        del block, blocks
        pool.check()
        assert pool.take_faults() == []
        pool.close()
        assert pool.stats().reserved == 0
        pool.forget_stream(a)
        a.close()

    use()  # what the driver keeps for itself it has taken after this
    gc.collect()
    gpu.device.sync()
    calls, free = gpu.pool().driver.calls(), driver.memory_free()
    use()
    gc.collect()
    gpu.device.sync()
    after = gpu.pool().driver.calls()
    for take, give in PAIRED_CALLS:
        assert after[take] - calls[take] == after[give] - calls[give], (take, give)
    if kind != "managed":  # whose device pages the driver keeps for the next managed memory
        assert driver.memory_free() >= free - DRIVERS_OWN


def test_a_pool_that_is_dropped_gives_its_memory_back_too(gpu: GpuScene) -> None:
    stream = gpu.stream()
    for _ in range(2):
        before = driver.memory_free()
        pool = sp.Pool(gpu.device)
        block = pool.allocate(64 * MIB, stream=stream)
        gpu.write_pattern(stream, block, 1)
        stream.sync()
        del block, pool
        gc.collect()
    assert driver.memory_free() >= before - DRIVERS_OWN


def test_buffers_outlive_their_pool(gpu: GpuScene) -> None:
    pool = gpu.pool()
    stream = gpu.stream(pool)
    block = pool.allocate(MIB, stream=stream)
    pool.close()
    with pytest.raises(sp.PoolClosedError):
        pool.allocate(1, stream=stream)
    gpu.write_pattern(stream, block, 9)
    stream.sync()
    assert gpu.read(block) == pattern(MIB, 9)
    block.close(stream)
    assert pool.stats().reserved == 0


# -- memory that the host can touch (R2) ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4096, 256 * KIB])
@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_host_visible_memory_is_not_handed_out_before_its_work_is_done(gpu: GpuScene, kind: str, size: int) -> None:
    pool = gpu.pool(kind=kind)
    stream = gpu.stream(pool)
    pool.allocate(size, stream=stream).close(stream)  # the driver's memory is there before anything is stuck
    stream.sync()
    block = pool.allocate(size, stream=stream)
    address = block.handle
    gpu.gate(stream)
    gpu.write_pattern(stream, block, 1)
    block.close(stream)
    for _ in range(3):
        other = pool.allocate(size, stream=stream)
        assert not overlap(other.handle, size, address, size), "the host could write it while a kernel does"
        other.close(stream)
    gpu.assert_held()
    gpu.open()
    reserved = pool.stats().reserved
    blocks = []
    while not any(overlap(block.handle, size, address, size) for block in blocks):
        blocks.append(pool.allocate(size, stream=stream))
        assert pool.stats().reserved == reserved, "its bytes are not used again"


@pytest.mark.parametrize("how", ["call", "pool"])
@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_who_touches_it_in_stream_order_only_gets_it_back_at_once(gpu: GpuScene, kind: str, how: str) -> None:
    size = 3 * MIB // 2
    pool = gpu.pool(kind=kind, limit=2 * MIB, stream_ordered=how == "pool")
    stream = gpu.stream(pool)
    ordered = True if how == "call" else None
    block = pool.allocate(size, stream=stream, stream_ordered=ordered)
    address = block.handle
    gpu.gate(stream)
    gpu.write_pattern(stream, block, 1)
    block.close(stream)
    again = pool.allocate(size, stream=stream, stream_ordered=ordered)
    gpu.assert_held()
    assert again.handle == address
    gpu.open()


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_host_and_kernels_see_the_same_bytes(gpu: GpuScene, kind: str) -> None:
    pool = gpu.pool(kind=kind)
    stream = gpu.stream(pool)
    block, copy = pool.allocate(100_000, stream=stream), pool.allocate(100_000, stream=stream)
    gpu.write_pattern(stream, block, 11)
    stream.sync()
    view = block.numpy()
    assert view.tobytes() == pattern(100_000, 11)
    view[:] = 42
    gpu.copy(stream, copy, block)
    stream.sync()
    assert memoryview(copy) == bytes([42]) * 100_000
    assert (block.is_host_accessible, block.is_device_accessible) == (True, True)
    del view
    block.close(stream)
    copy.close(stream)


def test_device_memory_is_copied_filled_and_not_viewed(gpu: GpuScene) -> None:
    pool, pinned = gpu.pool(), gpu.pool(kind="pinned")
    stream = gpu.stream(pool)
    block, back = pool.allocate(10_000, stream=stream), pinned.allocate(10_000, stream=stream)
    block.copy_from(pattern(10_000, 3), stream=stream)
    block.copy_to(back, stream=stream)
    stream.sync()
    assert memoryview(back) == pattern(10_000, 3)
    block.fill(7, stream=stream)
    host = bytearray(10_000)
    block.copy_to(host, stream=stream)
    assert host == bytes([7]) * 10_000
    assert not block.is_host_accessible
    with pytest.raises(BufferError, match="cannot be viewed from the host"):
        memoryview(block)
    with pytest.raises(BufferError):
        block.numpy()


def test_blocks_of_no_bytes_and_odd_alignments(gpu: GpuScene) -> None:
    pool = gpu.pool()
    stream = gpu.stream(pool)
    nothing = [pool.allocate(0, stream=stream) for _ in range(3)]
    assert len({block.handle for block in nothing}) == 3
    for alignment in (1, 256, 512, 4096, 64 * KIB, 2 * MIB):
        for size in (1, 5000, 3 * MIB):
            block = pool.allocate(size, stream=stream, alignment=alignment)
            assert block.handle % max(256, alignment) == 0
            gpu.write_pattern(stream, block, 1)
            stream.sync()
            assert gpu.read(block) == pattern(size, 1)
    assert pool.audit() == ""


# -- no memory ------------------------------------------------------------------------------------------------------


def test_a_request_above_the_limit_says_so(gpu: GpuScene) -> None:
    pool = gpu.pool(limit="8MiB")
    stream = gpu.stream(pool)
    held = pool.allocate(6 * MIB, stream=stream)
    with pytest.raises(sp.OutOfMemoryError) as caught:
        pool.allocate(4 * MIB, stream=stream)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert error.fields["reason"] == "limit"
    assert (error.fields["request"], error.fields["limit"]) == (4 * MIB, 8 * MIB)
    assert error.fields["device"] == "cuda:0"
    assert error.fields["in_use"] == 6 * MIB
    assert error.fields["device_total"] >= error.fields["device_free"] > 0
    held.close(stream)
    pool.allocate(4 * MIB, stream=stream).close(stream)


@pytest.mark.parametrize("segments", ["vmm", "malloc"])
def test_a_request_above_the_device_is_the_drivers_refusal_and_the_pool_lives_on(gpu: GpuScene, segments: str) -> None:
    pool = gpu.pool(segments=segments)
    stream = gpu.stream(pool)
    _, total = pool.driver.memory_info()
    free = driver.memory_free()
    for request in (2 * total, 1 << 50, 1 << 63):
        with pytest.raises(sp.OutOfMemoryError) as caught:
            pool.allocate(request, stream=stream)
        assert caught.value.fields["reason"] == "driver"
        assert caught.value.fields["driver_error"]
        assert caught.value.fields["device_total"] == total
    assert pool.stats().reserved == 0
    assert driver.memory_free() >= free - DRIVERS_OWN
    with pool.allocate(MIB, stream=stream) as block:
        gpu.write_pattern(stream, block, 2)
        stream.sync()
        assert gpu.read(block) == pattern(MIB, 2)


def test_threads_on_streams_of_their_own_and_on_one_get_bytes_of_their_own(gpu: GpuScene) -> None:
    pool = gpu.pool()
    shared = gpu.stream(pool)
    streams = [gpu.stream(pool) for _ in range(4)]
    problems: list[str] = []

    def work(seed: int) -> None:
        gpu.device.set_current()
        for stream in (streams[seed], shared):
            for i in range(40):
                size = (256, 5000, 70_000, 2 * MIB)[i % 4]
                block = pool.allocate(size, stream=stream)
                gpu.write_pattern(stream, block, seed)
                stream.sync()
                if gpu.read(block) != pattern(size, seed):
                    problems.append(f"thread {seed}, round {i}, {size} bytes")
                block.close(stream)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert pool.audit() == ""
