"""Who holds what is left: chains of Python objects, two marks with nothing left between them, and ages."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest

import streampool as sp
from streampool.leaks import LeakClass
from streampool.report import Report

MIB = 1 << 20


@pytest.fixture
def pool(device: sp.sim.Device) -> Iterator[sp.Pool]:
    with sp.Pool(device, mode="debug") as pool:
        yield pool


def chain(pool: sp.Pool) -> tuple[str, ...]:
    (leak,) = pool.leaks(chains=True)
    assert leak.leak_class is LeakClass.HELD
    return leak.held_by


def _started(generator: Iterator[int]) -> Iterator[int]:
    next(generator)
    return generator


# -- chains -----------------------------------------------------------------------------------------------------------
def holders(buffer: sp.Buffer) -> dict[str, tuple[Any, list[str]]]:
    """Something that a module names and that holds the buffer, and the words of the steps to it."""

    class Cache:
        def __init__(self, entry: object) -> None:
            self.entry = entry

    class Slotted:
        __slots__ = ("kept",)

        def __init__(self, kept: object) -> None:
            self.kept = kept

    class Keeps:
        shared = buffer

    def closure() -> object:
        return buffer

    def generate() -> Iterator[int]:
        kept = buffer
        yield id(kept)

    return {
        "name": (buffer, []),
        "list": ([1, 2, buffer], ["[2] of a list of 3"]),
        "dict": ({"loss": [buffer]}, ["loss of a dict of 1", "[0] of a list of 1"]),
        "number": ({7: buffer}, ["7 of a dict of 1"]),
        "deque": (deque([buffer]), ["[0] of a deque of 1"]),
        "set": ({buffer}, ["an item of a set of 1"]),
        "tuple": ((0, (buffer,)), ["[1] of a tuple of 2", "[0] of a tuple of 1"]),
        "object": (Cache([buffer]), [".entry of a", "[0] of a list of 1"]),
        "slots": (Slotted(buffer), [".kept of a"]),
        "closure": (closure, ["function", "an enclosing function"]),
        "class": (Keeps, []),
        "generator": (_started(generate()), ["kept in the generator"]),
        "secret": ({("a", object()): buffer}, ["a key of type tuple"]),
    }


@pytest.mark.parametrize("how", holders(object()))  # type: ignore[arg-type]
def test_the_chain_leads_from_a_modules_name_to_the_buffer(pool: sp.Pool, how: str) -> None:
    module = ModuleType("train")
    module.__dict__["__builtins__"] = {}
    sys.modules["train"] = module

    def fill() -> list[str]:
        module.cache, steps = holders(pool.allocate(1000))[how]  # type: ignore[attr-defined]
        return steps

    try:
        steps = fill()
        gc.collect()
        held = chain(pool)
        assert held, "nothing was found"
        if how == "class":
            assert held[0].startswith("class ")
            assert held[0].endswith("Keeps")
            assert "shared of a dict" in held[1]
            return
        assert held[0] == "module train: cache"
        at = 0
        for words in steps:
            at = next(i for i in range(at, len(held)) if words in held[i]) + 1
    finally:
        del sys.modules["train"]
        module.__dict__.clear()


def test_a_frame_that_holds_a_buffer_is_named_with_its_variable(pool: sp.Pool) -> None:
    scores = pool.allocate(1000)
    (root,) = chain(pool)
    assert root.startswith("frame of test_a_frame_that_holds_a_buffer_is_named_with_its_variable (")
    assert root.endswith(": scores")
    del scores  # and the search left nothing behind that holds it
    assert len(pool.leaks()) == 0


def test_under_a_debugger_the_search_leaves_variables_alone(pool: sp.Pool) -> None:
    seen: list[object] = []

    def step() -> object:
        kept = object()
        seen.append(kept)
        marker = 1
        return kept if marker else None

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code is step.__code__ and event == "line":
            pool.leaks(chains=True)
        return trace

    held = pool.allocate(8)  # something to look for
    sys.settrace(trace)
    try:
        result = step()
    finally:
        sys.settrace(None)
    assert result is seen[0]
    held.close()


def test_a_view_that_holds_a_buffer_is_a_step_of_the_chain(pool: sp.Pool) -> None:
    view = memoryview(pool.allocate(1000))
    root, *steps = chain(pool)
    assert root.endswith(": view")
    assert "memoryview" in steps[0]
    view.release()


def test_the_kept_frame_of_a_caught_exception_is_named(pool: sp.Pool) -> None:
    def step() -> None:
        activations = pool.allocate(1000)
        raise LookupError(activations.size)

    caught = None
    try:
        step()
    except LookupError as error:
        caught = error
    held = chain(pool)
    assert held[0].endswith(": caught")
    assert any("activations in the kept frame of " in step for step in held)
    del caught


def test_no_code_of_the_program_runs_in_the_search(pool: sp.Pool) -> None:
    ran: list[str] = []

    class Nosy:
        def __repr__(self) -> str:
            ran.append("repr")
            return "nosy"

        def __eq__(self, other: object) -> bool:
            ran.append("eq")
            return False

        def __hash__(self) -> int:
            return 1

        def __getattr__(self, name: str) -> object:
            ran.append(name)
            raise AttributeError(name)

        @property
        def trap(self) -> object:
            ran.append("trap")
            return None

    nosy = Nosy()
    kept = {nosy: [nosy, pool.allocate(1000)]}
    nosy.__dict__["kept"] = kept
    gc.collect()
    ran.clear()
    assert chain(pool)
    assert ran == []
    kept.clear()
    nosy.__dict__.clear()


def test_the_report_of_a_run_says_who_holds_what_is_held(device: sp.sim.Device) -> None:
    from streampool import session

    watching = session.begin()
    try:
        pool = sp.Pool(device, mode="debug")
        kept = {"epoch": pool.allocate(1000)}
        report = Report.from_findings(watching.finish())
    finally:
        session.end()
    (leak,) = report.leaks
    assert leak.held_by[-1] == "epoch of a dict of 1"
    assert "epoch of a dict of 1" in report.to_text()
    assert "epoch of a dict of 1" in report.to_html()
    assert Report.from_json(report.to_json()).leaks == report.leaks
    kept.clear()
    pool.close()


# -- two marks --------------------------------------------------------------------------------------------------------
def test_what_is_freed_by_the_end_is_no_leak_nor_what_was_there_before(pool: sp.Pool) -> None:
    before = pool.allocate_raw(100)
    kept = pool.allocate(100)
    with pool.expect_no_leaks():
        pool.allocate(1000).close()
        cycle: list[object] = [pool.allocate(1000)]
        cycle.append(cycle)
        del cycle
    pool.free_raw(before)
    kept.close()


def test_what_is_left_at_the_end_is_raised_with_its_class_line_and_chain(pool: sp.Pool) -> None:
    kept: list[Any] = []

    def leave() -> None:
        with pool.expect_no_leaks():
            kept.extend((pool.allocate_raw(1000), pool.allocate(24)))

    with pytest.raises(sp.LeakError) as caught:
        leave()
    assert isinstance(caught.value, AssertionError)
    lost, held = caught.value.leaks
    assert (lost.leak_class, held.leak_class) == (LeakClass.LOST, LeakClass.HELD)
    assert held.held_by
    text = str(caught.value)
    assert text.startswith("1,024 bytes in 2 blocks are still live of pool 'default'\n")
    assert "lost: 1,000 bytes in 1 block, allocated raw and never freed, allocated at " in text
    assert "(docs/faults/held.md)" in text
    pool.free_raw(kept[0])
    kept.clear()


def test_an_exception_of_the_body_goes_out_as_it_is(pool: sp.Pool) -> None:
    with pytest.raises(ZeroDivisionError), pool.expect_no_leaks():
        _ = pool.allocate(8).size / 0


def test_a_pool_that_tracks_nothing_says_what_it_needs(device: sp.sim.Device) -> None:
    with (
        sp.Pool(device, name="fast") as pool,
        pytest.raises(ValueError, match="pool 'fast' does not track its blocks: use mode='debug'"),
        pool.expect_no_leaks(),
    ):
        pytest.fail("the body runs")


# -- growing ----------------------------------------------------------------------------------------------------------
def test_a_growing_site_is_reported_with_its_bytes_by_epoch_and_by_age(pool: sp.Pool) -> None:
    results: list[sp.Buffer] = []
    for _ in range(6):
        results.append(pool.allocate(MIB))
        pool.check()
        sp.sim.clock.advance(20)
    (leak,) = pool.leaks()
    assert leak.leak_class is LeakClass.GROWING
    assert leak.growth == tuple(n * MIB for n in range(1, 7))
    assert leak.ages == (0, 0, 2 * MIB, 4 * MIB, 0, 0)  # under 1 min: two; under 10 min: the rest
    text = Report(leaks=pool.leaks()).to_text()
    assert "2,097,152 bytes under 1 min, 4,194,304 bytes under 10 min" in text
    assert "docs/faults/growing.md" in text
    results.clear()
