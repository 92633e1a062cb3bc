"""A pool at one moment, as plain data that another process can read: its account, who holds memory, its live blocks.

>>> Path("pool.json").write_text(json.dumps(pool.snapshot()))
>>> print(read_snapshot("pool.json").to_text())           # to_html(), to_pprof()

``streampool report pool.json`` does the same. Call stacks are in words, each once: a number means nothing elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streampool._sizes import format_size
from streampool.faults import Frame, byte_count, default_resolve, user_frames

if TYPE_CHECKING:
    from streampool.pool import Pool

__all__ = ["SCHEMA_ID", "Holding", "Snapshot", "read_snapshot", "take"]

SCHEMA_ID = "urn:streampool:snapshot:1"
"""``$defs/snapshot`` of report_schema.json."""

_PARTS = ("in_use", "rounding", "guards", "quarantined", "pending", "cached")
_SHOWN = 20  # call sites in the text
_FRAMES = 8  # of each


@dataclass(frozen=True, slots=True)
class Holding:
    """What the live blocks of one call stack, or of one of its tags, hold; estimates where allocations are sampled."""

    bytes: int
    blocks: int
    allocated_bytes: int = 0
    allocated_blocks: int = 0
    oldest: float = 0.0  # seconds
    aged_bytes: int = 0
    tag: str = ""
    frames: tuple[Frame, ...] = ()

    def together(self, other: Holding) -> Holding:
        """Give what two call stacks of the same lines hold."""
        return Holding(
            self.bytes + other.bytes,
            self.blocks + other.blocks,
            self.allocated_bytes + other.allocated_bytes,
            self.allocated_blocks + other.allocated_blocks,
            max(self.oldest, other.oldest),
            self.aged_bytes + other.aged_bytes,
            self.tag,
            self.frames,
        )

    @property
    def title(self) -> str:
        """How much, in how many blocks, under which tag."""
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks:,} blocks"
        return f"{byte_count(self.bytes)} in {blocks}" + (f", tag '{self.tag}'" if self.tag else "")


@dataclass(frozen=True, slots=True)
class Saved:
    """A pool's holders, for a profile."""

    pool: str
    kind: str
    device: str
    sample_bytes: int
    holders: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A saved snapshot. Sizes in bytes.

    Attributes
    ----------
    sample_bytes
        `holders` are estimates, from one sample in so many bytes; 0: they are exact.
    data
        All that was saved, as `Pool.snapshot` gave it.
    """

    pool: str
    kind: str
    device: str
    created: str
    stats: Mapping[str, Any]
    options: Mapping[str, str]
    sample_bytes: int
    holders: tuple[Holding, ...]
    data: Mapping[str, Any] = field(repr=False)

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """Read what ``json.dumps(pool.snapshot())`` gave.

        Raises
        ------
        ValueError
            It is no snapshot, or damaged: says where it is not as it should be. ``json.JSONDecodeError`` where it is
            no JSON at all.
        """
        from streampool._report_check import checked
        from streampool.report import schema

        data = checked(text, SCHEMA_ID, {"$ref": "#/$defs/snapshot", "$defs": schema()["$defs"]})
        stacks = {number: tuple(Frame(**frame) for frame in frames) for number, frames in data["stacks"].items()}
        # Two calls in one line are two stacks, and look the same.
        holders: dict[tuple[object, ...], Holding] = {}
        for row in data["holders"]:
            facts = {name: value for name, value in row.items() if name != "stack"}
            one = Holding(**facts, frames=stacks.get(str(row["stack"]), ()))
            known = holders.get((one.frames, one.tag))
            holders[one.frames, one.tag] = one if known is None else known.together(one)
        held = sorted(holders.values(), key=lambda one: -one.bytes)
        names = ("pool", "kind", "device", "created", "stats", "options", "sample_bytes")
        return cls(**{name: data[name] for name in names}, holders=tuple(held), data=data)

    @property
    def title(self) -> str:
        """Whose it is, and of when."""
        return f"pool '{self.pool}' ({self.kind} memory, {self.device}, {self.options['mode']} mode) at {self.created}"

    @property
    def account(self) -> list[tuple[str, int]]:
        """The parts that add up to what the pool has reserved, and that."""
        return [(name, int(self.stats[name])) for name in (*_PARTS, "reserved")]

    @property
    def precision(self) -> str:
        """Whether the holders are exact."""
        return (
            f"estimated: one call stack in {format_size(self.sample_bytes)} is kept" if self.sample_bytes else "exact"
        )

    def to_json(self) -> str:
        """Give the JSON text."""
        return json.dumps(self.data, indent=1, allow_nan=False)

    def to_text(self) -> str:
        """Give the text that a person reads."""
        return "\n".join(self._lines())

    def to_html(self) -> str:
        """Give a page of its own, without scripts and without anything from elsewhere."""
        from streampool._report_html import render_snapshot

        return render_snapshot(self)

    def to_pprof(self) -> bytes:
        """Give who holds memory as a gzipped pprof profile."""
        from streampool.metrics.pprof import encode

        return encode([self])

    def _lines(self) -> Iterator[str]:
        yield self.title
        yield ""
        *parts, (total, reserved) = self.account
        for number, (name, value) in enumerate(parts):
            yield f"  {'+' if number else ' '} {value:>20,}  {name}"
        yield f"  = {reserved:>20,}  {total}"
        for name in ("reserved_peak", "in_use_peak", "limit", "largest_free", "live_blocks"):
            yield f"    {int(self.stats[name]):>20,}  {name}"
        yield ""
        yield f"held by ({self.precision})"
        held = [one for one in self.holders if one.bytes or one.blocks]
        for one in held[:_SHOWN]:
            yield f"  {one.title}"
            yield from (f"      {frame}" for frame in one.frames[:_FRAMES])
            if not one.frames:
                yield "      no stack was kept"
        if more := held[_SHOWN:]:
            yield f"  omitting {len(more):,} more ({byte_count(sum(one.bytes for one in more))}); the JSON has all"
        if not held:
            yield "  nothing that was seen"


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Read a saved snapshot. ``OSError`` where it cannot be read, ``ValueError`` where it is none."""
    return Snapshot.from_json(Path(path).read_text(encoding="utf-8"))


def take(pool: Pool) -> dict[str, Any]:
    """Give a pool as plain data, ready for JSON: see `Pool.snapshot`. Looks at every live block."""
    from streampool.metrics.holders import Holder
    from streampool.report import Process, _version

    names = ("bytes", "blocks", "allocated_bytes", "allocated_blocks", "oldest", "aged_bytes", "tag", "stack")
    held = [Holder(*row) for row in pool.holders(by_tag=True)]
    blocks = pool.live_blocks()
    numbers = [one.stack for one in held] + [block[name] for block in blocks for name in ("allocated_at", "freed_at")]
    return {
        "schema": SCHEMA_ID,
        "tool": {"name": "streampool", "version": _version()},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "pid": Process.this().pid,
        "pool": pool.name,
        "kind": pool.kind,
        "device": pool.driver.name,
        "options": dict(pool.options),
        "stats": dict(pool.stats()),
        "sample_bytes": pool._sample_bytes(),
        "holders": [{name: getattr(one, name) for name in names} for one in held],
        "blocks": blocks,
        "stacks": {str(number): _words(number) for number in dict.fromkeys(numbers) if number},
    }


def _words(stack: int) -> list[dict[str, Any]]:
    frames: Iterable[Frame] = user_frames(default_resolve(stack))
    return [{"file": frame.file, "line": frame.line, "function": frame.function} for frame in frames]
