"""Graph captures on a GPU: a graph has memory of its own, and nothing that the pool does ends a capture."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import streampool as sp
from gpu import driver
from gpu.gpu_scene import KIB, MIB, GpuScene, overlap
from gpu.kernels import pattern

pytestmark = pytest.mark.gpu


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(sp.CaptureError, match="captur"):
        call()


@pytest.mark.parametrize("mode", driver.MODES)
@pytest.mark.parametrize("kind", ["raw", "object", "lasting"])
def test_replays_find_their_data_whatever_happens_beside_them(gpu: GpuScene, kind: str, mode: str) -> None:
    pool = gpu.pool()
    stream: Any = gpu.raw_stream() if kind == "raw" else gpu.stream(pool if kind == "lasting" else None)
    beside = gpu.stream(pool)
    source, target = pool.allocate(3 * MIB, stream=stream), pool.allocate(3 * MIB, stream=stream)
    driver.sync_stream(stream)
    with pool.capturing(stream), driver.capture(stream, mode) as captured:
        temporary = pool.allocate(3 * MIB, stream=stream)
        large = pool.allocate_raw(64 * MIB, stream=stream)  # the pool grows
        gpu.copy(stream, temporary, source)
        gpu.copy(stream, target, temporary)
        where = temporary.handle
        temporary.close(stream)
        pool.free_raw(large, stream=stream)
        again = pool.allocate(3 * MIB, stream=stream)
        assert again.handle == where, "reused inside the capture"
        again.close(stream)
        if kind != "lasting":
            refused(lambda: pool.register_stream(stream))
    assert captured.is_valid
    for seed in range(1, 5):
        gpu.write_pattern(stream, source, seed)
        captured.launch(stream)
        assert gpu.read(target) == pattern(3 * MIB, seed)
        for size in (3 * MIB, 64 * MIB):
            other = pool.allocate(size, stream=beside)
            assert not overlap(other.handle, size, where, 3 * MIB)
            gpu.write_pattern(beside, other, 99)
            other.close(beside)
    source.close(stream)
    target.close(stream)
    assert pool.stats().pending >= 3 * MIB, "the graph's"
    pool.allocate(4096, stream=stream).close(stream)  # all is as before
    captured.destroy()


@pytest.mark.parametrize("mode", driver.MODES)
def test_a_graphs_memory_is_everybodys_once_the_graph_is_gone_and_its_launches_are_done(
    gpu: GpuScene, mode: str
) -> None:
    """The driver calls back when the last graph that holds the memory is destroyed, and not before its launches end."""
    pool = gpu.pool(limit=64 * MIB, wait_timeout=0.2)
    stream, other = gpu.stream(pool), gpu.stream(pool)
    with pool.capturing(stream), driver.capture(stream, mode) as captured:
        block = pool.allocate(40 * MIB, stream=stream)
        gpu.write_pattern(stream, block, 1)
        block.close(stream)
    captured.prepare(stream)
    with gpu.gate(stream):
        captured.queue(stream)  # behind the gate
        captured.destroy()
        with pytest.raises(sp.OutOfMemoryError):
            pool.allocate(40 * MIB, stream=other)
        gpu.assert_held()
    driver.sync_stream(stream)
    end = time.monotonic() + 10  # the driver calls back from a thread of its own
    while True:
        try:
            pool.allocate(40 * MIB, stream=other).close(other)
            break
        except sp.OutOfMemoryError:
            assert time.monotonic() < end


@pytest.mark.parametrize("mode", driver.MODES)
def test_an_undeclared_capture_of_a_stream_that_is_not_lasting_is_found(gpu: GpuScene, mode: str) -> None:
    pool = gpu.pool()
    stream = gpu.raw_stream()
    target = pool.allocate(4096, stream=stream)
    with driver.capture(stream, mode) as captured:
        gpu.write_pattern(stream, target, 3)
        pool.allocate(4096, stream=stream).close(stream)
        target.record_stream(stream)
    assert captured.is_valid
    captured.launch(stream)
    assert gpu.read(target) == pattern(4096, 3)
    target.close(stream)
    pool.allocate(4096, stream=stream).close(stream)  # all is as before
    captured.destroy()


@pytest.mark.parametrize("mode", driver.MODES)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
@pytest.mark.parametrize("pool_mode", ["production", "debug"])
def test_use_of_other_streams_leaves_a_capture_whole(gpu: GpuScene, declared: bool, mode: str, pool_mode: str) -> None:
    pool = gpu.pool(mode=pool_mode, fence_age=0)
    captures = gpu.stream(pool if declared else None)
    a, b, raw = gpu.stream(pool), gpu.stream(pool), gpu.raw_stream()
    target = pool.allocate(4096, stream=captures)
    stale = [pool.allocate(MIB, stream=a) for _ in range(2)]
    for block in stale:
        block.close(a)  # fences of before are polled during the capture

    def use() -> None:
        for size in (256, 64 * KIB, 3 * MIB, 40 * MIB):
            for stream in (a, b, raw, driver.LEGACY, driver.PER_THREAD):
                block = pool.allocate(size, stream=stream)
                block.record_stream(b)
                block.close(stream)
                pool.allocate(size, stream=stream).close()
        pool.reserve(pool.stats().reserved + 64 * MIB)
        pool.trim()
        if declared:  # a wait may make a context event, which ends a capture that nobody declared
            assert pool.check(timeout=0.2).faults == 0

    if declared:
        with pool.capturing(captures), driver.capture(captures, mode) as captured:
            gpu.write_pattern(captures, target, 4)
            use()
    else:
        with driver.capture(captures, mode) as captured:
            gpu.write_pattern(captures, target, 4)
            use()
    assert captured.is_valid
    captured.launch(captures)
    assert gpu.read(target) == pattern(4096, 4)
    assert pool.stats().fences_failed == 0
    captured.destroy()


def test_an_event_of_a_capture_is_refused(gpu: GpuScene) -> None:
    """Asking about such an event may end the capture: the driver leaves no other way to learn what the event is."""
    pool = gpu.pool()
    stream, other = gpu.raw_stream(), gpu.stream(pool)
    block = pool.allocate(4096, stream=other)
    event = gpu.device.create_event()
    handle = gpu.kernels._object(stream)
    with pool.capturing(stream), driver.capture(stream) as captured:
        gpu.write_pattern(stream, block, 1)
        handle.record(event)
        refused(lambda: block.record_event(event))
    captured.destroy()
    block.close(other)


def test_no_context_event_is_made_while_a_capture_is_declared(gpu: GpuScene) -> None:
    pool = gpu.pool(limit=2 * MIB, wait_timeout=0.2)
    gone, stays, captures = gpu.raw_stream(), gpu.stream(pool), gpu.raw_stream()
    pointers = [pool.allocate_raw(512 * KIB, stream=gone) for _ in range(4)]
    pool.free_raw(pointers.pop(), stream=gone)
    gpu.destroy(gone)
    with pool.capturing(captures), driver.capture(captures) as captured:
        with pytest.raises(sp.OutOfMemoryError):
            pool.allocate_raw(512 * KIB, stream=stays)
        assert pool.stats().context_events == 0
    assert captured.is_valid
    pool.free_raw(pool.allocate_raw(512 * KIB, stream=stays), stream=stays)
    for pointer in pointers:
        pool.free_raw(pointer, stream=stays)


def test_a_graph_builder_of_cuda_core_is_served_like_its_stream(gpu: GpuScene) -> None:
    pool = gpu.pool()
    stream = gpu.stream()
    target = pool.allocate(4096, stream=stream)
    builder = stream.create_graph_builder()
    with pool.capturing(builder):
        builder.begin_building("global")
        temporary = pool.allocate(4096, stream=builder)
        where = temporary.handle
        gpu.write_pattern(builder, temporary, 5)
        gpu.copy(builder, target, temporary)
        temporary.close(builder)
        builder.end_building()
    graph = builder.complete()
    other = pool.allocate(4096, stream=stream)
    assert other.handle != where, "the graph's"
    gpu.write_pattern(stream, other, 6)
    graph.launch(stream)
    stream.sync()
    assert gpu.read(target) == pattern(4096, 5)
    assert gpu.read(other) == pattern(4096, 6)
    graph.close()
    builder.close()
