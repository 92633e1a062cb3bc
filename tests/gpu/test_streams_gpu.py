"""Streams and devices on a GPU are cuda.core's own, and a stream is known by its id however it is named."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import streampool as sp
from gpu import driver
from gpu.gpu_scene import GpuScene, overlap

pytestmark = pytest.mark.gpu


def stream_of(block: sp.Buffer) -> int:
    """Give the id of the stream that a block belongs to."""
    return int(block.facts()["stream"])


def test_devices_and_streams_are_cuda_core_objects(gpu: GpuScene) -> None:
    from cuda import core

    for name in (None, "auto", "cuda", "cuda:0", 0):
        assert type(sp.Device(name)) is core.Device
        assert sp.Device(name).device_id == 0
    assert type(sp.Device().create_stream()) is core.Stream
    for device in (sp.Device(), core.Device(0), "cuda:0", None):
        with sp.Pool(device) as pool:
            assert pool.driver.name == "cuda:0"
            assert not pool.driver.simulated
            pool.allocate(1).close()


def test_a_stream_is_the_same_however_it_is_named(gpu: GpuScene) -> None:
    from cuda import core

    pool = gpu.pool()
    stream = gpu.stream()
    expected = driver.stream_id(stream)
    for name in (stream, int(stream.handle), core.Stream.from_handle(int(stream.handle))):
        with pool.allocate(100, stream=name) as block:
            assert stream_of(block) == expected
    with sp.stream(stream), pool.allocate(100) as block:
        assert stream_of(block) == expected
        assert block.stream is None or block.stream is stream
    block = pool.allocate(100, stream=stream)
    assert block.stream is stream


def test_the_default_stream_is_cuda_cores(gpu: GpuScene) -> None:
    from cuda import core

    pool = gpu.pool()
    legacy = driver.stream_id(driver.LEGACY)
    for name in (None, 0, 1, core.LEGACY_DEFAULT_STREAM, gpu.device.default_stream):
        with pool.allocate(100, stream=name) as block:
            assert stream_of(block) == legacy
    with sp.stream(gpu.stream()), sp.stream(driver.LEGACY), pool.allocate(100) as block:
        assert stream_of(block) == legacy


def test_a_closed_stream_is_refused_before_any_driver_call(gpu: GpuScene) -> None:
    """NVIDIA/cuda-python#2627: a closed stream's handle reads 0, which is the legacy stream."""
    pool = gpu.pool()
    stream = gpu.device.create_stream()
    block = pool.allocate(4096, stream=stream)
    pointer = pool.allocate_raw(4096, stream=stream)
    stream.sync()
    stream.close()
    assert int(stream.handle) == 0
    before = pool.driver.calls()
    calls: list[Any] = [
        lambda: pool.allocate(4096, stream=stream),
        lambda: pool.allocate_raw(4096, stream=stream),
        lambda: pool.free_raw(pointer, stream=stream),
        lambda: pool.register_stream(stream),
        lambda: pool.record_stream_raw(pointer, stream),
        lambda: block.close(stream),
        lambda: block.record_stream(stream),
        lambda: block.fill(0, stream=stream),
    ]
    for call in calls:
        with pytest.raises(sp.StreamError, match="closed"):
            call()
    assert pool.driver.calls() == before
    assert not block.is_closed
    pool.free_raw(pointer, stream=gpu.stream())
    block.close(gpu.stream())
    assert pool.stats().live_blocks == 0


def test_a_closed_event_is_refused_before_any_driver_call(gpu: GpuScene) -> None:
    pool = gpu.pool()
    stream = gpu.stream(pool)
    block = pool.allocate(4096, stream=stream)
    event = stream.record()
    event.close()
    before = pool.driver.calls()
    with pytest.raises(sp.StreamError, match="closed"):
        block.record_event(event)
    assert pool.driver.calls() == before


def test_per_thread_default_streams_of_two_threads_are_two_streams(gpu: GpuScene) -> None:
    pool = gpu.pool()
    size = 1 << 20
    mine = pool.allocate(size, stream=driver.PER_THREAD)
    address = mine.handle
    gpu.gate(driver.PER_THREAD)
    gpu.write_pattern(driver.PER_THREAD, mine, 3)
    mine.close(driver.PER_THREAD)
    theirs: list[tuple[int, int]] = []

    def other() -> None:
        gpu.device.set_current()
        for _ in range(4):
            pointer = pool.allocate_raw(size, stream=driver.PER_THREAD)
            theirs.append((pointer, driver.stream_id(driver.PER_THREAD)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    gpu.assert_held()
    assert len(theirs) == 4
    for pointer, identity in theirs:
        assert identity != driver.stream_id(driver.PER_THREAD)
        assert not overlap(pointer, size, address, size)
    gpu.open()
    for pointer, _ in theirs:
        pool.free_raw(pointer, stream=driver.LEGACY)


def test_the_per_thread_default_stream_cannot_be_registered(gpu: GpuScene) -> None:
    pool = gpu.pool()
    with pytest.raises(sp.StreamError, match="per-thread"):
        pool.register_stream(driver.PER_THREAD)
    pool.allocate(1, stream=driver.PER_THREAD).close()


def test_a_destroyed_streams_handle_names_a_new_stream(gpu: GpuScene) -> None:
    pool = gpu.pool()
    first = gpu.raw_stream()
    identity = driver.stream_id(first)
    pointer = pool.allocate_raw(4096, stream=first)
    pool.free_raw(pointer, stream=first)
    gpu.destroy(first)
    again = [gpu.raw_stream() for _ in range(64)]
    assert first in again, "the driver gives handles out again at once, says what was tried on the device"
    block = pool.allocate(4096, stream=first)
    assert stream_of(block) == driver.stream_id(first) != identity
    assert not overlap(block.handle, 4096, pointer, 4096)
    block.close(first)


def test_a_thread_without_a_current_context_names_a_raw_handle(gpu: GpuScene) -> None:
    """The second call of a thread asks the driver without making our context current, which it must not need."""
    pool = gpu.pool()
    stream = gpu.raw_stream()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(8):
                pool.free_raw(pool.allocate_raw(4096, stream=stream), stream=stream)
        except BaseException as failure:  # carried to the test's thread
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert pool.stats().stream_lookups >= 16
    assert pool.stats().live_blocks == 0
