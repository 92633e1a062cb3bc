"""Leaks: live blocks by class and by the call stack that allocated them.

Only live blocks are ever leaks: cached, pending, quarantined and exported ones, and blocks from before tracking, are
not (R18).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from streampool.faults import BlockState, Frame, Resolve, byte_count, default_resolve, page_of, user_frames

__all__ = ["AGES", "Epochs", "Growth", "Leak", "LeakClass", "LeakPolicy", "Leaks", "find_leaks"]

_SOME_TAGS = 5  # shown of a group's tags
AGES = {1.0: "1 s", 10.0: "10 s", 60.0: "1 min", 600.0: "10 min", 3600.0: "1 h"}
"""Bounds, in seconds, of the ages that live bytes are counted by, and their words."""


class LeakClass(StrEnum):
    """How sure it is that nobody will free a block."""

    LOST = "lost"
    GROWING = "growing"
    HELD = "held"

    @property
    def meaning(self) -> str:
        """One phrase, as reports put it."""
        return _MEANINGS[self]


_MEANINGS = {
    LeakClass.LOST: "allocated raw and never freed",
    LeakClass.GROWING: "held, and live bytes only rose",
    LeakClass.HELD: "still held by live objects",
}


class LeakPolicy(StrEnum):
    """Which leaks count for the exit code (``--leaks``)."""

    DEFINITE = "definite"  # lost and growing count, held ones are listed
    ALL = "all"
    OFF = "off"  # none counts and none is listed

    def counts(self, leak_class: LeakClass) -> bool:
        """Say whether leaks of this class make a program fail."""
        if self is LeakPolicy.DEFINITE:
            return leak_class is not LeakClass.HELD
        return self is LeakPolicy.ALL


@dataclass(frozen=True, slots=True)
class Leak:
    """The live blocks of one class that were allocated by one call stack."""

    leak_class: LeakClass
    bytes: int  # requested
    blocks: int
    allocated_at: tuple[Frame, ...] = ()
    smallest: int = 0  # bytes
    largest: int = 0  # bytes
    first_time: float = 0.0  # of the oldest block, seconds of the device's clock
    last_time: float = 0.0  # of the youngest
    tags: tuple[str, ...] = ()
    serials: tuple[int, ...] = ()  # of the oldest few
    pool: str = ""
    device: str = ""
    growth: tuple[int, ...] = ()  # live bytes by epoch, for growing ones
    suppressed_by: str = ""
    ages: tuple[int, ...] = ()  # live bytes by age, one for each bound of `AGES` and one beyond, for growing ones
    held_by: tuple[str, ...] = ()  # the chain of Python objects that holds one of the blocks, outermost first

    def __str__(self) -> str:
        return f"{self.leak_class}: {self.sentence}"

    @property
    def line(self) -> str:
        """How much, where it was allocated, who holds it, and the page that explains it, in one line."""
        where = f", allocated at {self.allocated_at[0]}" if self.allocated_at else ""
        held = f"; held by {' → '.join(self.held_by)}" if self.held_by else ""
        return f"{self}{where}{held} ({page_of(self.leak_class)})"

    @property
    def sentence(self) -> str:
        """How much, in words."""
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks:,} blocks"
        sizes = "" if self.blocks == 1 else f", {self.smallest:,} to {byte_count(self.largest)} each"
        if self.blocks > 1 and self.smallest == self.largest:
            sizes = f", {byte_count(self.largest)} each"
        return f"{byte_count(self.bytes)} in {blocks}{sizes}, {self.leak_class.meaning}"

    @property
    def tag(self) -> str:
        """The first of the group's tags."""
        return self.tags[0] if self.tags else ""

    @property
    def summary(self) -> str:
        """Class and place in one line that can be searched for."""
        where = str(self.allocated_at[0]) if self.allocated_at else "an unknown place (no stack was kept)"
        return f"{self.leak_class} leak {where}"


@dataclass(frozen=True, slots=True)
class Leaks:
    """Leaks of one or more pools: surest class first, most bytes first."""

    items: tuple[Leak, ...] = ()

    def __iter__(self) -> Iterator[Leak]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Leak:
        return self.items[index]

    def __str__(self) -> str:
        return "\n".join(map(str, self.items)) or "no leaks"

    def of(self, leak_class: LeakClass) -> Leaks:
        """Those of one class."""
        return Leaks(tuple(leak for leak in self.items if leak.leak_class is leak_class))

    @property
    def lost(self) -> Leaks:
        """Blocks that nobody can free any more."""
        return self.of(LeakClass.LOST)

    @property
    def growing(self) -> Leaks:
        """Blocks of call sites whose live bytes only rise."""
        return self.of(LeakClass.GROWING)

    @property
    def held(self) -> Leaks:
        """Blocks that live objects still own."""
        return self.of(LeakClass.HELD)

    @property
    def bytes(self) -> int:
        """Requested bytes of all."""
        return sum(leak.bytes for leak in self.items)

    @property
    def blocks(self) -> int:
        """How many blocks."""
        return sum(leak.blocks for leak in self.items)

    @property
    def summary(self) -> str:
        """How much in all: ``'1,024 bytes in 2 blocks are still live'``."""
        verb = "1 block is" if self.blocks == 1 else f"{self.blocks:,} blocks are"
        return f"{byte_count(self.bytes)} in {verb} still live"

    def counted(self, policy: LeakPolicy | str = LeakPolicy.DEFINITE) -> Leaks:
        """Those that count under `policy` and are not suppressed."""
        policy = LeakPolicy(policy)
        return Leaks(tuple(k for k in self.items if policy.counts(k.leak_class) and not k.suppressed_by))

    def __add__(self, other: Leaks) -> Leaks:
        return Leaks(tuple(sorted((*self.items, *other.items), key=_order)))


def _order(leak: Leak) -> tuple[int, int]:
    return list(LeakClass).index(leak.leak_class), -leak.bytes


@dataclass(slots=True)
class Growth:
    """One call site's live bytes over the epochs in which they rose without a break; ``bytes[0]`` is the start."""

    bytes: list[int]

    def observe(self, live: int) -> None:
        """Add an epoch: a rise goes on, anything else starts anew."""
        if live > self.bytes[-1]:
            self.bytes.append(live)
        else:
            self.bytes = [live]


@dataclass(slots=True)
class Epochs:
    """Live bytes of each call site, epoch by epoch.

    A site *grows* when its live bytes rose in each of the last `needed` epochs, by at least `min_bytes` together. So a
    cache that has filled up, and a site that also frees, do not count.

    Parameters
    ----------
    needed
        Rises in a row that make a site suspicious.
    min_bytes
        Bytes that it must have grown by over them.
    """

    needed: int = 4
    min_bytes: int = 1 << 20
    count: int = 0
    _sites: dict[Any, Growth] = field(default_factory=dict)

    def observe(self, blocks: Iterable[Mapping[str, Any]]) -> None:
        """End an epoch: `blocks` are the facts of all live blocks now, as the core gives them."""
        live: dict[Any, int] = {}
        for block in blocks:
            if _is_tracked(block):
                site = _site(block)
                live[site] = live.get(site, 0) + int(block["size"])
        for site in self._sites.keys() - live.keys():
            del self._sites[site]
        for site, size in live.items():
            # A site that was not there before had no live bytes, except that nothing is known before the first epoch.
            growth = self._sites.setdefault(site, Growth([0 if self.count else size]))
            if self.count:
                growth.observe(size)
        self.count += 1

    def growing(self) -> dict[Any, tuple[int, ...]]:
        """Give the growing sites (stack number, or tag where there is none), each with its live bytes by epoch."""
        return {
            site: tuple(growth.bytes)
            for site, growth in self._sites.items()
            if len(growth.bytes) > self.needed and growth.bytes[-1] - growth.bytes[0] >= self.min_bytes
        }


def _site(block: Mapping[str, Any]) -> Any:
    """Give what groups blocks: the stack's number, or the tag where no stack was kept."""
    return block.get("allocated_at") or block.get("tag") or ""


def _is_tracked(block: Mapping[str, Any]) -> bool:
    """R18: a live block of the program, which was tracked from its birth, and that nobody outside was given."""
    if block.get("state", BlockState.LIVE) != BlockState.LIVE or block.get("owner") == "released":
        return False
    return bool(block.get("serial")) and not block.get("exported", False)


@dataclass(slots=True)
class _Group:
    sizes: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    tags: dict[str, None] = field(default_factory=dict)
    growth: tuple[int, ...] = ()

    def ages(self, now: float) -> tuple[int, ...]:
        """Give the live bytes by the age of their blocks."""
        of_age = [0] * (len(AGES) + 1)
        for size, time in zip(self.sizes, self.times, strict=True):
            of_age[bisect_right(list(AGES), now - time)] += size
        return tuple(of_age)

    def add(self, block: Mapping[str, Any], growth: tuple[int, ...]) -> None:
        self.sizes.append(int(block["size"]))
        self.times.append(float(block.get("allocated_time", 0.0)))
        self.serials.append(int(block["serial"]))
        if block.get("tag"):
            self.tags[block["tag"]] = None
        self.growth = self.growth or growth


def _chain(group: _Group, chains: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    return next((tuple(chains[serial]) for serial in sorted(group.serials) if serial in chains), ())


def find_leaks(
    blocks: Iterable[Mapping[str, Any]],
    *,
    epochs: Epochs | None = None,
    chains: Mapping[int, Sequence[str]] | None = None,
    now: float | None = None,
    resolve: Resolve | None = None,
    pool: str = "",
    device: str = "",
) -> Leaks:
    """Group live blocks into leaks, as if the program ended now.

    Parameters
    ----------
    blocks
        Facts of the live blocks, as ``live_blocks()`` of the core gives them: the fields of a block, and ``owner``
        (``"raw"``: nobody's object owns it; ``"buffer"``; ``"released"``: freed already, and only not collected yet).
    epochs
        What was observed while the program ran; without it no site grows.
    chains
        By a block's number, the chain of Python objects that holds it (`_referrers.chains`).
    now
        The device's clock, in seconds, for the ages of blocks; without it ages are counted from the youngest block.
    resolve
        From a stack's number to its frames; the core's own by default.
    pool, device
        Where the blocks live, for the report.
    """
    resolve = resolve or default_resolve
    growing = epochs.growing() if epochs is not None else {}
    frames_of: dict[int, tuple[Frame, ...]] = {}
    # Two stack numbers may be one line, such as its first call and those after it: what grows is the line.
    growing_at = {user_frames(resolve(site)): growth for site, growth in growing.items() if isinstance(site, int)}
    groups: dict[tuple[LeakClass, tuple[Frame, ...], str], _Group] = {}
    for block in blocks:
        if not _is_tracked(block):
            continue
        stack = int(block.get("allocated_at") or 0)
        if stack not in frames_of:
            frames_of[stack] = user_frames(resolve(stack)) if stack else ()
        owner = block.get("owner", "raw" if block.get("raw") else "buffer")
        growth = growing.get(_site(block)) or (growing_at.get(frames_of[stack], ()) if frames_of[stack] else ())
        leak_class = LeakClass.LOST if owner == "raw" else LeakClass.GROWING if growth else LeakClass.HELD
        name = "" if frames_of[stack] else block.get("tag") or ""
        groups.setdefault((leak_class, frames_of[stack], name), _Group()).add(block, growth)
    leaks = [
        Leak(
            leak_class=leak_class,
            bytes=sum(group.sizes),
            blocks=len(group.sizes),
            allocated_at=frames,
            smallest=min(group.sizes),
            largest=max(group.sizes),
            first_time=min(group.times),
            last_time=max(group.times),
            tags=tuple(group.tags)[:_SOME_TAGS],
            serials=tuple(sorted(group.serials)[:_SOME_TAGS]),
            pool=pool,
            device=device,
            growth=group.growth,
            # A library's own pools say no times.
            ages=group.ages(max(group.times) if now is None else now) if group.growth and any(group.times) else (),
            held_by=_chain(group, chains or {}),
        )
        for (leak_class, frames, _), group in groups.items()
    ]
    return Leaks(tuple(sorted(leaks, key=_order)))
