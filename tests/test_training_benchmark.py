"""The arithmetic of benchmarks/training.py: medians, and ratios to the plain runs of the same script."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "training.py"


@pytest.fixture(scope="module")
def training() -> Any:
    spec = importlib.util.spec_from_file_location("training_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["training_benchmark"] = module
    spec.loader.exec_module(module)
    return module


def run(script: str, way: str, step: float, reserved: int, code: int = 0) -> dict[str, Any]:
    return {"script": script, "way": way, "step_ms": step, "peak_reserved": reserved, "exit_code": code, "loss": 1.0}


def test_ratios_are_of_medians_to_the_same_scripts_plain_runs(training: Any) -> None:
    runs = [
        *(run("a", "plain", step, 100) for step in (10, 11, 30)),
        *(run("a", "ours", step, reserved) for step, reserved in ((11, 90), (12.1, 120), (50, 80))),
        run("b", "plain", 5, 1000),
        run("b", "ours", 4, 500, code=1),
    ]
    rows = {(row["script"], row["way"]): row for row in training.summary(runs)}
    assert rows["a", "plain"]["step_ratio"] == 1
    assert rows["a", "ours"]["step_ratio"] == pytest.approx(1.1)
    assert rows["a", "ours"]["reserved_ratio"] == pytest.approx(1.2)
    assert (rows["b", "ours"]["step_ratio"], rows["b", "ours"]["exit_codes"]) == (pytest.approx(0.8), [1])
    assert training.table(list(rows.values())).count("\n") == 5


def test_a_script_that_says_nothing_is_a_failure_with_what_it_said(training: Any, tmp_path: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text("raise SystemExit('no such thing')\n")
    assert "exit code 1: no such thing" in training.measure(script, training.WAYS[0], [], 60)["failed"]
    script.write_text("import time\ntime.sleep(60)\n")
    assert "did not end within 1 s" in training.measure(script, training.WAYS[0], [], 1)["failed"]
    script.write_text('print(\'{"script": "x", "step_ms": 1}\')\n')
    done = training.measure(script, training.WAYS[0], [], 60)
    assert (done["script"], done["way"], done["exit_code"]) == ("silent", "plain", 0)


def test_a_checker_that_is_not_there_is_named_and_one_that_is_gets_few_steps(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json, sys\nprint(json.dumps({'step_ms': 1, 'arguments': sys.argv[1:]}))\n")
    way = training.Way("checked", under="no-such-checker", once=True)
    assert training.measure(script, way, [], 60)["absent"] == "no-such-checker was not found"
    there = tmp_path / "bin" / "checker"
    there.parent.mkdir()
    there.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    there.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    way = training.Way("checked", under="checker", under_options=("--tool",), once=True)
    done = training.measure(script, way, ["--batch", "4"], 60)
    assert done["arguments"] == ["--batch", "4", "--steps", str(training.FEW_STEPS)]


class Machine:
    """Runs that take a known time, by way."""

    def __init__(self, **seconds: float) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.done: list[tuple[str, str]] = []
        self.allowed: dict[str, float] = {}

    def run(self, script: Path, way: Any, left: float) -> dict[str, Any]:
        self.done.append((script.stem, way.name))
        self.allowed[way.name] = left
        self.now += self.seconds.get(way.name, 10)
        found = {"script": script.stem, "way": way.name}
        if way.name == "broken":
            return {**found, "failed": "out of memory"}
        return {**found, "step_ms": 1.0, "peak_reserved": 1, "exit_code": 0, "loss": 1.0}


def session(training: Any, machine: Machine, seconds: float, *ways: Any, repetitions: int = 3) -> Any:
    made = training.Session(
        [Path("a.py"), Path("b.py")], repetitions, seconds, machine.run, clock=lambda: machine.now, ways=ways
    )
    made.go(lambda text: None)
    return made


def test_every_script_is_run_each_way_before_anything_is_repeated_and_the_order_turns(training: Any) -> None:
    machine = Machine()
    ways = [training.Way("plain"), training.Way("ours"), training.Way("checker", once=True)]
    session(training, machine, 1000, *ways, repetitions=2)
    first = [(script, way) for script in "ab" for way in ("plain", "ours")]
    assert machine.done[:4] == first
    assert machine.done[4] == ("a", "checker")
    assert machine.done[5:] == [(script, way) for script in "ab" for way in ("ours", "plain")]


def test_a_way_that_fails_is_noted_and_not_tried_again(training: Any) -> None:
    machine = Machine()
    made = session(training, machine, 1000, training.Way("plain"), training.Way("broken"))
    assert made.problems == ["a, broken: out of memory", "b, broken: out of memory"]
    assert machine.done.count(("a", "broken")) == 1
    assert machine.done.count(("a", "plain")) == 3
    assert [row["way"] for row in training.summary(made.runs)] == ["plain", "plain"]


def test_a_checker_may_fail_and_has_a_part_of_the_time_at_most(training: Any) -> None:
    machine = Machine()
    made = session(training, machine, 200, training.Way("plain"), training.Way("broken", once=True))
    assert machine.allowed["broken"] == 40
    assert made.problems == []
    assert machine.done.count(("a", "plain")) == 3


def test_no_run_is_begun_that_would_not_end_in_time(training: Any) -> None:
    machine = Machine(slow=40)
    made = session(training, machine, 75, training.Way("plain"), training.Way("slow"))
    assert machine.now <= 75
    assert machine.done == [("a", "plain"), ("a", "slow"), ("b", "plain"), ("a", "plain")]
    assert made.problems == []


def test_promises_are_held_where_both_ways_were_measured(training: Any) -> None:
    runs = [
        run("resnet18", training.PLAIN, 10, 100),
        run("resnet18", training.PRODUCTION, 10.1, 101),
        run("resnet18", training.DEBUG, 12, 300),
        run("gpt", training.PLAIN, 10, 100),
        run("gpt", training.DEBUG, 20, 300),
    ]
    held = {
        one["what"].partition(",")[0]: (one["kept"], one["bar"]) for one in training.promises(training.summary(runs))
    }
    assert held == {
        "resnet18: step time in production": (True, 1.02),
        "resnet18: peak reserved in production": (False, 1.0),
        "resnet18: step time in debug mode": (True, 1.25),
    }


def test_without_plain_runs_there_are_figures_and_no_ratios(training: Any) -> None:
    (row,) = training.summary([run("a", training.DEBUG, 10, 100)])
    assert (row["step_ms"], row["step_ratio"], row["reserved_ratio"]) == (10, None, None)
    assert "|  |  | 10.00 |" in training.table([row])
