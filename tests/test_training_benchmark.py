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


def test_a_script_that_says_nothing_is_an_error_with_what_it_said(training: Any, tmp_path: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text("raise SystemExit('no such thing')\n")
    with pytest.raises(SystemExit, match=r"no result.*\n.*no such thing"):
        training.measure(script, training.WAYS[0], [], 60)
    script.write_text('print(\'{"script": "x", "step_ms": 1}\')\n')
    assert training.measure(script, training.WAYS[0], [], 60)["exit_code"] == 0
