"""How many calls of the driver an allocation and a free make: none on lasting streams, two on others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import streampool as sp
from gpu import driver
from gpu.gpu_scene import MIB, GpuScene

pytestmark = pytest.mark.gpu

PAIRS = 30  # fewer than a batch of frees, which is fenced


def calls_of(pool: sp.Pool, body: Callable[[], object]) -> dict[str, int]:
    """Give the driver calls that `body` makes."""
    before = pool.driver.calls()
    body()
    return {name: n - before[name] for name, n in pool.driver.calls().items() if n != before[name]}


@pytest.mark.parametrize("size", [256, 4096, 1 * MIB, 5 * MIB])
@pytest.mark.parametrize("named", ["object", "handle", "legacy"])
def test_a_lasting_stream_costs_no_driver_call(gpu: GpuScene, size: int, named: str) -> None:
    pool = gpu.pool()
    stream = gpu.stream(pool)
    name = {"object": stream, "handle": int(stream.handle), "legacy": driver.LEGACY}[named]

    def pairs() -> None:
        for _ in range(PAIRS):
            pool.free_raw(pool.allocate_raw(size, stream=name), stream=name)
            block = pool.allocate(size, stream=name)
            block.close(name)
            pool.allocate(size, stream=name).close()

    pairs()
    assert calls_of(pool, pairs) == {}


def test_a_raw_handle_is_looked_up_in_each_call_and_costs_no_other_driver_call(gpu: GpuScene) -> None:
    pool = gpu.pool(fence_age=1000)
    stream = gpu.raw_stream()
    pool.free_raw(pool.allocate_raw(4096, stream=stream), stream=stream)

    def pairs() -> None:
        for _ in range(PAIRS):
            pool.free_raw(pool.allocate_raw(4096, stream=stream), stream=stream)

    before = pool.stats().stream_lookups
    assert calls_of(pool, pairs) == {}, "the pool counts lookups, the driver all else"
    assert pool.stats().stream_lookups - before == 2 * PAIRS


def test_a_large_free_on_a_raw_handle_is_fenced_in_the_call(gpu: GpuScene) -> None:
    pool = gpu.pool(fence_age=1000)
    stream = gpu.raw_stream()
    pointer = pool.allocate_raw(4 * MIB, stream=stream)
    calls = calls_of(pool, lambda: pool.free_raw(pointer, stream=stream))
    assert calls["event_record"] == 1
    assert "stream_synchronize" not in calls
    assert "event_synchronize" not in calls


def test_record_stream_and_release_queue_nothing(gpu: GpuScene) -> None:
    pool = gpu.pool()
    a, b = gpu.stream(pool), gpu.stream(pool)

    def body() -> None:
        block = pool.allocate(4096, stream=a)
        block.record_stream(b)
        del block
        pool.free_raw(pool.allocate_raw(256, stream=a), stream=a)

    body()
    calls = calls_of(pool, body)
    assert "event_record" not in calls
    assert "stream_wait_event" not in calls


def test_statistics_make_no_driver_call(gpu: GpuScene) -> None:
    pool = gpu.pool()
    stream = gpu.stream(pool)
    block = pool.allocate(4096, stream=stream)
    for ask in (pool.stats, pool.live_blocks, pool.snapshot):
        assert calls_of(pool, ask) == {}
    block.close(stream)
