"""Python programs that a watched program starts are watched too, and their reports come into its report.

The parent puts ``_site`` first on PYTHONPATH and says in an environment variable how it is watched. A child that was
*forked* without a new program is its parent's copy, and is not watched; nor is one that is started with ``-I``, ``-E``
or ``-S``, or with another environment. A child that ends without a report is named in the parent's.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Children", "begin_here"]

_VARIABLE = "STREAMPOOL_WATCHED_BY"
_SITE = str(Path(__file__).parent / "_site")
_PREFIX = "streampool-run-"
_LOCK = "lock"  # held by the process that a folder belongs to, and by its forked copies, for as long as they live
_YOUNG = 60.0  # seconds in which a folder may not be locked yet


@dataclass(frozen=True, slots=True)
class _Settings:
    folder: str
    mode: str | None
    device: str | None
    libraries: list[str]
    leaks: str
    suppressions: list[str]


class Children:
    """The parent's side: a folder for the children's reports, and the environment that they get."""

    def __init__(
        self, *, mode: str | None, device: str | None, libraries: list[str], leaks: str, suppressions: list[str]
    ) -> None:
        # Removed by reports(): what cleans up by itself does so with the program's exit handlers, which is too early.
        _remove_orphans()
        self._folder, self._lock = _make_folder()
        self._before = {name: os.environ.get(name) for name in (_VARIABLE, "PYTHONPATH")}
        settings = _Settings(str(self._folder), mode, device, libraries, leaks, suppressions)
        os.environ[_VARIABLE] = json.dumps(asdict(settings))
        rest = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([_SITE, rest] if rest else [_SITE])

    def reports(self) -> tuple[list[Any], list[Any]]:
        """Give the children's reports, and what is to be said of those that left none."""
        from streampool.report import NotChecked, Report

        reports, missing = [], []
        for begun in sorted(self._folder.glob("*.begun")):
            with contextlib.suppress(OSError, ValueError):
                facts = json.loads(begun.read_text(encoding="utf-8"))
                report = begun.with_suffix(".json")
                if report.exists():
                    reports.append(Report.from_json(report.read_text(encoding="utf-8")))
                    continue
                why = facts.get("problem") or "it left no report: it is still running, or was ended from outside"
                command = " ".join(map(str, facts["command"]))
                missing.append(NotChecked(f"process {facts['pid']} ({command[:100]})", str(why)))
        self.close()
        return reports, missing

    def close(self) -> None:
        """Leave the environment as it was, and no folder."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # The program may have closed all that it found open: then the number is nobody's, or its own file's.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._lock), os.stat(self._folder / _LOCK)):
                os.close(self._lock)
        shutil.rmtree(self._folder, ignore_errors=True)


def _make_folder() -> tuple[Path, int]:
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: the process's number has to do
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, lock


def _remove_orphans() -> None:
    """Remove what processes left behind that were ended from outside, or by ``os._exit``: nobody else can."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError, OverflowError):  # others' folders, whose names hold no pid
            if _is_orphan(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_orphan(folder: Path) -> bool:
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        return False
    if time.time() - facts.st_mtime < _YOUNG:
        return False
    pid = int(folder.name.removeprefix(_PREFIX).partition("-")[0])
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    # The number may be of another container's process: the lock says whether anybody lives.
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def begin_here(text: str) -> None:
    """Watch this process, a child of a watched one: called before its program begins. Raises nothing."""
    try:
        settings = _Settings(**json.loads(text))
        folder = Path(settings.folder)
        if not folder.is_dir():  # the parent is gone
            return
        pid = os.getpid()
        facts = {"pid": pid, "command": list(sys.orig_argv)}
        (folder / f"{pid}.begun").write_text(json.dumps(facts), encoding="utf-8")
        _watch(settings, folder, pid)
    except Exception as error:
        print(f"streampool: this process is not watched: {type(error).__name__}: {error}", file=sys.stderr)


def _watch(settings: _Settings, folder: Path, pid: int) -> None:
    from streampool import config, device, session
    from streampool.attach import _hooks

    config.override_mode(settings.mode)
    device.override_default(settings.device)
    watching = session.begin()
    _hooks.expect(settings.libraries)
    observed = None
    if settings.mode == config.Mode.OBSERVE:
        from streampool import _observe

        _observe.observe(stacks=True)
        observed = _observe.Observed()

    def end() -> None:
        if session.active() is not watching:  # a forked copy of this process
            return
        from streampool.attach import _coverage

        try:
            findings = watching.finish()
            own = [] if observed is None else observed.finish()
            session.end()
            report = _coverage.report(findings, own, leaks=settings.leaks, suppressions=settings.suppressions)
            # The name says that it is whole. There is no folder where the parent has ended.
            part = folder / f"{pid}.part"
            with contextlib.suppress(OSError):
                part.write_text(report.to_json(), encoding="utf-8", errors="backslashreplace")
                part.rename(folder / f"{pid}.json")
        finally:
            session.exiting()

    atexit.register(end)  # the first to be registered is the last to run
