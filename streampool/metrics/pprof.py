"""What holds memory as a profile for pprof and its like: github.com/google/pprof, proto/profile.proto, gzipped.

A sample a call stack, tag and pool, with four values as Go's heap profiles have them: blocks and bytes allocated so
far, blocks and bytes live. Labels name the pool and the tag. In production they are estimates without bias; where call
stacks are not sampled but all kept, what was allocated so far is not counted and 0.
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from streampool.faults import Frame
from streampool.metrics.holders import read

__all__ = ["encode", "heap_profile"]

_TYPES = (("alloc_objects", "count"), ("alloc_space", "bytes"), ("inuse_objects", "count"), ("inuse_space", "bytes"))


def heap_profile() -> bytes:
    """Give the profile of all pools of the process, gzipped."""
    return encode(read(by_tag=True))


class _Message:
    """The few pieces of the protobuf encoding that a profile needs (protobuf.dev, "Encoding")."""

    def __init__(self) -> None:
        self.bytes = bytearray()

    def number(self, field: int, value: int) -> None:
        if value:
            self.bytes += _varint(field << 3) + _varint(value)

    def numbers(self, field: int, values: Iterable[int]) -> None:
        self.piece(field, b"".join(_varint(value) for value in values))

    def piece(self, field: int, value: bytes | bytearray) -> None:
        self.bytes += _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Strings:
    """The table of strings; the empty one is its first."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self.at.setdefault(text, len(self.at))


class Held(Protocol):
    """What one call stack, or one of its tags, holds: a sample."""

    @property
    def frames(self) -> tuple[Frame, ...]: ...
    @property
    def tag(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def allocated_bytes(self) -> int: ...
    @property
    def allocated_blocks(self) -> int: ...


class Profiled(Protocol):
    """A pool with its holders, living or saved."""

    @property
    def pool(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def sample_bytes(self) -> int: ...
    @property
    def holders(self) -> Sequence[Held]: ...


def encode(pools: Sequence[Profiled]) -> bytes:
    """Give a profile of pools, as `read` gives them."""
    profile, strings = _Message(), _Strings()
    for kind, unit in _TYPES:
        value_type = _Message()
        value_type.number(1, strings(kind))
        value_type.number(2, strings(unit))
        profile.piece(1, value_type.bytes)
    functions: dict[tuple[str, str], int] = {}
    locations: dict[Frame, int] = {}
    for pool in pools:
        for holder in pool.holders:
            frames = holder.frames or (Frame("", 0, "(no call stack)"),)
            for frame in frames:
                functions.setdefault((frame.function, frame.file), len(functions) + 1)
                locations.setdefault(frame, len(locations) + 1)
            sample = _Message()
            sample.numbers(1, [locations[frame] for frame in frames])
            sample.numbers(2, [holder.allocated_blocks, holder.allocated_bytes, holder.blocks, holder.bytes])
            labels = {"pool": pool.pool, "device": pool.device, "kind": pool.kind, "tag": holder.tag}
            for key, text in labels.items():
                if not text:
                    continue
                label = _Message()
                label.number(1, strings(key))
                label.number(2, strings(text))
                sample.piece(3, label.bytes)
            profile.piece(2, sample.bytes)
    for frame, number in locations.items():
        line = _Message()
        line.number(1, functions[frame.function, frame.file])
        line.number(2, frame.line)
        location = _Message()
        location.number(1, number)
        location.piece(4, line.bytes)
        profile.piece(4, location.bytes)
    for (name, file), number in functions.items():
        function = _Message()
        function.number(1, number)
        function.number(2, strings(name))
        function.number(3, strings(name))
        function.number(4, strings(file))
        profile.piece(5, function.bytes)
    period = _Message()
    period.number(1, strings("space"))
    period.number(2, strings("bytes"))
    default = strings("inuse_space")
    for text in strings.at:
        profile.piece(6, text.encode(errors="backslashreplace"))
    profile.number(9, time.time_ns())
    profile.piece(11, period.bytes)
    profile.number(12, max((pool.sample_bytes for pool in pools), default=0))
    profile.number(14, default)
    return gzip.compress(bytes(profile.bytes), mtime=0)
