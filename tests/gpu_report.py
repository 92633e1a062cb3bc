"""The pytest plugin behind `make test-gpu`: writes what ran where, and fails the run when a GPU test proved nothing.

A test marked `gpu` counts only when it made calls of the CUDA driver in this process, or when it says where its child
processes ran: `record_property("device", "cuda:0")`. A skipped one, one that ran on the simulated device and one that
touched no device at all are failures. The report: `gpu-report.json` and `gpu-report.txt` in the folder given.
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

_TESTS = pytest.StashKey["dict[str, GpuTest]"]()
_DRIVER = pytest.StashKey[Any]()
_STARTED = pytest.StashKey[float]()


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
    config.stash[_TESTS] = {}
    config.stash[_STARTED] = time.time()


def pytest_sessionstart(session: pytest.Session) -> None:
    from streampool import _core

    try:
        session.config.stash[_DRIVER] = _core.open_device("cuda:0")
    except _core.DriverError as error:
        pytest.exit(f"the GPU suite needs a GPU: {error}", returncode=pytest.ExitCode.USAGE_ERROR)


def _calls(config: pytest.Config) -> int:
    return sum(config.stash[_DRIVER].calls().values())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("gpu") is None:
        return (yield)
    test = item.config.stash[_TESTS].setdefault(item.nodeid, GpuTest(item.nodeid))
    before = _calls(item.config)
    try:
        return (yield)
    finally:
        test.driver_calls = _calls(item.config) - before
        _judge(item, test)


def _judge(item: pytest.Item, test: GpuTest) -> None:
    """Decide from its driver calls and its own words whether the test ran on a GPU."""
    devices = [str(value) for key, value in item.user_properties if key == "device"]
    if not devices and test.driver_calls > 0:
        devices = [str(item.config.stash[_DRIVER].name)]
    test.device = ", ".join(devices)
    if test.outcome != "passed":
        test.problems.append(test.outcome)
    elif not devices:
        test.problems.append("made no call of the CUDA driver and names no device")
    elif not all(name.startswith("cuda:") for name in devices):
        test.problems.append(f"ran on {test.device}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    test = item.config.stash[_TESTS].get(item.nodeid)
    if test is not None:
        test.seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            test.outcome = "expected to fail" if hasattr(report, "wasxfail") else report.outcome
    return report


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


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if _DRIVER not in config.stash:
        return
    folder = config.getoption("--gpu-report")
    if folder is None:
        return
    tests = list(config.stash[_TESTS].values())
    bad = sum(1 for test in tests if test.problems)
    passed = bad == 0 and bool(tests) and exitstatus == 0
    verdict = f"{len(tests)} gpu tests, {len(tests) - bad} passed on a GPU, {bad} did not"
    if not tests:
        verdict += ": no gpu test was selected"
    machine = _machine(config)
    report = {
        "passed": passed,
        "verdict": verdict,
        "seconds": round(time.time() - config.stash[_STARTED], 3),
        "machine": machine,
        "tests": [asdict(test) for test in tests],
    }
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu-report.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / "gpu-report.txt").write_text(_as_text(machine, tests, verdict))
    if not passed and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    tests = config.stash[_TESTS].values()
    bad = [test for test in tests if test.problems]
    if bad:
        terminalreporter.section("gpu tests that prove nothing", red=True)
        for test in bad:
            terminalreporter.line(f"{test.name}: {'; '.join(test.problems)}")
    folder = config.getoption("--gpu-report")
    terminalreporter.line(f"{len(tests)} gpu tests, {len(bad)} without proof; report: {folder}")
