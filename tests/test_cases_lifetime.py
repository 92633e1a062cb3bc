"""Public bug reports of other allocators about lifetime, shutdown and fork, as tests of ours; see test_cases.py."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
from cases_scene import in_thread
from scene import KIB, MIB, Scene, scene

import streampool as sp


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


# -- H. lifetime, shutdown, fork (more in test_lifetime.py) -----------------------------------------------------------


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("kind", ["device", "pinned"])
@pytest.mark.parametrize("end", ["closed", "dropped", "closed and dropped"])
@pytest.mark.parametrize("order", ["first in first out", "last in first out", "other thread"])
def test_case_36_buffers_outlive_their_pool_and_are_released_in_any_order(
    sc: Scene, mode: str, kind: str, end: str, order: str
) -> None:
    """rapidsai/rmm#943, opencv/opencv#21939: a buffer destroyed after its pool crashed; only stack order worked."""
    before = sc.device.used_memory
    pool = sp.Pool(sc.device, kind=kind, mode=mode)
    s = sc.device.create_stream()
    buffers = [pool.allocate(size, stream=s) for size in (0, 1, 4 * KIB, 700 * KIB, 5 * MIB)]
    view = memoryview(buffers[2])
    if "closed" in end:
        pool.close()
    if "dropped" in end:
        del pool
        gc.collect()
    view[:3] = b"abc"
    for block in buffers:
        sc.use(s, block)
    del block
    sp.sim.settle()
    assert bytes(view[:3]) == b"abc"
    assert sc.device.fault == ""
    view.release()

    def release() -> None:
        while buffers:
            block = buffers.pop(-1 if order == "last in first out" else 0)
            if len(buffers) % 2:
                block.close(s)
            del block

    if order == "other thread":
        in_thread(lambda: release())
    else:
        release()
    pool = None  # type: ignore[assignment]
    gc.collect()
    assert sc.device.used_memory == before
    assert sc.device.fault == ""
    sc.assert_no_race()


EXIT_PROGRAM = """
import atexit, gc, sys, threading
import streampool as sp
def late(): print("late handler", flush=True)
atexit.register(late)
how, mode, kind = sys.argv[1:4]
dev = sp.Device("sim:0")
pool = sp.Pool(dev, mode=mode, kind=kind)
stream = dev.create_stream()
pool.register_stream(stream)
event = stream.record()
blocks = [pool.allocate(n, stream=stream) for n in (0, 100, 1 << 20, 5 << 20)]
pointer = pool.allocate_raw(1000, stream=stream)
cycle = [blocks[1]]; cycle.append(cycle)
class Kept:
    static = pool.allocate(64, stream=stream)
    def __del__(self): Kept.static.close(stream)
kept = Kept()
atexit.register(lambda: (blocks[0].close(stream), pool.free_raw(pointer, stream=stream)))
print("ready", flush=True)
if how == "exit": sys.exit(7)
if how == "raise": raise ValueError("the program's own")
if how == "thread": threading.Thread(target=lambda: pool.allocate(10, stream=stream)).start()
"""


@pytest.mark.parametrize("how", ["return", "exit", "raise", "thread"])
@pytest.mark.parametrize(("mode", "kind"), [("production", "device"), ("debug", "device"), ("debug", "pinned")])
def test_case_37_leaving_everything_in_globals_ends_the_process_as_asked_and_silently(
    how: str, mode: str, kind: str
) -> None:
    """rapidsai/rmm#2366, #2203, LBANN/lbann#380, MrNeRF/LichtFeld-Studio#1419: crashes and error floods at exit."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT_PROGRAM, how, mode, kind], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == {"exit": 7, "raise": 1}.get(how, 0), done.stderr
    assert done.stdout == "ready\nlate handler\n"
    if how == "raise":
        assert done.stderr.startswith("Traceback")
        assert done.stderr.endswith("ValueError: the program's own\n")
        assert done.stderr.count("Traceback") == 1
    else:
        assert done.stderr == ""


FORK_PROGRAM = """
import os, sys, threading
import streampool as sp
dev = sp.Device("sim:0")
pool = sp.Pool(dev, mode=sys.argv[1])
stream = dev.create_stream()
pool.register_stream(stream)
block, gone = pool.allocate(4096, stream=stream), pool.allocate(4096, stream=stream)
pointer = pool.allocate_raw(4096, stream=stream)
before = dict(pool.stats())
child = os.fork()
if child == 0:
    calls = [lambda: pool.allocate(1, stream=stream), lambda: pool.allocate_raw(1), lambda: pool.stats(),
             lambda: pool.reserve(1), lambda: pool.trim(), lambda: pool.check(), lambda: block.record_stream(stream),
             lambda: pool.register_stream(stream), lambda: sp.Pool(dev),
             lambda: pool.begin_capturing(stream), lambda: pool.end_capturing(stream)]
    for i, call in enumerate(calls):
        try:
            call()
        except sp.ForkedProcessError as error:
            assert "spawn" in str(error), (i, error)
        else:
            print("call", i, "did not raise", flush=True)
    block.close(stream)      # inherited frees are ignored
    pool.free_raw(pointer, stream=stream)
    gone = None
    pool.close()
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert dict(pool.stats()) == before
assert pool.audit() == ""
block.close(stream); gone.close(stream); pool.free_raw(pointer, stream=stream)
pool.close()
print("parent done", flush=True)
"""


@pytest.mark.parametrize("mode", ["production", "debug"])
def test_case_39_a_forked_child_ignores_inherited_frees_and_use_raises_and_names_spawn(mode: str) -> None:
    """PaddlePaddle/Paddle#78171, NVIDIA/cudf#5515, gabrieldemarmiesse/torch-mojo-backend#460: memory and fork."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK_PROGRAM, mode], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent done\n", "")
