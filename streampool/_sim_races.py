"""Races of the simulated device: pairs of conflicting accesses that nothing orders."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from streampool import _core, session
from streampool._core import sim as _sim

__all__ = ["Access", "Frame", "Race", "RaceKind", "take_races"]

_OWN = {str(Path(__file__).with_name(name)) for name in ("sim.py", "_sim_graphs.py")}  # no places of the program


class RaceKind(StrEnum):
    """What the two accesses of a race are."""

    WRITE_WRITE = "write-write"
    READ_WRITE = "read-write"


class Frame(NamedTuple):
    """One line of a stack."""

    filename: str
    line: int
    function: str


@dataclass(frozen=True)
class Access:
    """One side of a race.

    Attributes
    ----------
    write
        Whether it writes.
    label
        Of the work.
    stream, stream_name
        The stream's driver id (0: the host, or the debugger) and name.
    stack_id, stack
        Where it was queued, innermost frame first, of the program's own frames.
    """

    write: bool
    label: str
    stream: int
    stream_name: str
    stack_id: int
    stack: tuple[Frame, ...]

    def __str__(self) -> str:
        head = f"{'write' if self.write else 'read'} by {self.label or 'work'} on {self.stream_name}"
        return "\n".join([head, *(f"    {f.filename}:{f.line} in {f.function}" for f in self.stack)])


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes, at least one of them a write, that nothing orders.

    Attributes
    ----------
    kind
        ``write-write`` or ``read-write``.
    device
        ``"sim:0"``.
    address, size
        The bytes that both touch.
    first, second
        The accesses, in the order in which they were queued.
    count
        How often this pair of places in the program was seen.
    """

    kind: RaceKind
    device: str
    address: int
    size: int
    first: Access
    second: Access
    count: int

    def __str__(self) -> str:
        times = f", seen {self.count} times" if self.count > 1 else ""
        head = f"race ({self.kind}) on {self.size} bytes at {self.address:#x} of {self.device}{times}"
        sides = f"{self.first}\nnot ordered with\n{self.second}"
        return head + "\n" + "\n".join("  " + line for line in sides.splitlines())


_untaken: list[Race] = []  # of devices that nobody asked about yet


def take_races(device: str | None) -> list[Race]:
    """Give the races since the last call, on the device of that name or on all of them."""
    with _races_lock:
        _untaken.extend(map(_race, _sim.races()))
        taken = [race for race in _untaken if device is None or race.device == device]
        _untaken[:] = [race for race in _untaken if device is not None and race.device != device]
    if taken and (watching := session.active()) is not None:
        watching.note_races(taken)
    return taken


_races_lock = threading.Lock()


def _race(row: tuple[int, int, int, int, Any, Any]) -> Race:
    device, address, size, count, first, second = row
    kind = RaceKind.WRITE_WRITE if first[0] and second[0] else RaceKind.READ_WRITE
    return Race(kind, f"sim:{device}", address, size, _access(first), _access(second), count)


def _access(side: tuple[bool, str, int, str, int]) -> Access:
    return Access(*side, stack=tuple(Frame(*frame) for frame in _core.resolve_stack(side[4]) if frame[0] not in _OWN))
