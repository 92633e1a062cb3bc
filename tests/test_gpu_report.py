"""The rules of `make test-gpu`, tried on a device that only claims to be a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from streampool import _core

pytest_plugins = ["pytester"]


class ClaimedGpu:
    """Stands in for the CUDA driver: counts what the tests below say they called."""

    name = "cuda:0"
    version = "claimed"
    ordinal = 0
    count = 0

    def calls(self) -> dict[str, int]:
        return {"mem_alloc": self.count}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a suite of one test under the plugin; give its exit code and report."""
    monkeypatch.setattr(_core, "open_device", lambda name: ClaimedGpu())
    monkeypatch.setattr(ClaimedGpu, "count", 0)
    pytester.makeini("[pytest]\nmarkers = gpu: needs a GPU\n")

    def run(body: str) -> tuple[int, dict[str, Any]]:
        pytester.makepyfile(
            "import pytest\n"
            f"from {__name__} import ClaimedGpu\n"
            "@pytest.mark.gpu\n"
            f"def test_it(record_property):\n    {body}\n"
        )
        result = pytester.runpytest_inprocess("-p", "gpu_report", "--gpu-report", "out", "-m", "gpu")
        return int(result.ret), json.loads(Path(pytester.path, "out", "gpu-report.json").read_text())

    return run


def test_a_test_that_called_the_cuda_driver_counts(suite: Any) -> None:
    code, report = suite("ClaimedGpu.count += 3")
    assert (code, report["passed"]) == (0, True)
    assert report["tests"][0]["driver_calls"] == 3
    assert report["tests"][0]["device"] == "cuda:0"


def test_a_line_is_written_as_each_test_ends(suite: Any, pytester: pytest.Pytester) -> None:
    for _ in range(2):  # a second run begins anew
        _, report = suite("ClaimedGpu.count += 3")
        lines = Path(pytester.path, "out", "gpu-tests.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == report["tests"]


_SPREAD = """
import pytest
from streampool import _core
class ClaimedGpu:
    name, version, ordinal, count = "cuda:0", "claimed", 0, 0
    def calls(self): return {"mem_alloc": self.count}
_core.open_device = lambda name: ClaimedGpu()
"""


def test_tests_that_are_spread_over_processes_are_judged_alike(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    pytester.makeini("[pytest]\nmarkers = gpu: needs a GPU\n")
    pytester.makeconftest(_SPREAD)
    pytester.makepyfile(
        """
        import os
        import pytest
        from streampool import _core
        pytestmark = pytest.mark.gpu
        @pytest.mark.parametrize("n", range(4))
        def test_calls(n): type(_core.open_device("")).count += 1
        def test_child(record_property): record_property("device", "cuda:0")
        def test_nothing(): pass
        def test_crash(): os._exit(9)
        """
    )
    done = pytester.runpytest_subprocess("-p", "gpu_report", "--gpu-report", "out", "-m", "gpu", "-n", "2")
    assert done.ret == 1
    report = json.loads(Path(pytester.path, "out", "gpu-report.json").read_text())
    found = {test["name"].partition("::")[2]: test for test in report["tests"]}
    assert {name: test["problems"] for name, test in found.items()} == {
        **{f"test_calls[{n}]": [] for n in range(4)},
        "test_child": [],
        "test_nothing": ["made no call of the CUDA driver and names no device"],
        "test_crash": ["failed"],
    }
    assert found["test_calls[0]"]["driver_calls"] == 1
    assert found["test_child"]["device"] == "cuda:0"


def test_a_test_that_says_where_its_child_ran_counts(suite: Any) -> None:
    code, report = suite("record_property('device', 'cuda:1')")
    assert (code, report["passed"]) == (0, True)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("pytest.skip('no kernel')", "skipped"),
        ("pass", "made no call of the CUDA driver and names no device"),
        ("record_property('device', 'sim:0')", "ran on sim:0"),
        ("assert 0", "failed"),
        ("pytest.xfail('known')", "expected to fail"),
    ],
)
def test_a_test_without_proof_fails_the_run(suite: Any, body: str, problem: str) -> None:
    code, report = suite(body)
    assert code == 1
    assert report["passed"] is False
    assert report["tests"][0]["problems"] == [problem]
