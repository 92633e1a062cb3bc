"""Which lines of the program hold memory, and which of them hold more and more: the page behind an alert.

In production these are estimates from the sampled allocations (one in ``sample_bytes``), without bias; in debug mode
exact. A thread looks once a minute, so that the page can say what has changed; who opens it looks too.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from streampool import _core, _fork, _observe, logs
from streampool._observe._model import intern
from streampool._sizes import format_size
from streampool.faults import Frame, default_resolve, user_frames

__all__ = ["LIBRARY", "History", "Holder", "PoolHolders", "Suspects", "history", "read"]

_EPOCH = 60.0  # seconds between two looks
_EPOCHS = 61  # so many are remembered: an hour
_QUARTER = 15  # epochs
_SITES = 100  # of a pool, in an epoch
_SHOWN = 20  # on the page, of a pool
_FRAMES = 12  # of a stack
_SAMPLES = 20  # of a line, before it is judged by age
_FREED = 0.9  # of what a line allocates: then what is old is left over

PoolName = tuple[str, str, str]  # device, name, kind
LIBRARY = "library:"  # before the name of an observed library, where names of pools stand
_Seen = tuple[int, dict[int, int]]  # sample bytes, and the bytes of each stack


@dataclass(frozen=True, slots=True)
class Suspects:
    """How many call sites of a pool look like leaks, and by how many bytes they grew in the last hour.

    ``aged_sites`` free most of what they allocate, and hold ``aged_bytes`` that are older than an hour.
    """

    sites: int = 0
    bytes: int = 0
    aged_sites: int = 0
    aged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """What the live blocks of one call stack, or of one of its tags, hold; estimates where allocations are sampled.

    ``allocated_bytes`` and ``allocated_blocks`` are of all its allocations so far, 0 where they are not sampled.
    ``grown`` is how many more bytes it holds than ``since`` seconds ago. ``oldest`` is the age of its oldest block in
    seconds, where blocks are sampled from the first look at it on; ``aged_bytes`` are those older than an hour.
    """

    bytes: int
    blocks: int
    stack: int
    allocated_bytes: int = 0
    allocated_blocks: int = 0
    oldest: float = 0.0
    aged_bytes: int = 0
    tag: str = ""
    grown: int = 0
    since: float = 0.0

    def together(self, other: Holder) -> Holder:
        """Give what two pools of one name hold from the same call stack and tag."""
        return Holder(
            self.bytes + other.bytes,
            self.blocks + other.blocks,
            self.stack,
            self.allocated_bytes + other.allocated_bytes,
            self.allocated_blocks + other.allocated_blocks,
            max(self.oldest, other.oldest),
            self.aged_bytes + other.aged_bytes,
            self.tag,
        )

    def is_left_over(self, sample_bytes: int) -> bool:
        """Whether it looks like blocks that were forgotten: old ones, of a line that frees nine of ten.

        Of lines that were sampled twenty times or more; where allocations are not sampled nothing is known.
        """
        freed = self.allocated_bytes - self.bytes
        known = sample_bytes > 0 and self.allocated_bytes >= _SAMPLES * sample_bytes
        return known and self.aged_bytes > 0 and freed >= _FREED * self.allocated_bytes

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The Python frames, innermost first."""
        return user_frames(default_resolve(self.stack))


@dataclass(frozen=True, slots=True)
class PoolHolders:
    """The holders of all pools of one device, name and kind. ``sample_bytes`` 0: the numbers are exact.

    Of an observed library's pool ``pool`` is ``LIBRARY`` and the library's name.
    """

    device: str
    pool: str
    kind: str
    sample_bytes: int
    holders: list[Holder]

    @property
    def title(self) -> str:
        """How texts name the pool."""
        library = self.pool.removeprefix(LIBRARY)
        what = f"pool {self.pool!r}" if library == self.pool else f"{library}'s own pool, observed"
        return f"{what}, {self.kind} memory of {self.device}"

    @property
    def name(self) -> PoolName:
        """Device, pool and kind."""
        return self.device, self.pool, self.kind


def read(*, in_background: bool = False, by_tag: bool = False) -> list[PoolHolders]:
    """Look at all pools now, those that hold most first. Looks at every live block, so not in a hot loop.

    ``by_tag`` tells the tags of a call stack apart: of a pool 256, others are ``_other``.
    """
    found: dict[PoolName, tuple[int, dict[tuple[int, str], Holder]]] = {}

    def add(sums: dict[tuple[int, str], Holder], holder: Holder) -> None:
        known = sums.get((holder.stack, holder.tag))
        sums[holder.stack, holder.tag] = holder if known is None else known.together(holder)

    for device, pool, kind, sampled, held in _core.read_holders(by_tag):
        before, sums = found.setdefault((device, pool, kind), (0, {}))
        for row in held:
            add(sums, Holder(*row))
        found[device, pool, kind] = max(before, sampled), sums
    for (device, library, kind), live in _observe.blocks(in_background=in_background).items():
        sums = found.setdefault((device, LIBRARY + library, kind), (0, {}))[1]
        for block in live:
            add(sums, Holder(block.size, 1, block.stack or intern([Frame("", 0, block.tag)])))
    return [
        PoolHolders(*name, sampled, sorted(sums.values(), key=lambda holder: -holder.bytes))
        for name, (sampled, sums) in found.items()
    ]


class History:
    """Remembers what held memory during the last hour. Safe from several threads.

    Parameters
    ----------
    clock
        Gives the time in seconds, or None while there is nothing to see; the devices' own where it is left out.
    """

    def __init__(self, clock: Callable[[], float | None] | None = None) -> None:
        self._clock = clock or _now
        self._lock = _fork.lock()
        self._epochs: deque[tuple[float, dict[PoolName, _Seen]]] = deque(maxlen=_EPOCHS)
        self._suspects: dict[PoolName, Suspects] = {}

    def observe(self) -> None:
        """Look, if a minute has gone by since the last time, on the devices' clock."""
        now = self._clock()
        if now is None:
            return
        with self._lock:
            if self._epochs and now < self._epochs[-1][0]:  # another clock: a simulated device came or went
                self._epochs.clear()
            if self._epochs and now - self._epochs[-1][0] < _EPOCH:
                return
        pools = read(in_background=True)
        seen = {
            pool.name: (pool.sample_bytes, {held.stack: held.bytes for held in pool.holders[:_SITES]}) for pool in pools
        }
        left_over = {
            pool.name: [held.aged_bytes for held in pool.holders if held.is_left_over(pool.sample_bytes)]
            for pool in pools
        }
        with self._lock:
            self._epochs.append((now, seen))
            before, self._suspects = self._suspects, self._suspect(left_over)
            after = self._suspects
        for name, found in after.items():
            known = before.get(name, Suspects())
            for word, sites, earlier, size in (
                ("leak.suspected", found.sites, known.sites, found.bytes),
                ("leak.left_over", found.aged_sites, known.aged_sites, found.aged_bytes),
            ):
                if sites > earlier:
                    device, pool, kind = name
                    logs.emit(word, device=device, pool=pool, memory_kind=kind, at=time.time(), sites=sites, bytes=size)

    def suspects(self) -> dict[PoolName, Suspects]:
        """Give, for each pool seen at the last look, the call sites that look like leaks; nothing is looked at here.

        By growth a site is one whose least of each quarter of the last hour is above the least of the quarter before,
        and which has grown by more than chance can make of the samples (four standard deviations). By age it is one
        with blocks older than an hour, though it frees nine of ten of what it allocates.
        """
        with self._lock:
            return dict(self._suspects)

    def _suspect(self, left_over: dict[PoolName, list[int]]) -> dict[PoolName, Suspects]:
        """Judge the epochs by growth; `left_over` was judged by age. With the lock held."""
        epochs = [seen for _, seen in self._epochs]
        found = {}
        for name, (sampled, last) in epochs[-1].items():
            by_age = len(left_over[name]), sum(left_over[name])
            if len(epochs) < _EPOCHS:
                found[name] = Suspects(0, 0, *by_age)
                continue
            sites, grown = 0, 0
            for stack, size in last.items():
                history = [seen[name][1].get(stack, 0) if name in seen else 0 for seen in epochs]
                least = [min(history[begin : begin + _QUARTER]) for begin in range(0, 4 * _QUARTER, _QUARTER)]
                chance = 4 * math.sqrt(size * sampled)
                rises = all(after > before for before, after in pairwise(least))
                if rises and least[-1] - least[0] > chance:
                    sites += 1
                    grown += least[-1] - least[0]
            found[name] = Suspects(sites, grown, *by_age)
        return found

    def now(self) -> list[PoolHolders]:
        """Give what holds memory now, in each pool what grew most first."""
        now = self._clock() or 0.0
        with self._lock:
            begin, before = self._epochs[0] if self._epochs else (now, {})
        out = []
        for pool in read():
            known = before.get(pool.name)
            held = [
                replace(
                    holder,
                    grown=holder.bytes - known[1].get(holder.stack, 0) if known is not None else 0,
                    since=now - begin,
                )
                for holder in pool.holders
            ]
            left = pool.sample_bytes
            held.sort(key=lambda h: (-max(h.grown, 0), not h.is_left_over(left), -h.bytes))
            out.append(PoolHolders(*pool.name, pool.sample_bytes, held))
        return out

    def text(self) -> str:
        """Give the page."""
        found = self.now()
        parts = [_HEAD if found else "No pool is open in this process.\n"]
        for pool in found:
            exact = f"estimates from one sample in {format_size(pool.sample_bytes)}" if pool.sample_bytes else "exact"
            parts.append(f"\n== {pool.title}: {exact}\n")
            holders = [holder for holder in pool.holders if holder.bytes or holder.blocks]
            if not holders:
                parts.append("nothing is held\n")
            parts += [_entry(holder, pool.sample_bytes) for holder in holders[:_SHOWN]]
            if len(holders) > _SHOWN:
                parts.append(f"\n... and {len(holders) - _SHOWN} more call sites\n")
        return "".join(parts)


_HEAD = """Which lines of the program hold the pools' memory; those that hold more and more come first.
A line that only grows is a leak, or a cache without a bound. Old blocks of a line that frees most of its blocks may be
left over from work that ended.
"""


def _now() -> float | None:
    """Give the time on the clock that pools go by, also a simulated one; None while there is nothing to look at."""
    own = max((device[4] for device in _core.read_pulse()[1] if device[4] >= 0), default=None)
    # CUDA's devices go by the same clock.
    return time.monotonic() if own is None and _observe.observed() else own


def _entry(holder: Holder, sample_bytes: int) -> str:
    minutes = holder.since / 60
    change = ""
    if minutes >= 1:
        sign = "+" if holder.grown >= 0 else "-"
        change = f", {sign}{format_size(abs(holder.grown))} in {minutes:.0f} min"
    age = f", the oldest {holder.oldest / 3600:.1f} h old" if holder.oldest >= 360 else ""
    text = f"\n{format_size(holder.bytes)} in {holder.blocks:,} blocks{change}{age}\n"
    if holder.is_left_over(sample_bytes):
        aged = format_size(holder.aged_bytes)
        text += f"    left over? {aged} are older than an hour, and this line frees most of its blocks\n"
    frames = holder.frames[:_FRAMES]
    if not frames:
        return text + "    (no call stack: allocated from C or C++)\n"
    return text + "".join(f"    {_place(frame)}\n" for frame in frames)


def _place(frame: Frame) -> str:
    return f"{frame.file}:{frame.line} in {frame.function}" if frame.file else frame.function


history = History()
