"""Watching other libraries' own pools without touching them: ``sp.observe("torch")``.

The library keeps its allocator; its statistics and snapshots are read in the background, and give metrics, the page of
holders and the report of ``streampool run --mode observe``. Nothing is started in the library's or CUDA's name: a
library is looked at once the program has imported it and it has taken memory. What goes wrong with looking is counted
and never raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from streampool import _fork
from streampool._findings import PoolFindings
from streampool._observe import _cupy, _torch
from streampool._observe._model import LibraryPool, LiveBlock

__all__ = [
    "LIBRARIES",
    "Library",
    "LibraryPool",
    "LiveBlock",
    "Observed",
    "blocks",
    "failures",
    "observe",
    "observed",
    "pools",
    "unobserve",
]


class Library(Protocol):
    """What is known of one library: how to read its pools."""

    name: str

    def begin(self, *, stacks: bool) -> None:
        """Start watching; with call stacks where the library can keep them. May be called again."""

    def end(self) -> None:
        """Leave the library as it was."""

    def pools(self) -> list[LibraryPool]:
        """Give what its pools hold, without a driver call; empty while it has taken none, or where it is not loaded."""

    def blocks(self) -> list[LiveBlock]:
        """Give its live blocks; empty where it does not tell of them. Not in a hot loop."""


_T = TypeVar("_T")

LIBRARIES: dict[str, Library] = {library.name: library for library in (_torch.Torch(), _cupy.CuPy())}

_lock = _fork.lock()
_watched: dict[str, bool] = {}  # name -> with call stacks
_failures: dict[str, int] = dict.fromkeys(LIBRARIES, 0)
_crowded: set[str] = set()  # whose blocks are too many for a look in the background
_MOST_BLOCKS = 20_000  # of those: to list so many takes some ten milliseconds of everybody's time


def observe(*libraries: str, stacks: bool = False) -> None:
    """Watch the own pools of other libraries of this process: metrics and reports show them beside ours.

    No allocator is changed, and a library that is not imported yet, or never, is fine.

    Parameters
    ----------
    libraries
        ``"torch"``, ``"cupy"``; all that are known where none is named.
    stacks
        Whether PyTorch is asked to keep the Python call stack of each live block (its memory history, about 2 µs an
        allocation), so that holders and growing call sites have lines. A history that the program has switched on
        itself is used and left alone. CuPy keeps none.

    Raises
    ------
    ValueError, TypeError
        A library that is not known, with those that are; a name that is no text.
    """
    names = _known(libraries)
    with _lock:
        for name in names:
            _watched[name] = stacks or _watched.get(name, False)
            _crowded.discard(name)
    for name in names:
        _guarded(name, lambda name=name: LIBRARIES[name].begin(stacks=_watched.get(name, False)))  # type: ignore[misc]


def unobserve(*libraries: str) -> None:
    """Stop watching; of all libraries where none is named. Call stacks that `observe` switched on are switched off.

    Raises
    ------
    ValueError, TypeError
        A library that is not known, with those that are; a name that is no text.
    """
    for name in _known(libraries):
        with _lock:
            was = _watched.pop(name, None)
        if was is not None:
            _guarded(name, LIBRARIES[name].end)


def observed() -> tuple[str, ...]:
    """Give the names of the libraries that are watched."""
    with _lock:
        return tuple(sorted(_watched))


def failures() -> dict[str, int]:
    """Give how often reading each library failed."""
    return dict(_failures)


def pools() -> list[LibraryPool]:
    """Give what the pools of the watched libraries hold. Takes their locks for a moment. Never raises."""
    return [pool for name in observed() for pool in _guarded(name, LIBRARIES[name].pools) or ()]


def blocks(*, in_background: bool = False) -> dict[tuple[str, str, str], list[LiveBlock]]:
    """Give the live blocks of the watched libraries, by device, library and kind. Never raises.

    Takes their locks for as long as a snapshot of them takes, so once a minute and for people. A library that once had
    too many blocks is left out `in_background`, from then on: what comes and goes would look like growth.
    """
    found: dict[tuple[str, str, str], list[LiveBlock]] = {}
    for name in observed():
        if in_background and _is_crowded(name):
            continue
        for block in _guarded(name, LIBRARIES[name].blocks) or ():
            found.setdefault((block.device, name, block.kind), []).append(block)
    return found


def _is_crowded(name: str) -> bool:
    if name not in _crowded:
        held = _guarded(name, LIBRARIES[name].pools) or []
        if any((pool.live or 0) > _MOST_BLOCKS for pool in held):
            _crowded.add(name)
    return name in _crowded


class Observed:
    """The watched libraries of one program under ``streampool run``: what a report says of them at its end."""

    def __init__(self) -> None:
        self._findings: dict[tuple[str, str, str], PoolFindings] = {}

    def epoch(self) -> None:
        """End an epoch: note what each call site holds now, so that the report can tell which grow."""
        found = blocks()
        for key in found:
            self._of(*key)
        for key, findings in self._findings.items():
            # A whole pool is no call site: without stacks nothing can be said to grow.
            findings.epochs.observe([block.facts() for block in found.get(key, []) if block.stack])

    def finish(self) -> list[PoolFindings]:
        """Give what there is to say of each library's pools, at the end of the program."""
        for pool in pools():
            findings = self._of(pool.device, pool.library, pool.kind)
            findings.stats = pool.counters()
        for key, held in blocks().items():
            findings = self._of(*key)
            findings.ended = "at exit"
            findings.live_blocks = [block.facts() for block in held]
        for name, count in _failures.items():
            if count and name in _watched:
                self._of("", name, "").problems.append(f"{name}'s memory: reading it failed {count} times")
        return list(self._findings.values())

    def _of(self, device: str, library: str, kind: str) -> PoolFindings:
        key = (device, library, kind)
        if key not in self._findings:
            # The settings say what a report must say is not seen: no guards, no fill.
            self._findings[key] = PoolFindings(library, kind, device, "observe", options={"track": "true"})
        return self._findings[key]


def _known(libraries: tuple[str, ...]) -> tuple[str, ...]:
    for name in libraries:
        if not isinstance(name, str):
            raise TypeError(
                f"a library to observe is named by text, as in observe('torch', 'cupy'), not {name!r} of type "
                f"{type(name).__name__}"
            )
        if name not in LIBRARIES:
            raise ValueError(f"cannot observe {name!r}: the libraries that can be are {', '.join(LIBRARIES)}")
    return libraries or tuple(LIBRARIES)


def _guarded(name: str, call: Callable[[], _T]) -> _T | None:
    try:
        return call()
    except Exception:  # the library changed, or the device is lost: that is a number, and no harm to the program
        _failures[name] += 1
        return None
