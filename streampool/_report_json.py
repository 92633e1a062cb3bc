"""Faults and leaks to and from the plain data of report_schema.json. Addresses are hexadecimal text there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streampool.faults import BlockFacts, Candidate, Fault, Frame, page_of
from streampool.leaks import Leak, LeakClass
from streampool.suppressions import suggest

__all__ = ["candidate_to_dict", "fault_from_dict", "fault_to_dict", "leak_from_dict", "leak_to_dict"]


def _frames_to_list(frames: Sequence[Frame]) -> list[dict[str, Any]]:
    return [{"file": frame.file, "line": frame.line, "function": frame.function} for frame in frames]


def _frames_from_list(frames: Iterable[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(frame["file"], frame["line"], frame["function"]) for frame in frames)


_ADDRESSES = ("address", "begin")


def _block_to_dict(block: BlockFacts | None) -> dict[str, Any] | None:
    if block is None:
        return None
    names = [name for name in BlockFacts.__dataclass_fields__ if not name.endswith("_at")]
    plain = {name: getattr(block, name) for name in names}
    return {
        **plain,
        "state": str(block.state),
        **{name: hex(plain[name]) for name in _ADDRESSES},
        "allocated_at": _frames_to_list(block.allocated_at),
        "freed_at": _frames_to_list(block.freed_at),
    }


def _block_from_dict(plain: Mapping[str, Any] | None) -> BlockFacts | None:
    if plain is None:
        return None
    stacks: dict[str, Any] = {name: _frames_from_list(plain[name]) for name in ("allocated_at", "freed_at")}
    facts = {**plain, **{name: int(plain[name], 16) for name in _ADDRESSES}, "allocated_at": None, "freed_at": None}
    return replace(BlockFacts.from_dict(facts), **stacks)


def candidate_to_dict(candidate: Candidate) -> dict[str, Any]:
    return {"block": _block_to_dict(candidate.block), "why": candidate.why}


def fault_to_dict(fault: Fault) -> dict[str, Any]:
    return {
        "kind": str(fault.kind),
        "sentence": fault.sentence,
        "dedup_token": fault.dedup_token,
        "suppression": suggest(fault.kind, fault.stack, fault.tag),
        "number": fault.number,
        "pool": fault.pool,
        "device": fault.device,
        "address": hex(fault.address),
        "last": hex(fault.last),
        "bad_bytes": fault.bad_bytes,
        "shown_from": hex(fault.shown_from),
        "found": fault.found.hex(),
        "expected": fault.expected.hex(),
        "block": _block_to_dict(fault.block),
        "below": _block_to_dict(fault.below),
        "above": _block_to_dict(fault.above),
        "at": _frames_to_list(fault.at),
        "time": fault.time,
        "found_by_check": fault.found_by_check,
        "last_good_check": fault.last_good_check,
        "last_good_time": fault.last_good_time,
        "scopes": list(fault.scopes),
        "candidates": [candidate_to_dict(candidate) for candidate in fault.candidates],
        "note": fault.note,
        "other_at": _frames_to_list(fault.other_at),
        "count": fault.count,
        "page": fault.page,
    }


def fault_from_dict(plain: Mapping[str, Any]) -> Fault:
    facts = {name: plain[name] for name in Fault.__dataclass_fields__ if name in plain}
    facts |= {name: int(plain[name], 16) for name in ("address", "last", "shown_from")}
    facts |= {name: bytes.fromhex(plain[name]) for name in ("found", "expected")}
    if len(facts["found"]) != len(facts["expected"]):
        raise ValueError(f"fault {plain['number']}: 'found' and 'expected' are not of the same bytes")
    blocks: dict[str, Any] = {name: _block_from_dict(plain[name]) for name in ("block", "below", "above")}
    candidates = tuple(
        Candidate(block, candidate["why"])
        for candidate in plain.get("candidates", ())
        if (block := _block_from_dict(candidate["block"])) is not None
    )
    without = {**facts, **dict.fromkeys(blocks), "at": None, "other_at": None, "candidates": None}
    fault = Fault.from_dict(without, pool=plain["pool"], device=plain["device"])
    at, other_at = (_frames_from_list(plain.get(name, ())) for name in ("at", "other_at"))
    return replace(fault, at=at, other_at=other_at, candidates=candidates, **blocks)


def leak_to_dict(leak: Leak) -> dict[str, Any]:
    plain = {name: getattr(leak, name) for name in Leak.__dataclass_fields__ if name != "leak_class"}
    return {
        "class": str(leak.leak_class),
        "sentence": leak.sentence,
        "suppression": suggest(leak.leak_class, leak.allocated_at, leak.tag),
        "page": page_of(leak.leak_class),
        **{name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()},
        "allocated_at": _frames_to_list(leak.allocated_at),
    }


def leak_from_dict(plain: Mapping[str, Any]) -> Leak:
    values = {name: plain[name] for name in Leak.__dataclass_fields__ if name in plain}
    values |= {name: tuple(values[name]) for name in values if isinstance(values[name], list)}
    values["allocated_at"] = _frames_from_list(plain["allocated_at"])
    return Leak(leak_class=LeakClass(plain["class"]), **values)
