"""The real libraries on a GPU, each in a process of its own: served, right, and honest about what was watched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attach_scene import NATIVE_POOL, Ended, lines_of, python, watched

import streampool as sp
from gpu.gpu_scene import GpuScene
from gpu.kernels import pattern

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def on_a_gpu(record_property: Callable[[str, object], None]) -> None:
    """The work is done in children, where the suite's report cannot see it."""
    record_property("device", "cuda:0")


def out(source: str) -> list[str]:
    ended = python(source, lookalikes=False)
    assert ended.code == 0, ended.err
    return ended.out.splitlines()


def run(folder: Path, source: str, *options: object) -> Ended:
    return watched(folder, source, *options, lookalikes=False, device="cuda")


# -- PyTorch ----------------------------------------------------------------------------------------------------------

TRAINING = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for step in range(12):
    x = torch.randn(16, 3, 32, 32, device="cuda")
    loss = nn.functional.cross_entropy(model(x), torch.zeros(16, dtype=torch.long, device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"{losses[-1]:.3f}", losses[-1] < losses[0])
"""


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("segments", ["malloc", "vmm"])
def test_an_unmodified_training_script_is_clean_and_its_result_is_pytorchs_own(
    tmp_path: Path, mode: str, segments: str
) -> None:
    pytest.importorskip("torch")
    plain = out(TRAINING)
    ended = watched(
        tmp_path, TRAINING, "--mode", mode, lookalikes=False, device="cuda", STREAMPOOL_OPTIONS=f"segments={segments}"
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == plain
    assert ended.library("torch")["other_bytes"] == 0
    assert "COVERAGE: torch 100 % of its bytes" in ended.err
    assert ended.report["faults"] == []


def test_pytorchs_own_out_of_memory_error_is_raised_and_the_next_allocation_works() -> None:
    pytest.importorskip("torch")
    lines = out(
        """
import torch
import streampool as sp
sp.install("torch", limit="256MiB")
kept = torch.empty(1000, device="cuda")
try:
    torch.empty(1 << 30, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    print("the pool's own limit is reached" in str(error))
print(torch.ones(10, device="cuda").sum().item(), torch.cuda.memory_allocated() >= 4000)
free, total = torch.cuda.mem_get_info()
print(0 < free < total)
torch.cuda.empty_cache()
"""
    )
    assert lines == ["True", "10.0 True", "True"]


def test_a_tensor_used_on_a_side_stream_keeps_its_bytes_until_that_work_is_done() -> None:
    pytest.importorskip("torch")
    lines = out(
        """
import torch
import streampool as sp
sp.install("torch")
side = torch.cuda.Stream()
a = torch.full((1 << 20,), 7.0, device="cuda")
torch.cuda._sleep(1)  # kernels are loaded when first launched, which may wait for work that is under way
warm = a * 1
torch.cuda.synchronize()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    torch.cuda._sleep(200_000_000)
    b = a * 1
a.record_stream(side)
address = a.data_ptr()
del a
c = torch.full((1 << 20,), 9.0, device="cuda")
print(c.data_ptr() != address)
torch.cuda.synchronize()
print(b.mean().item())
"""
    )
    assert lines == ["True", "7.0"]


GRAPH = """
import gc
import torch
import streampool as sp
sp.install("torch", mode="{mode}")
x = torch.ones(1 << 16, device="cuda")
def work():
    a = x * 2
    b = a + 1
    del a
    return (b * b).sqrt()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        work()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = work()
for value in (1.0, 5.0, -3.0):
    x.fill_(value)
    graph.replay()
    noise = [torch.randn(1 << 16, device="cuda") for _ in range(20)]     # must not get the graph's memory
    graph.replay()
    torch.cuda.synchronize()
    print(y.mean().item())
(pool,) = sp.installed()[0].pools
a_lot = torch.empty(64 << 20, device="cuda")
del graph, y, noise, x, a_lot, side
gc.collect()
torch.cuda.synchronize()
torch.cuda.empty_cache()
pool.check()
torch.cuda.empty_cache()
print(pool.stats().in_use < 65536, sp._core.torch_problems())  # PyTorch keeps a generator's state
"""


@pytest.mark.parametrize("mode", ["production", "debug"])
def test_a_graph_replays_right_beside_other_allocations_and_gives_its_memory_back(mode: str) -> None:
    """pytorch/pytorch#159594, NVIDIA/cuopt#1748 (case 47)."""
    pytest.importorskip("torch")
    assert out(GRAPH.format(mode=mode)) == ["3.0", "11.0", "5.0", "True (0, '')"]


def test_autograd_threads_and_data_loader_workers_are_served(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ended = run(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == "__main__":
            data = TensorDataset(torch.arange(64.0).reshape(64, 1))
            w = torch.ones(1, 1, device="cuda", requires_grad=True)
            total = 0.0
            for (batch,) in DataLoader(data, batch_size=8, num_workers=2, pin_memory=True):
                loss = (batch.to("cuda", non_blocking=True) @ w).sum()
                loss.backward()
                total += loss.item()
            print(total, w.grad.item())
        """,
        "--mode",
        "debug",
    )
    assert ended.code == 0, ended.err
    assert ended.out == "2016.0 2016.0\n"


def test_what_grows_in_a_training_loop_is_a_leak_at_its_line(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ended = run(
        tmp_path,
        """
        import torch
        import streampool as sp
        w = torch.ones(1 << 18, device="cuda", requires_grad=True)
        (pool,) = next(served.pools for served in sp.installed() if served.library == "torch")
        losses = []
        for step in range(12):
            losses.append(w * 2)  # the leak
            pool.check()
        """,
        "--mode",
        "debug",
    )
    assert ended.code == 1, ended.err
    (leak,) = [leak for leak in ended.report["leaks"] if leak["class"] == "growing"]
    assert any(frame["line"] == 8 and frame["file"].endswith("program.py") for frame in leak["allocated_at"])
    assert leak["held_by"][0] == "module __main__: losses"


def test_tensors_that_live_to_the_end_in_the_programs_own_pool_are_no_leak(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ended = run(
        tmp_path,
        """
        import streampool as sp
        pool = sp.Pool("cuda:0", mode="debug")
        sp.install("torch", pool=pool)
        import torch
        kept = torch.ones(1000, device="cuda")
        print(kept.sum().item())
        """,
    )
    assert ended.code == 0, ended.err
    assert ended.out == "1000.0\n"
    assert {leak["class"] for leak in ended.report["leaks"]} == {"held"}


# -- CuPy and mixtures ------------------------------------------------------------------------------------------------

OVERRUN = """
import cupy
kernel = cupy.RawKernel(r'extern "C" __global__ void past(char* p, int n) { p[n] = 0x41; }', "past")
a = cupy.zeros(1000, dtype="u1")  # the block
kernel((1,), (1,), (a, 1000))
cupy.cuda.get_current_stream().synchronize()
del a
"""


def test_an_overrun_of_a_raw_kernel_in_cupys_memory_is_found_at_its_line(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    ended = run(tmp_path, OVERRUN, "--mode", "debug")
    assert ended.code == 1, ended.err
    (fault,) = ended.report["faults"]
    assert fault["kind"] == "overrun"
    assert any(f["line"] == 4 and f["file"].endswith("program.py") for f in fault["block"]["allocated_at"])


def test_cupys_programs_are_right_and_wholly_watched(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    ended = run(
        tmp_path,
        """
        import cupy
        with cupy.cuda.Stream(non_blocking=True) as stream:
            a = cupy.arange(1 << 20, dtype="f4")
            b = (cupy.sort(a[::-1]) * a).sum()
            stream.synchronize()
            print(abs(float(b) / 1e12 - 384306.6) < 1)
        print(cupy.asnumpy(a)[-1])
        print(cupy.get_default_memory_pool().total_bytes())
        """,
        "--mode",
        "debug",
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["True", "1048575.0", "0"]
    assert ended.library("cupy")["other_bytes"] == 0


def test_pytorch_cupy_and_a_raw_kernel_share_memory_through_dlpack(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    pytest.importorskip("torch")
    ended = run(
        tmp_path,
        """
        import cupy, torch
        add = cupy.RawKernel(
            r'extern "C" __global__ void add(float* p, int n)'
            r'{ int i = blockIdx.x * 256 + threadIdx.x; if (i < n) p[i] += 1; }',
            "add",
        )
        t = torch.full((1 << 16,), 2.0, device="cuda")
        side = cupy.cuda.Stream(non_blocking=True)
        with side:
            c = cupy.from_dlpack(t)
            add((256,), (256,), (c, c.size))
            d = c * 10
        side.synchronize()
        print(t.mean().item(), float(d.mean()))
        u = torch.from_dlpack(d)
        del d
        print(u.sum().item() / (1 << 16))
        """,
        "--mode",
        "debug",
    )
    assert ended.code == 0, ended.err
    assert ended.out == "3.0 30.0\n30.0\n"
    assert (ended.library("torch")["other_bytes"], ended.library("cupy")["other_bytes"]) == (0, 0)


def test_a_borrowers_stream_waits_for_what_is_queued_on_the_blocks(gpu: GpuScene) -> None:
    cupy: Any = pytest.importorskip("cupy")
    pool = gpu.pool()
    ours = gpu.stream(pool)
    block = pool.allocate(100_000, stream=ours)
    theirs = cupy.cuda.Stream(non_blocking=True)
    with theirs:
        cupy.zeros(100_000, dtype="u1").copy()  # what loads and takes memory may wait for work that is stuck
    theirs.synchronize()
    gate = gpu.gate(ours)
    gpu.write_pattern(ours, block, 5)
    with theirs:
        copy = cupy.from_dlpack(block).copy()
    gpu.assert_held()
    gate.open()
    theirs.synchronize()
    assert cupy.asnumpy(copy).tobytes() == pattern(100_000, 5)
    assert block.__dlpack_device__() == (2, 0)
    assert gpu.pool("pinned").allocate(10, stream=ours).__dlpack_device__() == (3, 0)
    assert gpu.pool("managed").allocate(10, stream=ours).__dlpack_device__() == (13, 0)


CAPTURE = """
import contextlib
import gc
import cupy
import streampool as sp
sp.install("cupy", mode="{mode}")
stream, beside = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
size = 1 << 16
with stream:
    x, y = cupy.ones(size, dtype="f4"), cupy.zeros(size, dtype="f4")
(pool,) = (one for one in sp.installed()[0].pools if one.kind == "device")
declared = pool.capturing(stream) if {declared} else contextlib.nullcontext()
def work():
    a = x * 2
    b = a + 1
    del a
    c = b * b
    cupy.sqrt(c, out=y)
with stream:
    work()  # kernels are compiled
    stream.synchronize()
    with declared:
        stream.begin_capture()
        work()
        graph = stream.end_capture()
live = pool.stats().live_blocks
for value in (1.0, 5.0, 10.0):
    with stream:
        x.fill(value)
        graph.launch(stream)
    with beside:
        noise = [cupy.full(size, -7, dtype="f4") for _ in range(20)]  # must not get the graph's memory
    with stream:
        graph.launch(stream)
    stream.synchronize()
    beside.synchronize()
    with beside:
        print(float(y.min()), float(y.max()), all(float(n.max()) == -7 for n in noise))
stats = pool.stats()
print(live, stats.pending + stats.quarantined > 0)
del graph, noise
gc.collect()
stream.synchronize()
with stream:
    x.fill(0)  # all is as before
    print(float((x + 3).sum()) / size)
stream.synchronize()
pool.check()
print(pool.audit() == "", len(pool.faults()))
"""


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
def test_a_graph_that_cupy_captured_replays_right_beside_other_allocations(mode: str, declared: bool) -> None:
    pytest.importorskip("cupy")
    lines = out(CAPTURE.format(mode=mode, declared=declared))
    assert lines == ["3.0 3.0 True", "11.0 11.0 True", "21.0 21.0 True", "2 True", "3.0", "True 0"]


def test_memory_of_a_capture_of_cupys_that_outlives_it_is_still_the_graphs_after_its_free() -> None:
    """What is allocated inside and freed after the capture is written by each launch."""
    pytest.importorskip("cupy")
    lines = out(
        """
import cupy
import streampool as sp
sp.install("cupy")
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    x = cupy.ones(1 << 16, dtype="f4")
    x * 2
    stream.synchronize()
    stream.begin_capture()
    y = x * 2
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    address = y.data.ptr
    print(float(y.sum()) / y.size)
    del y
    others = [cupy.full(1 << 16, 7, dtype="f4") for _ in range(8)]
    print(all(o.data.ptr != address for o in others))
    graph.launch(stream)
    stream.synchronize()
    print(all(float(o.min()) == 7 for o in others))
"""
    )
    assert lines == ["2.0", "True", "True"]


def test_numpy_is_refused_device_memory_with_the_reason_and_sees_what_the_host_may_touch(gpu: GpuScene) -> None:
    import numpy as np

    stream = gpu.stream()
    block = gpu.pool().allocate(1000, stream=stream)
    with pytest.raises(BufferError, match="device memory cannot be viewed from the host"):
        np.asarray(block)
    for kind in ("pinned", "managed"):
        block = gpu.pool(kind).allocate(1000, stream=stream)
        gpu.write_pattern(stream, block, 3)
        stream.sync()
        array = np.asarray(block)
        assert array.ctypes.data == block.handle
        assert array.tobytes() == pattern(1000, 3)


def test_a_double_free_through_the_c_abi_is_found_with_its_lines(tmp_path: Path) -> None:
    source = NATIVE_POOL.format(device="cuda:0", mode="production", end="assert lib.sp_pool_destroy(pool) == 0")
    ended = run(tmp_path, source, "--mode", "debug")
    assert ended.code == 1, ended.err
    (fault,) = ended.report["faults"]
    assert fault["kind"] == "double_free"
    assert "allocate(1000, p)  # the block" in lines_of(fault["block"]["allocated_at"], source)
    assert "print(lib.sp_free(pool, p, stream))  # the second" in lines_of(fault["at"], source)
    (leak,) = ended.report["leaks"]
    assert "allocate(2000, q)  # the leak" in lines_of(leak["allocated_at"], source)


def test_a_double_free_by_native_code_of_a_tensors_memory_is_found_with_its_lines(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = """
        import ctypes
        import torch
        import streampool as sp
        free = ctypes.CDLL(str(sp.library_path())).sp_torch_free
        free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        t = torch.empty(1000, device="cuda")  # the block
        free(t.data_ptr(), 4000, 0, None)  # native code's
        del t  # PyTorch's
    """
    ended = run(tmp_path, source, "--mode", "debug")
    assert ended.code == 1, ended.err
    (fault,) = ended.report["faults"]
    assert fault["kind"] == "double_free"
    assert lines_of(fault["block"]["allocated_at"], source) == {'t = torch.empty(1000, device="cuda")  # the block'}
    assert lines_of(fault["block"]["freed_at"], source) == {"free(t.data_ptr(), 4000, 0, None)  # native code's"}
    assert lines_of(fault["at"], source) == {"del t  # PyTorch's"}


# -- Numba, RMM, cuda.core --------------------------------------------------------------------------------------------


def test_numbas_kernels_work_on_the_pools_memory(tmp_path: Path) -> None:
    pytest.importorskip("numba_cuda")
    ended = run(
        tmp_path,
        """
        import numpy as np
        from numba import cuda
        @cuda.jit
        def twice(a):
            i = cuda.grid(1)
            if i < a.size:
                a[i] *= 2
        a = cuda.to_device(np.arange(1000, dtype="f4"))
        twice[4, 256](a)
        print(a.copy_to_host().sum())
        del a
        """,
        "--mode",
        "debug",
    )
    assert ended.code == 0, ended.err
    assert ended.out == "999000.0\n"
    assert ended.library("numba")["watched_bytes"] >= 4000


def test_rmms_buffers_are_the_pools(tmp_path: Path) -> None:
    pytest.importorskip("rmm")
    ended = run(
        tmp_path,
        """
        import numpy as np
        import rmm
        b = rmm.DeviceBuffer.to_device(np.arange(1000, dtype="u1").tobytes())
        c = b.copy()
        print(sum(c.tobytes()) == sum(b.tobytes()))
        """,
        "--mode",
        "debug",
    )
    assert ended.code == 0, ended.err
    assert ended.out == "True\n"
    assert ended.library("rmm")["watched_bytes"] >= 2000


def test_a_buffer_of_cuda_core_is_freed_on_its_stream_or_the_one_that_close_names() -> None:
    lines = out(
        """
from cuda.core import Device
import gc
import streampool as sp
device = Device(); device.set_current()
pool = sp.Pool(device)
sp.install("cuda.core", pool=pool)
s, t = device.create_stream(), device.create_stream()
a = device.allocate(1000, stream=s)
b = device.allocate(2000, stream=s)
print(pool.stats().in_use, a.memory_resource.device_id, a.is_host_accessible)
a.close(t)
del b
gc.collect()
device.sync()
print(pool.stats().live_blocks)
sp.uninstall("cuda.core")
c = device.allocate(10, stream=s)
print(pool.stats().live_blocks)
c.close(s)
"""
    )
    assert lines == ["3000 0 False", "0", "0"]


def test_a_program_that_only_uses_other_memory_ends_with_3_and_says_what_is_outside(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ended = run(tmp_path, "import torch\na = torch.ones(1000, device='cuda')\n", "--libraries", "none")
    assert ended.code == 3, ended.err
    assert "torch NOT WATCHED" in ended.err
    assert [device["device"] for device in ended.report["coverage"]["devices"]] == ["cuda:0"]
    assert "NO ALLOCATION WAS OBSERVED" in ended.err


def test_a_waiting_allocation_of_numba_is_served_when_the_queued_work_is_done(gpu: GpuScene) -> None:
    """Its frees complete by a context event, whatever the stream."""
    pool = gpu.pool(segments="malloc")
    memory = sp._core.UnorderedMemory(pool)
    address = memory.allocate(1 << 20)
    stream = gpu.stream()
    gate = gpu.gate(stream)
    gpu.kernels.write_pattern(stream, address, 1 << 20, 1)
    memory.free(address)
    other = memory.allocate(1 << 20)
    assert other != address
    gpu.assert_held()
    gate.open()
    stream.sync()
    memory.free(other)
    gpu.device.sync()
    assert address in (memory.allocate(1 << 20), memory.allocate(1 << 20))
    assert pool.audit() == ""
