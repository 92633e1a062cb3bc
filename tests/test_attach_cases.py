"""Public bug reports about allocators of other libraries, on memory that the adapters serve.

Numbers are those of the project's list of cases. 12, 40 and 42 are in test_dlpack.py, 47 in
native/tests/test_attach.cpp.
"""

from __future__ import annotations

from attach_scene import python


def out(source: str) -> list[str]:
    ended = python(source)
    assert ended.code == 0, ended.err
    return ended.out.splitlines()


def test_case_5_an_array_that_the_collector_frees_elsewhere_is_ordered_by_its_own_stream() -> None:
    """NVIDIA/cuda-python#779, JuliaGPU/CUDA.jl#778: freed on the finaliser thread's idle stream, and reused early."""
    lines = out(
        """
import gc, threading
import streampool as sp
sp.sim.configure(memory="1GiB", scheduler="seeded", seed=1)
pool = sp.Pool("sim:0", reuse="opportunistic")
import cupy
sp.install("cupy", pool=pool)
s = cupy.cuda.Stream().use()
a = cupy.empty(1 << 20)
address, gate = a.data.ptr, sp.sim.Gate()
s.launch(writes=[(address, 1 << 20)], gate=gate)
cycle = [a]
cycle.append(cycle)
del a, cycle
def elsewhere():
    cupy.cuda.Stream().use()
    gc.collect()
    print(cupy.empty(1 << 20).data.ptr == address)
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
print(cupy.empty(1 << 20).data.ptr == address)      # on its own stream, at once
gate.open(); sp.sim.settle()
print(sp.sim.Device(0).races())
"""
    )
    assert lines == ["False", "True", "[]"]


def test_case_45_ctrl_c_ends_an_allocation_that_waits_and_nothing_is_lost() -> None:
    """NVIDIA/cuda-quantum#4284, pytorch/pytorch#109159: ignored while a native wait held the GIL; a leak after it."""
    lines = out(
        """
import _thread, threading, time
import streampool as sp
sp.sim.configure(memory="64MiB")
pool = sp.Pool("sim:0", limit="8MiB", wait_timeout=60, reuse="opportunistic")
import cupy
sp.install("cupy", pool=pool)
s = cupy.cuda.Stream().use()
a = cupy.empty(7 << 20)
gate = sp.sim.Gate()
s.launch(writes=[(a.data.ptr, 1)], gate=gate)
del a
t = cupy.cuda.Stream().use()
before = pool.stats().in_use
beats = []
def beat():
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        beats.append(1)
        time.sleep(0.01)
    _thread.interrupt_main()
thread = threading.Thread(target=beat)
thread.start()
try:
    cupy.empty(7 << 20)
    print("allocated")
except KeyboardInterrupt:
    print("interrupted", len(beats) > 3, pool.stats().in_use == before)
gate.open()
thread.join()
print(pool.audit() == "")
"""
    )
    assert lines == ["interrupted True True", "True"]


def test_case_48_memory_of_device_1_never_touches_device_0() -> None:
    """pytorch/pytorch#25752, meta-pytorch/torchcomms#4105: trims and frees on workers made a context on GPU 0."""
    lines = out(
        """
import ctypes, threading
import streampool as sp
sp.sim.configure(devices=2, memory="1GiB")
sp.device.override_default("sim")
import torch
sp.install("torch")
def used(): return sum(sp.sim.Device(0).calls().values())
entry, free = torch._C._allocator.alloc, torch._C._allocator.free
before = used()
pointer = entry(5 << 20, 1, None)
thread = threading.Thread(target=free, args=(pointer, 5 << 20, 1, None))
thread.start()
thread.join()
torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction(0.5, 1)
(pool,) = sp.installed()[0].pools
print(pool.driver.name, pool.stats().live_blocks, used() == before)
"""
    )
    assert lines == ["sim:1 0 True"]


def test_case_50_after_a_reset_old_arrays_go_harmlessly_and_new_ones_are_refused_with_the_reason() -> None:
    """JuliaGPU/CUDA.jl#16, CERN/TIGRE#770: cached blocks of a dead context were handed out, or their free failed."""
    lines = out(
        """
import streampool as sp
sp.sim.configure(memory="1GiB")
pool = sp.Pool("sim:0")
import cupy, torch, rmm
import numba.cuda as cuda
for library in ("cupy", "torch", "rmm", "numba"):
    sp.install(library, pool=pool)
held = [cupy.empty(1000), torch.empty(1000), rmm.DeviceBuffer(1000), cuda.device_array(1000)]
sp.sim.Device(0).set_lost()
try:
    cupy.empty(64 << 20)
except sp.DriverError as error:
    print("illegal address" in str(error))
held.clear()
print(sp._core.torch_problems())
"""
    )
    assert lines == ["True", "(0, '')"]
