"""Faults as objects: what was hit, where, by how much, and both stacks in words a person reads.

The native core finds faults (native/src/debug/fault.hpp) and hands them over as plain facts with stacks as numbers;
`Fault.from_dict` makes them objects. Everything here is pure: no device, no pool.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = [
    "BlockFacts",
    "BlockState",
    "Candidate",
    "Fault",
    "FaultKind",
    "Frame",
    "Resolve",
    "byte_count",
    "default_resolve",
    "page_of",
    "user_frames",
]

Resolve = Callable[[int], "Sequence[tuple[str, int, str] | Frame]"]
"""From the number of a stack to its frames (file, line, function), innermost first."""

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_RUNNER = os.path.join(_PACKAGE, "cli") + os.sep
_TOKEN_FRAMES = 3


def page_of(word: str) -> str:
    """Give the page of a kind of fault, or of a class of leaks."""
    return f"docs/faults/{word}.md"


class FaultKind(StrEnum):
    """What kind of misuse of memory was proven. The words of the native table, each with a page in docs/faults."""

    OVERRUN = "overrun"
    UNDERRUN = "underrun"
    WRITE_AFTER_FREE = "write_after_free"
    DOUBLE_FREE = "double_free"
    FOREIGN_FREE = "foreign_free"
    INTERIOR_FREE = "interior_free"
    WRONG_POOL_FREE = "wrong_pool_free"
    TRAMPLED_RECORD = "trampled_record"
    SIZE_MISMATCH = "size_mismatch"
    ILLEGAL_ACCESS = "illegal_access"
    RACE = "race"

    @property
    def meaning(self) -> str:
        """One sentence, as in the native table."""
        return _MEANINGS[self]

    @property
    def page(self) -> str:
        """Where the documentation explains it, with "is the pool wrong?"."""
        return page_of(self)

    @property
    def at_the_call(self) -> bool:
        """True for misuse seen in the very call, false for damage that is found later."""
        return self not in (FaultKind.OVERRUN, FaultKind.UNDERRUN, FaultKind.WRITE_AFTER_FREE)


_MEANINGS = {
    FaultKind.OVERRUN: "a write behind the end of a block",
    FaultKind.UNDERRUN: "a write before the start of a block",
    FaultKind.WRITE_AFTER_FREE: "a write into a block after it was freed",
    FaultKind.DOUBLE_FREE: "a block freed twice",
    FaultKind.FOREIGN_FREE: "a free of an address that no pool owns",
    FaultKind.INTERIOR_FREE: "a free of an address inside a block, not at its start",
    FaultKind.WRONG_POOL_FREE: "a free of a block that belongs to another pool",
    FaultKind.TRAMPLED_RECORD: "the pool's own record of a block was overwritten",
    FaultKind.SIZE_MISMATCH: "a free that names another size than was allocated",
    FaultKind.ILLEGAL_ACCESS: "an access to memory that is not there",
    FaultKind.RACE: "two uses of the same bytes that nothing orders",
}


class BlockState(StrEnum):
    """Where a block stood when its facts were taken."""

    LIVE = "live"
    RELEASED = "released"
    QUARANTINED = "quarantined"
    FREED = "freed"


def stream_text(stream: int, capture: int = 0) -> str:
    """Name a stream by its id, or the capture whose graph a block belongs to."""
    return f"capture {capture}" if capture else f"stream {stream}"


def byte_count(count: int) -> str:
    """``'1 byte'``, ``'4,096 bytes'``."""
    return f"{count:,} byte" if count == 1 else f"{count:,} bytes"


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a call stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.place} in {self.function}"

    @property
    def place(self) -> str:
        """``file:line``, with the file relative to the current folder where it lies in it."""
        return f"{_short(self.file)}:{self.line}"

    @property
    def module(self) -> str:
        """The last part of the module's name, from the file's."""
        return os.path.splitext(os.path.basename(self.file))[0]


def _short(file: str) -> str:
    folder = os.getcwd() + os.sep
    return file[len(folder) :] if file.startswith(folder) else file


def user_frames(frames: Iterable[tuple[str, int, str] | Frame]) -> tuple[Frame, ...]:
    """Give the frames of the user's program: without ours inside and the runner outside; all, if none would be left."""
    all_frames = tuple(frame if isinstance(frame, Frame) else Frame(*frame) for frame in frames)
    first = 0
    while first < len(all_frames) and all_frames[first].file.startswith(_PACKAGE):
        first += 1
    last = first
    while last < len(all_frames) and not all_frames[last].file.startswith(_RUNNER):
        last += 1
    while last > first and all_frames[last - 1].file.startswith("<frozen "):
        last -= 1
    return all_frames[first:last] or all_frames


def default_resolve(stack: int) -> Sequence[tuple[str, int, str] | Frame]:
    """Resolve a stack's number in this process: the native core's, or a negative one, of an observed library."""
    if stack < 0:
        from streampool._observe._model import resolve

        return resolve(stack)
    from streampool import _core

    return _core.resolve_stack(stack)


def _stack(value: Any, resolve: Resolve) -> tuple[Frame, ...]:
    return user_frames(resolve(value)) if value else ()


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """A block as reports describe it. Addresses and sizes in bytes, times in seconds of the device's clock.

    ``stream`` is the driver's id of its home stream, and 0 for a block of a graph: then ``capture`` is its capture's.
    """

    serial: int
    state: BlockState
    address: int
    size: int
    begin: int
    reserved: int
    stream: int = 0
    allocated_thread: int = 0
    freed_thread: int = 0
    allocated_time: float = 0.0
    freed_time: float = 0.0
    allocated_at: tuple[Frame, ...] = ()
    freed_at: tuple[Frame, ...] = ()
    raw: bool = False
    tag: str = ""
    pages: str = "none"  # "right", "left": it has pages of its own, and lies at their end, or start
    capture: int = 0  # 0: it belongs to a stream and to no graph

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any], resolve: Resolve | None = None) -> BlockFacts:
        """Make a block's facts from what the core gives, whose stacks are numbers."""
        resolve = resolve or default_resolve
        address, size = int(facts["address"]), int(facts["size"])
        return cls(
            serial=int(facts.get("serial", 0)),
            state=BlockState(facts.get("state", BlockState.LIVE)),
            address=address,
            size=size,
            begin=int(facts.get("begin", address)),
            reserved=int(facts.get("reserved", size)),
            stream=int(facts.get("stream", 0)),
            allocated_thread=int(facts.get("allocated_thread", 0)),
            freed_thread=int(facts.get("freed_thread", 0)),
            allocated_time=float(facts.get("allocated_time", 0.0)),
            freed_time=float(facts.get("freed_time", 0.0)),
            allocated_at=_stack(facts.get("allocated_at"), resolve),
            freed_at=_stack(facts.get("freed_at"), resolve),
            raw=bool(facts.get("raw", facts.get("owner") == "raw")),
            tag=facts.get("tag") or "",
            pages=facts.get("pages") or "none",
            capture=int(facts.get("capture", 0)),
        )

    @property
    def end(self) -> int:
        """The address of the first byte behind the block."""
        return self.address + self.size

    @property
    def was_freed(self) -> bool:
        """True once the program gave the block away."""
        return self.state is not BlockState.LIVE


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block that an illegal access may have been meant for, and what makes it one."""

    block: BlockFacts
    why: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A proven misuse of memory: the native record with its stacks resolved, and the words for it."""

    kind: FaultKind
    number: int
    block: BlockFacts | None = None
    below: BlockFacts | None = None
    above: BlockFacts | None = None
    address: int = 0
    last: int = 0
    bad_bytes: int = 0
    shown_from: int = 0
    found: bytes = b""
    expected: bytes = b""
    at: tuple[Frame, ...] = ()
    time: float = 0.0
    last_good_check: int = 0
    found_by_check: int = 0
    last_good_time: float = 0.0
    scopes: tuple[str, ...] = ()  # of the program (`sp.scope`), that were open in the window
    candidates: tuple[Candidate, ...] = ()  # for an illegal access: the likeliest first
    note: str = ""
    pool: str = ""
    device: str = ""
    other_at: tuple[Frame, ...] = ()  # of a race: where the earlier of the two uses was queued
    count: int = 1  # itself, and those that followed it from the same lines and were not kept (option max_repeats)

    @classmethod
    def from_dict(
        cls, facts: Mapping[str, Any], resolve: Resolve | None = None, *, pool: str = "", device: str = ""
    ) -> Fault:
        """Make a fault from what ``take_faults()`` of the core gives, whose stacks are numbers.

        Parameters
        ----------
        facts
            The fields of the native record by name.
        resolve
            From a stack's number to its frames; the core's own by default.
        pool, device
            Where it was found, for the report.
        """
        resolve = resolve or default_resolve

        def block(name: str) -> BlockFacts | None:
            return BlockFacts.from_dict(facts[name], resolve) if facts.get(name) is not None else None

        return cls(
            kind=FaultKind(facts["kind"]),
            number=int(facts.get("number", 0)),
            block=block("block"),
            below=block("below"),
            above=block("above"),
            address=int(facts.get("address", 0)),
            last=int(facts.get("last", 0)),
            bad_bytes=int(facts.get("bad_bytes", 0)),
            shown_from=int(facts.get("shown_from", 0)),
            found=bytes(facts.get("found", b"")),
            expected=bytes(facts.get("expected", b"")),
            at=_stack(facts.get("at"), resolve),
            time=float(facts.get("time", 0.0)),
            last_good_check=int(facts.get("last_good_check", 0)),
            found_by_check=int(facts.get("found_by_check", 0)),
            last_good_time=float(facts.get("last_good_time", 0.0)),
            scopes=tuple(facts.get("scopes") or ()),
            candidates=tuple(
                Candidate(BlockFacts.from_dict(candidate, resolve), candidate["why"])
                for candidate in facts.get("candidates") or ()
            ),
            note=facts.get("note") or "",
            pool=pool,
            device=device,
            other_at=_stack(facts.get("other_at"), resolve),
            count=int(facts.get("count", 1)),
        )

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence}"

    @property
    def stack(self) -> tuple[Frame, ...]:
        """The stack that names the fault: of the call for misuse at the call, else of the block's life."""
        candidates = [self.at]
        if self.block is not None:
            later = [self.block.freed_at, self.block.allocated_at]
            candidates += later if self.kind is FaultKind.WRITE_AFTER_FREE else later[::-1]
        if not self.kind.at_the_call:
            candidates = [*candidates[1:], self.at]
        return next((stack for stack in candidates if stack), ())

    @property
    def stacks(self) -> tuple[tuple[Frame, ...], ...]:
        """Every stack of the fault and its block, without the neighbours'."""
        of_block = () if self.block is None else (self.block.allocated_at, self.block.freed_at)
        return (self.at, *of_block, self.other_at)

    @property
    def page(self) -> str:
        """Where the documentation explains its kind."""
        return self.kind.page

    @property
    def tag(self) -> str:
        """The tag of the block that was hit."""
        return "" if self.block is None else self.block.tag

    @property
    def sentence(self) -> str:
        """What happened, with distances in words."""
        return _sentence(self)

    @property
    def dedup_token(self) -> str:
        """Equal for equal faults: the kind and the top frames of the stack that names it."""
        top = [f"{frame.module}.{frame.function}:{frame.line}" for frame in self.stack[:_TOKEN_FRAMES]]
        if not top:
            size = "" if self.block is None else f"{self.block.size}-bytes"
            top = [part for part in (self.tag, size) if part]
        return "-".join([self.kind, *top])

    @property
    def summary(self) -> str:
        """Kind and place in one line that can be searched for."""
        where = str(self.stack[0]) if self.stack else f"address {self.address:#x} (no stack was kept)"
        return f"{self.kind} {where}"


def _written(fault: Fault) -> str:
    """How much was written: holes in a run may be bytes that happened to equal the pattern."""
    span = fault.last - fault.address + 1
    if fault.bad_bytes == span:
        return f"write of {byte_count(span)}"
    return f"write of at least {byte_count(fault.bad_bytes)} in a run of {span:,}"


def _in_freed(fault: Fault, block: BlockFacts) -> str:
    if fault.address >= block.end:
        return f"{byte_count(fault.address - block.end)} behind the end of"
    if fault.address < block.address:
        return f"{byte_count(block.address - fault.address)} before the start of"
    return f"{byte_count(fault.address - block.address)} into"


def _sentence(fault: Fault) -> str:
    block, kind = fault.block, fault.kind
    if kind is FaultKind.RACE:
        size = byte_count(fault.last - fault.address + 1)
        into = 0 if block is None else fault.address - block.address
        inside = "" if block is None else f", {byte_count(into)} into a {block.size}-byte block"
        return f"two uses of {size} at {fault.address:#x}{inside}, that nothing orders"
    if block is None:
        return f"free of {fault.address:#x}, which no pool owns" if kind is FaultKind.FOREIGN_FREE else kind.meaning
    a_block = f"a {block.size}-byte block"
    match kind:
        case FaultKind.OVERRUN:
            return f"{_written(fault)}, {byte_count(fault.address - block.end)} behind the end of {a_block}"
        case FaultKind.UNDERRUN:
            return f"{_written(fault)}, {byte_count(block.address - 1 - fault.last)} before the start of {a_block}"
        case FaultKind.WRITE_AFTER_FREE:
            return f"{_written(fault)}, {_in_freed(fault, block)} {a_block} that had been freed"
        case FaultKind.DOUBLE_FREE:
            return f"second free of {a_block} at {block.address:#x}"
        case FaultKind.INTERIOR_FREE:
            inside = byte_count(fault.address - block.address)
            return f"free of {fault.address:#x}, which is {inside} inside {a_block} and not its start"
        case FaultKind.WRONG_POOL_FREE:
            return f"free of {a_block} at {block.address:#x}, which belongs to another pool"
        case FaultKind.SIZE_MISMATCH:
            return f"free of {a_block} at {block.address:#x} with another size than it has"
        case FaultKind.ILLEGAL_ACCESS:
            return f"{kind.meaning}; the likeliest block is {a_block} at {block.address:#x}"
        case FaultKind.TRAMPLED_RECORD:
            return f"the pool's record of {a_block} at {block.address:#x} was overwritten in host memory"
        case _:
            return f"{kind.meaning}: {fault.address:#x}"
