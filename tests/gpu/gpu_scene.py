"""One scene for tests on a GPU: cuda:0, pools, streams, gates and kernels, all of them gone when the test is over."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import streampool as sp
from gpu import driver
from gpu.gate import Gate
from gpu.kernels import Kernels

__all__ = ["KIB", "MIB", "GpuScene", "line_of", "overlap"]

KIB = 1024
MIB = 1024 * KIB


def line_of(function: Callable[..., object], text: str) -> int:
    """Give the number of the line of a function that ends with the comment `text`."""
    lines, first = inspect.getsourcelines(function)
    (line,) = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {text}")]
    return line


def overlap(a: int, a_size: int, b: int, b_size: int) -> bool:
    """Whether two ranges share a byte."""
    return a < b + b_size and b < a + a_size


@dataclass
class GpuScene:
    """A GPU, and what a test made on it."""

    device: Any
    kernels: Kernels
    pools: list[sp.Pool] = field(default_factory=list)
    streams: list[Any] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)

    def pool(self, kind: str = "device", mode: str = "production", **options: Any) -> sp.Pool:
        """Make a pool that is closed with the scene."""
        pool = sp.Pool(self.device, kind=kind, mode=mode, **options)
        self.pools.append(pool)
        return pool

    def stream(self, pool: sp.Pool | None = None) -> Any:
        """Make a stream of cuda.core, registered with `pool` where one is given."""
        stream = self.device.create_stream()
        self.streams.append(stream)
        if pool is not None:
            pool.register_stream(stream)
        return stream

    def raw_stream(self) -> int:
        """Make a stream that is known by its handle only."""
        handle = driver.create_stream()
        self.handles.append(handle)
        return handle

    def destroy(self, handle: int) -> None:
        """Destroy a raw stream now."""
        self.handles.remove(handle)
        driver.destroy_stream(handle)

    def gate(self, *streams: Any) -> Gate:
        """Hold streams back; the gate opens with the end of the scene at the latest."""
        gate = Gate(*streams)
        self.gates.append(gate)
        return gate

    def write_pattern(self, stream: Any, block: sp.Buffer, seed: int) -> None:
        """Queue a kernel that writes all of a block."""
        self.kernels.write_pattern(stream, block.handle, block.size, seed)

    def copy(self, stream: Any, to: sp.Buffer, source: sp.Buffer) -> None:
        """Queue a kernel that copies all of a block."""
        self.kernels.copy(stream, to.handle, source.handle, source.size)

    def read(self, block: sp.Buffer) -> bytes:
        """Give a block's bytes."""
        return self.kernels.read(block.handle, block.size)

    def event(self, stream: Any) -> Any:
        """Record an event on a stream."""
        return (self.kernels._object(stream) if isinstance(stream, int) else stream).record()

    def order(self, after: Any, before: Any) -> None:
        """Make `after` wait for what was queued on `before`."""
        (self.kernels._object(after) if isinstance(after, int) else after).wait(self.event(before))

    def open(self) -> None:
        """Open every gate, none of which may have been opened by its timer, and wait for the device."""
        timed_out = [gate for gate in self.gates if gate.timed_out]
        for gate in self.gates:
            gate.open()
        self.gates.clear()
        self.device.sync()
        assert not timed_out, "a call waited for work that was held back"

    def assert_held(self) -> None:
        """Nothing in the test waited so long that a gate's timer opened it."""
        assert not any(gate.is_open for gate in self.gates), "a call waited for work that was held back"

    def end(self) -> None:
        """Leave nothing behind."""
        for gate in self.gates:
            gate.open()
        self.device.sync()
        for pool in self.pools:
            pool.close()
            # Blocks may outlive the test, in the traceback of an error that it caught; its streams do not.
            for stream in self.streams:
                with contextlib.suppress(sp.StreamError):
                    pool.forget_stream(stream)
        for stream in self.streams:
            stream.close()
        for handle in self.handles:
            driver.destroy_stream(handle)
        self.pools.clear()
        gc.collect()
