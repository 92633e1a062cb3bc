"""The command itself, and the small verbs: help everywhere, doctor, report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from streampool import _core
from streampool.cli import cli

VERBS = ["run", "replay", "report", "doctor", "demo"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    done = CliRunner().invoke(cli, [verb, "--help"])
    assert done.exit_code == 0
    assert f"streampool {verb}" in done.output.partition("Example")[2]


def test_help_lists_every_verb() -> None:
    output = CliRunner().invoke(cli, ["--help"]).output
    for verb in VERBS:
        assert f"\n  {verb} " in output


def test_a_misspelt_verb_is_met_with_the_nearest() -> None:
    done = CliRunner().invoke(cli, ["replya"])
    assert done.exit_code == 2
    assert "Did you mean 'replay'?" in done.stderr
    assert "There are: run" in CliRunner().invoke(cli, ["xyzzy"]).stderr


def test_python_m_streampool_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "streampool", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("streampool ")


def test_doctor_says_what_there_is_in_json() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    facts = json.loads(done.stdout)
    assert done.exit_code == (1 if facts["broken"] else 0)
    assert facts["devices"]["sim"][0]["name"] == "sim:0"
    assert {option["name"] for option in facts["options"]} == {option.name for option in _core.option_table()}
    assert facts["limits"]["max_map_count"] > 0
    assert facts["build"]


def test_doctor_says_the_same_to_a_person() -> None:
    done = CliRunner().invoke(cli, ["doctor"])
    for words in ("sim:0", "max_map_count", "guard_bytes", "options"):
        assert words in done.stdout


def test_a_machine_without_a_gpu_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cuda(name: str, real=_core.open_device) -> _core.Driver:  # type: ignore[no-untyped-def]
        if name.startswith("cuda"):
            raise _core.DriverNotFoundError("there is no libcuda.so.1")
        driver: _core.Driver = real(name)
        return driver

    monkeypatch.setattr(_core, "open_device", no_cuda)
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "cuda: none: there is no libcuda.so.1" in done.stdout
    assert "nothing is broken" in done.stdout


def test_a_driver_that_fails_is_broken_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, real=_core.open_device) -> _core.Driver:  # type: ignore[no-untyped-def]
        if name.startswith("cuda"):
            raise _core.DriverError("driver too old: 11.4")
        driver: _core.Driver = real(name)
        return driver

    monkeypatch.setattr(_core, "open_device", broken)
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 1
    assert "broken: cuda:0: driver too old: 11.4" in done.stdout


def test_doctor_names_a_bad_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMPOOL_OPTIONS", "nonsense=1")
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 1
    assert "unknown option 'nonsense'" in done.stdout


def test_a_saved_report_becomes_text_again(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import streampool as sp\ndev = sp.Device('sim'); pool = sp.Pool(dev)\n"
        "pool.allocate_raw(77, stream=dev.create_stream())\n"
    )
    saved = tmp_path / "saved.json"
    command = [sys.executable, "-m", "streampool", "run", "--mode", "debug", "--report", str(saved), str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    text = CliRunner().invoke(cli, ["report", str(saved)])
    assert text.exit_code == 0, text.output
    assert text.stdout.strip() in ran.stderr
    as_json = CliRunner().invoke(cli, ["report", "--json", str(saved)])
    assert json.loads(as_json.stdout) == json.loads(saved.read_text())


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3", '{"faults": 3}', "\udcff"])
def test_what_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    done = CliRunner().invoke(cli, ["report", str(path)])
    assert done.exit_code == 2, done.output
    assert "report" in done.stderr
    assert CliRunner().invoke(cli, ["report", str(tmp_path / "none.json")]).exit_code == 2
