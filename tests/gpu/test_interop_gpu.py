"""Other libraries read and write a Buffer through `__cuda_array_interface__` version 3."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import streampool as sp
from gpu.gpu_scene import GpuScene
from gpu.kernels import pattern

# What those libraries warn of at import is no business of ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

SIZE = 100_000


@pytest.fixture
def pool(gpu: GpuScene) -> sp.Pool:
    return gpu.pool()


def test_the_interface_says_what_the_block_is(gpu: GpuScene, pool: sp.Pool) -> None:
    stream = gpu.stream()
    block = pool.allocate(SIZE, stream=stream)
    assert block.__cuda_array_interface__ == {
        "shape": (SIZE,),
        "typestr": "|u1",
        "data": (block.handle, False),
        "strides": None,
        "version": 3,
        "stream": int(stream.handle),
    }
    block.close(stream)
    with pytest.raises(ValueError, match="closed"):
        _ = block.__cuda_array_interface__
    legacy = pool.allocate(SIZE, stream=0)
    assert legacy.__cuda_array_interface__["stream"] == 1  # 0 is forbidden there
    nothing = pool.allocate(0, stream=stream)
    assert nothing.__cuda_array_interface__["data"] == (0, False)


def test_the_interface_names_the_stream_of_the_allocation_also_outside_its_with(gpu: GpuScene, pool: sp.Pool) -> None:
    stream = gpu.stream()
    with sp.stream(stream):
        block = pool.allocate(SIZE)
    assert block.__cuda_array_interface__["stream"] == int(stream.handle)


def test_cupy_reads_and_writes_a_buffer(gpu: GpuScene, pool: sp.Pool) -> None:
    cupy: Any = pytest.importorskip("cupy")
    stream = gpu.stream()
    block = pool.allocate(SIZE, stream=stream)
    gpu.write_pattern(stream, block, 1)
    array = cupy.asarray(block)
    assert array.data.ptr == block.handle
    assert (array.shape, array.dtype) == ((SIZE,), cupy.uint8)
    assert cupy.asnumpy(array).tobytes() == pattern(SIZE, 1)
    array[:] = 9
    cupy.cuda.get_current_stream().synchronize()
    assert gpu.read(block) == bytes([9]) * SIZE
    assert cupy.asarray(pool.allocate(0, stream=stream)).size == 0


def test_torch_reads_and_writes_a_buffer(gpu: GpuScene, pool: sp.Pool) -> None:
    torch: Any = pytest.importorskip("torch")
    stream = gpu.stream()
    block = pool.allocate(SIZE, stream=stream)
    gpu.write_pattern(stream, block, 2)
    stream.sync()  # torch does not look at the interface's stream
    tensor = torch.as_tensor(block, device="cuda")
    assert tensor.data_ptr() == block.handle
    assert bytes(tensor.cpu().numpy()) == pattern(SIZE, 2)
    tensor.fill_(5)
    torch.cuda.synchronize()
    assert gpu.read(block) == bytes([5]) * SIZE


def test_a_view_of_another_library_keeps_the_block_alive(gpu: GpuScene, pool: sp.Pool) -> None:
    torch: Any = pytest.importorskip("torch")
    stream = gpu.stream()
    block = pool.allocate(SIZE, stream=stream)
    gpu.write_pattern(stream, block, 3)
    stream.sync()
    tensor = torch.as_tensor(block, device="cuda")
    del block
    gc.collect()
    pool.free_raw(pool.allocate_raw(SIZE, stream=stream), stream=stream)
    assert pool.stats().live_blocks == 1
    assert bytes(tensor.cpu().numpy()) == pattern(SIZE, 3)
    del tensor
    gc.collect()
    pool.free_raw(pool.allocate_raw(SIZE, stream=stream), stream=stream)
    assert pool.stats().live_blocks == 0


def test_streams_of_other_libraries_are_taken_as_they_are(gpu: GpuScene, pool: sp.Pool) -> None:
    torch: Any = pytest.importorskip("torch")
    cupy: Any = pytest.importorskip("cupy")
    from gpu import driver

    theirs: list[tuple[Any, int]] = [(torch.cuda.Stream(), 0), (cupy.cuda.Stream(non_blocking=True), 0)]
    for stream, _ in theirs:
        handle = int(getattr(stream, "cuda_stream", 0) or stream.ptr)
        block = pool.allocate(SIZE, stream=stream if hasattr(stream, "__cuda_stream__") else handle)
        assert block.facts()["stream"] == driver.stream_id(handle)
        gpu.write_pattern(handle, block, 4)
        driver.sync_stream(handle)
        assert gpu.read(block) == pattern(SIZE, 4)
        block.close(handle)
