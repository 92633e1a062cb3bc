"""Early reuse is impossible, late reuse happens (R1 to R4): random walks and a Hypothesis state machine over them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reuse_walk import SIZES, Walk, random_walk
from scene import scene

from streampool import _core

# Small, so that the driver refuses and the ladder's later rungs are climbed.
MACHINE = {"memory": "40MiB"}


@pytest.mark.parametrize("seed", range(6))
def test_a_random_walk_never_hands_out_memory_early(seed: int) -> None:
    print(f"seed {seed}")
    with scene(seed=seed, **MACHINE) as here:
        walk = Walk(here)
        random_walk(walk, seed, 400)
        walk.finish()


def test_each_reuse_path_is_taken_a_hundred_times_and_none_synchronises() -> None:
    paths: Counter[str] = Counter()
    seed = 100
    while min((paths[p] for p in ("own", "completed", "waited")), default=0) < 100:
        assert seed < 160, f"paths after 60 walks: {paths}"
        with scene(seed=seed, **MACHINE) as here:
            before = here.device.calls()
            walk = Walk(here)
            random_walk(walk, seed, 400)
            paths.update(walk.pool.stats().paths)
            calls = here.device.calls()
            for name in ("stream_synchronize", "event_synchronize"):
                assert calls[name] == before[name]
            walk.finish()
        seed += 1


@pytest.mark.parametrize("reuse", ["wait", "opportunistic", "deterministic"])
def test_every_reuse_policy_keeps_the_rule(reuse: str) -> None:
    with scene(seed=7, **MACHINE) as here:
        walk = Walk(here, reuse=reuse)
        random_walk(walk, 7, 300)
        paths = walk.pool.stats().paths
        if reuse != "wait":
            assert paths["waited"] == 0
        if reuse == "deterministic":
            assert paths["completed"] == 0
        walk.finish()


def test_debug_mode_keeps_the_rule_and_finds_nothing() -> None:
    with scene(seed=3, memory="96MiB") as here:
        walk = Walk(here, mode="debug", quarantine_bytes="4MiB", check_every=4)
        random_walk(walk, 3, 300)
        walk.finish()
        assert walk.pool.take_faults() == []


def test_the_walk_fails_when_the_rule_is_broken() -> None:
    """A switch of the test build breaks R1: the tests above must notice."""
    if not hasattr(_core, "break_r1"):
        pytest.skip("not a test build")
    noticed = 0
    for seed in range(3):
        with scene(seed=seed, **MACHINE) as here:
            walk = Walk(here)
            _core.break_r1(True)
            try:
                random_walk(walk, seed, 400)
            except AssertionError:
                noticed += 1
            finally:
                _core.break_r1(False)
                walk.worker.stop()
                here.device.races()
    assert noticed == 3


class ReuseMachine(RuleBasedStateMachine):
    """The moves of a Walk, chosen and shrunk by Hypothesis."""

    @initialize(seed=st.integers(0, 2**16), reuse=st.sampled_from(["wait", "opportunistic", "deterministic"]))
    def begin(self, seed: int, reuse: str) -> None:
        self._context = scene(seed=seed, **MACHINE)
        self.walk = Walk(self._context.__enter__(), reuse=reuse)

    def lane(self, data: Any) -> Any:
        return data.draw(st.sampled_from(self.walk.lanes))

    def block(self, data: Any) -> Any:
        return data.draw(st.sampled_from(self.walk.blocks))

    @rule(kind=st.sampled_from(["lasting", "raw", "per-thread", "legacy"]))
    def add_lane(self, kind: str) -> None:
        self.walk.add_lane(kind)

    @rule(data=st.data())
    def close_lane(self, data: Any) -> None:
        self.walk.close_lane(self.lane(data))

    @rule(data=st.data(), size=st.sampled_from(SIZES), raw=st.booleans(), gated=st.booleans())
    def allocate(self, data: Any, size: int, raw: bool, gated: bool) -> None:
        self.walk.allocate(self.lane(data), size, raw=raw, gated=gated)

    @precondition(lambda self: self.walk.blocks)
    @rule(data=st.data(), gated=st.booleans(), first=st.booleans(), event=st.booleans(), offset=st.integers(0, 1 << 20))
    def use(self, data: Any, gated: bool, first: bool, event: bool, offset: int) -> None:
        block = self.block(data)
        self.walk.use(block, self.lane(data), gated=gated, record_first=first, by_event=event, offset=offset)

    @precondition(lambda self: self.walk.blocks)
    @rule(data=st.data(), how=st.sampled_from(["home", "other", "release"]), elsewhere=st.booleans())
    def free(self, data: Any, how: str, elsewhere: bool) -> None:
        block = self.block(data)
        lane = {"home": block.home, "other": None, "release": None}[how] if how != "other" else self.lane(data)
        self.walk.free(block, lane, elsewhere=elsewhere)

    @rule(which=st.integers(0, 100))
    def open_gate(self, which: int) -> None:
        self.walk.open_gate(which)

    @rule()
    def settle(self) -> None:
        self.walk.settle()

    @rule(keep=st.sampled_from([0, 1 << 22]))
    def trim(self, keep: int) -> None:
        self.walk.trim(keep)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "walk"):
            self.walk.check()

    def teardown(self) -> None:
        if hasattr(self, "walk"):
            try:
                self.walk.finish()
            finally:
                self._context.__exit__(None, None, None)


ReuseMachine.TestCase.settings = settings(stateful_step_count=60, deadline=None)
TestReuseMachine = ReuseMachine.TestCase
