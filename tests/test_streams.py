"""Which stream a call means that names none."""

from __future__ import annotations

import asyncio
import threading

import pytest
from scene import scene

import streampool as sp
from streampool import streams


@pytest.fixture
def pool() -> sp.Pool:
    return sp.Pool("sim:0")


def test_the_innermost_stream_of_the_context_is_current(pool: sp.Pool) -> None:
    device = sp.Device("sim")
    outer, inner = device.create_stream(), device.create_stream()
    with sp.stream(outer) as entered:
        assert entered is outer
        assert sp.current_stream(pool) is outer
        with sp.stream(inner):
            assert sp.current_stream(pool) is inner
        assert sp.current_stream(pool) is outer
    assert sp.current_stream(pool) == 1


def test_a_with_block_that_raises_restores_the_stream(pool: sp.Pool) -> None:
    with pytest.raises(KeyError), sp.stream(7):
        raise KeyError
    assert sp.current_stream(pool) == 1


def test_one_context_manager_can_be_entered_again(pool: sp.Pool) -> None:
    chosen = sp.stream(7)
    with chosen, sp.stream(8), chosen:
        assert sp.current_stream(pool) == 7
    assert sp.current_stream(pool) == 1


def test_another_thread_starts_without_a_stream_and_a_task_inherits_it(pool: sp.Pool) -> None:
    seen: list[object] = []

    async def task() -> object:
        return sp.current_stream(pool)

    async def tasks() -> object:
        with sp.stream(9):
            inside = asyncio.create_task(task())
        return await inside, sp.current_stream(pool)

    with sp.stream(7):
        thread = threading.Thread(target=lambda: seen.append(sp.current_stream(pool)))
        thread.start()
        thread.join()
        assert asyncio.run(tasks()) == (9, 7)
    assert seen == [1]


@pytest.mark.parametrize("value", [None, True, 1.5, "s", object()])
def test_what_is_no_stream_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="__cuda_stream__"):
        sp.stream(value)


@pytest.mark.parametrize(
    ("switch", "handle"), [(None, 1), ("", 1), ("0", 1), ("1", 2), ("2", 2), ("nonsense", 1), ("-1", 1)]
)
def test_the_default_on_cuda_follows_cuda_cores_switch(
    monkeypatch: pytest.MonkeyPatch, switch: str | None, handle: int
) -> None:
    monkeypatch.delenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", raising=False)
    if switch is not None:
        monkeypatch.setenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", switch)
    assert streams.default_stream(simulated=False) == handle
    assert streams.default_stream(simulated=True) == 1


def test_an_allocation_that_names_no_stream_goes_to_the_current_one(pool: sp.Pool) -> None:
    """microsoft/onnxruntime#32342: an omitted stream is the current one by rule, never free-for-all."""
    device = sp.Device("sim")
    chosen = device.create_stream()
    with sp.stream(chosen):
        inside = pool.allocate(64)
    outside = pool.allocate(64)
    assert inside.facts()["stream"] != outside.facts()["stream"]
    named = pool.allocate(64, stream=chosen)
    assert named.facts()["stream"] == inside.facts()["stream"]
    for buffer in (inside, outside, named):
        buffer.close()
    pool.close()


def test_a_stream_object_that_was_used_last_is_still_asked_whether_it_is_closed() -> None:
    with scene() as sc:
        pool = sc.pool()
        stream = sc.device.create_stream()
        pool.register_stream(stream)
        for _ in range(3):
            pool.allocate(4096, stream=stream).close(stream)
        pool.forget_stream(stream)
        stream.close()
        with pytest.raises(sp.StreamError, match="closed"):
            pool.allocate(4096, stream=stream)


def test_a_stream_object_that_answers_anew_each_time_is_asked_each_time() -> None:
    class Current:
        is_closed = False

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, now.handle)

    with scene() as sc:
        pool = sc.pool()
        current = Current()
        now = first = sc.stream(pool)
        a = pool.allocate(4096, stream=current)
        now = second = sc.stream(pool)
        b = pool.allocate(4096, stream=current)
        facts = {block["address"]: block["stream"] for block in pool.live_blocks()}
        assert (facts[a.handle], facts[b.handle]) == (first.id, second.id)


def test_a_new_stream_object_in_the_place_of_one_that_is_gone_is_another_stream() -> None:
    with scene() as sc:
        pool = sc.pool()
        seen = set()
        for _ in range(50):
            stream = sc.device.create_stream()  # most often where the last one was
            block = pool.allocate(4096, stream=stream)
            (facts,) = pool.live_blocks()
            assert facts["stream"] == stream.id
            seen.add(stream.id)
            block.close(stream)
            del block, stream
        assert len(seen) == 50


def test_what_was_not_entered_cannot_be_left() -> None:
    with pytest.raises(RuntimeError, match="a stream is left more often than it was entered"):
        sp.stream(1).__exit__(None, None, None)
    scope = sp.scope("decode")
    with scope:
        pass
    with pytest.raises(RuntimeError, match="scope 'decode' is left more often than it was entered"):
        scope.__exit__(None, None, None)


def test_a_peers_stream_is_registered_declared_and_forgotten_but_nothing_is_allocated_there() -> None:
    with scene(devices=2) as sc:
        pool, s = sc.pool(), sc.stream()
        far = sp.sim.Device(1).create_stream()
        block = pool.allocate(4096, stream=s)
        for stream in (far, far.handle):
            pool.register_stream(stream)
            block.record_stream(stream)
            with pool.capturing(stream):
                far.begin_capture()
                assert far.end_capture() is not None
            pool.forget_stream(stream)
            with pytest.raises(sp.StreamError, match=r"another device|belongs to device 1"):
                pool.allocate(1, stream=stream)
            with pytest.raises(sp.StreamError, match=r"another device|belongs to device 1"):
                block.close(stream)
        with pytest.raises(sp.DriverError, match=r"^fill: CUDA_ERROR_INVALID_HANDLE"):
            block.fill(0, stream=far.handle)
        block.close(s)
        sc.assert_no_race()
