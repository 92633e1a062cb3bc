"""The command itself, and the small verbs: help, exit codes, where it is started; doctor, report."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from streampool import _core, config
from streampool.cli import cli

ROOT = Path(__file__).parent.parent
TRACE = ROOT / "examples" / "traces" / "multistream_pipeline.csv.gz"
VERBS = ["run", "replay", "bench", "report", "doctor", "demo"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    done = CliRunner().invoke(cli, [verb, "--help"])
    assert done.exit_code == 0
    assert f"streampool {verb}" in done.output.partition("Example")[2]


def test_every_verb_speaks_json() -> None:
    for verb in VERBS:
        assert re.search(r"^ +--json ", CliRunner().invoke(cli, [verb, "--help"]).output, re.MULTILINE), verb


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
    done = subprocess.run(
        [sys.executable, "-P", "-m", "streampool", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("streampool ")


def test_doctor_says_what_there_is_in_json() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    facts = json.loads(done.stdout)
    assert done.exit_code == (1 if facts["broken"] else 0)
    assert facts["devices"]["sim"][0]["name"] == "sim:0"
    assert {option["name"] for option in facts["options"]} == {option.name for option in _core.option_table()}
    assert facts["limits"]["max_map_count"] > 0
    assert facts["build"]
    assert facts["devices"]["sim"][0]["segments"] == {
        "default": "vmm", "sources": ["vmm", "malloc", "driver"], "export": ["posix_fd"], "rdma": True, "peers": [],
    }  # fmt: skip


def test_doctor_says_the_same_to_a_person() -> None:
    done = CliRunner().invoke(cli, ["doctor"])
    for words in ("sim:0", "segments=vmm unless told otherwise", "max_map_count", "guard_bytes", "options"):
        assert words in done.stdout


def test_doctor_says_what_debug_mode_takes_by_the_cores_own_figures() -> None:
    out = CliRunner().invoke(cli, ["doctor"]).stdout
    section = out.partition("memory of mode debug, beside the blocks:")[2].partition("memory of mode paranoid")[0]
    for words in ("guards: 512 B of a block", "quarantine: at most 64 MiB", f"facts: {_core.BLOCK_FACTS_BYTES} B"):
        assert words in section, section


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


def test_doctor_says_what_an_operator_needs_of_metrics_and_of_observing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # somebody else has it: just as well
            taken.bind(("127.0.0.1", 9466))
            taken.listen()
        found = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).stdout)["metrics"]
        text = CliRunner().invoke(cli, ["doctor"]).stdout
    assert found["default_port_is_free"] is False
    assert "metrics: port 9466 of 127.0.0.1 is in use\n" in text
    assert found["process_memory"]["sim:0"] == "process"
    assert "    sim:0: device memory is known of this process alone\n" in text
    assert set(found["observable"]) == {"torch", "cupy"}
    assert "libraries that can be observed: " in text
    assert "NVML: " in text


def test_doctor_names_metrics_that_are_set_up_and_cannot_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STREAMPOOL_METRICS_PORT", "high")
    monkeypatch.setenv("STREAMPOOL_METRICS_FOLDER", str(tmp_path / "file" / "sd"))
    monkeypatch.setenv("STREAMPOOL_POSTMORTEM", str(tmp_path / "later"))  # would be made
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 1
    assert "broken: STREAMPOOL_METRICS_PORT is 'high', not a port: no metrics would be served\n" in done.stdout
    assert f"broken: STREAMPOOL_METRICS_FOLDER: the folder {tmp_path}/file/sd cannot be written: " in done.stdout
    assert "STREAMPOOL_POSTMORTEM:" not in done.stdout
    assert "multi-process mode takes no collectors" in done.stdout


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
    command = [sys.executable, "-P", "-m", "streampool", "run", "--mode", "debug", "--report", str(saved), str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    text = CliRunner().invoke(cli, ["report", str(saved)])
    assert text.exit_code == 0, text.output
    assert text.stdout.strip() in ran.stderr
    as_json = CliRunner().invoke(cli, ["report", "--json", str(saved)])
    assert json.loads(as_json.stdout) == json.loads(saved.read_text())


@pytest.fixture(scope="module")
def saved_report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the JSON of a report with findings of each sort."""
    folder = tmp_path_factory.mktemp("saved")
    program, saved = folder / "program.py", folder / "saved.json"
    program.write_text(
        "import streampool as sp\ndev = sp.Device(); s = dev.create_stream(); pool = sp.Pool(dev)\n"
        "pool.allocate_raw(77, stream=s)\nbuf = pool.allocate(1000, stream=s)\n"
        "s.launch(lambda view: view.fill(0x41), writes=[(buf.handle, 1001)])\ns.sync(); buf.close(s)\n"
    )
    options = ["run", "--device", "sim", "--mode", "debug", "--report", str(saved)]
    subprocess.run([sys.executable, "-P", "-m", "streampool", *options, str(program)], capture_output=True, check=False)
    return saved.read_text()


@pytest.fixture
def saved(saved_report: str, tmp_path: Path) -> Path:
    path = tmp_path / "saved.json"
    path.write_text(saved_report)
    return path


def test_a_saved_report_becomes_a_page_in_a_file_that_is_not_overwritten_unasked(saved: Path) -> None:
    page = saved.with_suffix(".html")
    options = ["report", str(saved), "--format", "html", "--output", str(page)]
    done = CliRunner().invoke(cli, options)
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert f"written to {page}" in done.stderr
    first = page.read_text(encoding="utf-8")
    assert first.startswith("<!DOCTYPE html>")
    assert "program.py:6 in &lt;module&gt;" in first
    page.write_text("mine")
    done = CliRunner().invoke(cli, options)
    assert done.exit_code == 2
    assert f"{page} exists: --force overwrites it" in done.stderr
    assert page.read_text() == "mine"
    assert CliRunner().invoke(cli, [*options, "--force"]).exit_code == 0
    assert page.read_text(encoding="utf-8") == first
    assert CliRunner().invoke(cli, ["report", str(saved), "--format", "html"]).stdout == first


def test_the_rules_that_a_report_suggests_suppress_all_of_it(saved: Path) -> None:
    rules = CliRunner().invoke(cli, ["report", str(saved), "--format", "suppressions"])
    assert rules.exit_code == 0, rules.output
    assert "# overrun: write of 1 byte" in rules.stdout
    known = saved.with_suffix(".txt")
    known.write_text(rules.stdout + "underrun:nobody\n")
    as_json = CliRunner().invoke(cli, ["report", str(saved), "--json", "--suppressions", str(known)])
    data = json.loads(as_json.stdout)
    assert data["summary"]["counts"] == 0
    assert data["summary"]["suppressed"] == 2
    assert [rule["used"] for rule in data["suppressions"]] == [1, 1, 0]
    text = CliRunner().invoke(cli, ["report", str(saved), "--suppressions", str(known)])
    assert "unused rules  underrun:nobody" in text.stdout
    page = CliRunner().invoke(cli, ["report", str(saved), "--format", "html", "--suppressions", str(known)])
    assert "0: unused" in page.stdout
    nothing = CliRunner().invoke(cli, ["report", str(saved), "--format", "suppressions", "--suppressions", str(known)])
    assert nothing.stdout == "# nothing was found that counts\n"


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({}, False)],
)
def test_a_saved_report_is_coloured_where_that_is_asked_for_and_never_in_a_file(
    saved: Path, environment: dict[str, str], coloured: bool
) -> None:
    environment = {"FORCE_COLOR": "", "NO_COLOR": "", **environment}
    text = CliRunner().invoke(cli, ["report", str(saved)], env=environment)
    assert ("\x1b[" in text.stdout) == coloured
    assert "FAULT 1 of 1: overrun" in text.stdout
    plain = saved.with_suffix(".txt")
    assert CliRunner().invoke(cli, ["report", str(saved), "-o", str(plain)], env=environment).exit_code == 0
    assert "\x1b[" not in plain.read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--force"], "--force goes with --output"),
        (["--output", "no/such/folder/x.html"], "cannot be written: No such file or directory"),
        (["--format", "pdf"], "'pdf' is not one of"),
        (["--suppressions", "SAVED"], "is not kind:glob"),
    ],
)
def test_wrong_use_of_report_ends_with_2_and_says_what_is_wrong(saved: Path, options: list[str], says: str) -> None:
    options = [str(saved) if option == "SAVED" else option for option in options]
    done = CliRunner().invoke(cli, ["report", str(saved), *options])
    assert done.exit_code == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "is cut"),
        (b"[" * 200_000, "nested too deeply"),
        (b"\x89PNG\r\n\x1a\n\0", "byte 0 is not text in UTF-8"),
        (b'{"a": 1,, "b": 2}', "line 1, column 9"),
        (b"[]", "expected schema urn:streampool:report:1, found none"),
        (b"{}", "expected schema urn:streampool:report:1, found none"),
        (b'{"faults": 3}', "expected schema urn:streampool:report:1, found none"),
        (b'{"schema": "urn:streampool:report:9"}', "found 'urn:streampool:report:9'"),
        (b'{"schema": "urn:streampool:report:1"}', "'tool' is missing"),
        (b"=== streampool 0.1\nSUMMARY: streampool: no faults\n", "is a report as text already"),
    ],
)
def test_a_file_that_is_no_report_ends_with_2_and_says_why(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    done = CliRunner().invoke(cli, ["report", str(path)])
    assert done.exit_code == 2, done.output
    assert str(path) in done.stderr
    assert says in done.stderr


def test_a_report_that_is_no_file_ends_with_2_and_is_named(tmp_path: Path) -> None:
    for path, says in ((tmp_path, "is a directory"), (tmp_path / "none.json", "does not exist")):
        done = CliRunner().invoke(cli, ["report", str(path)])
        assert done.exit_code == 2
        assert f"'{path}' {says}" in done.stderr


def test_a_report_that_was_cut_anywhere_ends_with_2_and_says_so(saved_report: str, tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    for length in range(1, len(saved_report.rstrip()), 397):
        path.write_text(saved_report[:length])
        done = CliRunner().invoke(cli, ["report", str(path)])
        assert done.exit_code == 2, done.output
        assert f"{path} is no JSON report: it is cut" in done.stderr


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"faults": 3}, "faults: expected array, found 3"),
        ({"faults": [{}]}, "faults[0]: 'kind' is missing"),
        ({"schema": None}, "expected schema urn:streampool:report:1, found none"),
        ({"tool": {"name": "other", "version": "1"}}, "tool.name: expected 'streampool', found 'other'"),
        ({"tool": {"name": "streampool", "version": [1]}}, "tool.version: expected string, found an array"),
        ({"exit_code": "1"}, "exit_code: expected integer or null, found '1'"),
        ({"leak_policy": "some"}, "leak_policy: expected one of definite, all, off, found 'some'"),
        ({"created": None}, "created: expected string, found null"),
        ({"more": 1}, "'more' is not known here"),
        ({"suppressions": [{"rule": "held:x", "used": -1}]}, "suppressions[0].used: expected 0 or more, found -1"),
        ({"suppressions": [{"rule": "held:x", "used": float("nan")}]}, "suppressions[0].used: expected integer"),
        ({"suppressions": [{"rule": "held:x", "used": 1.0}]}, "suppressions[0].used: expected integer, found 1.0"),
        ({"suppressions": [{"rule": "held:x", "used": 10**400}]}, "does not fit 64 bits"),
    ],
)
def test_a_report_with_a_wrong_part_ends_with_2_and_names_the_part(
    saved_report: str, tmp_path: Path, damage: dict[str, object], says: str
) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps({**json.loads(saved_report), **damage}))
    done = CliRunner().invoke(cli, ["report", str(path)])
    assert done.exit_code == 2, done.output
    assert str(path) in done.stderr
    assert says in done.stderr


def test_a_report_about_a_file_whose_name_is_no_text_can_be_printed(saved_report: str, tmp_path: Path) -> None:
    data = json.loads(saved_report)
    data["processes"][0]["command"] = ["\udcff.py"]
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(data))
    done = CliRunner().invoke(cli, ["report", str(path)])
    assert done.exit_code == 0, done.output
    assert "\\udcff.py" in done.stdout


# -- where it is started ----------------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Give a folder that is as the repository's root after a clone: ./streampool is there, and cannot run."""
    shutil.copytree(ROOT / "streampool", tmp_path / "streampool", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "native").mkdir()
    return tmp_path


def python(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", config.ENVIRONMENT)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=env | environment, timeout=60
    )


def test_the_source_tree_says_that_it_is_not_the_installed_package(clone: Path) -> None:
    for arguments in (("-c", "import streampool"), ("-m", "streampool", "demo")):
        done = python(*arguments, cwd=clone)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ImportError: ")
        assert f"{clone / 'streampool'} is streampool's source, not the installed package" in last
        assert "-P" in last
        assert "`make build`" in last
    assert python("-P", "-c", "import streampool", cwd=clone).returncode == 0


def test_a_package_that_is_not_whole_says_so(clone: Path) -> None:
    (clone / "pyproject.toml").unlink()
    last = python("-c", "import streampool", cwd=clone).stderr.splitlines()[-1]
    assert "has no native core for this Python" in last
    assert sys.executable in last


def test_the_demo_runs_in_the_root_of_the_source_tree(clone: Path) -> None:
    """Its child was `python -m streampool`, which found the sources in ./streampool."""
    done = python("-P", "-m", "streampool", "demo", "--device", "sim", cwd=clone)
    assert done.returncode == 0, done.stderr
    assert "Exactly the 3 planted findings" in done.stdout


def test_a_demo_whose_run_ends_without_a_report_says_so(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nif 'run' in sys.orig_argv: os._exit(1)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = python("-P", "-m", "streampool", "demo", "--device", "sim", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 1
    assert "Error: `streampool run` ended without a report" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_demo_whose_examples_are_not_in_the_folder_names_what_is_missing(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["demo", "--device", "sim", "--examples", str(tmp_path)])
    assert done.exit_code == 2
    assert f"{tmp_path} has no find_overrun_and_leak.py" in done.stderr


def test_commands_in_the_documents_do_not_find_the_sources_before_the_package() -> None:
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.txt")]
    commands = [line for path in texts for line in path.read_text().splitlines() if "import streampool;" in line]
    assert commands
    assert [line for line in commands if "python -P " not in line] == []


# -- devices that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [["run", __file__], ["replay", str(TRACE)], ["demo"]], ids=lambda verb: verb[0])
@pytest.mark.parametrize("driver", ["none", "broken"])
def test_a_device_that_cannot_be_used_ends_with_2_and_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: list[str], driver: str
) -> None:
    library = tmp_path / "libcuda.so.1"
    if driver == "broken":
        library.write_text("not a library")
    monkeypatch.setenv("STREAMPOOL_LIBCUDA", str(library))
    done = CliRunner().invoke(cli, [verb[0], "--device", "cuda:1", *verb[1:]])
    assert done.exit_code == 2, done.output
    says = "there is no CUDA driver here" if driver == "none" else "the CUDA driver library cannot be loaded"
    assert f"cuda:1 was asked for, but {says}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", [["run", __file__], ["replay", str(TRACE)], ["demo"]], ids=lambda verb: verb[0])
@pytest.mark.parametrize("name", ["cuda:99999999999", "sim:99999999999999999999", "sim:-1", "cuda:1.5"])
def test_an_ordinal_that_no_device_has_ends_with_2_and_says_which_there_are(
    monkeypatch: pytest.MonkeyPatch, verb: list[str], name: str
) -> None:
    monkeypatch.setenv("STREAMPOOL_LIBCUDA", "/nowhere/libcuda.so.1")
    done = CliRunner().invoke(cli, [verb[0], "--device", name, *verb[1:]])
    assert done.exit_code == 2, done.output
    assert f"no device is called '{name}'" in done.stderr
    present = "sim:0" if name.startswith("sim") else "there is no CUDA driver here"
    assert present in done.stderr.partition("2147483647;")[2]


def test_every_verb_that_takes_a_device_tells_of_code_2() -> None:
    for verb in VERBS:
        output = CliRunner().invoke(cli, [verb, "--help"]).output
        codes = output.partition("Exit codes")[2]
        assert re.search(r"\b0\b", codes), verb
        assert re.search(r"\b2\b", codes), verb
        assert ("cannot be used" in codes) == ("--device" in output), verb


# -- help=1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--version"], *([verb, "--help"] for verb in VERBS), ["doctor", "--json"]])
def test_help_in_the_environment_prints_every_option_whatever_the_verb(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv(config.ENVIRONMENT, "help=1")
    monkeypatch.setattr(config, "_help_shown", False)
    done = CliRunner().invoke(cli, arguments)
    for option in _core.option_table():
        assert f"\n  {option.name} (" in done.stderr
    if "--json" in arguments:
        assert json.loads(done.stdout)["environment"] == {config.ENVIRONMENT: "help=1"}
