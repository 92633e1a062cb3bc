"""Which stream a call means that names none."""

from __future__ import annotations

import asyncio
import threading

import pytest

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
