"""Running a program under a session: its end, whatever that is, the report, and the exit code of R17."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streampool import config, session
from streampool import device as devices
from streampool._findings import PoolFindings
from streampool._paths import library_path
from streampool._terminal import wants_color
from streampool.attach import _coverage, _hooks
from streampool.attach._children import Children
from streampool.cli._program import NoProgram, Program

if TYPE_CHECKING:
    from streampool._observe import Observed
    from streampool.suppressions import Suppressions

__all__ = ["run"]

_NOTHING_SEEN = 3
_INTERRUPTED = 130
_OWN_FILES = (str(Path(__file__).parent), "<frozen runpy>")


class _EpochClock:
    """Ends an epoch now and then, on a thread of its own, for the class of growing leaks. Takes little of one core."""

    _PERIOD = 0.5  # seconds
    _SHARE = 20  # epochs that take long are followed by a pause so many times as long

    def __init__(self, observe: Callable[[], None]) -> None:
        self._observe = observe
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streampool-epochs", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause, before = self._PERIOD, 0.0
        while not self._stop.wait(pause):
            begin = time.monotonic()
            with contextlib.suppress(Exception):  # a pool closed meanwhile; the report does not depend on this
                self._observe()
            taken = time.monotonic() - begin
            pause, before = self.pause_after(taken, before), taken

    @classmethod
    def pause_after(cls, taken: float, before: float) -> float:
        """Give the pause behind an epoch, in seconds, from what it and the one before it took.

        One that takes long by itself is forgiven: PyTorch's first snapshot does, a second or two.
        """
        return max(cls._PERIOD, cls._SHARE * min(taken, before))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def run(
    program: Program,
    *,
    mode: str | None,
    device: str | None,
    report: Path | None,
    as_json: bool = False,
    leaks: str,
    error_exitcode: int,
    suppressions: Suppressions | None = None,
    libraries: tuple[str, ...] = (),
) -> int:
    """Run `program` to its end, print the report to standard error, write it to `report`, and give the exit code."""
    # The program's NVTX ranges name the window of a fault, unless another tool takes them.
    os.environ.setdefault("NVTX_INJECTION64_PATH", str(library_path()))
    config.override_mode(mode)
    devices.override_default(device)
    watching = session.begin()
    if mode == config.Mode.OBSERVE:  # other libraries' allocators stay
        libraries = ()
    children = Children(
        mode=mode,
        device=device,
        libraries=list(libraries),
        leaks=leaks,
        suppressions=[] if suppressions is None else [str(rule) for rule in suppressions.rules],
    )
    _hooks.expect(libraries)
    observed = _observe_libraries() if mode == config.Mode.OBSERVE else None
    clocks = [_EpochClock(watching.observe), *([_EpochClock(observed.epoch)] if observed is not None else [])]
    try:
        code = _run_to_its_end(program)
    except NoProgram:
        children.close()
        raise
    if session.active() is not watching:  # a forked child that came to the end of the program: its parent reports
        return code
    for clock in clocks:
        clock.stop()
    gc.collect()  # what only a cycle holds is nobody's, and is released
    findings = watching.finish()
    own = [] if observed is None else observed.finish()
    session.end()
    code = _conclude(findings, own, report, as_json, code, leaks, error_exitcode, suppressions, children)
    session.exiting()
    return code


def _observe_libraries() -> Observed:
    """Watch the own pools of all known libraries, with call stacks, from their import on."""
    from streampool import _observe

    _observe.observe(stacks=True)
    return _observe.Observed()


def _run_to_its_end(program: Program) -> int:
    """Run the program, its remaining threads and its exit handlers; give the exit code that ``python`` would give."""
    code = _guarded(program.run)
    # As at the end of the interpreter: wait for threads, run exit handlers. Only then nothing of the program runs.
    threads = _guarded(threading._shutdown)  # type: ignore[attr-defined]
    handlers = _guarded(atexit._run_exitfuncs)
    return code or threads or handlers


def _guarded(call: Callable[[], Any]) -> int:
    """Call, and give the exit code that the interpreter would give for what comes out."""
    try:
        call()
    except NoProgram:
        raise
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
            return code & 0xFF if -(2**31) <= code < 2**31 else 0xFF  # as the interpreter does
        with contextlib.suppress(Exception):
            print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        _show(error)
        return _INTERRUPTED
    except BaseException as error:
        _show(error)
        return 1
    return 0


def _show(error: BaseException) -> None:
    """Print a traceback as the interpreter would, from the program's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:
        traceback.print_exception(error)


def _conclude(
    findings: list[PoolFindings],
    observed: list[PoolFindings],
    path: Path | None,
    as_json: bool,
    code: int,
    leaks: str,
    error_exitcode: int,
    suppressions: Suppressions | None,
    children: Children,
) -> int:
    """Print and write the report; give the exit code."""
    from streampool.report import Report

    report = _coverage.report(findings, observed, leaks=leaks, suppressions=suppressions or ())
    others, missing = children.reports()
    report = Report.merge([report, *others])
    if missing:
        gaps = (*report.coverage.not_checked, *missing)
        report.coverage = replace(report.coverage, not_checked=gaps)
    seen = report.coverage.blocks_allocated > 0
    report.exit_code = error_exitcode if report.counts else code or (0 if seen else _NOTHING_SEEN)
    with contextlib.suppress(Exception):  # the program closed it, or its reader is gone
        sys.stdout.flush()
    problem = None
    if path is not None:
        try:
            make = {".json": report.to_json, ".html": report.to_html}.get(path.suffix, report.to_text)
            # A file's name may be no text: what UTF-8 cannot say is escaped.
            path.write_text(make() + "\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            problem = f"streampool: THE REPORT COULD NOT BE WRITTEN to {path}: {error.strerror}"
    text = [] if as_json else [report.to_text(color=wants_color(sys.stderr))]
    if problem is not None:
        text.append(problem)
    elif path is not None:
        text.append(f"streampool: report written to {path}")
    if not seen:
        text.append(
            "streampool: NO ALLOCATION WAS OBSERVED: neither the program nor a library of its took "
            "memory from streampool, so this report says nothing about it."
        )
    if as_json:
        text.append(report.to_json())  # last, for who reads it
    _say("\n".join(text))
    return report.exit_code


def _say(text: str) -> None:
    """Print on standard error: the program's, else the one the process began with; where both are gone, nowhere."""
    for stream in (sys.stderr, sys.__stderr__):
        try:
            print(text, file=stream, flush=True)
        except Exception:
            continue
        if stream is not None:
            return
