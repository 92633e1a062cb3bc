"""Call stacks: walked inside the interpreter as by its public functions, interned, put into words when reported."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import streampool as sp
from streampool import _core

HERE = __file__
INSIDE = sys.implementation.name == "cpython" and sys.version_info[:2] in ((3, 11), (3, 12), (3, 13))


def captured(depth: int = 64, native_depth: int = 0) -> list[tuple[str, int, str]]:
    return _core.resolve_stack(_core.capture_stack(depth, native_depth))


def expected() -> list[tuple[str, int, str]]:
    """Give the caller's stack as the standard library sees it, innermost first."""
    frames = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return frames


def check() -> bool:
    """Both ways of walking give the same here, and what traceback gives."""
    same = _core.try_stack_walker() is INSIDE
    mine, theirs = captured()[1:], expected()[:63]
    return same and mine == theirs


# -- both walkers, on every kind of frame -----------------------------------------------------------------------------
def test_frames_are_walked_inside_the_interpreter_where_the_version_is_known() -> None:
    assert _core.stack_walker() == ("interpreter" if INSIDE else "public")


def in_generator() -> Iterator[bool]:
    yield check()
    yield from (check() for _ in range(2))


async def in_async_generator() -> AsyncIterator[bool]:
    yield check()
    await asyncio.sleep(0)
    yield check()


async def in_coroutine() -> list[bool]:
    return [check(), *[found async for found in in_async_generator()]]


@contextlib.contextmanager
def in_context(found: list[bool]) -> Iterator[None]:
    found.append(check())
    yield
    found.append(check())


def recursive(depth: int, call: Callable[[], Any]) -> Any:
    return call() if depth == 0 else recursive(depth - 1, call)


def test_both_ways_give_the_same_for_every_kind_of_frame() -> None:
    found: list[bool] = [check(), *in_generator(), (lambda: check())(), *map(lambda _: check(), range(2))]  # noqa: C417
    found += asyncio.run(in_coroutine())
    with in_context(found):
        found.append(check())

    class Body:
        found.append(check())

        def __del__(self) -> None:
            found.append(check())

        @functools.cached_property
        def value(self) -> bool:
            return check()

    body = Body()
    found.append(body.value)
    del body
    gc.collect()
    sorted(range(3), key=lambda n: found.append(check()) or n)  # called from C
    exec("found.append(check())", {"found": found, "check": check})
    found.append(eval("check()", {"check": check}))
    found.append(recursive(5, check))
    found.append(recursive(200, check))
    try:
        raise ValueError
    except ValueError:
        found.append(check())
    callback = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: found.append(check()) or 0)
    callback()
    assert len(found) >= 24
    assert all(found), found


def test_a_thread_and_a_profiled_call_are_walked_too() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(check()))
    thread.start()
    thread.join()
    sys.settrace(lambda *_: None)
    try:
        found.append(check())
    finally:
        sys.settrace(None)
    assert found == [True, True]


# -- interning --------------------------------------------------------------------------------------------------------
def test_equal_stacks_have_one_number_and_others_another() -> None:
    numbers = [_core.capture_stack(8) for _ in range(3)]
    other = _core.capture_stack(8)
    assert len(set(numbers)) == 1
    assert other not in numbers
    assert _core.capture_stack(0) == 0
    assert len(_core.resolve_stack(_core.capture_stack(2))) == 2


def test_many_different_stacks_are_all_kept() -> None:
    source = "\n".join(["def many(capture):", "    return [", *["        capture(3),"] * 5000, "    ]"])
    names: dict[str, Any] = {}
    exec(compile(source, "<many>", "exec"), names)
    numbers = names["many"](_core.capture_stack)
    assert len(set(numbers)) == 5000
    assert names["many"](_core.capture_stack) != numbers  # called from another line
    lines = [_core.resolve_stack(number)[0][1] for number in numbers]
    assert lines == list(range(3, 5003))


def test_a_stack_outlives_its_function() -> None:
    names: dict[str, Any] = {}
    exec(compile("def gone(capture):\n    return capture(4)", "<gone>", "exec"), names)
    number = names["gone"](_core.capture_stack)
    names.clear()
    gc.collect()
    for _ in range(2):  # resolved, and remembered
        assert _core.resolve_stack(number)[0] == ("<gone>", 2, "gone")


def test_a_number_that_is_no_stack_resolves_to_nothing() -> None:
    assert _core.resolve_stack(0) == []
    assert _core.resolve_stack(2**32 - 1) == []


def raise_and_capture() -> None:
    try:
        raise KeyError("kept")
    finally:
        captured()


def test_capturing_leaves_a_pending_exception_alone() -> None:
    with pytest.raises(KeyError, match="kept"):
        raise_and_capture()


# -- native frames ----------------------------------------------------------------------------------------------------
def test_native_frames_stand_between_the_python_frames_that_they_lie_between() -> None:
    found: list[list[tuple[str, int, str]]] = []

    def called_back() -> int:
        found.append(captured(native_depth=64))
        return 0

    def calls_out() -> None:
        ctypes.CFUNCTYPE(ctypes.c_int)(called_back)()

    calls_out()
    (frames,) = found
    functions = [function for _, _, function in frames]
    inner = next(i for i, name in enumerate(functions) if name.endswith("called_back"))
    outer = next(i for i, name in enumerate(functions) if name.endswith("calls_out"))
    between = [file for file, _, _ in frames[inner + 1 : outer]]
    assert any("ctypes" in file or "ffi" in file for file in between), frames
    python = [frame for frame in frames if frame[1] != 0]
    assert python == captured_python_of(frames)


def captured_python_of(frames: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Give the frames with a line: those of Python, none lost and none twice."""
    seen = [frame for frame in frames if frame[0].endswith((".py", ">")) or frame[0].startswith("<")]
    assert any(function.startswith("test_native_frames") for _, _, function in seen)
    return seen


def test_native_frames_cost_nothing_unless_asked_for() -> None:
    assert all(line != 0 for _, line, _ in captured())


# -- from the pool ----------------------------------------------------------------------------------------------------
@pytest.fixture
def device() -> Iterator[sp.sim.Device]:
    sp.sim.reset()
    device = sp.Device("sim:0")
    assert isinstance(device, sp.sim.Device)
    yield device
    sp.sim.reset()


@pytest.mark.parametrize("depth", [0, 8])
def test_native_depth_is_an_option_of_the_pool(device: sp.sim.Device, depth: int) -> None:
    with sp.Pool(device, mode="debug", native_depth=depth) as pool:
        block = pool.allocate(100, stream=device.create_stream())
        frames = _core.resolve_stack(block.facts()["allocated_at"])
        assert frames[0][2] == "test_native_depth_is_an_option_of_the_pool"
        block.close()
