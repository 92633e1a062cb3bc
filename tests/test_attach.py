"""``sp.install``: each library's memory comes from a pool, in its own terms. By lookalikes."""

from __future__ import annotations

import importlib.util

import pytest
from attach_scene import python

import streampool as sp

SIM = "import streampool as sp\nsp.sim.configure(memory='1GiB')\npool = sp.Pool('sim:0', mode='debug', name='mine')\n"


def out(source: str, **more: str) -> list[str]:
    """The lines that a program prints; it must end well."""
    ended = python(source, **more)
    assert ended.code == 0, ended.err
    return ended.out.splitlines()


# -- install, uninstall, installed ------------------------------------------------------------------------------------


def test_importing_streampool_imports_no_library_and_not_the_adapters() -> None:
    lines = out(
        """
        import sys
        import streampool as sp
        sp.Pool("sim:0")
        print([name for name in sys.modules if name.split(".")[0] in ("torch", "cupy", "numba", "rmm", "cuda")])
        print([name for name in sys.modules if name.startswith("streampool.attach")])
        """
    )
    assert lines == ["[]", "[]"]


def test_what_is_installed_is_listed_with_version_pools_and_limits() -> None:
    lines = out(
        SIM
        + """
found = sp.install("cupy", pool=pool)
print(found.library, found.version, found.pools == (pool,), bool(found.notes))
print([i.library for i in sp.installed()])
sp.uninstall("cupy")
print(sp.installed())
"""
    )
    assert lines == ["cupy 14.0.0 True True", "['cupy']", "()"]


def test_an_unknown_library_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"numpy cannot be served: .*pool.allocate\(size\).numpy"):
        sp.install("numpy")
    with pytest.raises(ValueError, match=r"JAX cannot be served: .*from_dlpack"):
        sp.install("JAX")
    with pytest.raises(ValueError, match=r"no library 'cupi'.*torch, cupy, numba, rmm, cuda.core.*did you mean 'cupy'"):
        sp.install("cupi")
    with pytest.raises(TypeError, match="named by text"):
        sp.install(7)  # type: ignore[arg-type]
    with pytest.raises(sp.AttachError, match="RMM is not served"):
        sp.uninstall("rmm")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("sp.install('cupy', pool=7)", "TypeError: pool must be a streampool.Pool, not int"),
        ("sp.install('cupy', pool=sp.Pool('sim:0', kind='pinned'))", "ValueError: pool must be one of device memory"),
        ("sp.install('cupy', limmit='1GiB')", "ValueError: unknown option"),
        ("import cupy; cupy.__version__ = '9.1'; sp.install('cupy')", "AttachError: CuPy 9.1 is too old"),
        ("sp.install('cupy', pool=pool); sp.install('cupy', pool=pool)", "AttachError: CuPy is served already"),
        (
            "import torch; torch._C._initialized = True; sp.install('torch')",
            "AttachError: PyTorch has used CUDA already",
        ),
        ("sp.install('torch', pool=pool); sp.uninstall('torch')", "AttachError: PyTorch keeps an allocator"),
    ],
)
def test_what_cannot_be_installed_is_an_error_that_says_why(call: str, says: str) -> None:
    ended = python(SIM + call)
    assert ended.code == 1
    assert says in ended.err.splitlines()[-1]


def test_a_library_that_is_not_there_is_an_error_and_not_a_traceback_of_imports() -> None:
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("the real CuPy is installed here")
    ended = python(SIM + "sp.install('cupy')", lookalikes=False)
    assert ended.code == 1
    assert "CuPy cannot be imported" in ended.err.splitlines()[-1]


# -- CuPy -------------------------------------------------------------------------------------------------------------


def test_cupys_memory_is_in_the_order_of_its_current_stream_and_goes_with_its_arrays() -> None:
    lines = out(
        SIM
        + """
import cupy
sp.install("cupy", pool=pool)
s = cupy.cuda.Stream().use()
a = cupy.empty(5000)
print(pool.live_blocks()[0]["size"], pool.live_blocks()[0]["stream"] != 1, a.data.mem.device_id)
address = a.data.ptr
del a
print(len(pool.live_blocks()))
print(cupy.get_default_memory_pool().total_bytes())
"""
    )
    assert lines == ["5000 True 0", "0", "0"]


def test_cupys_error_is_its_own_class_with_our_account_and_cupys_blocks_outlive_an_uninstall() -> None:
    lines = out(
        """
import streampool as sp
sp.sim.configure(memory="1GiB")
pool = sp.Pool("sim:0", limit="4MiB")
import cupy
sp.install("cupy", pool=pool)
kept = cupy.empty(1000)
try:
    cupy.empty(1 << 30)
except cupy.cuda.memory.OutOfMemoryError as error:
    print(isinstance(error.__cause__, sp.OutOfMemoryError), "the pool's own limit is reached" in str(error))
sp.uninstall("cupy")
print(cupy.empty(10).data.ptr == 0xDEAD0000, pool.stats().live_blocks)
"""
    )
    assert lines == ["True True", "True 1"]


def test_cupys_memory_hooks_fire_and_its_pinned_memory_is_ours() -> None:
    lines = out(
        SIM
        + """
import cupy
from cupy.cuda.memory_hook import MemoryHook
class Hook(MemoryHook):
    name = "mine"
    def malloc_postprocess(self, *, device_id, size, mem_size, mem_ptr, pmem_id): print("malloc", size, mem_ptr != 0)
    def free_postprocess(self, *, device_id, mem_size, mem_ptr, pmem_id): print("free", mem_size)
sp.install("cupy", pool=pool)
with Hook():
    a = cupy.empty(300)
    del a
a = cupy.empty(300)
p = cupy.cuda.memory.alloc_pinned(700)
print([(q.kind, q.stats().live_blocks) for q in sp.installed()[0].pools])
"""
    )
    assert lines == ["malloc 300 True", "free 300", "[('device', 1), ('pinned', 1)]"]


LOCKED = """
import threading
held, done = threading.Event(), threading.Event()
def hold(lock):
    with lock:
        held.set()
        done.wait()
"""


@pytest.mark.parametrize(
    ("lock", "call"),
    [
        ("adapter._pools._lock", "adapter._pools.on(0)"),
        ("adapter._lock", "adapter.memory(0)"),
    ],
)
def test_a_fork_while_a_pool_is_made_does_not_hang_the_child(lock: str, call: str) -> None:
    lines = out(
        LOCKED
        + f"""
import os, signal
import streampool as sp
sp.sim.configure(memory="1GiB")
sp.device.override_default("sim")
import numba.cuda
adapter = sp.install("numba").adapter
threading.Thread(target=hold, args=({lock},), daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        {call}
    except sp.StreamPoolError:
        pass
    os._exit(0)
print(os.waitpid(child, 0)[1])
done.set()
"""
    )
    assert lines == ["0"]


def test_a_signals_handler_that_allocates_while_a_pool_is_made_gets_memory_from_the_same_pool() -> None:
    lines = out(
        """
import faulthandler, signal
faulthandler.dump_traceback_later(20, exit=True)
import streampool as sp
sp.sim.configure(memory="1GiB")
sp.device.override_default("sim")
import cupy
sp.install("cupy")
from streampool.attach import _pools
made, kept = _pools.Pool, []
def interrupted(*given, **options):
    _pools.Pool = made
    signal.raise_signal(signal.SIGUSR1)
    return made(*given, **options)
_pools.Pool = interrupted
signal.signal(signal.SIGUSR1, lambda *_: kept.append(cupy.empty(100)))
kept.append(cupy.empty(10))
(pool,) = sp.installed()[0].pools
print(pool.stats().live_blocks)
"""
    )
    assert lines == ["2"]


# -- RMM --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
@pytest.mark.parametrize("mode", ["production", "debug"])
def test_what_cupy_allocates_in_a_capture_is_its_graphs_until_the_graph_is_gone(mode: str, declared: bool) -> None:
    lines = out(
        f"""
import contextlib, gc
import cupy
import streampool as sp
pool = sp.Pool("sim", mode={mode!r}, limit="16MiB", wait_timeout=0.2, quarantine_bytes=0)
sp.install("cupy", pool=pool)
stream = cupy.cuda.Stream()
before = cupy.empty(100_000)  # on the null stream
stream.use()
with pool.capturing(stream) if {declared} else contextlib.nullcontext():
    stream._stream.begin_capture()
    inside, kept = cupy.empty(100_000), cupy.empty(100_000)
    graphs = {{inside.data.ptr, kept.data.ptr}}
    del inside
    graph = stream._stream.end_capture()
del kept

def fill():
    arrays = []
    try:
        while True:
            arrays.append(cupy.empty(100_000))
    except cupy.cuda.memory.OutOfMemoryError:
        return {{array.data.ptr for array in arrays}}

print(fill() & graphs)
graph.launch(stream._stream)
stream.synchronize()
print(fill() & graphs)
del graph
gc.collect()
print(fill() >= graphs, pool.audit())
"""
    )
    assert lines == ["set()", "set()", "True "]


def test_rmms_buffers_are_in_the_order_of_their_stream_and_a_wrong_size_is_found() -> None:
    lines = out(
        SIM
        + """
import rmm
sp.install("rmm", pool=pool)
stream = sp.sim.Device(0).create_stream()
b = rmm.DeviceBuffer(3000, rmm.Stream(int(stream.handle)))
print(pool.live_blocks()[0]["size"])
mr = rmm.mr.get_per_device_resource(0)
try:
    mr.deallocate(b.ptr, 2999, rmm.Stream(int(stream.handle)))
except sp.SizeMismatchError as error:
    print("found")
del b
print(pool.stats().live_blocks)
sp.uninstall("rmm")
print(type(rmm.mr.get_per_device_resource(0)).__name__)
"""
    )
    assert lines == ["3000", "found", "0", "CudaMemoryResource"]


def test_rmms_resource_takes_the_stream_first_and_an_alignment_last_as_newer_releases_give_them() -> None:
    lines = out(
        """
import rmm
import streampool as sp
from streampool.attach.rmm import memory_resource
pool = sp.Pool("sim", mode="debug")
stream = sp.sim.Device(0).create_stream()
theirs = rmm.Stream(int(stream.handle))
mr = memory_resource(pool)
kept = [mr.allocate(theirs, 1000, 256), mr.allocate(theirs, 1000, 1 << 16), mr.allocate(1000, theirs)]
print(pool.stats().in_use, kept[1] % (1 << 16), pool.stats().live_blocks)
try:
    mr.deallocate(theirs, kept[0], 999, 256)
except sp.InvalidFreeError as error:
    print("999" in str(error))
mr.deallocate(theirs, kept[0], 1000, 256)
mr.deallocate(theirs, kept[1], 1000, 1 << 16)
mr.deallocate(kept[2], 1000, theirs)
print(pool.stats().live_blocks)
"""
    )
    assert lines == ["3000 0 3", "True", "0"]


# -- Numba ------------------------------------------------------------------------------------------------------------


def test_numbas_memory_is_settled_when_it_is_handed_out_and_freed_after_everything_queued() -> None:
    """Its interface names no stream: any may use the memory at once."""
    lines = out(
        """
import streampool as sp
sp.sim.reset(); sp.sim.configure(memory="1GiB", scheduler="seeded", seed=1)
pool = sp.Pool("sim:0", reuse="opportunistic", wait_timeout=0)
import numba.cuda as cuda
sp.install("numba", pool=pool)
dev = sp.sim.Device(0)
s = dev.create_stream()
a = cuda.device_array(1 << 20)
address = int(a.handle)
gate = sp.sim.Gate()
s.launch(writes=[(address, 1 << 20)], gate=gate)      # on a stream that Numba's interface never hears of
a.free()
b = cuda.device_array(1 << 20)
print(int(b.handle) == address)
gate.open(); sp.sim.settle()
b.free()
c = [cuda.device_array(1 << 20) for _ in range(2)]
print(address in [int(x.handle) for x in c])
print(dev.races())
"""
    )
    assert lines == ["False", "True", "[]"]


def test_numba_finds_the_manager_by_its_environment_variable() -> None:
    lines = out(
        """
import numba.cuda as cuda
import streampool as sp
sp.device.override_default("sim")
a = cuda.device_array(1234)
(found,) = sp.installed()
print(found.library, found.pools[0].stats().in_use)
info = cuda.current_context().memory_manager.get_memory_info()
print(0 < info.free <= info.total)
cuda.current_context().memory_manager.reset()
print(found.pools[0].stats().live_blocks)
a.free()
""",
        NUMBA_CUDA_MEMORY_MANAGER="streampool.attach.numba",
    )
    assert lines == ["numba 1234", "True", "0"]


def test_numba_is_refused_where_the_driver_could_order_none_of_its_frees() -> None:
    """cuCtxRecordEvent came with CUDA 12.5."""
    for given in ("", ", pool=sp.Pool('sim:0')"):
        ended = python(
            f"""
            import streampool as sp
            sp.sim.configure(memory="1GiB", context_events=False)
            sp.device.override_default("sim")
            sp.install("numba"{given})
            """
        )
        assert ended.code == 1
        assert "AttachError: Numba's interface names no stream" in ended.err
        assert "CUDA 12.5 or newer" in ended.err


def test_a_free_of_numbas_that_the_driver_refuses_is_done_later() -> None:
    lines = out(
        """
import streampool as sp
sp.sim.configure(memory="1GiB")
pool = sp.Pool("sim:0")
import numba.cuda as cuda
sp.install("numba", pool=pool)
a = cuda.device_array(5000)
sp.sim.Device(0).fail_call("context_event_record", code="failed")
a.free()
print(pool.stats().live_blocks)
b = cuda.device_array(5000)
print(pool.stats().live_blocks)
"""
    )
    assert lines == ["1", "1"]


# -- PyTorch ----------------------------------------------------------------------------------------------------------

TORCH = """
import streampool as sp
sp.sim.configure(memory="1GiB")
sp.device.override_default("sim")
import torch
"""


def test_pytorchs_questions_about_memory_are_answered_from_the_pool() -> None:
    lines = out(
        TORCH
        + """
sp.install("torch")
print(torch.cuda.memory_allocated(), sp.installed()[0].pools)
a, b = torch.empty(1000), torch.empty(3000)
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
del b
torch.cuda.reset_peak_memory_stats()
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
(pool,) = sp.installed()[0].pools
print(pool.name, pool.stats().source, pool.stats().live_blocks)
big = torch.empty(64 << 20)
del big
held = pool.stats().reserved
torch.cuda.empty_cache()
print(pool.stats().reserved < held)
try:
    torch.cuda.memory_snapshot()
except RuntimeError as error:
    print("pool.snapshot()" in str(error))
"""
    )
    assert lines == ["0 ()", "4000 4000", "1000 1000", "torch malloc 1", "True", "True"]


def test_pytorchs_segments_are_those_that_were_asked_for() -> None:
    ask = "t = torch.empty(10); print(sp.installed()[0].pools[0].stats().source)"
    assert out(TORCH + f"sp.install('torch', segments='vmm'); {ask}") == ["vmm"]
    assert out(TORCH + f"sp.install('torch'); {ask}", STREAMPOOL_OPTIONS="segments=vmm") == ["vmm"]


def test_a_fraction_of_the_device_bounds_pytorchs_pool_before_and_after_it_is_made() -> None:
    lines = out(
        TORCH
        + """
sp.install("torch", segments="vmm")
torch.cuda.set_per_process_memory_fraction(0.5)
t = torch.empty(10)
(pool,) = sp.installed()[0].pools
print(pool.stats().limit == 512 << 20)
torch.cuda.set_per_process_memory_fraction(0.25)
print(pool.stats().limit == 256 << 20)
"""
    )
    assert lines == ["True", "True"]


def test_a_fraction_of_the_device_does_not_lift_the_limit_that_was_asked_for() -> None:
    lines = out(
        TORCH
        + """
sp.install("torch", segments="vmm", limit="64MiB")
torch.cuda.set_per_process_memory_fraction(0.5)
t = torch.empty(10)
(pool,) = sp.installed()[0].pools
found = [pool.stats().limit >> 20]
for fraction in (0.03125, 0.9, 1.0):
    torch.cuda.set_per_process_memory_fraction(fraction)
    found.append(pool.stats().limit >> 20)
print(found)
"""
    )
    assert lines == ["[64, 32, 64, 64]"]


def test_two_threads_that_look_at_once_make_pytorchs_pool_known_once() -> None:
    lines = out(
        TORCH
        + """
import threading
sp.install("torch")
t = torch.empty(10)
from streampool.attach import torch as adapter
made, calls, others = adapter._ServedPool, [], []
def slow(*given):
    calls.append(given)
    if len(calls) == 1:
        others.append(threading.Thread(target=torch.cuda.memory_stats))
        others[0].start()
        others[0].join(0.5)  # it has made one too, or waits
    return made(*given)
adapter._ServedPool = slow
print(len(sp.installed()[0].pools))
others[0].join()
print(len(calls))
"""
    )
    assert lines == ["1", "1"]


def test_a_tensor_of_a_stream_that_is_gone_is_freed_without_a_touch_of_the_handle() -> None:
    """Only PyTorch's own streams are sure to live: an external one may be destroyed before its tensors."""
    lines = out(
        TORCH
        + """
sp.install("torch")
s = sp.sim.Device(0).create_stream()
t = torch.empty(5000, int(s.handle))
s.close()
del t
(pool,) = sp.installed()[0].pools
print(pool.stats().live_blocks, sp.sim.traps(), sp._core.torch_problems())
"""
    )
    assert lines == ["0 [] (0, '')"]


def test_pytorchs_own_streams_are_lasting_and_cost_no_question_of_the_driver() -> None:
    lines = out(
        TORCH
        + """
sp.install("torch")
s = torch.cuda.Stream()
external = torch.cuda.Stream(stream_ptr=int(sp.sim.Device(0).create_stream().handle))
def lookups(stream):
    for _ in range(3):
        torch.empty(5000, stream.cuda_stream)
    before = sp.installed()[0].pools[0].stats().stream_lookups
    for _ in range(10):
        torch.empty(5000, stream.cuda_stream)
    return sp.installed()[0].pools[0].stats().stream_lookups - before
print(lookups(s), lookups(external) > 0)
"""
    )
    assert lines == ["0 True"]


def test_a_tensor_used_on_a_second_stream_is_not_reused_before_that_work() -> None:
    """PyTorch drops record_stream silently for an allocator that has not set its hook."""
    lines = out(
        """
import streampool as sp
sp.sim.reset(); sp.sim.configure(memory="1GiB", scheduler="seeded", seed=1)
pool = sp.Pool("sim:0")
import torch
sp.install("torch", pool=pool)
s, t = torch.cuda.Stream(), torch.cuda.Stream()
a = torch.empty(1 << 20, s.cuda_stream)
gate = sp.sim.Gate()
t.own.launch(writes=[(a.data_ptr(), 1 << 20)], gate=gate)
a.record_stream(t)
address = a.data_ptr()
del a
print(torch.empty(1 << 20, s.cuda_stream).data_ptr() == address)
gate.open(); sp.sim.settle()
print(sp.sim.Device(0).races())
"""
    )
    assert lines == ["False", "[]"]
