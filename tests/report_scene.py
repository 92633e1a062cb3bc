"""Facts as the core gives them, and reports of them: one scene for the tests of reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jsonschema

from streampool.faults import Fault
from streampool.report import Process, Report, schema

ADDRESS = 0x7F0000000400
PATTERN = bytes(range(0x71, 0x71 + 64))
STACKS = {
    1: [("/app/train.py", 31, "fill_edges"), ("/app/train.py", 58, "main"), ("/app/train.py", 70, "<module>")],
    2: [("/app/train.py", 44, "drop"), ("/app/train.py", 59, "main")],
    3: [("/app/load.py", 20, "load")],
}
DEBUG_OPTIONS = {"guard_bytes": "256", "fill": "true", "fill_edge_bytes": "0", "track": "true"}
STANDARD = jsonschema.Draft202012Validator(schema())


def resolve(stack: int) -> list[tuple[str, int, str]]:
    return STACKS[stack]


def block(**changes: Any) -> dict[str, Any]:
    facts = {
        "serial": 12,
        "state": "live",
        "address": ADDRESS,
        "size": 1013,
        "begin": ADDRESS - 256,
        "reserved": 1536,
        "stream": 3,
        "allocated_thread": 77,
        "freed_thread": 0,
        "allocated_time": 0.12,
        "freed_time": 0.0,
        "allocated_at": 1,
        "freed_at": 0,
        "raw": False,
        "tag": "",
    }
    return facts | changes


def freed(**changes: Any) -> dict[str, Any]:
    return block(state="quarantined", freed_at=2, freed_thread=78, freed_time=0.5) | changes


def written(
    kind: str, offset: int, data: bytes, *, before: int = 0, of: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A fault of `data` written at `offset` from the block's start, shown from `before` bytes earlier."""
    of = of or block()
    address = of["address"] + offset
    found = PATTERN[:before] + data + PATTERN[before + len(data) :]
    facts = {
        "kind": kind,
        "number": 1,
        "block": of,
        "below": None,
        "above": None,
        "address": address,
        "last": address + len(data) - 1,
        "bad_bytes": len(data),
        "shown_from": address - before,
        "found": found,
        "expected": PATTERN,
        "at": 0,
        "time": 1.31,
        "last_good_check": 3,
        "found_by_check": 4,
        "last_good_time": 1.2,
        "note": "",
    }
    return facts | more


def overrun(**more: Any) -> dict[str, Any]:
    return written("overrun", 1013, b"\xab", **more)


@dataclass
class Found:
    """What the session gathers of one pool."""

    name: str = "default"
    kind: str = "device"
    device: str = "sim:0"
    mode: str = "debug"
    ended: str = "closed"
    faults: list[dict[str, Any]] = field(default_factory=list)
    live_blocks: list[dict[str, Any]] = field(default_factory=list)
    not_checked: list[dict[str, Any]] = field(default_factory=list)
    debug_totals: dict[str, int] = field(default_factory=lambda: {"checks": 4, "blocks_checked": 130})
    stats: dict[str, Any] = field(default_factory=lambda: {"allocations": 123, "frees": 120})
    options: dict[str, str] = field(default_factory=lambda: dict(DEBUG_OPTIONS))
    problems: list[str] = field(default_factory=list)


def report(*found: Found, **options: Any) -> Report:
    process = Process(1, ("train.py", "--fast"), "3.11.2")
    return Report.from_findings(found, resolve=resolve, process=process, **options)


def fault(facts: dict[str, Any]) -> Fault:
    return Fault.from_dict(facts, resolve, pool="default", device="sim:0")


def assert_in_order(text: str, *parts: str) -> None:
    at = 0
    for part in parts:
        found = text.find(part, at)
        assert found >= 0, f"{part!r} is not in the text after {text[:at][-80:]!r}"
        at = found + len(part)
