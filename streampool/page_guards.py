"""The records of blocks with page guards, read back when the process that wrote them is gone.

>>> post_mortem = read_records("guards.jsonl")
>>> print(post_mortem.to_text())                          # to_json(), to_html()

The native core writes the file (option ``page_guard_records``, native/src/debug/guard_records.hpp). Which blocks are
candidates is decided as the core decides it while it lives (native/src/pool/guarded.cpp).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from streampool.faults import BlockFacts, BlockState, Candidate, FaultKind, Frame, byte_count, stream_text, user_frames

__all__ = ["REPORT_SCHEMA_ID", "SCHEMA_ID", "PostMortem", "read_records"]

SCHEMA_ID = "urn:streampool:page-guards:1"
"""Of the records, a JSON object a line."""
REPORT_SCHEMA_ID = "urn:streampool:page-guards-report:1"
"""Of what `PostMortem.to_json` gives: ``$defs/post_mortem`` of report_schema.json."""

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class PostMortem:
    """What the records say of a process that is gone.

    Attributes
    ----------
    pid, pool, device
        Whose records they are.
    seed
        With what sides and samples were drawn: ``page_guard_seed`` of the same program gives the same.
    error
        The device's error, where the pool came to note it.
    candidates
        Blocks that an access may have been meant for, the one that was used last first.
    left_out
        How many more had been used only on streams that were idle when they were looked at last.
    bad_lines
        How many lines of the file were damaged and are left out: blocks may be missing, or be more than there were.
    """

    pid: int
    pool: str
    device: str
    seed: int
    error: str = ""
    candidates: tuple[Candidate, ...] = ()
    left_out: int = 0
    bad_lines: int = 0

    @property
    def verdict(self) -> str:
        """How many blocks an access may have been meant for, and what is left out."""
        left_out = f"; {self.left_out:,} more are left out: all their streams were idle" if self.left_out else ""
        count = len(self.candidates)
        blocks = "1 block" if count == 1 else f"{count:,} blocks"
        return f"{blocks} between unmapped pages may be meant{left_out}"

    @property
    def damage(self) -> str:
        """Say how much of the file could not be read; empty: all of it was."""
        if not self.bad_lines:
            return ""
        lines = "1 line is" if self.bad_lines == 1 else f"{self.bad_lines:,} lines are"
        return f"the file is damaged: {lines} left out, so blocks may be missing or shown in an earlier state"

    def to_json(self) -> str:
        """Give the JSON text, with every candidate."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """Give plain data, ready for JSON, as ``$defs/post_mortem`` of report_schema.json describes it."""
        from streampool._report_json import candidate_to_dict

        return {
            "schema": REPORT_SCHEMA_ID,
            "pid": self.pid,
            "pool": self.pool,
            "device": self.device,
            "seed": self.seed,
            "error": self.error,
            "candidates": [candidate_to_dict(candidate) for candidate in self.candidates],
            "left_out": self.left_out,
            "bad_lines": self.bad_lines,
            "page": FaultKind.ILLEGAL_ACCESS.page,
        }

    def to_html(self) -> str:
        """Give a page of its own, without scripts and without anything from elsewhere."""
        from streampool._report_html import render_post_mortem

        return render_post_mortem(self)

    def to_text(self) -> str:
        """Give the text that a person reads."""
        lines = [
            f"pool '{self.pool}' on {self.device}, process {self.pid}, page_guard_seed={self.seed}",
            f"the device was lost: {self.error}" if self.error else "the pool noted no lost device",
            self.verdict,
            *filter(None, [self.damage]),
        ]
        for candidate in self.candidates[:_SHOWN]:
            block = candidate.block
            name = f"#{block.serial}, {byte_count(block.size)} at {block.address:#x}"
            lines += ["", name + (f", tag '{block.tag}'" if block.tag else ""), f"    {candidate.why}"]
            lines += [f"    allocated at {frame}" for frame in block.allocated_at[:3]]
            lines += [f"    freed at {frame}" for frame in block.freed_at[:3]]
        if len(self.candidates) > _SHOWN:
            lines += ["", f"and {len(self.candidates) - _SHOWN:,} more, which JSON and HTML show"]
        if self.candidates:
            lines += ["", f"what it means, and what to do: {FaultKind.ILLEGAL_ACCESS.page}"]
        return "\n".join(lines)


_Stream = int | str  # a stream's id, or "capture 3" for what a graph's blocks are used in


def _name(stream: _Stream) -> str:
    return stream if isinstance(stream, str) else stream_text(stream)


@dataclass(slots=True)
class _Block:
    facts: BlockFacts
    streams: dict[_Stream, None] = field(default_factory=dict)
    revoked: bool = False

    def candidate(self, idle: Mapping[_Stream, bool]) -> Candidate:
        facts = self.facts
        if self.revoked:
            why = "freed, and its pages revoked: any access faults"
        else:
            right = facts.pages == "right"
            slack = facts.begin + facts.reserved - facts.end if right else facts.address - facts.begin
            state = "live" if facts.state is BlockState.LIVE else "freed, not revoked yet"
            why = f"{state}: an access {slack} bytes or more {'behind its end' if right else 'before its start'} faults"
        names = (_name(stream) + (" (idle)" if idle.get(stream) else "") for stream in self.streams)
        return Candidate(facts, f"{why}; used on {', '.join(names)}")


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _is_time(value: Any) -> bool:
    return math.isfinite(value) if type(value) is float else _is_number(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_stream(value: Any) -> bool:
    return re.fullmatch("capture [0-9]{1,19}", value) is not None if isinstance(value, str) else _is_number(value)


def _is_stack(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(frame, dict) and len(frame) == len(_FRAME) and not _unfit(frame, _FRAME) for frame in value
    )


_Fields = Mapping[str, Callable[[Any], bool]]

_FRAME: _Fields = {
    "file": _is_text,
    "line": lambda value: _is_number(value) or (type(value) is int and value == -1),
    "function": _is_text,
}
_HEAD: _Fields = {"pid": _is_number, "pool": _is_text, "device": _is_text, "seed": _is_number}
_EVENTS: Mapping[str, _Fields] = {
    "stack": {"stack": _is_number, "frames": _is_stack},
    "allocated": {
        **dict.fromkeys(("serial", "address", "size", "begin", "reserved", "thread", "stack"), _is_number),
        "pages": lambda value: value in ("none", "right", "left"),
        "stream": _is_stream,
        "time": _is_time,
        "raw": lambda value: isinstance(value, bool),
        "tag": _is_text,
    },
    "used_on": {"serial": _is_number, "stream": _is_stream},
    "freed": {"serial": _is_number, "thread": _is_number, "time": _is_time, "stack": _is_number},
    "revoked": {"serial": _is_number},
    "dropped": {"serial": _is_number},
    "named": {"stream": _is_stream},
    "idle": {"stream": _is_stream},
    "lost": {"error": _is_text},
}
"""What each line holds, as the core writes it: one may be damaged, by a full disk or by hand."""


def _object(line: str) -> dict[str, Any]:
    """Read a line; what is no object is an empty one."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _unfit(found: Mapping[str, Any], fields: _Fields) -> str:
    """Name the first field that is missing or not as it should be; empty: all fit."""
    return next((repr(name) for name, fits in fields.items() if name not in found or not fits(found[name])), "")


def read_records(path: str | Path) -> PostMortem:
    """Read the records that a process left behind.

    Parameters
    ----------
    path
        The file that ``page_guard_records`` named. A last line that was cut is left out; other lines that are not as
        the core writes them are left out and counted.

    Raises
    ------
    ValueError
        It is no such file, or its first line is damaged.
    OSError
        It cannot be read.
    """
    first, *lines = Path(path).read_bytes().decode(errors="replace").split("\n")
    head = _object(first)
    if head.get("schema") != SCHEMA_ID:
        raise ValueError(f"{path} holds no records of page guards: its first line names no schema {SCHEMA_ID}")
    if unfit := _unfit(head, _HEAD):
        raise ValueError(
            f"{path} holds no whole records of page guards: {unfit} in its first line is missing or damaged"
        )

    stacks: dict[int, tuple[Frame, ...]] = {}
    blocks: dict[int, _Block] = {}
    idle: dict[_Stream, bool] = {}
    error = ""
    bad_lines = 0
    for number, line in enumerate(lines, 1):
        event = _object(line)
        name = event.get("event")
        fields = _EVENTS.get(name) if isinstance(name, str) else None
        if fields is None or _unfit(event, fields):
            bad_lines += bool(line) and number < len(lines)  # the last one is cut, or empty
            continue
        block = blocks.get(event["serial"]) if "serial" in fields else None
        match name:
            case "stack":
                stacks[event["stack"]] = user_frames(Frame(**frame) for frame in event["frames"])
            case "allocated":
                blocks[event["serial"]] = _Block(_facts(event, stacks), {event["stream"]: None})
                idle[event["stream"]] = False
            case "used_on" if block is not None:
                block.streams[event["stream"]] = None
                idle[event["stream"]] = False
            case "freed" if block is not None:
                freed_at = stacks.get(event["stack"], ())
                block.facts = replace(
                    block.facts,
                    state=BlockState.FREED,
                    freed_at=freed_at,
                    freed_time=event["time"],
                    freed_thread=event["thread"],
                )
            case "revoked" if block is not None:
                block.revoked = True
            case "dropped":
                blocks.pop(event["serial"], None)
            case "named":
                idle[event["stream"]] = False
            case "idle":
                idle[event["stream"]] = True
            case "lost":
                error = event["error"]
    busy = [block for block in blocks.values() if not all(idle.get(stream) for stream in block.streams)]
    chosen = busy or list(blocks.values())
    chosen.sort(key=lambda b: (max(b.facts.freed_time, b.facts.allocated_time), b.facts.serial), reverse=True)
    return PostMortem(
        pid=head["pid"],
        pool=head["pool"],
        device=head["device"],
        seed=head["seed"],
        error=error,
        candidates=tuple(block.candidate(idle) for block in chosen),
        left_out=len(blocks) - len(chosen),
        bad_lines=bad_lines,
    )


def _facts(event: Mapping[str, Any], stacks: Mapping[int, tuple[Frame, ...]]) -> BlockFacts:
    stream: _Stream = event["stream"]
    return BlockFacts(
        serial=event["serial"],
        state=BlockState.LIVE,
        address=event["address"],
        size=event["size"],
        begin=event["begin"],
        reserved=event["reserved"],
        stream=0 if isinstance(stream, str) else stream,
        capture=int(stream.rpartition(" ")[2]) if isinstance(stream, str) else 0,
        allocated_thread=event["thread"],
        allocated_time=event["time"],
        allocated_at=stacks.get(event["stack"], ()),
        raw=event["raw"],
        tag=event["tag"],
        pages=event["pages"],
    )
