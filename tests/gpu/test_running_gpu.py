"""Growth, trim and other streams' work beside a kernel that is running: nobody waits for it, and it runs on."""

from __future__ import annotations

import threading

import pytest

from gpu.gpu_scene import MIB, GpuScene
from gpu.kernels import pattern
from gpu.running import Running

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("uses", ["memory of the pool", "nothing of the pool"])
def test_growth_and_trim_return_while_a_kernel_runs_and_it_runs_on(gpu: GpuScene, uses: str) -> None:
    pool = gpu.pool()
    stream, other = gpu.stream(pool), gpu.stream(pool)
    block = pool.allocate(32 * MIB, stream=other)
    with Running(gpu.kernels, other) as kernel:
        if uses == "memory of the pool":
            block.close(other)  # and so it may still touch it
        blocks = [pool.allocate(64 * MIB, stream=stream) for _ in range(4)]
        assert pool.reserve(512 * MIB) >= 512 * MIB
        for one in blocks:
            gpu.write_pattern(stream, one, 1)
        stream.sync()  # that work runs beside it
        assert gpu.read(blocks[-1]) == pattern(64 * MIB, 1)
        for one in blocks:
            one.close(stream)
        del blocks, one
        stream.sync()
        result = pool.trim()
        assert kernel.runs, "somebody waited for it"
        assert result["released"] >= 480 * MIB - 2 * MIB
        assert result["pending"] == (32 * MIB if uses == "memory of the pool" else 0)
        pool.allocate(128 * MIB, stream=stream).close(stream)
        assert kernel.runs
    gpu.device.sync()
    assert kernel.was_told
    if not block.is_closed:
        block.close(other)
    gpu.device.sync()
    pool.trim()
    assert pool.stats().reserved == 0


def test_threads_that_grow_and_trim_beside_a_running_kernel_do_not_hold_up_each_others_streams(gpu: GpuScene) -> None:
    pool = gpu.pool()
    streams = [gpu.stream(pool) for _ in range(3)]
    problems: list[str] = []

    def rounds(number: int) -> None:
        gpu.device.set_current()
        stream = streams[number]
        for i in range(20):
            block = pool.allocate((8 + 16 * number) * MIB + i, stream=stream)
            gpu.write_pattern(stream, block, i)
            stream.sync()
            if gpu.kernels.read(block.handle, 100) != pattern(100, i):
                problems.append(f"thread {number}, round {i}")
            block.close(stream)
            if number == 0:
                pool.trim()

    with Running(gpu.kernels, gpu.stream()) as kernel:
        threads = [threading.Thread(target=rounds, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert kernel.runs, "somebody waited for it"
    gpu.device.sync()
    assert kernel.was_told
    assert problems == []
    assert pool.audit() == ""
