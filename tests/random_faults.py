"""A random program on the simulated device with everything on, clean or with faults planted now and then, by seed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import streampool as sp
from streampool.faults import FaultKind

KIB, MIB = 1024, 1 << 20
_LIVE = 400  # blocks at most
_REST = 256  # operations between two settles of the device: work is pending meanwhile
_LARGEST = 16  # sizes up to 2 to this power, rarely 1 MiB
NO_BYTE_OF_THE_PATTERN = 0

EVERYTHING = {
    "mode": "debug",
    "count_untouched": True,
    "quarantine_bytes": "4MiB",
    "page_guards": "sampled",
    "page_guard_sample": "8MiB",
    "page_guard_cap": "256MiB",
    "max_faults": 1_000_000,
    "max_repeats": 0,
}
PLANTED = (
    FaultKind.OVERRUN,
    FaultKind.UNDERRUN,
    FaultKind.WRITE_AFTER_FREE,
    FaultKind.DOUBLE_FREE,
    FaultKind.FOREIGN_FREE,
    FaultKind.INTERIOR_FREE,
    FaultKind.WRONG_POOL_FREE,
    FaultKind.SIZE_MISMATCH,
)

Found = Counter[tuple[FaultKind, int]]


def make_pool(device: sp.sim.Device, kind: str, seed: int) -> sp.Pool:
    return sp.Pool(device, kind=kind, page_guard_seed=seed + 1, **EVERYTHING)  # type: ignore[arg-type]


@dataclass
class _Block:
    address: int
    size: int
    stream: Any
    buffer: sp.Buffer | None  # None: raw
    also: Any = None  # a recorded stream
    damaged: bool = False


@dataclass
class RandomProgram:
    """One run. `planted` and `found` are kinds and addresses, each with how often."""

    device: sp.sim.Device
    seed: int
    kind: str = "device"
    shared: sp.Pool | None = None  # a pool that other programs use too; whoever made it closes it
    planted: Found = field(default_factory=Counter)
    found: Found = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self.pool = self.shared or make_pool(self.device, self.kind, self.seed)
        self.other = sp.Pool(self.device, kind=self.kind, name="other", **EVERYTHING)  # type: ignore[arg-type]
        self._streams = [self.device.create_stream() for _ in range(3)]
        for stream in self._streams[:2]:  # the third is known by its handle only
            self.pool.register_stream(stream)
        self._live: list[_Block] = []
        self._foreign = 0x1000

    def run(self, operations: int, *, plant_every: int = 0) -> None:
        """Make so many operations, with one fault planted in each `plant_every` of them; 0: none."""
        plant_at = -1
        for number in range(operations):
            if plant_every and number % plant_every == 0:
                plant_at = number + self._draw.randrange(plant_every)
            if number == plant_at:
                self._plant(self._draw.choice(PLANTED))
            self._operation()
            if number % _REST == 0:
                sp.sim.settle()
            if number % 20_000 == 0 and self.shared is None:
                assert self.pool.audit() == ""
        while self._live:
            self._free(self._live.pop())
        sp.sim.settle()
        self.pool.check()
        if self.shared is None:
            assert self.pool.audit() == ""
            self.pool.close()
        self.other.close()
        for pool in (self.pool, self.other):
            self._collect(pool)

    # -- what the program does ----------------------------------------------------------------------------------------
    def _operation(self) -> None:
        draw = self._draw.random()
        if draw < 0.45 and len(self._live) < _LIVE:
            self._allocate()
        elif draw < 0.86:
            if self._live:
                at = self._draw.randrange(len(self._live))
                self._live[at], self._live[-1] = self._live[-1], self._live[at]
                self._free(self._live.pop())
        elif draw < 0.97:
            if self._live:
                self._use(self._draw.choice(self._live))
        elif draw < 0.999:
            with sp.scope("step"):
                self._collect(self.pool)
        elif draw < 0.9995:
            self.pool.check(timeout=0)
        else:
            self.pool.trim()

    def _allocate(self) -> None:
        size = MIB if self._draw.random() < 0.001 else int(2 ** self._draw.uniform(0, _LARGEST))
        stream = self._draw.choice(self._streams)
        alignment = self._draw.choice((256, 256, 256, 4096))
        if self._draw.random() < 0.5:
            address = self.pool.allocate_raw(size, stream=stream, alignment=alignment)
            self._live.append(_Block(address, size, stream, None))
        else:
            buffer = self.pool.allocate(size, stream=stream, alignment=alignment, tag="random")
            self._live.append(_Block(buffer.handle, size, stream, buffer))

    def _use(self, block: _Block) -> None:
        """Write all of a block in order: on its stream, or on another one that waits for it and is recorded."""
        stream = block.also or block.stream
        if block.also is None and block.buffer is not None and self._draw.random() < 0.2:
            stream = block.also = self._draw.choice([s for s in self._streams if s is not block.stream])
            stream.wait(block.stream)
            block.buffer.record_stream(stream)
        value = self._draw.randrange(256)
        stream.launch(lambda out: out.fill(value), writes=[(block.address, block.size)], label="use")

    def _free(self, block: _Block) -> None:
        if block.buffer is None:
            self.pool.free_raw(block.address, stream=block.stream)
        elif self._draw.random() < 0.2:
            block.buffer = None  # an implicit release
        else:
            block.buffer.close(block.stream)

    def _collect(self, pool: sp.Pool) -> None:
        for fault in pool.take_faults():
            self.found[FaultKind(fault["kind"]), fault["address"]] += fault["count"]

    # -- what is planted ----------------------------------------------------------------------------------------------
    def _plant(self, kind: FaultKind) -> None:
        match kind:
            case FaultKind.OVERRUN | FaultKind.UNDERRUN:
                block = self._whole()
                at = block.address + block.size if kind is FaultKind.OVERRUN else block.address - 1
                self._poke(block.stream, at)
                block.damaged = True
            case FaultKind.WRITE_AFTER_FREE:
                block = self._whole()
                self._live.remove(block)
                self._free(block)
                sp.sim.settle()
                self.pool.check()
                self._collect(self.pool)
                at = block.address + self._draw.randrange(block.size)
                self._poke(self._streams[0], at)
            case _:
                at = self._misuse(kind)
        self.planted[kind, at] += 1

    def _whole(self) -> _Block:
        """Take a block that has its guards, and no damage yet; its work is done."""
        sp.sim.settle()
        guarded = {facts["address"] for facts in self.pool.live_blocks() if facts["pages"] != "none"}
        fit = [block for block in self._live if not block.damaged and block.address not in guarded]
        if fit:
            return self._draw.choice(fit)
        self._allocate()
        return self._whole()

    def _poke(self, stream: Any, at: int) -> None:
        stream.launch(lambda out: out.fill(NO_BYTE_OF_THE_PATTERN), writes=[(at, 1)], label="planted")
        stream.sync()

    def _misuse(self, kind: FaultKind) -> int:
        stream = self._streams[0]
        size = int(2 ** self._draw.uniform(1, _LARGEST))
        pointer = self.pool.allocate_raw(size, stream=stream)
        wrong, where, named = pointer, self.pool, None
        if kind is FaultKind.DOUBLE_FREE:
            self.pool.free_raw(pointer, stream=stream)
        elif kind is FaultKind.FOREIGN_FREE:
            wrong = self._foreign = self._foreign + 256
        elif kind is FaultKind.INTERIOR_FREE:
            wrong = pointer + self._draw.randrange(1, size)
        elif kind is FaultKind.WRONG_POOL_FREE:
            where = self.other
        else:
            named = size + 1
        try:
            if named is None:
                where.free_raw(wrong, stream=stream)
            else:
                where.free_raw_sized(wrong, named, stream=stream)
        except sp.InvalidFreeError:
            pass
        else:
            raise AssertionError(f"a {kind} was not refused")
        if kind is not FaultKind.DOUBLE_FREE:
            self.pool.free_raw(pointer, stream=stream)
        self._collect(self.other)
        return wrong
