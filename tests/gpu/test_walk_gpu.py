"""A walk over streams with real kernels: every block's bytes are what its owner wrote until the last reader is done."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

import streampool as sp
from gpu import driver
from gpu.gpu_scene import KIB, MIB, GpuScene

pytestmark = pytest.mark.gpu

SIZES = [300, 4 * KIB, 4 * KIB, 20 * KIB, 64 * KIB, 200 * KIB, MIB, 3 * MIB]
SLOW = 100_000  # nanoseconds that a reader waits before it reads
STEPS = 1500
MOST_LIVE = 24


@dataclass
class Owned:
    """A block, the stream it lives on, and what it was filled with."""

    block: sp.Buffer
    stream: Any
    seed: int


class Walk:
    """Allocates, writes, reads on other streams, and gives away in every way that there is."""

    def __init__(self, gpu: GpuScene, pool: sp.Pool, seed: int) -> None:
        self.gpu = gpu
        self.pool = pool
        self.random = random.Random(seed)
        self.streams: list[Any] = [gpu.stream(pool) for _ in range(3)] + [gpu.raw_stream() for _ in range(2)]
        self.streams.append(driver.PER_THREAD)
        self.live: list[Owned] = []
        self.seeds = 0
        counter = gpu.pool(name="counter").allocate(8, stream=self.streams[0])
        counter.fill(0)
        gpu.device.sync()
        self.counter = counter

    def wrong(self) -> int:
        """Give the number of bytes that readers found wrong."""
        self.gpu.device.sync()
        return int.from_bytes(self.gpu.read(self.counter), "little")

    def step(self) -> None:
        if len(self.live) < MOST_LIVE and self.random.random() < 0.6:
            self.allocate()
        elif self.live:
            self.give_away(self.live.pop(self.random.randrange(len(self.live))))

    def allocate(self) -> None:
        stream = self.random.choice(self.streams)
        try:
            block = self.pool.allocate(self.random.choice(SIZES), stream=stream)
        except sp.OutOfMemoryError:  # the limit is met by live blocks alone
            self.give_away(self.live.pop(0))
            return
        self.seeds += 1
        self.gpu.write_pattern(stream, block, self.seeds % 251)
        self.live.append(Owned(block, stream, self.seeds % 251))

    def read(self, stream: Any, owned: Owned) -> None:
        delay = SLOW if self.random.random() < 0.5 else 0
        block = owned.block
        self.gpu.kernels.count_wrong(stream, block.handle, block.size, owned.seed, self.counter.handle, delay)

    def give_away(self, owned: Owned) -> None:
        block, home = owned.block, owned.stream
        reader = self.random.choice([stream for stream in self.streams if stream is not home])
        self.gpu.order(reader, home)
        self.read(reader, owned)
        how = self.random.choice(["stream", "event", "ordered", "handed over", "released"])
        if how == "stream":
            block.record_stream(reader)
            block.close(home)
        elif how == "event":
            block.record_event(self.gpu.event(reader))
            block.close(home)
        elif how == "ordered":
            self.gpu.order(home, reader)
            block.close(home)
        elif how == "handed over":
            block.close(reader)
        else:
            block.record_stream(reader)
            block.close()


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("production", {}),
        ("production", {"limit": "24MiB", "wait_timeout": 0.5}),
        ("production", {"reuse": "deterministic"}),
        ("production", {"segments": "malloc"}),
        ("debug", {}),
    ],
    ids=["plain", "limit", "deterministic", "malloc", "debug"],
)
def test_no_reader_finds_bytes_of_a_later_owner(gpu: GpuScene, mode: str, options: dict[str, Any]) -> None:
    pool = gpu.pool(mode=mode, **options)
    walk = Walk(gpu, pool, seed=len(options) + len(mode))
    for _ in range(STEPS):
        walk.step()
    while walk.live:
        walk.give_away(walk.live.pop())
    assert walk.wrong() == 0
    assert pool.check().faults == 0
    assert pool.audit() == ""
    for stream in walk.streams:
        pool.allocate(1, stream=stream).close(stream)
    gpu.device.sync()
    pool.trim()
    assert pool.stats().live_blocks == 0


def test_the_walk_would_notice(gpu: GpuScene) -> None:
    """Without a word to the pool a later owner's bytes are what the reader finds: the counter counts."""
    pool = gpu.pool()
    walk = Walk(gpu, pool, seed=0)
    home, reader = walk.streams[:2]
    block = pool.allocate(4 * KIB, stream=home)
    gpu.write_pattern(home, block, 1)
    gpu.order(reader, home)
    gpu.gate(reader)
    walk.read(reader, Owned(block, home, 1))
    block.close(home)  # nobody said that `reader` still reads
    later = pool.allocate(4 * KIB, stream=home)
    gpu.write_pattern(home, later, 2)
    home.sync()
    gpu.open()
    assert walk.wrong() == 4 * KIB
