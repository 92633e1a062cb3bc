"""Which lines of the program hold memory, and which of them hold more and more: the page behind an alert.

In production these are estimates from the sampled allocations (one in ``sample_bytes``), without bias; in debug mode
exact. A thread looks once a minute, so that the page can say what has changed; who opens it looks too.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from streampool import _core
from streampool._sizes import format_size
from streampool.faults import Frame, default_resolve, user_frames

__all__ = ["History", "Holder", "history"]

_EPOCH = 60.0  # seconds between two looks
_EPOCHS = 61  # so many are remembered: an hour
_SITES = 100  # of a pool, in an epoch
_SHOWN = 20  # on the page, of a pool
_FRAMES = 12  # of a stack

Pool = tuple[str, str, str]  # device, name, kind


@dataclass(frozen=True, slots=True)
class Holder:
    """What the live blocks of one call stack hold.

    ``bytes`` and ``blocks`` are estimates where allocations are sampled. ``grown`` is how many more bytes that is than
    ``since`` seconds ago.
    """

    bytes: int
    blocks: int
    stack: int
    grown: int = 0
    since: float = 0.0

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The Python frames, innermost first."""
        return user_frames(default_resolve(self.stack))


class History:
    """Remembers what held memory during the last hour. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epochs: deque[tuple[float, dict[Pool, dict[int, int]]]] = deque(maxlen=_EPOCHS)

    def observe(self) -> None:
        """Look, if a minute has gone by since the last time, on the devices' clock."""
        now = _now()
        if now is None:
            return
        with self._lock:
            if self._epochs and now - self._epochs[-1][0] < _EPOCH:
                return
        seen = self._read()
        with self._lock:
            self._epochs.append((now, {p: {h[2]: h[0] for h in held[:_SITES]} for p, (_, held) in seen.items()}))

    def now(self) -> dict[Pool, tuple[int, list[Holder]]]:
        """Give each pool's sample bytes (0: exact) and holders, those that grew most first."""
        seen = self._read()
        now = _now() or 0.0
        with self._lock:
            begin, before = self._epochs[0] if self._epochs else (now, {})
        found: dict[Pool, tuple[int, list[Holder]]] = {}
        for pool, (sampled, held) in seen.items():
            known = before.get(pool)
            holders = [
                Holder(size, blocks, stack, size - known.get(stack, 0) if known is not None else 0, now - begin)
                for size, blocks, stack in held
            ]
            found[pool] = sampled, sorted(holders, key=lambda holder: (-max(holder.grown, 0), -holder.bytes))
        return found

    def text(self) -> str:
        """Give the page."""
        found = self.now()
        parts = [_HEAD if found else "No pool is open in this process.\n"]
        for (device, name, kind), (sampled, holders) in found.items():
            accuracy = f"estimates from one sample in {format_size(sampled)}" if sampled else "exact"
            parts.append(f"\n== pool {name!r}, {kind} memory of {device}: {accuracy}\n")
            if not holders:
                parts.append("nothing is held\n")
            for holder in holders[:_SHOWN]:
                parts.append(_entry(holder))
            if len(holders) > _SHOWN:
                parts.append(f"\n... and {len(holders) - _SHOWN} more call sites\n")
        return "".join(parts)

    @staticmethod
    def _read() -> dict[Pool, tuple[int, list[tuple[int, int, int]]]]:
        """Give pools of one device, name and kind together, as in the metrics."""
        seen: dict[Pool, tuple[int, list[tuple[int, int, int]]]] = {}
        for device, name, kind, sampled, held in _core.read_holders():
            known = seen.get((device, name, kind))
            if known is not None:
                sums = {stack: (size, blocks) for size, blocks, stack in known[1]}
                for size, blocks, stack in held:
                    more = sums.get(stack, (0, 0))
                    sums[stack] = (size + more[0], blocks + more[1])
                held = sorted(((s, b, stack) for stack, (s, b) in sums.items()), reverse=True)
                sampled = max(sampled, known[0])
            seen[device, name, kind] = sampled, held
        return seen


_HEAD = """Which lines of the program hold the pools' memory; those that hold more and more come first.
A line that only grows is a leak, or a cache without a bound.
"""


def _now() -> float | None:
    """Give the time on the clock that pools go by, also a simulated one; None while there is no pool."""
    return max((device[4] for device in _core.read_pulse()[1] if device[4]), default=None)


def _entry(holder: Holder) -> str:
    minutes = holder.since / 60
    change = ""
    if minutes >= 1:
        sign = "+" if holder.grown >= 0 else "-"
        change = f", {sign}{format_size(abs(holder.grown))} in {minutes:.0f} min"
    text = f"\n{format_size(holder.bytes)} in {holder.blocks:,} blocks{change}\n"
    frames = holder.frames[:_FRAMES]
    if not frames:
        return text + "    (no call stack: allocated from C or C++)\n"
    return text + "".join(f"    {frame.file}:{frame.line} in {frame.function}\n" for frame in frames)


history = History()
