"""``streampool run``: a program runs as under python, its end is kept, and the report always comes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

CLEAN = """
import streampool as sp
dev = sp.Device(); s = dev.create_stream(); pool = sp.Pool(dev)
with pool.allocate(1000, stream=s) as buf:
    buf.fill(1, stream=s)
s.sync()
"""
LEAKY = CLEAN + "pool.allocate_raw(5000, stream=s)  # the leak\n"
HELD = CLEAN + "kept = pool.allocate(5000, stream=s)\n"
FAULTY = (
    CLEAN
    + """
buf = pool.allocate(1000, stream=s)  # the block
s.launch(lambda view: view.fill(0x41), writes=[(buf.handle, 1001)])
s.sync()
buf.close(s)
"""
)


class Ran:
    """What a run gave."""

    def __init__(self, done: subprocess.CompletedProcess[str], report: Path) -> None:
        self.code = done.returncode
        self.out = done.stdout
        self.err = done.stderr
        self._report = report

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self._report.read_text())
        return loaded


def streampool(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("STREAMPOOL_OPTIONS", "PYTHONSAFEPATH")}
    # -P: the package under test is the installed one, whatever the current folder holds.
    return subprocess.run(
        [sys.executable, "-P", "-m", "streampool", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**env, **environment},
        timeout=60,
    )


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def run(
        source: str, *arguments: object, options: tuple[object, ...] = ("--mode", "debug"), **environment: str
    ) -> Ran:
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(source))
        report = tmp_path / "report.json"
        done = streampool(
            "run", "--device", "sim", "--report", report, *options, script, *arguments, cwd=tmp_path, **environment
        )
        return Ran(done, report)

    return run


# -- exit codes (R17) ------------------------------------------------------------------------------------------------


def test_a_clean_program_ends_with_0_and_a_report_that_says_what_was_covered(run: Any) -> None:
    ran = run(CLEAN)
    assert ran.code == 0, ran.err
    assert ran.report["faults"] == []
    assert "overridden" not in ran.err
    assert ran.err.strip(), "the report goes to standard error"
    assert ran.out == ""


def test_faults_end_with_1_and_are_reported_at_their_line(run: Any) -> None:
    ran = run(FAULTY)
    assert ran.code == 1, ran.err
    (fault,) = ran.report["faults"]
    assert fault["kind"] == "overrun"
    line = FAULTY.splitlines().index("buf = pool.allocate(1000, stream=s)  # the block") + 1
    assert f"program.py:{line}" in ran.err


def test_a_leak_ends_with_1_and_leaks_off_with_0(run: Any) -> None:
    assert run(LEAKY).code == 1
    assert run(LEAKY, options=("--mode", "debug", "--leaks", "off")).code == 0


def test_a_block_that_a_live_object_holds_counts_only_when_all_do(run: Any) -> None:
    assert run(HELD).code == 0
    assert run(HELD, options=("--mode", "debug", "--leaks", "all")).code == 1


def test_the_code_for_findings_can_be_chosen_and_stands_over_the_programs_own(run: Any) -> None:
    ran = run(FAULTY + "import sys; sys.exit(5)\n", options=("--mode", "debug", "--error-exitcode", 42))
    assert ran.code == 42
    assert run(FAULTY, options=("--mode", "debug", "--error-exitcode", 0)).code == 0


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("sys.exit(5)", 5, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(None)", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit(259)", 3, ""),
        ("sys.exit('no good')", 1, "no good\n"),
        ("raise SystemExit(['odd'])", 1, "['odd']\n"),
    ],
)
def test_the_programs_own_exit_code_is_kept(run: Any, end: str, code: int, says: str) -> None:
    ran = run(f"{CLEAN}\nimport sys\n{end}\n")
    assert ran.code == code, ran.err
    assert says in ran.err
    assert ran.report["faults"] == []


def test_a_program_without_allocations_ends_with_3_and_a_loud_line(run: Any) -> None:
    ran = run("print('hello')")
    assert ran.code == 3
    assert ran.out == "hello\n"
    assert "NO ALLOCATION WAS OBSERVED" in ran.err


def test_without_allocations_the_programs_own_code_stands_over_3(run: Any) -> None:
    ran = run("raise SystemExit(7)")
    assert ran.code == 7
    assert "NO ALLOCATION WAS OBSERVED" in ran.err


def test_a_program_that_raises_keeps_its_traceback_and_ends_with_1_after_the_report(run: Any) -> None:
    ran = run(CLEAN + "def broken():\n    raise RuntimeError('mine')\nbroken()\n")
    assert ran.code == 1
    assert ran.report["faults"] == []
    trace = ran.err[ran.err.index("Traceback") :].splitlines()
    assert trace[1].strip().startswith('File "') and "program.py" in trace[1]  # noqa: PT018 - one frame, both matter
    assert "RuntimeError: mine" in trace
    assert "_program.py" not in ran.err
    assert "runpy" not in ran.err


def test_a_program_with_a_syntax_error_shows_it_as_python_does(run: Any) -> None:
    ran = run("def f(:\n    pass\n")
    assert ran.code == 1
    assert "SyntaxError" in ran.err
    assert "_program.py" not in ran.err


def test_a_program_that_sets_its_own_excepthook_has_it_called(run: Any) -> None:
    ran = run("import sys\nsys.excepthook = lambda *a: print('hooked', a[0].__name__)\n1 / 0\n")
    assert ran.out == "hooked ZeroDivisionError\n"
    assert ran.code == 1


def test_ctrl_c_ends_with_130_and_the_report_still_comes(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(CLEAN + "import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    report = tmp_path / "report.json"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "streampool", "run", "--device", "sim", "--report", str(report), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "KeyboardInterrupt" in err
    assert json.loads(report.read_text())["faults"] == []


# -- as under python -------------------------------------------------------------------------------------------------


def test_the_program_sees_what_it_would_see_under_python(tmp_path: Path) -> None:
    script = tmp_path / "sub" / "program.py"
    script.parent.mkdir()
    script.write_text(
        "import sys, json\n"
        "import neighbour\n"
        "print(json.dumps([sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ is None, "
        "sys.modules['__main__'].__dict__ is globals(), neighbour.here]))\n"
    )
    (script.parent / "neighbour.py").write_text("here = 1\n")
    arguments = ["sub/program.py", "--mode", "x", "-m", "--", "last"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    plain = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path, env=env
    )
    env_run = subprocess.run(
        [sys.executable, "-m", "streampool", "run", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=env,
    )
    assert json.loads(env_run.stdout) == json.loads(plain.stdout)


def test_a_module_runs_as_under_python_m(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    source = "import sys, json\nprint(json.dumps([sys.argv, sys.path[0], __name__, __package__, __spec__.name]))\n"
    (package / "__main__.py").write_text(source)
    (package / "tool.py").write_text(source)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    for name in ("pack", "pack.tool"):
        command = [sys.executable, "-m", name, "--flag", "a"]
        plain = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
        command = [sys.executable, "-m", "streampool", "run", "-m", name, "--flag", "a"]
        ours = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
        assert ours.stdout, ours.stderr
        assert json.loads(ours.stdout) == json.loads(plain.stdout)


def test_a_folder_with_a_main_runs(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "__main__.py").write_text("import other; print(__name__, other.x)\n")
    (folder / "other.py").write_text("x = 3\n")
    done = streampool("run", folder)
    assert done.stdout == "__main__ 3\n", done.stderr


def test_a_console_script_on_path_runs(tmp_path: Path) -> None:
    script = tmp_path / "mytool"
    script.write_text("#!/usr/bin/env python3\nimport sys\nprint('tool', sys.argv[1:])\n")
    script.chmod(0o755)
    done = streampool("run", "mytool", "--x", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert done.stdout == "tool ['--x']\n", done.stderr


def test_classes_of_the_program_can_be_pickled(run: Any) -> None:
    ran = run("import pickle\nclass Mine: pass\nprint(type(pickle.loads(pickle.dumps(Mine()))).__name__)\n")
    assert ran.out == "Mine\n", ran.err


def test_threads_and_exit_handlers_of_the_program_are_waited_for_before_the_report(run: Any) -> None:
    ran = run(
        """
        import atexit, threading, time
        import streampool as sp
        dev = sp.Device(); s = dev.create_stream(); pool = sp.Pool(dev)
        one, two = pool.allocate_raw(100, stream=s), pool.allocate_raw(100, stream=s)
        def later():
            time.sleep(0.3)
            pool.free_raw(one, stream=s)
            print("thread")
        def handler():
            pool.free_raw(two, stream=s)
            print("handler")
        atexit.register(handler)
        threading.Thread(target=later).start()
        print("end of the script")
        """
    )
    assert ran.out == "end of the script\nthread\nhandler\n"
    assert ran.code == 0, ran.err


def test_a_handler_registered_before_the_first_pool_still_runs_before_the_report(run: Any) -> None:
    ran = run(
        """
        import atexit
        pools = []
        atexit.register(lambda: [pool.close() for pool in pools])
        import streampool as sp
        dev = sp.Device(); s = dev.create_stream()
        pools.append(sp.Pool(dev)); pools[0].allocate(10, stream=s).close()
        """
    )
    assert ran.code == 0, ran.err


# -- pools that are gone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["pool.close()", "pool.close(); del pool, buf", "del pool, buf", "pass"])
def test_a_pool_reports_its_faults_however_it_ended(run: Any, ending: str) -> None:
    ran = run(FAULTY + ending + "\nimport gc; gc.collect()\n")
    assert ran.code == 1, ran.err
    assert [fault["kind"] for fault in ran.report["faults"]] == ["overrun"]


@pytest.mark.parametrize("ending", ["pool.close()", "del pool, buf", "pass"])
def test_a_pool_reports_its_leaks_however_it_ended(run: Any, ending: str) -> None:
    assert run(LEAKY + ending + "\n").code == 1


def test_a_pool_in_a_collected_cycle_reports_too(run: Any) -> None:
    ran = run(FAULTY + "pool.me = pool\ndel pool, buf\nimport gc; gc.collect()\n")
    assert ran.code == 1, ran.err


def test_faults_that_the_program_took_itself_are_still_reported(run: Any) -> None:
    ran = run(FAULTY + "pool.check()\nassert len(pool.take_faults()) == 1\n")
    assert ran.code == 1, ran.err
    assert len(ran.report["faults"]) == 1


def test_an_unreachable_buffer_in_a_cycle_is_released_and_no_leak(run: Any) -> None:
    cycle = "import gc; gc.disable()\nclass Node: pass\nn = Node(); n.me, n.buf = n, kept\ndel n, kept\n"
    ran = run(HELD + cycle, options=("--mode", "debug", "--leaks", "all"))
    assert ran.code == 0, ran.err


def test_a_forked_child_that_ends_normally_reports_nothing(run: Any) -> None:
    ran = run(
        CLEAN
        + """
import os, sys
child = os.fork()
if child == 0:
    sys.exit(9)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status))
"""
    )
    assert ran.out == "child 9\n"
    assert ran.code == 0, ran.err
    assert ran.err.count("SUMMARY") <= 1


@pytest.mark.parametrize(("ends_by", "code"), [("os._exit(7)", 7), ("os.abort()", -signal.SIGABRT)])
def test_what_a_program_without_an_end_leaves_behind_the_next_run_removes(
    run: Any, tmp_path: Path, ends_by: str, code: int
) -> None:
    folders = tmp_path / "temporary"
    folders.mkdir()
    assert run(CLEAN, TMPDIR=str(folders)).code == 0
    assert list(folders.iterdir()) == []
    assert run(CLEAN + f"import os; {ends_by}\n", TMPDIR=str(folders)).code == code
    (left,) = folders.iterdir()
    living = folders / f"streampool-run-{os.getpid()}-living"
    foreign = folders / left.name.replace("streampool-run-", "streampool-run-of-another-program-")
    locked = folders / f"{left.name}-locked"  # a forked copy of a process that is gone
    for folder in (living, foreign, locked):
        shutil.copytree(left, folder)
    assert run(CLEAN, TMPDIR=str(folders)).code == 0
    assert left.is_dir(), "it might be on the way to its lock"
    for folder in folders.iterdir():
        os.utime(folder, (0, 0))
    with (locked / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(CLEAN, TMPDIR=str(folders)).code == 0
        assert {folder.name for folder in folders.iterdir()} == {living.name, foreign.name, locked.name}
    assert run(CLEAN, TMPDIR=str(folders)).code == 0
    assert {folder.name for folder in folders.iterdir()} == {living.name, foreign.name}


def test_a_program_that_closes_everything_it_finds_open_is_reported_all_the_same(run: Any, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    ran = run(FAULTY + "import os; os.closerange(3, 256)\n", TMPDIR=str(tmp_path / "temporary"))
    assert ran.code == 1, ran.err
    assert len(ran.report["faults"]) == 1
    assert list((tmp_path / "temporary").iterdir()) == []


# -- settings --------------------------------------------------------------------------------------------------------


def test_the_mode_stands_over_the_programs_and_says_so(run: Any) -> None:
    ran = run(FAULTY.replace("sp.Pool(dev)", "sp.Pool(dev, mode='production')"))
    assert ran.code == 1
    assert "mode=production in the program, overridden by --mode debug" in ran.err


def test_the_environment_does_not_stand_over_the_program(run: Any) -> None:
    source = FAULTY.replace("sp.Pool(dev)", "sp.Pool(dev, mode='production')")
    assert run(source, options=(), STREAMPOOL_OPTIONS="mode=debug").code == 0
    assert run(FAULTY, options=(), STREAMPOOL_OPTIONS="mode=debug").code == 1


@pytest.mark.parametrize(("source", "code"), [(FAULTY, 1), (CLEAN, 0), ("print('nothing')", 3)])
def test_the_report_is_one_json_object_where_that_is_asked_for(tmp_path: Path, source: str, code: int) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys; print('{ my own', file=sys.stderr)\n" + source)
    done = streampool("run", "--device", "sim", "--mode", "debug", "--json", script, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    report = json.loads(done.stderr[done.stderr.index("\n{\n") :])
    assert report["exit_code"] == code
    assert len(report["faults"]) == (source == FAULTY)
    assert "SUMMARY" not in done.stderr
    assert ("NO ALLOCATION WAS OBSERVED" in done.stderr) == (code == 3)


def test_the_report_is_text_or_json_by_its_name(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(FAULTY)
    for name in ("report.txt", "report"):
        done = streampool("run", "--device", "sim", "--mode", "debug", "--report", tmp_path / name, script)
        assert done.returncode == 1
        text = (tmp_path / name).read_text()
        assert "overrun" in text
        assert not text.startswith("{")


def test_a_report_as_html_is_a_page(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(FAULTY)
    page = tmp_path / "report.html"
    done = streampool("run", "--device", "sim", "--mode", "debug", "--report", page, script, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    written = page.read_text(encoding="utf-8")
    assert written.startswith("<!DOCTYPE html>")
    assert "About overrun" in written


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({"FORCE_COLOR": ""}, False)],
)
def test_the_report_is_coloured_only_where_a_person_reads_it_and_has_not_refused(
    run: Any, environment: dict[str, str], coloured: bool
) -> None:
    ran = run(FAULTY, **environment)
    assert ("\x1b[" in ran.err) == coloured
    assert "FAULT 1 of 1: overrun" in ran.err


def test_a_report_as_text_about_a_file_whose_name_is_no_text_is_written(tmp_path: Path) -> None:
    script = os.fsencode(tmp_path) + b"/\xff.py"
    Path(os.fsdecode(script)).write_text(LEAKY)
    report = tmp_path / "report.txt"
    done = streampool("run", "--device", "sim", "--mode", "debug", "--report", report, os.fsdecode(script))
    assert done.returncode == 1, done.stderr
    assert "\\udcff.py" in report.read_text()


# -- wrong use -------------------------------------------------------------------------------------------------------


def test_a_report_that_cannot_be_written_is_refused_before_the_program_runs(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("print('ran')")
    done = streampool("run", "--report", tmp_path / "none" / "report.json", script)
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert "ran" not in done.stdout


def test_a_report_file_is_not_left_behind_by_the_look_at_it(tmp_path: Path) -> None:
    done = streampool("run", "--report", tmp_path / "report.json", "-m", "no.such.module")
    assert done.returncode == 2
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("none.py",), "There is no 'none.py'"),
        (("folder/none.py",), "There is no 'folder/none.py'"),
        (("json",), "Did you mean `-m json`?"),
        (("-m", "no_such_module"), "There is no module 'no_such_module'"),
        (("-m", "json.nothing"), "There is no module 'json.nothing'"),
        (("--mode", "debgu", "x.py"), "did you mean 'debug'"),
        (("--moed", "debug", "x.py"), "--mode"),
        (("--device", "gpu", "x.py"), "unknown device 'gpu'"),
        (("--leaks", "some", "x.py"), "definite"),
        (("--error-exitcode", "300", "x.py"), "255"),
        ((), "Missing argument"),
        (("ls",), "not a Python program"),
        (("",), "The program's name is empty"),
        (("-m", ""), "The program's name is empty"),
        (("-m", ".json"), "'.json' is not a module's name"),
        (("-m", "json..tool"), "'json..tool' is not a module's name"),
        ((".",), "'.' cannot be run: the folder has no __main__.py"),
        (("archive.zip",), "'archive.zip' cannot be run: the archive has no __main__.py"),
        (("a" * 300,), "cannot be read: File name too long"),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_is_wrong(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "archive.zip").write_bytes(b"PK\x03\x04 and no more")
    done = streampool("run", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "NO ALLOCATION" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_whose_device_cannot_be_used_is_not_run(run: Any) -> None:
    ran = run("print('ran')", options=("--device", "cuda"), STREAMPOOL_LIBCUDA="/nowhere/libcuda.so.1")
    assert ran.code == 2
    assert ran.out == ""
    assert "Invalid value for --device: cuda:0 was asked for, but there is no CUDA driver here" in ran.err


def test_a_device_that_the_program_itself_asks_for_is_the_programs(run: Any) -> None:
    source = "import streampool as sp\nsp.Device('cuda')\n"
    ran = run(source, options=(), STREAMPOOL_LIBCUDA="/nowhere/libcuda.so.1")
    assert ran.code == 1
    assert "DriverNotFoundError: cuda:0 was asked for" in ran.err


def test_a_usage_error_of_the_program_itself_is_the_programs(run: Any) -> None:
    ran = run("import click\nraise click.UsageError('mine')\n")
    assert ran.code == 1
    assert "UsageError: mine" in ran.err
