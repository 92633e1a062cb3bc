"""R9, R24: the GIL is never held while a thread waits for a lock of the pool, so that the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from scene import KIB, Scene, scene

import streampool as sp
from streampool import _native_tests


@dataclass
class Held:
    """A pool, a stream whose lock somebody holds, and blocks that lie there."""

    sc: Scene
    pool: sp.Pool
    stream: Any
    elsewhere: Any  # a stream with memory of its own
    buffers: list[sp.Buffer]
    pointers: list[int]


@pytest.fixture(params=["production", "debug"])
def held(request: pytest.FixtureRequest) -> Iterator[Held]:
    with scene(seed=None) as sc:
        pool = sc.pool(mode=request.param, name="whose lock is held", quarantine_bytes=0)
        stream, elsewhere = sc.stream(pool), sc.stream(pool)
        pool.allocate(4 * KIB, stream=elsewhere).close(elsewhere)
        buffers = [pool.allocate(4 * KIB, stream=stream) for _ in range(3)]
        yield Held(sc, pool, stream, elsewhere, buffers, [pool.allocate_raw(4 * KIB, stream=stream) for _ in range(3)])
        buffers.clear()


def beside(call: Callable[[], object]) -> tuple[threading.Thread, threading.Event]:
    """Make a call in a thread; the event says that it returned."""
    done = threading.Event()

    def run() -> None:
        call()
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, done


WAITING: dict[str, Callable[[Held], object]] = {
    "allocate": lambda h: h.buffers.append(h.pool.allocate(4 * KIB, stream=h.stream)),
    "allocate_raw": lambda h: h.pointers.append(h.pool.allocate_raw(4 * KIB, stream=h.stream)),
    "close": lambda h: h.buffers[0].close(h.stream),
    "free_raw": lambda h: h.pool.free_raw(h.pointers[0], stream=h.stream),
    "stats": lambda h: h.pool.stats(),
    "trim": lambda h: h.pool.trim(),
    "audit": lambda h: h.pool.audit(),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_thread_that_waits_for_a_lock_of_the_pool_lets_the_others_run(held: Held, name: str) -> None:
    """cupy/cupy#2074, rapidsai/rmm#735: try, then drop the GIL, then wait."""
    holder = _native_tests.LockHolder(held.pool.name, held.stream.handle)
    try:
        thread, done = beside(lambda: WAITING[name](held))
        # Each of these lets the other thread have the GIL, and needs it back.
        for _ in range(100):
            time.sleep(0.0005)
        assert not holder.timed_out, "this thread could not run until the lock was free"
        assert not done.is_set(), "it did not wait for the lock: this test shows nothing"
    finally:
        holder.release()
    thread.join(30)
    assert done.is_set()
    assert held.pool.audit() == ""


NOT_WAITING: dict[str, Callable[[Held], object]] = {
    "drop a buffer": lambda h: h.buffers.pop(),
    "close without a stream": lambda h: h.buffers.pop().close(),
    "allocate elsewhere": lambda h: h.pointers.append(h.pool.allocate_raw(4 * KIB, stream=h.elsewhere)),
    "ask what a block is": lambda h: h.buffers[0].facts(),
}


@pytest.mark.parametrize("name", NOT_WAITING)
def test_what_concerns_no_other_stream_and_every_implicit_release_waits_for_nobody(held: Held, name: str) -> None:
    """R6, R9: a finalizer never waits for a lock; no lock is shared between streams."""
    holder = _native_tests.LockHolder(held.pool.name, held.stream.handle)
    try:
        _, done = beside(lambda: NOT_WAITING[name](held))
        assert done.wait(5)
        assert not holder.timed_out
    finally:
        holder.release()
    assert held.pool.audit() == ""
