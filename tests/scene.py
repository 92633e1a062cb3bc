"""One scene for tests about ordering: a fresh simulated machine, a pool, streams, gates and the oracle of reuse.

The oracle: while gated work that touches a block is pending, nobody may receive a byte of that block unless the
receiver's stream is ordered after that work. The simulated device's race check is the second, independent judge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import streampool as sp

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass
class Busy:
    """Gated work that touches a range of memory on a stream."""

    stream: Any
    address: int
    size: int
    gate: Any

    def overlaps(self, address: int, size: int) -> bool:
        """Tell whether the work touches any byte of a range."""
        return address < self.address + self.size and self.address < address + size


@dataclass
class Scene:
    """A machine, its device 0, and what is under way on it."""

    device: Any
    pools: list[Any] = field(default_factory=list)
    work: list[Busy] = field(default_factory=list)

    def pool(self, kind: str = "device", mode: str = "production", **options: Any) -> sp.Pool:
        """Make a pool that is closed with the scene."""
        options.setdefault("fence_age", 0)
        pool = sp.Pool(self.device, kind=kind, mode=mode, **options)
        self.pools.append(pool)
        return pool

    def stream(self, pool: Any = None, *, lasting: bool = True) -> Any:
        """Make a stream; registered with `pool` where one is given and `lasting`."""
        stream = self.device.create_stream()
        if pool is not None and lasting:
            pool.register_stream(stream)
        return stream

    def busy(self, stream: Any, memory: Any, *, size: int | None = None) -> Busy:
        """Queue work that writes `memory` (a Buffer, or an address with `size`), pending until its gate opens."""
        address = memory if isinstance(memory, int) else memory.handle
        length = memory.size if size is None else size
        gate = sp.sim.Gate()
        stream.launch(writes=[(address, length)], gate=gate, label="busy")
        work = Busy(stream, address, length, gate)
        self.work.append(work)
        return work

    def use(self, stream: Any, memory: Any, *, size: int | None = None) -> None:
        """Queue work that writes `memory` at once."""
        address = memory if isinstance(memory, int) else memory.handle
        stream.launch(writes=[(address, memory.size if size is None else size)], label="use")

    def open(self, *work: Busy) -> None:
        """Open gates (all of them where none is named) and run everything that can run."""
        for item in work or tuple(self.work):
            item.gate.open()
            if item in self.work:
                self.work.remove(item)
        sp.sim.settle()

    def assert_no_race(self) -> None:
        """Both judges of the simulated device are content: no race, no use of a dead handle."""
        assert self.device.races() == []
        assert sp.sim.traps() == []


@contextmanager
def scene(*, seed: int | None = 0, devices: int = 1, memory: int | str = "4GiB", **machine: Any) -> Iterator[Scene]:
    """Give a scene on a fresh machine: the seeded scheduler, or worker threads where `seed` is None."""
    sp.sim.reset()
    sp.sim.configure(
        devices=devices, memory=memory, scheduler="threads" if seed is None else "seeded", seed=seed or 0, **machine
    )
    here = Scene(sp.sim.Device(0))
    try:
        yield here
    finally:
        for work in here.work:
            work.gate.open()
        sp.sim.settle()
        for pool in here.pools:
            pool.close()
        sp.sim.reset()


def fill_up(pool: sp.Pool, size: int, stream: Any) -> tuple[list[sp.Buffer], sp.OutOfMemoryError]:
    """Take blocks of a size until the pool has no more: the blocks, and the error that said so."""
    blocks: list[sp.Buffer] = []
    try:
        while True:
            blocks.append(pool.allocate(size, stream=stream))
    except sp.OutOfMemoryError as error:
        return blocks, error


def becomes(value: Callable[[], Any], wanted: Any) -> bool:
    """Wait until a value is as wanted: memory in one piece goes back to the driver on a thread of its own."""
    end = time.monotonic() + 10
    while (found := value()) != wanted:
        assert time.monotonic() < end, f"{found!r} is not {wanted!r}"
        time.sleep(0.001)
    return True
