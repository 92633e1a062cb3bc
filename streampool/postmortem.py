"""A file about each out-of-memory error, written at the failure: readable without a GPU and without the program.

>>> import streampool as sp
>>> sp.postmortem.enable("/var/tmp/streampool")

or ``STREAMPOOL_POSTMORTEM=/var/tmp/streampool`` in the environment of any program. A file has the error, the account of
every pool (whose parts add up to what it holds), its largest free pieces, settings, counters, what the devices have
left, who holds memory by call stack, the last events, and where the program was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streampool import _core, _fork, _observe, _process_memory, session
from streampool._sizes import format_size

__all__ = ["ENVIRONMENT", "disable", "enable", "enable_from_environment", "text", "write"]

ENVIRONMENT = "STREAMPOOL_POSTMORTEM"
_MOST_FILES = 10  # a process writes by itself
_PAUSE = 60.0  # seconds between two of them: some programs live with refusals
_HOLDERS = 30
_FRAMES = 16
_PIECES = 10
_EVENTS = 100

_lock = _fork.lock()
_folder: Path | None = None
_written = 0
_last: float | None = None
_asked = False


def enable(folder: str | os.PathLike[str], *, on_signal: int | None = None) -> None:
    """Write a file into `folder` whenever an allocation ends with an ``OutOfMemoryError``.

    At most 10 files a process, a minute apart. What goes wrong with writing one is a ``RuntimeWarning``; the error is
    raised all the same.

    Parameters
    ----------
    folder
        Made where it is missing.
    on_signal
        A signal, such as ``signal.SIGUSR1``, at which a file is written too; the handler it had before is called after.

    Raises
    ------
    OSError
        The folder cannot be written, with its name.
    ValueError
        `on_signal` outside the main thread, or no signal that can be handled.
    """
    global _folder
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OSError(error.errno, f"postmortem: the folder {path} cannot be written: {error.strerror}") from None
    if on_signal is not None:
        _listen(on_signal)
    _folder = path
    _core._oom_hook = _failed


def enable_from_environment() -> None:
    """Do what ``STREAMPOOL_POSTMORTEM`` says, once. A folder that cannot be written is a warning."""
    global _asked
    if _asked:
        return
    _asked = True
    try:
        enable(os.environ[ENVIRONMENT])
    except OSError as error:
        warnings.warn(str(error.strerror), RuntimeWarning, stacklevel=2)


def disable() -> None:
    """Write no more files by itself. A signal's handler stays, and writes nothing."""
    global _folder
    _core._oom_hook = None
    _folder = None


def write(path: str | os.PathLike[str], error: BaseException | None = None) -> Path:
    """Write the file now: whole, or not at all.

    Parameters
    ----------
    path
        A file, which is replaced.
    error
        What happened, if anything.

    Raises
    ------
    OSError
        It cannot be written; an older file stays as it was.
    """
    target = Path(path)
    content = text(error).encode(errors="backslashreplace")
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = file.name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise
    return target


def text(error: BaseException | None = None) -> str:
    """Give the text of the file: what the process's pools are like at this moment."""
    return "\n".join([*_head(error), *_pools(), *_devices(), *_holders(), *_events(), *_where()]) + "\n"


def _failed(error: BaseException) -> None:
    """Write down an out-of-memory error, called from where it is raised."""
    global _written, _last
    with _lock:
        now = time.monotonic()
        if _folder is None or _written >= _MOST_FILES or (_last is not None and now - _last < _PAUSE):
            return
        _last = now
        _written += 1
        number = _written
    _save(_folder / f"streampool-oom-{os.getpid()}-{number}.txt", error)


def _save(path: Path, error: BaseException | None) -> None:
    try:
        write(path, error)
    except Exception as problem:
        warnings.warn(f"the post-mortem file {path} was not written: {problem}", RuntimeWarning, stacklevel=3)


def _listen(number: int) -> None:
    before = signal.getsignal(number)

    def handle(number: int, frame: Any) -> None:
        if _folder is not None:
            _save(_folder / f"streampool-signal-{os.getpid()}-{time.time_ns()}.txt", None)
        if callable(before):
            before(number, frame)

    signal.signal(number, handle)


# -- the text ----------------------------------------------------------------------------------------------------------


def _head(error: BaseException | None) -> Iterator[str]:
    import streampool

    yield f"streampool {streampool.__version__}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    yield f"command: {' '.join(sys.argv)}"
    if error is not None:
        yield ""
        yield f"== {type(error).__name__}"
        yield str(error)


_ACCOUNT = ("used_bytes", "guard_bytes", "quarantined_bytes", "pending_bytes", "cached_bytes")
_BESIDE = (
    "requested_bytes", "limit_bytes", "headroom_bytes", "largest_free_block_bytes", "requested_peak_bytes",
    "requested_window_peak_bytes", "reserved_peak_bytes", "live_allocations",
)  # fmt: skip
_COUNTERS = (
    "allocations_total", "frees_total", "allocation_failures_total", "growth_refusals_total", "host_waits_total",
    "trimmed_bytes_total", "invalid_frees_total", "faults_total",
)  # fmt: skip


def _pools() -> Iterator[str]:
    """Give each pool's account, from the same numbers as the metrics."""
    from streampool.metrics import _reading
    from streampool.metrics.catalogue import find

    reading = _reading.read(each_pool=True)
    for row in reading.rows:
        if not row.live:
            continue

        def values(name: str, row: _reading.Row = row) -> Iterator[tuple[str, float]]:
            metric = find(f"streampool_{name}")
            for word, value in zip(_reading.words_of(metric), _reading.values_of(metric, row, reading), strict=True):
                if isinstance(value, (int, float)):
                    yield f"{name}, {word}" if word else name, value

        yield ""
        yield f"== pool {row.pool!r}, {row.kind} memory of {row.device}"
        parts = [part for name in _ACCOUNT for part in values(name)]
        for number, (name, value) in enumerate(parts):
            yield f"  {'+' if number else ' '} {value:>20,.0f}  {name}"
        ((name, total),) = values("reserved_bytes")
        added = sum(value for _, value in parts)
        yield f"  = {total:>20,.0f}  {name}" + ("" if added == total else f" (the parts add up to {added:,.0f})")
        for name in _BESIDE:
            yield from (f"    {value:>20,.0f}  {label}" for label, value in values(name))
        counted = [f"{label} {value:,.0f}" for name in _COUNTERS for label, value in values(name) if value]
        yield "  counted: " + "; ".join(counted)
    defaults = {option.name: option.default for option in _core.option_table()}
    for pool in session.pools():
        if pieces := pool.free_pieces(_PIECES):
            yield ""
            yield f"largest free pieces of {pool!r}: " + "; ".join(
                f"{format_size(size)} ({reuse.replace('_', ' ')})" for size, reuse in pieces
            )
        changed = [f"{name}={value}" for name, value in pool.options.items() if value != defaults.get(name)]
        yield ""
        yield f"settings of {pool!r} beside the defaults: {' '.join(changed) or 'none'}"


def _devices() -> Iterator[str]:
    yield ""
    yield "== devices"
    for name, version, _, total, now, sample, _ in _core.read_pulse()[1]:
        left = "free memory was not sampled"
        if sample is not None:
            left = f"{format_size(sample[0])} were free {max(now - sample[2], 0):.0f} s ago"
        yield f"  {name} ({version}): {format_size(total)}, {left}"
    libraries = _observe.pools()
    reserved = _pools_on()
    for pool in libraries:
        if pool.used is not None and pool.reserved is not None:
            yield (
                f"  {pool.library}'s own pool, {pool.kind} memory of {pool.device}: "
                f"{format_size(pool.used)} used of {format_size(pool.reserved)}"
            )
            if pool.kind == "device":
                reserved[pool.device] = reserved.get(pool.device, 0) + pool.reserved
    for name, in_pools in reserved.items():
        found = _process_memory.read(name)
        if found is not None:
            who = "all processes together hold" if found.is_ceiling else "this process holds"
            outside = format_size(found.outside(in_pools))
            yield f"  {name}: {who} {format_size(found.bytes)}, of which {outside} are in no pool of this process"


def _pools_on() -> dict[str, int]:
    """Give what our pools hold of each device's memory."""
    reserved: dict[str, int] = {}
    for pool in session.pools():
        if pool.kind == "device":
            reserved[pool.driver.name] = reserved.get(pool.driver.name, 0) + pool.stats()["reserved"]
    return reserved


def _events() -> Iterator[str]:
    yield ""
    yield "== last events (the newest last)"
    for word, kind, device, pool, reason, numbers, at in _core.last_events()[-_EVENTS:]:
        when = time.strftime("%H:%M:%S", time.localtime(at)) + f"{at % 1:.3f}"[1:]
        fields = [f"{name}={value:,}" for name, value in numbers.items()] + ([f"reason={reason}"] if reason else [])
        yield f"  {when}  {word}  pool {pool!r} ({kind}, {device})  {' '.join(fields)}".rstrip()


def _holders() -> Iterator[str]:
    from streampool.metrics.holders import read

    for pool in read():
        exact = f"estimates from one sample in {format_size(pool.sample_bytes)}" if pool.sample_bytes else "exact"
        yield ""
        yield f"== who holds memory of {pool.title}: {exact}"
        for holder in [held for held in pool.holders if held.bytes][:_HOLDERS]:
            yield f"  {format_size(holder.bytes)} in {holder.blocks:,} blocks"
            frames = holder.frames[:_FRAMES]
            yield from (f"      {frame.file}:{frame.line} in {frame.function}" for frame in frames)
            if not frames:
                yield "      (no call stack)"


def _where() -> Iterator[str]:
    yield ""
    yield "== where the program is (the calls that lead here, the newest last)"
    own = os.path.dirname(__file__)
    for frame in traceback.extract_stack():
        if not frame.filename.startswith(own):
            yield f"  {frame.filename}:{frame.lineno} in {frame.name}"
