"""Public bug reports of other allocators whose claim is about hardware. Numbers: the project's list of cases."""

from __future__ import annotations

import gc

import pytest
from scene import fill_up

import streampool as sp
from gpu import driver
from gpu.gpu_scene import KIB, MIB, GpuScene
from gpu.kernels import pattern

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("held_by", ["its own stream", "record_stream", "record_event"])
def test_case_54_a_source_that_was_dropped_is_held_for_the_copy_until_that_is_done(gpu: GpuScene, held_by: str) -> None:
    """cupy/cupy#8789 (fix #8845), LMCache/LMCache#4830: pinned memory was used again under a copy; the pool is full."""
    size = 256 * KIB
    pool, device_pool = gpu.pool("pinned", limit=8 * MIB, wait_timeout=0.05), gpu.pool()
    s, home = gpu.stream(pool), gpu.stream(pool)
    device_pool.register_stream(s)
    target = device_pool.allocate(size, stream=s)
    receiver = s if held_by == "its own stream" else home
    source = pool.allocate(size, stream=receiver)
    memoryview(source)[:] = pattern(size, 7)
    place = source.handle
    gpu.gate(s)
    source.copy_to(target, stream=s)
    if held_by == "record_stream":
        source.record_stream(s)
    elif held_by == "record_event":
        source.record_event(s.record())
    del source
    gc.collect()
    others, error = fill_up(pool, size, receiver)
    assert error.fields["reason"] == "pending"
    for other in others:
        memoryview(other)[:] = pattern(size, 200)
    assert place not in {other.handle for other in others}
    gpu.assert_held()
    gpu.open()
    assert gpu.read(target) == pattern(size, 7)
    again = pool.allocate(size, stream=receiver)
    assert again.handle == place, "now it is there"


@pytest.mark.parametrize("segments", ["vmm", "malloc"])
def test_case_28_refusals_of_the_driver_leave_the_runtimes_last_error_as_it_was(gpu: GpuScene, segments: str) -> None:
    """NVIDIA/cub#47, NVIDIA/cub#705: after a recovered refusal the last error was still set; a true one crashed."""
    from cuda.bindings import runtime

    none, mine = runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorInvalidDevice
    runtime.cudaFree(0)
    runtime.cudaGetLastError()
    stream = gpu.stream()
    free = driver.memory_free()
    for before in (none, mine):
        if before is mine:
            assert runtime.cudaSetDevice(10_000)[0] == mine  # the program's own error, which it has not asked for yet
        pool = gpu.pool(segments=segments)
        pool.reserve(free // 2)
        taken = pool.allocate(free * 3 // 4, stream=stream)  # more than is left: what is idle goes back first
        assert runtime.cudaPeekAtLastError()[0] == before
        with pytest.raises(sp.OutOfMemoryError) as caught:
            pool.allocate(free // 2, stream=stream)
        assert caught.value.fields["reason"] == "driver"
        assert runtime.cudaPeekAtLastError()[0] == before
        small = pool.allocate(MIB, stream=stream)
        gpu.write_pattern(stream, small, 3)
        stream.sync()
        assert gpu.read(small) == pattern(MIB, 3)
        assert runtime.cudaGetLastError()[0] == before
        small.close(stream)
        taken.close(stream)
        stream.sync()
        pool.close()
