"""Random walks over everything that may happen to a block, on the seeded simulated device, with the oracle of reuse.

`Walk` is the world: streams of every kind (lasting, raw, per-thread, closed), gates, blocks, and a program's moves.
Each move keeps the rules of a correct program: a stream that reads a block is ordered after the write that
filled it, and declared (`record_stream`, `record_event`) or the freeing stream is ordered after it. Then every race the
device reports, and every block handed out over pending foreign work, is the pool's fault.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scene import KIB, MIB, Busy, Scene

import streampool as sp

# Small, at the edges of slots, slabs and extents, and large enough to be fenced in the freeing call.
SIZES = (1, 256, 4096, 4097, 60 * KIB, 64 * KIB, 64 * KIB + 1, 300 * KIB, MIB, MIB + 513, 2 * MIB, 3 * MIB, 5 * MIB)


@dataclass(eq=False)
class Lane:
    """A stream as the walk knows it."""

    stream: Any
    kind: str  # lasting, raw, per-thread, legacy
    open: bool = True


@dataclass(eq=False)
class Block:
    """A live block: a Buffer, or a raw address."""

    buffer: Any
    address: int
    size: int
    home: Lane
    users: list[Lane] = field(default_factory=list)  # every lane that has touched it, home first


class Worker:
    """One other thread, for per-thread default streams and for frees that come from elsewhere."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Run `call` on the thread and give its result."""
        self._calls.put(call)
        result, error = self._results.get(timeout=60)
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """End the thread."""
        self._calls.put(None)
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._results.put((call(), None))
            except BaseException as error:
                self._results.put((None, error))
            del call


class Walk:
    """The world of one walk. Every method is one move; `check` holds after each."""

    def __init__(self, scene: Scene, **options: Any) -> None:
        self.scene = scene
        options.setdefault("wait_timeout", 0.002)  # simulated seconds
        self.pool = scene.pool(**options)
        self.worker = Worker()
        self.lanes: list[Lane] = []
        self.blocks: list[Block] = []
        self.refused = 0
        self.vanished = 0  # streams that were closed with marks to come
        self.add_lane("lasting")
        self.add_lane("lasting")

    # -- streams ---------------------------------------------------------------------------------------------------

    def add_lane(self, kind: str) -> None:
        """Make a stream, or take a default one."""
        if sum(lane.open for lane in self.lanes) >= 8:
            return
        if kind in ("per-thread", "legacy"):
            if any(lane.kind == kind for lane in self.lanes):
                return
            if kind == "legacy":
                stream = self.scene.device.default_stream
            else:
                stream = self.worker(lambda: self.scene.device.per_thread_default_stream)
        else:
            stream = self.scene.device.create_stream()
        if kind == "lasting":
            self.pool.register_stream(stream)
        self.lanes.append(Lane(stream, kind))

    def close_lane(self, lane: Lane) -> None:
        """Destroy a stream, with whatever is still queued on it."""
        if lane.kind in ("per-thread", "legacy") or not lane.open or sum(x.open for x in self.lanes) <= 2:
            return
        if lane.kind == "lasting":
            self.pool.forget_stream(lane.stream)
        if lane.kind == "raw" or any(lane in block.users for block in self.blocks):
            self.vanished += 1  # marks are or will be on it that no call can fence any more
        lane.stream.close()
        lane.open = False

    def on(self, lane: Lane, call: Callable[[], Any]) -> Any:
        """Make a call in the thread that the lane belongs to."""
        return self.worker(call) if lane.kind == "per-thread" else call()

    # -- blocks ----------------------------------------------------------------------------------------------------

    def allocate(self, lane: Lane, size: int, *, raw: bool, gated: bool) -> None:
        """Allocate, ask the oracle, and write the whole block on its stream."""
        if not lane.open:
            return
        try:
            if raw:
                buffer, address = None, self.on(lane, lambda: self.pool.allocate_raw(size, stream=lane.stream))
            else:
                buffer = self.on(lane, lambda: self.pool.allocate(size, stream=lane.stream))
                address = buffer.handle
        except sp.OutOfMemoryError:
            self.refused += 1
            return
        for other in self.blocks:
            assert other.address + other.size <= address or address + size <= other.address, "two live blocks overlap"
        under_way = [w for w in self.scene.work if w.overlaps(address, size) and w.stream is not lane.stream]
        done = self.on(lane, lambda: self._write(lane, address, size))
        if under_way:
            # Only a stream that is ordered after that work may have these bytes: then its write cannot be done yet.
            sp.sim.settle()
            assert not done.is_done, f"{size} bytes at {address:#x} were handed out under work of another stream"
        block = Block(buffer, address, size, lane, [lane])
        if gated:
            self.on(lane, lambda: self._read(lane, block, gated=True))
        self.blocks.append(block)

    def use(self, block: Block, lane: Lane, *, gated: bool, record_first: bool, by_event: bool, offset: int) -> None:
        """Read the block on a stream: its own, or another one that waits for the writer and is declared."""
        if not lane.open:
            return
        if lane not in block.users:
            if not block.home.open:
                return
            ready = self.on(block.home, lambda: block.home.stream.record())
            self.on(lane, lambda: lane.stream.wait(ready))
            block.users.append(lane)
        foreign = lane is not block.home
        inside = block.address + offset % block.size
        if foreign and record_first and not by_event:
            self.on(lane, lambda: self.pool.record_stream_raw(inside, lane.stream))
        self.on(lane, lambda: self._read(lane, block, gated=gated))
        if foreign and by_event:
            event = self.on(lane, lambda: lane.stream.record())
            self.pool.record_event_raw(inside, event)
        elif foreign and not record_first:
            self.on(lane, lambda: self.pool.record_stream_raw(inside, lane.stream))

    def free(self, block: Block, lane: Lane | None, *, elsewhere: bool) -> None:
        """Free on a stream that is ordered after all use, or release without naming one."""
        self.blocks.remove(block)
        if lane is not None and (not lane.open or not all(user.open for user in block.users)):
            lane = None
        if lane is None:
            self._release(block, elsewhere)
            return
        for user in block.users:
            if user is not lane:
                done = self.on(user, lambda user=user: user.stream.record())
                self.on(lane, lambda done=done: lane.stream.wait(done))
        if block.buffer is not None:
            self.on(lane, lambda: block.buffer.close(lane.stream))
        else:
            self.on(lane, lambda: self.pool.free_raw(block.address, stream=lane.stream))

    def _release(self, block: Block, elsewhere: bool) -> None:
        if block.buffer is None:
            self.pool.free_raw(block.address)
        elif elsewhere:
            holder = [block.buffer]
            block.buffer = None
            self.worker(holder.clear)
        else:
            block.buffer = None  # the last reference

    # -- time ------------------------------------------------------------------------------------------------------

    def open_gate(self, which: int) -> None:
        """Open one gate and let some of what can run run."""
        if self.scene.work:
            work = self.scene.work.pop(which % len(self.scene.work))
            work.gate.open()
            event = self.lanes[0].stream.record() if self.lanes[0].open else None
            if event is not None:
                event.is_done

    def settle(self) -> None:
        """Run everything that can run."""
        sp.sim.settle()

    def trim(self, keep: int) -> None:
        """Give idle memory back."""
        self.pool.trim(keep)

    def check(self) -> None:
        """What holds after every move."""
        races = self.scene.device.races()
        assert races == [], "\n".join(map(str, races))
        assert sp.sim.traps() == []
        assert self.pool.audit() == ""

    def finish(self) -> None:
        """Open everything: then an equal request on another stream is served from what is there."""
        try:
            self._finish()
        finally:
            self.worker.stop()

    def _finish(self) -> None:
        for block in list(self.blocks):
            self.free(block, block.home, elsewhere=False)
        for work in self.scene.work:
            work.gate.open()
        self.scene.work.clear()
        sp.sim.settle()
        for lane in self.lanes:  # each raw stream is named again
            if lane.open and lane.kind != "lasting":
                self.on(lane, lambda lane=lane: self.pool.allocate(1, stream=lane.stream).close(lane.stream))
        sp.sim.settle()
        self.check()
        fresh = self.scene.device.create_stream()
        self.pool.register_stream(fresh)
        stats = self.pool.stats()
        if not self.vanished and self.pool.options["reuse"] != "deterministic":
            for size in (4096, MIB):
                if stats.reserved >= 4 * MIB:
                    before = self.pool.stats().reserved
                    self.pool.allocate(size, stream=fresh).close(fresh)
                    assert self.pool.stats().reserved <= before, "late reuse: the pool grew though all work was done"
        self.check()

    def _write(self, lane: Lane, address: int, size: int) -> Any:
        lane.stream.launch(writes=[(address, size)], label="write")
        return lane.stream.record()

    def _read(self, lane: Lane, block: Block, *, gated: bool) -> None:
        gate = sp.sim.Gate() if gated else None
        lane.stream.launch(reads=[(block.address, block.size)], gate=gate, label="read")
        if gate is not None:
            self.scene.work.append(Busy(lane.stream, block.address, block.size, gate))


def random_walk(walk: Walk, seed: int, moves: int) -> None:
    """Take `moves` moves, chosen by `seed`."""
    rng = random.Random(seed)
    for _ in range(moves):
        roll = rng.random()
        lane = rng.choice(walk.lanes)
        block = rng.choice(walk.blocks) if walk.blocks else None
        if roll < 0.38 and len(walk.blocks) < 24:
            walk.allocate(lane, rng.choice(SIZES), raw=rng.random() < 0.3, gated=rng.random() < 0.4)
        elif roll < 0.50 and block is not None:
            walk.use(
                block,
                lane,
                gated=rng.random() < 0.5,
                record_first=rng.random() < 0.5,
                by_event=rng.random() < 0.3,
                offset=rng.randrange(1 << 20),
            )
        elif roll < 0.80 and block is not None:
            where = rng.choice((block.home, block.home, block.home, lane, None))
            walk.free(block, where, elsewhere=rng.random() < 0.5)
        elif roll < 0.92:
            walk.open_gate(rng.randrange(1 << 20))
        elif roll < 0.94:
            walk.settle()
        elif roll < 0.97:
            walk.add_lane(rng.choice(("lasting", "raw", "raw", "per-thread", "legacy")))
        elif roll < 0.985:
            walk.close_lane(lane)
        elif roll < 0.99:
            walk.trim(rng.choice((0, 4 * MIB)))
        walk.check()
