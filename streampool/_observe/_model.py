"""What is known of another library's pool, in the same words for each library."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from streampool import _fork
from streampool.faults import Frame

__all__ = ["HOST", "LibraryPool", "LiveBlock", "intern", "resolve"]

HOST = "host"  # the device of pinned memory that a library keeps for all devices together


@dataclass(frozen=True, slots=True)
class LibraryPool:
    """The memory that one library keeps on one device. Sizes in bytes; None: the library does not say.

    used + pending + cached = reserved.
    """

    library: str
    device: str
    kind: str
    used: int | None  # live blocks, rounded as the library does
    reserved: int | None  # what it has from the driver
    requested: int | None = None
    pending: int = 0  # freed, and other streams may still use it
    limit: int | None = None  # the most that it may reserve
    reserved_peak: int | None = None
    live: int | None = None  # blocks
    free_blocks: int | None = None
    allocations: int | None = None  # since the process began, or since the program reset them
    frees: int | None = None
    failures: int | None = None  # out of memory
    refusals: int | None = None  # the driver said no, and the library gave back its cache and asked again

    @property
    def cached(self) -> int | None:
        """What is free and kept for later."""
        return None if self.reserved is None or self.used is None else self.reserved - self.used - self.pending

    def counters(self) -> dict[str, Any]:
        """Give what a report shows, under the words of our own pools' counters."""
        known = {
            "allocations": self.allocations if self.allocations is not None else int(bool(self.reserved)),
            "frees": self.frees,
            "in_use": self.used,
            "pending": self.pending,
            "cached": self.cached,
            "reserved": self.reserved,
            "reserved_peak": self.reserved_peak,
        }
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """One live block of a library. ``stack`` is a number of `intern`; 0 where no call stack was kept."""

    device: str
    kind: str
    address: int
    size: int  # requested, bytes
    stack: int = 0
    tag: str = ""  # what groups blocks without a stack

    def facts(self) -> dict[str, Any]:
        """Give the facts of a live block as the core gives them of ours: it is held, since nobody can say more."""
        return {
            "serial": self.address or 1,
            "state": "live",
            "owner": "buffer",
            "size": self.size,
            "address": self.address,
            "allocated_at": self.stack,
            "tag": self.tag,
        }


# -- call stacks that the core does not know --------------------------------------------------------------------------
# Their numbers are negative; the core's are positive.

_MOST = 100_000
_lock = _fork.lock()
_numbers: dict[tuple[Frame, ...], int] = {}
_stacks: dict[int, tuple[Frame, ...]] = {}
_next = itertools.count(-1, -1)


def intern(frames: Iterable[Frame]) -> int:
    """Give the number of a call stack, innermost frame first; 0 for an empty one, and once there are too many."""
    stack = tuple(frames)
    if not stack:
        return 0
    with _lock:
        number = _numbers.get(stack)
        if number is None:
            if len(_numbers) >= _MOST:
                return 0
            number = _numbers[stack] = next(_next)
            _stacks[number] = stack
        return number


def resolve(number: int) -> tuple[Frame, ...]:
    """Give the frames behind a number of `intern`."""
    return _stacks.get(number, ())
