"""The examples run on the simulated device, and say what they promise; the demo demands its own findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from metrics_scene import get, parse, value, values

EXAMPLES = Path(__file__).parent.parent / "examples"


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "STREAMPOOL_OPTIONS"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, env=env, timeout=110
    )


def line_of(script: Path, text: str) -> int:
    """Give the number of the line that holds `text`."""
    (line,) = [i for i, line in enumerate(script.read_text().splitlines(), 1) if text in line]
    return line


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> str:
    if request.param == "cuda":  # the work is done in children, where the GPU suite's report cannot see it
        record_property("device", "cuda:0")
    return str(request.param)


def test_a_block_that_crosses_streams_is_safe_once_it_is_declared(device: str) -> None:
    done = python(EXAMPLES / "multi_stream_reuse.py", "--device", device)
    assert done.returncode == 0, done.stderr
    without, with_it = [line for line in done.stdout.splitlines() if "handed out again" in line]
    assert without.startswith("without record_stream: bytes handed out again too early: yes")
    assert "too early: no; races seen: 0" in with_it
    assert "This pool is in" not in done.stdout
    if device == "sim":
        assert "races seen: 0" not in without
        for name in ("produce", "consume"):  # both stacks
            line = line_of(EXAMPLES / "multi_stream_reuse.py", f'label="{name}"')
            assert f"multi_stream_reuse.py:{line} in {name}\n" in done.stdout


def test_the_scrape_shows_memory_come_and_go(device: str) -> None:
    done = python(EXAMPLES / "metrics_scrape.py", "--device", device)
    assert done.returncode == 0, done.stderr
    full, freed = done.stdout.split("-- ")[1:3]
    live = [float(part.rpartition("live_allocations{")[2].split()[1]) for part in (full, freed)]
    assert live == [100, 40]
    assert "out of memory" in done.stdout


def test_the_inference_server_serves_requests_and_says_who_holds_memory() -> None:
    command = [sys.executable, str(EXAMPLES / "inference_server.py"), "--device", "sim", "--port", "0", "--leak"]
    command += ["--limit", "1280MiB", "--metrics-port", "0"]
    env = {name: value for name, value in os.environ.items() if name != "STREAMPOOL_OPTIONS"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as server:
        try:
            assert server.stdout is not None
            own, url = (server.stdout.readline().split()[-1] for _ in range(2))
            for _ in range(10):
                assert b"bytes in use" in get(f"{url}/infer")
            for page in (get(f"{url}/metrics"), get(own)):
                assert value(parse(page), "live_allocations", pool="inference") == 11
            assert b"in Model." in get(f"{url}/debug/holders")
            refused = False
            for _ in range(200):
                try:
                    get(f"{url}/infer")
                except OSError as error:
                    refused = "503" in str(error)
                    break
            assert refused
            assert sum(values(parse(get(own)), "allocation_failures_total", pool="inference")) >= 1
        finally:
            server.terminate()


@pytest.mark.parametrize("mode", ["debug", "paranoid"])
def test_under_debug_the_example_of_early_reuse_says_why_it_shows_none(mode: str) -> None:
    done = python(
        "-P", "-m", "streampool", "run", "--mode", mode, EXAMPLES / "multi_stream_reuse.py", "--device", "sim"
    )
    # The pool may fill the freed block, whose use nobody declared, while that still runs: that is a race, rightly told.
    assert done.returncode == 0 or "1 fault (1 race); exit code 1" in done.stderr, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith(f"This pool is in {mode} mode, which keeps freed memory back")
    assert "production mode" in first
    assert all("too early: no; races seen: " in line for line in rest)
    assert [line.endswith("races seen: 0") for line in rest][-1]


def test_planted_mistakes_do_not_crash_the_program_and_are_found_under_run(device: str, tmp_path: Path) -> None:
    script = EXAMPLES / "find_overrun_and_leak.py"
    alone = python(script, "--device", device)
    assert alone.returncode == 0, alone.stderr
    assert "nothing crashed" in alone.stdout
    report = tmp_path / "report.json"
    watched = python("-P", "-m", "streampool", "run", "--mode", "debug", "--report", report, script, "--device", device)
    assert watched.returncode == 1, watched.stderr
    found = json.loads(report.read_text())
    assert sorted(fault["kind"] for fault in found["faults"]) == ["overrun", "write_after_free"]


def test_a_log_is_replayed(device: str) -> None:
    done = python(EXAMPLES / "replay_a_log.py", "--device", device)
    assert done.returncode == 0, done.stderr
    assert "resnet50_train: 10,157 events on 1 stream\n" in done.stdout
    assert "sum of 5 passes (1 cold, 3 warm, 1 verifying)" in done.stdout
    assert "reserved is" in done.stdout.splitlines()[-1]


def test_the_demo_finds_exactly_what_is_planted_and_ends_with_0(device: str) -> None:
    done = python("-P", "-m", "streampool", "demo", "--device", device)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"Using {device}:0 (")
    assert "Exactly the 3 planted findings" in done.stdout
    assert "NOT FOUND" not in done.stdout
    assert "allocated at" in done.stderr
    assert "freed at" in done.stderr
    assert "resnet50_train on" in done.stdout


def test_the_demo_says_the_same_as_one_json_object() -> None:
    done = python("-P", "-m", "streampool", "demo", "--device", "sim", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert (facts["device"], facts["simulated"]) == ("sim:0", True)
    source = (EXAMPLES / "find_overrun_and_leak.py").read_text().splitlines()
    assert len(facts["planted"]) == 3
    for planted in facts["planted"]:
        assert source[planted["line"] - 1].endswith(f"# planted: {planted['what']}")
    assert facts["replay"]["faults"] == 0


def test_a_demo_whose_fault_is_not_found_fails(tmp_path: Path) -> None:
    """The demo is a check and no show: with a planted mark that nothing answers it ends with 1."""
    from click.testing import CliRunner

    from streampool.cli import cli

    script = tmp_path / "find_overrun_and_leak.py"
    script.write_text((EXAMPLES / script.name).read_text() + "\nx = 1  # planted: overrun\n")
    (tmp_path / "traces").symlink_to(EXAMPLES / "traces")
    done = CliRunner().invoke(cli, ["demo", "--device", "sim", "--examples", str(tmp_path)])
    assert done.exit_code == 1
    assert "expected exactly" in done.stderr


def test_a_read_behind_a_block_kills_the_program_and_its_records_name_the_block(device: str) -> None:
    script = EXAMPLES / "page_guards.py"
    done = python(script, "--device", device)
    assert done.returncode == 0, done.stderr
    first, _, records = done.stdout.partition("\n\n")
    assert first.startswith("the program died: ")
    assert "2 blocks between unmapped pages may be meant" in records
    line = line_of(script, 'tag="scores"')
    assert f"page_guards.py:{line} in the_program" in records
