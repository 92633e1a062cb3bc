"""The adapters with the real libraries, where they are installed: as far as each goes without a GPU.

Their memory is the simulated device's. What they ask of CUDA beside the allocator (which device and stream are current)
is answered in their place.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
from attach_scene import python

SIM = """
import streampool as sp
sp.sim.configure(memory="1GiB")
sp.device.override_default("sim")
"""


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


def out(source: str, **more: str) -> list[str]:
    ended = python(SIM + source, lookalikes=False, **more)
    assert ended.code == 0, ended.err
    return ended.out.splitlines()


@pytest.fixture(scope="module")
def current_device(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library before CUDA's runtime that says: there is one device, and it is current."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder: Path = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.c").write_text(
        "int cudaGetDevice(int* d) { *d = 0; return 0; }\n"
        "int cudaGetDeviceCount(int* d) { *d = 1; return 0; }\n"
        "int cudaSetDevice(int d) { (void)d; return 0; }\n"
    )
    built = folder / "runtime.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, folder / "runtime.c"], check=True)
    return str(built)


@needs("torch")
def test_pytorch_allocates_from_the_pool_and_its_own_out_of_memory_error_has_our_account(current_device: str) -> None:
    lines = out(
        """
import torch
if not hasattr(torch._C, "_cuda_customAllocator"):
    raise SystemExit("no CUDA")
sp.install("torch", limit="64MiB")
allocate, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
pointer = allocate(5000, 0)
stats = torch._C._cuda_memoryStats(0)["allocated_bytes"]["all"]
print(stats["current"], stats["peak"])
free(pointer)
print(torch._C._cuda_memoryStats(0)["allocated_bytes"]["all"]["current"])
try:
    allocate(1 << 30, 0)
except torch.OutOfMemoryError as error:
    print("the pool's own limit is reached" in str(error), "what to try" in str(error) or "raise limit=" in str(error))
print(sp._core.torch_problems())
""",
        LD_PRELOAD=current_device,
    )
    assert lines == ["5000 5000", "0", "True True", "(0, '')"]


@needs("torch")
def test_pytorch_is_told_what_its_interface_cannot_do() -> None:
    lines = out(
        """
import warnings
import torch
sp.install("torch")
try:
    torch.cuda.memory_snapshot()
except RuntimeError as error:
    print("pool.snapshot()" in str(error))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark = True
print(torch.backends.cudnn.benchmark, [str(w.message)[:49] for w in told])
"""
    )
    assert lines == ["True", "False ['streampool: torch.backends.cudnn.benchmark stays ']"]


@needs("torch")
def test_pytorch_reads_a_block_in_place() -> None:
    lines = out(
        """
import torch
pool = sp.Pool("sim:0")
block = pool.allocate(1000, stream=0)
tensor = torch.from_dlpack(block)
print(tensor.data_ptr() == block.handle, tensor.dtype, tuple(tensor.shape))
"""
    )
    assert lines == ["True torch.uint8 (1000,)"]


@needs("cupy")
def test_cupys_own_objects_hooks_and_error_stand_over_the_pools_memory() -> None:
    lines = out(
        """
import warnings; warnings.simplefilter("ignore")
import cupy
from cupy.cuda import memory_hooks
adapter = sp.install("cupy").adapter
class Null:
    ptr = 0
    def __cuda_stream__(self): return (0, 0)
adapter._device, adapter._stream = lambda: 0, Null
array = cupy.ndarray((1000,), dtype="u1", memptr=adapter.allocate(1000))
(pool,) = sp.installed()[0].pools
print(array.data.ptr == pool.live_blocks()[0]["address"], array.data.mem.device_id)
hook = memory_hooks.LineProfileHook()
with hook:
    adapter.allocate(4096)
hook.print_report()
try:
    adapter.allocate(1 << 50)
except cupy.cuda.memory.OutOfMemoryError as error:
    print(str(error)[:24])
pinned = adapter.allocate_pinned(64)
print(bytes(memoryview(pinned)[:0]), pinned.mem.size)
del array
print(pool.stats().live_blocks)
"""
    )
    assert lines[0] == "True 0"
    assert lines[1].startswith("_root (4.00KB")
    assert lines[-3:] == ["out of memory: 1.00 PiB ", "b'' 64", "0"]


@needs("rmm")
def test_rmms_resource_serves_from_the_pool_and_a_refusal_is_a_memory_error() -> None:
    lines = out(
        """
import rmm
from rmm.pylibrmm.stream import DEFAULT_STREAM
from streampool.attach.rmm import memory_resource
sp.install("rmm")
mr = rmm.mr.get_per_device_resource(0)
pointer = mr.allocate(1000, DEFAULT_STREAM)
(pool,) = sp.installed()[0].pools
print(pool.stats().in_use)
mr.deallocate(pointer, 1000, DEFAULT_STREAM)
print(pool.stats().in_use)
try:
    mr.allocate(1 << 50, DEFAULT_STREAM)
except MemoryError as error:
    print("asked of pool 'rmm'" in str(error))
mine = sp.Pool("sim:0")
own = memory_resource(mine)
own.deallocate(own.allocate(10, DEFAULT_STREAM), 10, DEFAULT_STREAM)
print(mine.stats().allocations)
sp.uninstall("rmm")
print(rmm.mr.get_per_device_resource(0) is mr)
"""
    )
    assert lines == ["1000", "0", "True", "1", "False"]


@needs("numba_cuda")
def test_numbas_manager_is_one_that_numba_accepts() -> None:
    lines = out(
        """
import gc, types
import numba.cuda as cuda
found = sp.install("numba")
class Context:
    device = types.SimpleNamespace(id=0)
context = Context()
manager = cuda.cudadrv.driver._memory_manager(context=context)
manager.initialize()
pointer = manager.memalloc(777)
(pool,) = sp.installed()[0].pools
print(type(pointer) is cuda.MemoryPointer, int(pointer.handle) == pool.live_blocks()[0]["address"], pointer.size)
info = manager.get_memory_info()
print(0 < info.free <= info.total)
del pointer
gc.collect()
print(pool.stats().live_blocks)
late = manager.memalloc(10)
manager.reset()
print(pool.stats().live_blocks)
del late
try:
    manager.get_ipc_handle(None)
except RuntimeError as error:
    print("segments=malloc" in str(error))
"""
    )
    assert lines == ["True True 777", "True", "0", "0", "True"]


@needs("cuda.bindings")
def test_a_resource_for_cuda_core_is_one_of_its_own_and_says_what_its_memory_is() -> None:
    lines = out(
        """
from cuda.core import MemoryResource
from streampool.attach.cuda_core import memory_resource
for kind in ("device", "pinned", "managed"):
    mr = memory_resource(sp.Pool("sim:0", kind=kind))
    print(isinstance(mr, MemoryResource), mr.device_id, mr.is_device_accessible, mr.is_host_accessible, mr.is_managed)
class Closed:
    is_closed = True
    def __cuda_stream__(self): return (0, 0)
try:
    mr.allocate(10, stream=Closed())
except sp.StreamError as error:
    print("closed" in str(error))
try:
    sp.install("cuda.core")
except sp.AttachError as error:
    print("CUDA devices only" in str(error))
"""
    )
    assert lines == ["True 0 True False False", "True 0 True True False", "True 0 True True True", "True", "True"]


@needs("torch")
def test_pytorchs_tensors_are_found_by_their_storages_address() -> None:
    lines = out(
        """
import torch
from streampool import _referrers
from streampool.attach._owners import objects_at
w = torch.ones(10, requires_grad=True)
losses = [(w * n).sum() for n in range(4)]
view = torch.zeros(100)[50:]
address_of = lambda tensor: tensor.untyped_storage().data_ptr()
serials = {address_of(losses[2]): 7, address_of(view): 8}
chains = _referrers.chains(None, {7, 8}, lambda: objects_at(torch.Tensor, address_of, serials))
print(chains[7], chains[8])
"""
    )
    assert lines == ["('module __main__: losses', '[2] of a list of 4') ('module __main__: view',)"]


@needs("tvm_ffi")
def test_tvms_functions_take_a_buffer_and_give_back_tensors_of_their_own() -> None:
    """A Buffer has no ``__dlpack_c_exchange_api__``, which would have to make Buffers of foreign memory."""
    lines = out(
        """
import gc
import tvm_ffi
pool = sp.Pool("sim")
block = pool.allocate(100)
block.numpy()[:] = 7
tensor = tvm_ffi.from_dlpack(block)
print(tuple(tensor.shape), tensor.dtype, tvm_ffi.get_global_func("testing.echo")(block).__class__.__name__)
del block
gc.collect()
pool.free_raw(pool.allocate_raw(1))
print(pool.stats().live_blocks)
del tensor
gc.collect()
pool.free_raw(pool.allocate_raw(1))
print(pool.stats().live_blocks)
"""
    )
    assert lines == ["(100,) uint8 Tensor", "1", "0"]
