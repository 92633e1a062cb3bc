"""The page, not the rule: servers in simulated time, their pages scraped each minute, and what the rules make of them.

The numbers are real pages of real pools; `promtool test rules` evaluates the shipped rules over them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from metrics_scene import DASHBOARDS, ROOT, promtool

pytestmark = pytest.mark.slow
PROGRAM = ROOT / "tests/paging_program.py"
DAY = 24 * 60  # minutes
LOUD = 'alertstate="firing", severity=~"critical|warning"'
TARGET = 'job="streampool", instance="127.0.0.1:9466"'


def simulate(scenario: str, minutes: int, start: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-P", str(PROGRAM), scenario, str(minutes), str(start)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def evaluate(folder: Path, runs: list[dict[str, Any]], expected: list[tuple[str, int, list[dict[str, Any]]]]) -> None:
    """Evaluate the rules over one run after the other, as of a process that is restarted: (query, minute, samples)."""
    rules = DASHBOARDS / "rules/streampool.rules.yml"
    names = {name for run in runs for name in run["values"]}
    length = {id(run): len(next(iter(run["values"].values()))) for run in runs}
    inputs = []
    for name in sorted(names):
        values: list[str] = []
        for run in runs:
            values += [v if v is not None else "_" for v in run["values"].get(name, ["_"] * length[id(run)])]
        bare, brace, labels = name.partition("{")
        own = f", {labels}" if brace else "}"
        text = " ".join(values).replace("+Inf", "Inf")
        inputs.append({"series": f"{bare}{{{TARGET}{own}", "values": text})
    tests = [{"expr": query, "eval_time": f"{minute}m", "exp_samples": samples} for query, minute, samples in expected]
    file = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": tests}],
    }
    path = folder / "pages.yml"
    path.write_text(json.dumps(file))
    done = promtool("test", "rules", path)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]


def quiet(folder: Path, *runs: dict[str, Any]) -> None:
    minutes = sum(len(next(iter(run["values"].values()))) for run in runs)
    assert all(run["failed_at"] is None for run in runs)
    query = f"count by (alertname) (max_over_time(ALERTS{{{LOUD}}}[{minutes}m]))"
    evaluate(folder, list(runs), [(query, minutes - 1, [])])


def pages_in_time(folder: Path, run: dict[str, Any], alert: str, quiet: str, head: str, place: str) -> None:
    """`alert` fires 15 minutes before the error, what matches `quiet` does not; the page has `place` at the top."""
    failed_at = run["failed_at"]
    assert failed_at is not None
    assert failed_at > 60
    early = failed_at - 15
    firing = 'alertstate="firing", severity="critical"'
    page = f'count by (alertname) (ALERTS{{alertname="{alert}", {firing}}})'
    fires = [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
    others = f"count by (alertname) (ALERTS{{{quiet}, {firing}}})"
    evaluate(folder, [run], [(page, early, fires), (page, failed_at, fires), (others, early, [])])
    first = run["holders"][early // 5].partition(head)[2].split("\n\n")[1]  # the entry at the top
    assert place in first
    assert " blocks, +" in first  # it grows


def line_of(source: Path, words: str) -> int:
    return next(i for i, text in enumerate(source.read_text().splitlines(), 1) if words in text)


def test_a_leaking_server_pages_before_it_fails_and_the_page_leads_to_the_line_that_grows(tmp_path: Path) -> None:
    line = line_of(ROOT / "examples/inference_server.py", "what leaks, when told to")
    place = f"inference_server.py:{line} in Model.remember"
    quiet = 'alertname="StreampoolOutOfMemory"'
    pages_in_time(tmp_path, simulate("leak", 600), "StreampoolMemoryRunsOut", quiet, "==", place)


def test_a_library_that_leaks_pages_before_it_fails_and_the_page_leads_to_the_line_that_grows(tmp_path: Path) -> None:
    place = f"paging_program.py:{line_of(PROGRAM, 'what leaks in a library')} in remember"
    alert, head = "StreampoolLibraryMemoryRunsOut", "== torch's own pool, observed"
    pages_in_time(tmp_path, simulate("library", 400), alert, f'alertname!="{alert}"', head, place)


@pytest.mark.parametrize("scenario", ["steady", "sawtooth", "idle"])
def test_a_healthy_server_stays_quiet_for_a_day(scenario: str, tmp_path: Path) -> None:
    quiet(tmp_path, simulate(scenario, DAY))


def test_a_server_that_is_restarted_stays_quiet_for_a_day(tmp_path: Path) -> None:
    quiet(tmp_path, *(simulate("steady", DAY // 6, start) for start in range(0, DAY, DAY // 6)))
