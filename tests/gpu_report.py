"""The pytest plugin behind `make test-gpu`: writes what ran where, and fails the run when a GPU test proved nothing.

A test marked `gpu` counts only when it made calls of the CUDA driver in its process, or when it says where its child
processes ran: `record_property("device", "cuda:0")`. A skipped one, one that ran on the simulated device and one that
touched no device at all are failures. The report: `gpu-report.json` and `gpu-report.txt` in the folder given, and
`gpu-tests.jsonl`, a line a test as it ends, for a run that does not come to its end. Works with pytest-xdist.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

_DRIVER = pytest.StashKey[Any]()
_BEFORE = pytest.StashKey[int]()
_CALLS = "driver_calls"  # the property, of a test's last report, that says how many


@dataclass
class GpuTest:
    """What became of one test; `problems` is empty when it counts."""

    name: str
    outcome: str = "not run"
    seconds: float = 0.0
    device: str = ""
    driver_calls: int = 0
    problems: list[str] = field(default_factory=list)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", metavar="FOLDER", help="write the GPU suite's report there and enforce its rules")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Report(config), "gpu-report-of-the-run")


def pytest_sessionstart(session: pytest.Session) -> None:
    from streampool import _core

    try:
        session.config.stash[_DRIVER] = _core.open_device("cuda:0")
    except _core.DriverError as error:
        pytest.exit(f"the GPU suite needs a GPU: {error}", returncode=pytest.ExitCode.USAGE_ERROR)


# -- in the process of the test ---------------------------------------------------------------------------------------


def _calls(config: pytest.Config) -> int:
    return sum(config.stash[_DRIVER].calls().values())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEFORE] = _calls(item.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown" and item.get_closest_marker("gpu") is not None:
        calls = _calls(item.config) - item.stash.get(_BEFORE, _calls(item.config))
        # With the report: it may be read in another process.
        report.user_properties = [*report.user_properties, (_CALLS, calls)]
        if calls > 0:
            report.user_properties.append(("called", str(item.config.stash[_DRIVER].name)))
    return report


# -- in the process that reports ------------------------------------------------------------------------------------


class _Report:
    """The tests of a run, and what is said of them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = config.getoption("--gpu-report")
        self._started = time.time()
        self._open: dict[str, GpuTest] = {}
        self._tests: list[GpuTest] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._open.setdefault(report.nodeid, GpuTest(report.nodeid))
        test.seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            test.outcome = "expected to fail" if hasattr(report, "wasxfail") else report.outcome
        if report.when == "teardown":
            del self._open[report.nodeid]
            if any(key == _CALLS for key, _ in report.user_properties):  # else it is no GPU test
                self._judge(test, report.user_properties)

    def _judge(self, test: GpuTest, properties: list[tuple[str, object]]) -> None:
        """Decide from its driver calls and its own words whether the test ran on a GPU."""
        said = {key: [str(value) for name, value in properties if name == key] for key in ("device", "called", _CALLS)}
        devices = said["device"] or said["called"]
        test.driver_calls = int(said[_CALLS][0]) if said[_CALLS] else 0
        test.device = ", ".join(devices)
        if test.outcome != "passed":
            test.problems.append(test.outcome)
        elif not devices:
            test.problems.append("made no call of the CUDA driver and names no device")
        elif not all(name.startswith("cuda:") for name in devices):
            test.problems.append(f"ran on {test.device}")
        self._tests.append(test)
        if self._folder is not None:
            out = Path(self._folder)
            out.mkdir(parents=True, exist_ok=True)
            with (out / "gpu-tests.jsonl").open("a" if self._tests[1:] else "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(test)) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        for test in self._open.values():  # whose process ended under it
            if test.outcome != "passed":
                self._judge(test, [])
        if self._folder is None or _DRIVER not in self._config.stash:
            return
        tests = self._tests
        bad = sum(1 for test in tests if test.problems)
        passed = bad == 0 and bool(tests) and exitstatus == 0
        verdict = f"{len(tests)} gpu tests, {len(tests) - bad} passed on a GPU, {bad} did not"
        if not tests:
            verdict += ": no gpu test was selected"
        machine = _machine(self._config)
        report = {
            "passed": passed,
            "verdict": verdict,
            "seconds": round(time.time() - self._started, 3),
            "machine": machine,
            "tests": [asdict(test) for test in tests],
        }
        out = Path(self._folder)
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu-report.json").write_text(json.dumps(report, indent=2) + "\n")
        (out / "gpu-report.txt").write_text(_as_text(machine, tests, verdict))
        if not passed and exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        bad = [test for test in self._tests if test.problems]
        if bad:
            terminalreporter.section("gpu tests that prove nothing", red=True)
            for test in bad:
                terminalreporter.line(f"{test.name}: {'; '.join(test.problems)}")
        terminalreporter.line(f"{len(self._tests)} gpu tests, {len(bad)} without proof; report: {self._folder}")


def _machine(config: pytest.Config) -> dict[str, str]:
    from streampool import _core

    driver = config.stash[_DRIVER]
    facts = {"device": str(driver.name), "driver": str(driver.version), "python": platform.python_version()}
    facts |= {f"build {key}": str(value) for key, value in _core.build_info().items()}
    try:
        from cuda.core import Device

        facts["gpu"] = str(Device(driver.ordinal).name)
    except Exception as error:  # the report is worth having without the name
        facts["gpu"] = f"unknown ({error})"
    return facts


def _as_text(machine: dict[str, str], tests: list[GpuTest], verdict: str) -> str:
    lines = [f"{key}: {value}" for key, value in machine.items()]
    lines += ["", f"{'seconds':>8}  {'calls':>8}  {'device':<8}  {'outcome':<8}  test"]
    for test in tests:
        row = f"{test.seconds:8.2f}  {test.driver_calls:8d}  {test.device:<8}  {test.outcome:<8}  {test.name}"
        lines.append(row + "".join(f"\n{'':>10}!! {problem}" for problem in test.problems))
    return "\n".join([*lines, "", verdict, ""])
