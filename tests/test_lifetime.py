"""R21, R22, R24: who outlives whom, the end of the process, fork, lost devices, and waits that honour Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from scene import KIB, MIB, Scene, becomes, scene

import streampool as sp

MODES = pytest.mark.parametrize("mode", ["production", "debug"])
KINDS = pytest.mark.parametrize("kind", ["device", "pinned", "managed"])


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


def program(text: str, *arguments: str, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, warnings being errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )


# -- R21 --------------------------------------------------------------------------------------------------------------


@MODES
@KINDS
def test_whoever_holds_a_block_keeps_its_memory_through_views_cycles_and_threads(
    sc: Scene, kind: str, mode: str
) -> None:
    """rapidsai/rmm#943, opencv/opencv#21939: through a view, a cycle, a thread; the pool is gone all the while."""
    pool = sp.Pool(sc.device, kind=kind, mode=mode)
    s = sc.device.create_stream()
    gone = weakref.ref(pool)
    views: list[Any] = []
    for make in (lambda b: b.numpy(), memoryview, lambda b: b.numpy("uint16")[5:], lambda b: memoryview(b)[100:200]):
        views.append(make(pool.allocate(4 * KIB, stream=s)))
    cycle: list[Any] = [pool.allocate(4 * KIB, stream=s)]
    cycle.append(cycle)
    held = [pool.allocate(700 * KIB, stream=s)]
    pool.close()
    del pool
    gc.collect()
    for view in views:
        np.asarray(view)[...] = 3
    assert all(np.all(np.asarray(view) == 3) for view in views)
    threading.Thread(target=held.clear).start()
    del cycle
    gc.collect()
    while views:
        del view
        views.pop(0)
        view = None
    gc.collect()
    assert not held
    assert gone() is None
    assert (sc.device.used_memory, sc.device.live_events, sc.device.fault) == (0, 0, "")


@MODES
@KINDS
def test_a_closed_pool_takes_nothing_new_and_lets_everything_go(sc: Scene, kind: str, mode: str) -> None:
    pool = sp.Pool(sc.device, kind=kind, mode=mode)
    s, t = sc.device.create_stream(), sc.device.create_stream()
    pool.register_stream(t)
    blocks = [pool.allocate(size, stream=s) for size in (100, 4 * KIB, 5 * MIB)]
    pointers = [pool.allocate_raw(size, stream=t) for size in (100, 4 * KIB, 5 * MIB)]
    pool.close()
    pool.close()
    for call in (
        lambda: pool.allocate(1, stream=s),
        lambda: pool.allocate_raw(1),
        lambda: pool.reserve(1),
        lambda: pool.register_stream(s),
    ):
        with pytest.raises(sp.PoolClosedError, match="closed"):
            call()
    assert pool.is_closed
    assert pool.stats().live_blocks == 6
    blocks[0].record_stream(t)  # blocks outlive their pool: what is true of them can be said
    blocks[1].record_event(t.record())
    pool.check()
    with pytest.raises(sp.InteriorFreeError):
        pool.free_raw(pointers[0] + 1)
    for block in blocks:
        block.close(t)
    for pointer in pointers:
        pool.free_raw(pointer, stream=t)
    with pytest.raises(sp.InvalidFreeError):
        pool.free_raw(pointers[-1])
    assert becomes(lambda: (pool.stats().reserved, sc.device.used_memory, pool.audit()), (0, 0, ""))
    assert pool.stats().live_blocks == 0
    pool.forget_stream(t)


@MODES
@KINDS
def test_close_waits_a_bounded_time_for_pending_work_and_takes_nothing_from_under_it(
    sc: Scene, kind: str, mode: str
) -> None:
    pool = sp.Pool(sc.device, kind=kind, mode=mode, wait_timeout=0.1)
    s, raw = sc.device.create_stream(), sc.device.create_stream()
    for stream in (s, raw):
        block = pool.allocate(3 * MIB, stream=stream)
        work = sc.busy(stream, block)
        block.close(stream)
    del block
    raw.close()
    pool.close()
    assert sc.device.fault == ""
    assert pool.stats().reserved >= 6 * MIB
    sc.open()
    del work
    pool.trim()
    if kind == "device":
        assert pool.stats().reserved == 0
    del pool
    gc.collect()
    assert (sc.device.used_memory, sc.device.fault) == (0, "")
    sc.assert_no_race()


@MODES
@KINDS
@pytest.mark.parametrize("how", ["implicitly", "explicitly"])
def test_a_closed_pool_touches_no_registered_stream_by_itself_any_more(
    sc: Scene, kind: str, mode: str, how: str
) -> None:
    """Found on a GPU: buffers in the traceback of an error died after their pool was closed and their streams gone."""
    pool = sp.Pool(sc.device, kind=kind, mode=mode)
    s, t, last = sc.device.create_stream(), sc.device.create_stream(), sc.device.create_stream()
    for stream in (s, t):
        pool.register_stream(stream)
    blocks = [pool.allocate(size, stream=s) for size in (100, 4 * KIB, 700 * KIB, 5 * MIB)]
    blocks[0].record_stream(t)
    for block in blocks[1:]:
        sc.use(s, block)
    del block
    blocks.pop(1)  # released before the close, and nobody names its stream again
    pool.close()
    s.close()
    t.close()
    while blocks:
        if how == "explicitly":
            blocks[-1].close(last)
        blocks.pop()
    assert becomes(lambda: (pool.close(), pool.stats().reserved, sc.device.used_memory)[1:], (0, 0))
    assert sp.sim.traps() == []
    sc.assert_no_race()


@MODES
@KINDS
def test_the_last_free_of_a_closed_pool_waits_for_nothing(sc: Scene, kind: str, mode: str) -> None:
    pool = sp.Pool(sc.device, kind=kind, mode=mode)
    s = sc.device.create_stream()
    blocks = [pool.allocate(3 * MIB, stream=s), pool.allocate(3 * MIB, stream=s)]
    work = sc.busy(s, blocks[0])
    pool.close()
    before = sp.sim.clock.now()
    blocks.pop().close(s)
    blocks.pop().close(s)
    assert sp.sim.clock.now() == before
    assert pool.stats().reserved >= 3 * MIB
    sc.open(work)
    pool.close()
    assert becomes(lambda: (pool.stats().reserved, sc.device.used_memory, pool.audit()), (0, 0, ""))
    assert sc.device.fault == ""


@MODES
@KINDS
def test_a_pool_that_is_only_dropped_gives_everything_back_or_leaves_it_to_running_work(
    sc: Scene, kind: str, mode: str
) -> None:
    for busy in (False, True):
        pool = sp.Pool(sc.device, kind=kind, mode=mode)
        s = sc.device.create_stream()
        pool.register_stream(s)
        block = pool.allocate(3 * MIB, stream=s)
        block.record_stream(sc.device.create_stream())
        if busy:
            sc.busy(s, block)
        del block
        pool.forget_stream(s)
        del pool
        gc.collect()
        if busy:
            sc.open()
            assert sc.device.fault == "", "nothing was pulled away under running work"
        else:
            assert becomes(lambda: sc.device.used_memory, 0)
    sc.assert_no_race()


def test_a_pool_in_a_cycle_with_its_own_buffers_is_collected(sc: Scene) -> None:
    pool = sp.Pool(sc.device)
    pool.kept = [pool.allocate(5 * MIB, stream=sc.device.create_stream())]  # type: ignore[attr-defined]
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert sc.device.used_memory == 0


def test_buffers_keep_their_stream_objects_alive_until_they_are_freed(sc: Scene) -> None:
    pool = sc.pool()
    before = sc.device.live_streams
    block = pool.allocate(4 * KIB, stream=sc.device.create_stream())
    block.record_stream(sc.device.create_stream())
    gc.collect()
    assert sc.device.live_streams == before + 2
    block.close()
    gc.collect()
    assert sc.device.live_streams == before


# -- R22: the end of the process ---------------------------------------------------------------------------------------

GLOBALS = """
import atexit, gc, sys, threading
def theirs(when): print(when, flush=True)
atexit.register(theirs, "registered before ours: runs last")
import streampool as sp
how, mode, kind, scheduler = sys.argv[1:5]
sp.sim.configure(scheduler=scheduler)
dev = sp.Device("sim:0")
atexit.register(theirs, "registered after ours: runs first")
pool = sp.Pool(dev, mode=mode, kind=kind, stack_depth=4)
lasting, raw = dev.create_stream(), dev.create_stream()
pool.register_stream(lasting)
blocks = [pool.allocate(n, stream=s) for n in (0, 100, 1 << 20, 5 << 20) for s in (lasting, raw)]
pointer = pool.allocate_raw(1000, stream=lasting)
view = blocks[2].numpy()
event = raw.record()
blocks[3].record_stream(lasting); blocks[4].record_event(event)
cycle = [blocks[1], pool]; cycle.append(cycle)
gate = sp.sim.Gate()
if how == "busy": raw.launch(writes=[blocks[3]], gate=gate)
class Late:
    def __del__(self):
        try: blocks[0].close(lasting)
        except TypeError: pass          # the module's globals are None by now
late = Late()
class Static: block = pool.allocate(10, stream=raw)
def at_exit():
    blocks[1].close(raw)
    pool.free_raw(pointer, stream=lasting)
    blocks.pop()
atexit.register(at_exit)
def use_late():
    for call in (lambda: pool.allocate(1, stream=lasting), pool.trim, pool.stats, lambda: pool.check(0.1), pool.close):
        try: call()
        except sp.StreamPoolError as error: assert "exiting" in str(error), error
atexit.register(use_late)
if how == "exit": sys.exit(7)
if how == "exit 0": sys.exit()
if how == "raise": raise ValueError("the program's own")
if how == "daemon":
    def loop():
        while True:
            try: pool.free_raw(pool.allocate_raw(10, stream=lasting), stream=lasting)
            except sp.StreamPoolError: pass
    threading.Thread(target=loop, daemon=True).start()
if how == "os._exit": sys.stdout.flush(); import os; os._exit(5)
"""
CODES = {"exit": 7, "raise": 1, "os._exit": 5}


@pytest.mark.parametrize("how", ["return", "exit", "exit 0", "raise", "busy", "daemon", "os._exit"])
@pytest.mark.parametrize(
    ("mode", "kind", "scheduler"),
    [("production", "device", "threads"), ("debug", "device", "seeded"), ("debug", "pinned", "threads")],
)
def test_the_process_ends_as_asked_and_silently_whatever_is_left(
    how: str, mode: str, kind: str, scheduler: str
) -> None:
    """rapidsai/rmm#2366 (fix #2367), #2203, LBANN/lbann#380, MrNeRF/LichtFeld-Studio#1419."""
    done = program(GLOBALS, how, mode, kind, scheduler)
    assert done.returncode == CODES.get(how, 0), done.stderr
    if how == "raise":
        assert done.stderr.splitlines()[-1] == "ValueError: the program's own"
        assert done.stderr.count("Traceback") == 1
    else:
        assert done.stderr == ""
    lines = ["registered after ours: runs first", "registered before ours: runs last"]
    assert done.stdout.splitlines() == ([] if how == "os._exit" else lines)


def test_a_handler_that_uses_the_pool_before_ours_runs_finds_it_working() -> None:
    done = program(
        """
        import atexit, streampool as sp
        dev = sp.Device("sim:0"); pool = sp.Pool(dev); s = dev.create_stream()
        def last_work():
            block = pool.allocate(4096, stream=s); block.close(s)
            assert pool.audit() == ""
            pool.close()
            print(dev.used_memory)
        atexit.register(last_work)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_no_driver_call_is_made_once_the_process_is_exiting() -> None:
    done = program(
        """
        import atexit, sys
        def compare():
            print(calls() == before, flush=True)
        atexit.register(compare)           # before ours: runs after the core knows
        import streampool as sp
        dev = sp.Device("sim:0"); pool = sp.Pool(dev, mode="debug"); s = dev.create_stream()
        pool.register_stream(s)
        calls = dev.calls
        blocks = [pool.allocate(4096, stream=s) for _ in range(5)]
        pointer = pool.allocate_raw(64, stream=s)
        def end():
            global before
            sp._core.set_exiting()
            before = calls()
            blocks[0].close(s); blocks.clear(); pool.free_raw(pointer, stream=s); pool.trim(); pool.close()
        atexit.register(end)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_pool_of_a_c_program_style_thread_ends_with_the_process() -> None:
    done = program(
        """
        import threading, streampool as sp
        dev = sp.Device("sim:0"); pool = sp.Pool(dev); s = dev.create_stream()
        kept = threading.local()
        def work():
            kept.block = pool.allocate(4096, stream=dev.per_thread_default_stream)
        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        import gc; gc.collect()
        assert pool.stats().live_blocks == 0, pool.stats()
        assert pool.audit() == ""
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- R22: fork --------------------------------------------------------------------------------------------------------


def test_a_child_that_only_exits_is_silent_and_leaves_the_parent_alone() -> None:
    """PaddlePaddle/Paddle#78171, NVIDIA/cudf#5515: inherited memory was freed at the child's exit, with an error."""
    done = program(
        """
        import gc, os, sys, streampool as sp
        dev = sp.Device("sim:0"); pool = sp.Pool(dev, mode="debug"); s = dev.create_stream()
        pool.register_stream(s)
        blocks = [pool.allocate(4096, stream=s) for _ in range(3)]
        before, calls = dict(pool.stats()), dev.calls()
        for how in ("return", "exit", "raise", "drop"):
            child = os.fork()
            if child == 0:
                if how == "exit": sys.exit(3)
                if how == "raise": os.close(2); raise ValueError
                if how == "drop": del pool, blocks; gc.collect()
                break
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == {"exit": 3, "raise": 1}.get(how, 0), (how, code)
        else:
            assert (dict(pool.stats()), dev.calls()) == (before, calls)
            assert pool.audit() == ""
            print("parent")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent\n", "")


def test_a_fork_while_other_threads_hold_the_pools_locks_does_not_hang_the_child() -> None:
    """gabrieldemarmiesse/torch-mojo-backend#460: locks held by threads that do not exist in the child."""
    done = program(
        """
        import os, threading, streampool as sp
        dev = sp.Device("sim:0"); pool = sp.Pool(dev, mode="debug", check_every=1); s = dev.create_stream()
        pool.register_stream(s)
        stop = False
        def loop(size):
            stream = dev.per_thread_default_stream
            while not stop:
                pool.allocate(size, stream=stream).close(stream); pool.stats()
        threads = [threading.Thread(target=loop, args=(n,)) for n in (100, 5 << 20, 100)]
        for t in threads: t.start()
        block = pool.allocate(100, stream=s)
        for _ in range(25):
            child = os.fork()
            if child == 0:
                block.close(s)
                for call in (lambda: pool.allocate(1, stream=s), pool.stats, pool.trim, pool.check, pool.live_blocks):
                    try: call()
                    except sp.ForkedProcessError as error: assert "spawn" in str(error)
                    else: os._exit(9)
                pool.close(); del block, pool
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stop = True
        for t in threads: t.join()
        print("done")
        """,
        timeout=40,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_processes_started_with_spawn_have_pools_of_their_own(tmp_path: Any) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, streampool as sp
            def work(n):
                dev = sp.Device("sim:0")
                with sp.Pool(dev) as pool:
                    with pool.allocate(n, stream=dev.create_stream()) as block: return block.size
            if __name__ == "__main__":
                pool = sp.Pool(sp.Device("sim:0")); block = pool.allocate(10)
                with multiprocessing.get_context("spawn").Pool(1) as workers: print(workers.map(work, [1, 2]))
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 2]\n", "")


# -- R22: a device that is lost, a driver that is gone -----------------------------------------------------------------


@MODES
@KINDS
@pytest.mark.parametrize("how", ["sticky error", "driver gone", "reset"])
def test_a_lost_device_is_one_clear_error_and_frees_are_harmless(sc: Scene, kind: str, mode: str, how: str) -> None:
    """JuliaGPU/CUDA.jl#16, CERN/TIGRE#770, numba-cuda#644: old blocks were handed out or freed after a reset."""
    pool = sp.Pool(sc.device, kind=kind, mode=mode, wait_timeout=0.1)
    lasting, raw = sc.device.create_stream(), sc.device.create_stream()
    pool.register_stream(lasting)
    blocks = [pool.allocate(size, stream=s) for size in (1, 4 * KIB, 5 * MIB) for s in (lasting, raw)]
    pointer = pool.allocate_raw(100, stream=raw)
    pool.allocate(3 * MIB, stream=raw).close(raw)
    sc.busy(raw, blocks[1])
    live = pool.stats().live_blocks
    if how == "sticky error":
        sc.device.set_lost(700)
    elif how == "driver gone":
        sc.device.set_gone()
    else:
        sp.sim.reset()
    words = "ILLEGAL_ADDRESS|DEINITIALIZED|CONTEXT_IS_DESTROYED"
    for size, stream in ((900 * MIB, lasting), (10, raw)):
        with pytest.raises(sp.StreamPoolError, match=words):
            pool.allocate(size, stream=stream)
    assert pool.stats().live_blocks == live
    if how == "driver gone":
        pool.check(timeout=0.1)
    else:
        with pytest.raises(sp.StreamPoolError, match=words):
            pool.check(timeout=0.1)
    for block in blocks[:3]:
        block.close(lasting)
    blocks.clear()
    pool.free_raw(pointer)
    pool.trim()
    assert pool.stats().live_blocks == 0
    pool.close()
    del pool
    gc.collect()
    sc.work.clear()
    sc.device.set_gone(False) if how == "driver gone" else None


@MODES
@KINDS
def test_frees_while_the_driver_goes_down_are_harmless_whatever_stream_they_name(
    sc: Scene, kind: str, mode: str
) -> None:
    """Interpreters free what globals hold when CUDA is half gone: an error there is a traceback at every exit."""
    pool = sp.Pool(sc.device, kind=kind, mode=mode)
    lasting, raw = sc.device.create_stream(), sc.device.create_stream()
    pool.register_stream(lasting)
    streams = (lasting, raw, raw.handle, sc.device.default_stream, sc.device.per_thread_default_stream)
    blocks = [(pool.allocate(size, stream=stream), stream) for size in (0, 4 * KIB, 3 * MIB) for stream in streams]
    for block, _ in blocks:
        block.record_stream(raw)
    pointers = [(pool.allocate_raw(size, stream=stream), size, stream) for size in (1, 2 * MIB) for stream in streams]
    doubled = pool.allocate_raw(64, stream=raw)
    pool.free_raw(doubled, stream=raw)
    sc.device.set_gone()
    for block, stream in blocks:
        block.close(stream)
        assert block.is_closed
    for number, (pointer, size, stream) in enumerate(pointers):
        if number % 2:
            pool.free_raw_sized(pointer, size, stream=stream)
        else:
            pool.free_raw(pointer, stream=stream)
    for stream in streams[1:3]:
        pool.forget_stream(stream)
    with pytest.raises(sp.DoubleFreeError):  # harmless is not blind
        pool.free_raw(doubled, stream=raw)
    assert pool.stats().live_blocks == 0
    assert pool.audit() == ""
    sc.device.set_gone(False)
    pool.close()
    assert sp.sim.traps() == []


# -- R24 --------------------------------------------------------------------------------------------------------------

CTRL_C = """
import os, signal, sys, threading, time
import streampool as sp
which, kind, mode = sys.argv[1:4]
sp.sim.configure(memory="64MiB", host_memory="64MiB")
dev = sp.Device("sim:0")
pool = sp.Pool(dev, kind=kind, mode=mode, limit="32MiB", wait_timeout=100)
s, t = dev.create_stream(), dev.create_stream()
pool.register_stream(s); pool.register_stream(t)
gate = sp.sim.Gate()
held = pool.allocate(5 << 20, stream=t)
block = pool.allocate(20 << 20, stream=s)
s.launch(writes=[block], gate=gate)
host = bytearray(5 << 20)
if which in ("allocate", "close"): block.close(s)
if which == "close": held.close(t)
counted, stop = [0], False
def spin():
    while not stop: counted[0] += 1; time.sleep(0)
spinner = threading.Thread(target=spin); spinner.start()
before = dict(pool.stats())
main = threading.get_ident()
def interrupt():
    time.sleep(0.2)
    global seen, at
    seen = counted[0]
    time.sleep(0.1)
    at = time.monotonic()
    seen = counted[0] - seen
    os.kill(os.getpid(), signal.SIGINT)
calls = {
    "allocate": lambda: pool.allocate(20 << 20, stream=t),
    "check": lambda: pool.check(timeout=100),
    "close": pool.close,
    "copy": lambda: (t.wait(s), held.copy_to(host, stream=t)),
    "second close": lambda: (held.close(t), pool.close(), block.close(s), pool.close()),
    "sync": s.sync,
}
threading.Thread(target=interrupt).start()
try:
    calls[which]()
except KeyboardInterrupt:
    took = time.monotonic() - at
    assert took < 20, took
    print("interrupted", flush=True)
else:
    print("not interrupted", flush=True)
assert seen > 0, "other threads run meanwhile"
stop = True; spinner.join()
after = dict(pool.stats())
if which != "second close":
    for name in ("in_use", "live_blocks", "allocations", "frees"): assert after[name] == before[name], name
assert pool.audit() == "", pool.audit()
gate.open()
if not pool.is_closed:
    pool.allocate(20 << 20, stream=t).close(t) if which == "allocate" else None
try:
    held.close(t); block.close(s); pool.close()
except KeyboardInterrupt: print("again", flush=True)
"""


@pytest.mark.parametrize(
    ("which", "kind", "mode"),
    [
        ("allocate", "device", "production"),
        ("allocate", "pinned", "production"),
        ("allocate", "device", "debug"),
        ("check", "device", "debug"),
        ("check", "pinned", "debug"),
        ("close", "device", "production"),
        ("close", "pinned", "debug"),
        ("copy", "device", "production"),
        ("second close", "device", "production"),
        ("second close", "pinned", "debug"),
        ("sync", "device", "production"),
    ],
)
def test_a_wait_ends_with_ctrl_c_and_lets_other_threads_run(which: str, kind: str, mode: str) -> None:
    """NVIDIA/cuda-quantum#4284, pytorch/pytorch#109159, odlgroup/odl#221: Ctrl-C was ignored, threads froze."""
    done = program(CTRL_C, which, kind, mode)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_ctrl_c_while_driver_pieces_are_freed_is_not_lost() -> None:
    """The last rung: mem_free blocks until the device is idle, on a helper thread."""
    done = program(
        """
        import os, signal, threading, time, streampool as sp
        sp.sim.configure(host_memory="64MiB")
        dev = sp.Device("sim:0"); pool = sp.Pool(dev, kind="pinned", limit="32MiB", wait_timeout=100)
        s, t = dev.create_stream(), dev.create_stream(); pool.register_stream(s)
        idle = pool.allocate(9 << 20, stream=s); idle.close(s); s.sync(); pool.check()
        gate = sp.sim.Gate(); t.launch(gate=gate)           # unrelated work keeps the device busy
        asked = []
        pool.set_oom_callback(lambda size: asked.append(size) or False)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        try: pool.allocate(30 << 20, stream=s)
        except KeyboardInterrupt: print("interrupted")
        except sp.OutOfMemoryError: print("lost")
        assert time.monotonic() - begin < 20
        gate.open(); t.sync()
        pool.close()
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_an_interrupt_during_the_wait_leaves_the_pool_as_it_was() -> None:
    """pytorch/pytorch#109159: the interrupt leaked the allocation."""
    with scene(seed=None) as here:
        pool = here.pool(limit=16 * MIB, wait_timeout=30)
        s, t = here.stream(pool), here.stream(pool)
        block = pool.allocate(12 * MIB, stream=s)
        work = here.busy(s, block)
        block.close(s)
        before = pool.stats()
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.allocate(12 * MIB, stream=t)
        timer.join()
        after = pool.stats()
        for name in ("in_use", "live_blocks", "pending", "reserved", "allocations"):
            assert after[name] == before[name]
        assert pool.audit() == ""
        here.open(work)
        pool.allocate(12 * MIB, stream=t).close(t)


def in_threads(work: list[Callable[[], object]], seconds: float) -> None:
    """Run endless pieces of work side by side for a while; re-raises what one raised."""
    errors: list[BaseException] = []
    end = time.monotonic() + seconds

    def run(piece: Callable[[], object]) -> None:
        try:
            while time.monotonic() < end and not errors:
                piece()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(piece,)) for piece in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@MODES
def test_pools_made_used_closed_and_dropped_by_many_threads_leave_nothing(mode: str) -> None:
    with scene(seed=None) as sc:
        shared = sc.pool(mode=mode, limit=256 * MIB)

        def own() -> None:
            with sp.Pool(sc.device, mode=mode) as pool:
                s = sc.device.create_stream()
                blocks = [pool.allocate(size, stream=s) for size in (10, 70 * KIB, 3 * MIB)]
                blocks[0].close(s)
            del blocks, pool

        def use() -> None:
            t = sc.device.per_thread_default_stream
            block = shared.allocate(70 * KIB, stream=t)
            sc.use(t, block)
            if hash(block) % 2:
                block.close(t)

        def look() -> None:
            shared.stats(), shared.trim(), shared.live_blocks(), gc.collect()

        in_threads([own, own, use, use, look], 0.6)
        gc.collect()
        assert shared.audit() == ""
        sc.assert_no_race()
        shared.close()
        # A dropped pool is kept until its work is done, and the next pool that looks finds that out.
        sc.device.sync()
        sp.Pool(sc.device).close()
        assert sc.device.used_memory == 0


def test_threads_that_close_one_buffer_and_record_streams_on_it_meet_no_freed_list() -> None:
    """A tester's crash: close() walked the recorded streams while another thread added to them or dropped them."""
    rounds, threads = 150, 4
    with scene() as sc:
        pool, s = sc.pool(), sc.stream()

        class Slow:
            """A stream that lets other threads run whenever it is asked."""

            def __init__(self, stream: Any) -> None:
                self.stream, self.is_owner = stream, True

            @property
            def is_closed(self) -> bool:
                time.sleep(0)
                return False

            def __cuda_stream__(self) -> tuple[int, int]:
                time.sleep(0)
                return self.stream.__cuda_stream__()

        slow, recorded = Slow(s), [Slow(sc.stream()) for _ in range(6)]
        wrong: list[BaseException] = []
        begin = threading.Barrier(threads)
        shared: list[sp.Buffer] = []

        def work(number: int) -> None:
            for _ in range(rounds):
                if begin.wait(60) == 0:
                    shared[:] = [pool.allocate(4096, stream=s)]
                    for stream in recorded[:3]:
                        shared[0].record_stream(stream)
                begin.wait(60)
                try:
                    if number % 2:
                        shared[0].record_stream(recorded[3 + number % 3])
                    shared[0].close(slow)  # twice is harmless
                except ValueError as error:
                    if "the buffer is closed" not in str(error):
                        wrong.append(error)
                except BaseException as error:
                    wrong.append(error)

        workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert wrong == []
        assert pool.stats().live_blocks == 0
