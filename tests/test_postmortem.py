"""A file about an out-of-memory error: what it has, when it is written, and that it never stands in the error's way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import libraries
import pytest
import structlog
from scene import MIB
from structlog.testing import capture_logs

import streampool as sp
from streampool import _core, postmortem

SHORT = {"limit": "64MiB", "wait_timeout": 0}


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(postmortem, "_written", 0)
    monkeypatch.setattr(postmortem, "_last", None)
    yield
    postmortem.disable()


def holding(pool: sp.Pool) -> list[sp.Buffer]:
    return [pool.allocate(8 * MIB) for _ in range(6)]


def fail(pool: sp.Pool) -> sp.OutOfMemoryError:
    with pytest.raises(sp.OutOfMemoryError) as caught:
        pool.allocate(128 * MIB)
    return caught.value


def test_the_file_has_the_error_the_account_the_settings_and_who_holds_memory(tmp_path: Path) -> None:
    postmortem.enable(tmp_path / "crash")
    with sp.Pool("sim:0", name="full", **SHORT) as pool:
        kept = holding(pool)
        error = fail(pool)
        (path,) = (tmp_path / "crash").iterdir()
        text = path.read_text()
        assert f"== OutOfMemoryError\n{error}\n" in text
        account = text.partition("== pool 'full', device memory of sim:0\n")[2].partition("\n    ")[0]
        parts = [int(number.replace(",", "")) for number in re.findall(r"^  [ +] +([\d,]+)  ", account, re.M)]
        (total,) = [
            int(number.replace(",", "")) for number in re.findall(r"^  = +([\d,]+)  reserved_bytes$", account, re.M)
        ]
        assert len(parts) == 6  # pending has two
        assert sum(parts) == total == pool.stats().reserved
        assert "the parts add up" not in text
        assert re.search(r"67,108,864  limit_bytes", text)
        assert re.search(r"largest_free_block_bytes", text)
        assert "allocation_failures_total, limit 1" in text
        settings = next(line for line in text.splitlines() if line.startswith("settings of") and "'full'" in line)
        assert "limit=67108864" in settings
        assert "in holding\n" in text.partition("== who holds memory of pool 'full'")[2]
        assert text.rstrip().endswith("in fail")
        del kept


def test_the_largest_free_pieces_are_listed_with_who_may_take_them(tmp_path: Path) -> None:
    with sp.Pool("sim:0", name="pieces", limit="128MiB", wait_timeout=0) as pool:
        blocks = [pool.allocate(size * MIB) for size in (10, 2, 20, 2, 30, 2)]
        for at in (0, 2, 4):
            blocks[at].close()
        sp.sim.settle()
        (line,) = [
            line
            for line in postmortem.text().splitlines()
            if line.startswith("largest free pieces") and "'pieces'" in line
        ]
        sizes = re.findall(r"(\d+) MiB \((any|own) stream\)", line)
        assert [int(size) for size, _ in sizes][:3] == [30, 20, 10]
        assert pool.free_pieces(1)[0][0] == 30 * MIB
        with pytest.raises(ValueError, match="most must be a number of pieces, at most 1000"):
            pool.free_pieces(1001)
        del blocks


def test_the_last_events_are_there_though_logs_took_them_and_though_nobody_reads_the_ring(tmp_path: Path) -> None:
    structlog.configure(processors=[])
    with capture_logs(), sp.Pool("sim:0", name="eventful", limit="32MiB", wait_timeout=0) as pool:
        kept = pool.allocate(MIB)
        with pytest.raises(sp.ForeignFreeError):
            pool.free_raw(12345)
        error = fail(pool)
        sp.logs.drain()
        events = (
            postmortem.text(error).partition("== last events (the newest last)\n")[2].partition("\n\n")[0].splitlines()
        )
        own = [re.sub(r"^  [\d:.]+  ", "", event) for event in events if "'eventful'" in event]
        words = [event.split()[0] for event in own]
        assert words[0] == "pool.created"
        assert words[-1] == "alloc.failed"
        assert words.index("pool.grown") < words.index("free.invalid") < words.index("growth.refused")
        assert own[-1].startswith("alloc.failed  pool 'eventful' (device, sim:0)  requested_bytes=134,217,728 ")
        assert own[-1].endswith("reason=limit")
        del kept
    structlog.reset_defaults()
    with sp.Pool("sim:0", name="unread", limit="32MiB", wait_timeout=0) as pool:
        for _ in range(1200):  # more than the ring holds
            with pytest.raises(sp.ForeignFreeError):
                pool.free_raw(12345)
        fail(pool)
        assert "alloc.failed  pool 'unread'" in postmortem.text()
    _core.drain_events()


def test_what_the_process_holds_beside_the_pools_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = libraries.Torch().install(monkeypatch)
    torch.allocate(5 * MIB)
    sp.observe("torch")
    try:
        with sp.Pool("sim:0", name="beside", initial="16MiB"):
            text = postmortem.text()
        assert "  torch's own pool, device memory of cuda:0: 5 MiB used of 6 MiB\n" in text
        assert re.search(r"  sim:0: this process holds .*, of which 0 B are in no pool of this process\n", text)
    finally:
        sp.unobserve()


def test_a_pool_whose_name_has_no_series_of_its_own_is_told_by_its_name() -> None:  # CI, 2026-11-30
    pools = [sp.Pool("sim:0", name=f"crowd {i}") for i in range(40)]
    kept = pools[39].allocate(3 * MIB)
    account = postmortem.text().partition("== pool 'crowd 39', device memory of sim:0\n")[2].partition("== ")[0]
    assert re.search(r"3,145,728  used_bytes$", account, re.M)
    assert re.search(rf"{pools[39].stats().reserved:,}  reserved_bytes$", account, re.M)
    del kept


def test_few_files_are_written_and_not_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    postmortem.enable(tmp_path)
    with sp.Pool("sim:0", **SHORT) as pool:
        for _ in range(5):
            fail(pool)
        assert len(list(tmp_path.iterdir())) == 1
        monkeypatch.setattr(postmortem, "_PAUSE", 0.0)
        for _ in range(20):
            fail(pool)
        assert len(list(tmp_path.iterdir())) == 10
        postmortem.disable()
        fail(pool)
        assert len(list(tmp_path.iterdir())) == 10


def test_a_file_that_cannot_be_written_is_a_warning_and_the_error_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"postmortem: the folder .*file/crash cannot be written: Not a directory"):
        postmortem.enable(tmp_path / "file" / "crash")
    folder = tmp_path / "gone"
    postmortem.enable(folder)
    folder.rmdir()
    with sp.Pool("sim:0", **SHORT) as pool, pytest.warns(RuntimeWarning, match="was not written: .*No such file"):
        fail(pool)


def test_an_older_file_stays_whole_when_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "older.txt"
    path.write_text("older")
    code = (
        "import resource, signal, sys; import streampool as sp\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try: sp.postmortem.write(sys.argv[1])\n"
        "except OSError as error: print(error.strerror)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    assert path.read_text() == "older"
    assert [p.name for p in tmp_path.iterdir()] == ["older.txt"]


def test_a_file_is_whole_or_the_older_one_whenever_the_process_is_killed(tmp_path: Path) -> None:
    """Kill -9 in the middle of writing."""
    path = tmp_path / "it.txt"
    code = (
        "import sys; import streampool as sp; p = sp.Pool('sim:0', name='killed'); kept = p.allocate(1 << 20)\n"
        "sp.postmortem.write(sys.argv[1]); print('ready', flush=True)\n"
        "while True: sp.postmortem.write(sys.argv[1])\n"
    )
    for number in range(8):
        with subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(path)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(0.003 * number)
            child.kill()
            child.wait()
        lines = path.read_text().splitlines()
        assert lines[0].startswith("streampool ")
        assert f"process {child.pid}," in lines[0]
        assert "== where the program is" in lines[-2]
        assert lines[-1].endswith("in <module>")


def test_it_is_written_on_a_signal_and_the_handler_before_is_called_too(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        postmortem.enable(tmp_path, on_signal=signal.SIGUSR1)
        with sp.Pool("sim:0", name="signalled"):
            os.kill(os.getpid(), signal.SIGUSR1)
            (path,) = tmp_path.iterdir()
        assert seen == [signal.SIGUSR1]
        assert "pool 'signalled'" in path.read_text()
        problems: list[BaseException] = []

        def elsewhere() -> None:
            try:
                postmortem.enable(tmp_path, on_signal=signal.SIGUSR1)
            except ValueError as error:
                problems.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(problems) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("good", [True, False])
def test_the_environment_switches_it_on_for_any_program(tmp_path: Path, good: bool) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / ("crash" if good else "file/crash")
    code = (
        "import streampool as sp\np = sp.Pool('sim:0', limit='8MiB', wait_timeout=0)\n"
        "try: p.allocate(1 << 30)\nexcept sp.OutOfMemoryError: print('raised')\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {postmortem.ENVIRONMENT: str(folder)},
    )  # fmt: skip
    assert done.stdout == "raised\n"
    assert ("cannot be written" in done.stderr) != good
    assert folder.exists() == good


def test_it_is_written_from_python_at_any_time(tmp_path: Path) -> None:
    with sp.Pool("sim:0", name="asked") as pool:
        kept = holding(pool)
        path = sp.postmortem.write(tmp_path / "now.txt")
        text = path.read_text()
        assert "OutOfMemoryError" not in text
        assert "pool 'asked'" in text
        del kept


def test_a_hook_that_fails_does_not_change_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(error: BaseException) -> None:
        raise RuntimeError("told to fail")

    from streampool import _core

    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr(_core, "_oom_hook", broken)
    with sp.Pool("sim:0", **SHORT) as pool:
        assert fail(pool).fields["reason"] == "limit"
    assert len(told) == 1
