"""A worker whose loops are Python's: for allocators that have no other face, and for what a Python call costs.

``python -m streampool._bench.python_worker NAME [--device D] [--options O] [--streams N]`` speaks as serve.hpp says,
and knows ``call NAME COUNT`` besides. NAME is a peer of this file, or ``calls:PROCESS`` with a process of `calls`.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from streampool._bench import calls
from streampool._bench.call import check

__all__ = ["main"]

BATCH = 256  # operations between two looks at the clock
_WINDOW = 256  # live blocks in the mixed pattern


class _Cuda:
    """What peers on a GPU share. `held` is what the driver counts as gone since the start."""

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        check(driver.cuInit(0))
        context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(ordinal))))
        check(driver.cuCtxSetCurrent(context))
        self._free_at_start = self._free()

    def _free(self) -> int:
        return int(check(self._driver.cuMemGetInfo())[0])

    def held(self) -> int:
        return self._free_at_start - self._free()

    def settle(self) -> None:
        check(self._driver.cuCtxSynchronize())


class _CuPy(_Cuda):
    """A block is an object: dropping it frees it, on the stream that was current at its allocation."""

    def __init__(self, ordinal: int, streams: int, options: str, pool: str) -> None:
        import cupy

        cupy.cuda.Device(ordinal).use()
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(streams)]
        self._current = -1
        super().__init__(ordinal)
        self._pool = getattr(cupy.cuda, pool)()
        self._malloc = self._pool.malloc

    def restart(self) -> None:
        self.settle()
        self._pool.free_all_blocks()

    def alloc(self, size: int, stream: int) -> Any:
        if stream != self._current:
            self._streams[stream].use()
            self._current = stream
        return self._malloc(size)

    def free(self, block: Any, size: int, stream: int) -> None:
        pass


class _Torch(_Cuda):
    def __init__(self, ordinal: int, streams: int, options: str) -> None:
        import torch

        torch.cuda.init()
        self._streams = [torch.cuda.Stream(ordinal).cuda_stream for _ in range(streams)]
        super().__init__(ordinal)
        self._alloc: Any = torch._C._cuda_cudaCachingAllocator_raw_alloc
        self._delete: Any = torch._C._cuda_cudaCachingAllocator_raw_delete
        self._empty_cache: Any = torch.cuda.empty_cache

    def restart(self) -> None:
        self._empty_cache()

    def alloc(self, size: int, stream: int) -> Any:
        return self._alloc(size, self._streams[stream])

    def free(self, block: Any, size: int, stream: int) -> None:
        self._delete(block)


class _Rmm(_Cuda):
    def __init__(self, ordinal: int, streams: int, options: str, make: Callable[[Any, int], Any]) -> None:
        import rmm.mr
        from rmm.pylibrmm.stream import Stream

        super().__init__(ordinal)
        self._streams = [Stream() for _ in range(streams)]
        self._make: Callable[[], Any] = lambda: make(rmm.mr, int(options.partition("=")[2] or 1 << 28))
        self._resource = self._make()

    def restart(self) -> None:
        self.settle()
        self._resource = None  # the old one first
        self._resource = self._make()

    def alloc(self, size: int, stream: int) -> Any:
        return self._resource.allocate(size, self._streams[stream])

    def free(self, block: Any, size: int, stream: int) -> None:
        self._resource.deallocate(block, size, self._streams[stream])


_PEERS: dict[str, Callable[[int, int, str], Any]] = {
    "cupy": lambda o, s, options: _CuPy(o, s, options, "MemoryPool"),
    "cupy-async": lambda o, s, options: _CuPy(o, s, options, "MemoryAsyncPool"),
    "torch": _Torch,
    "rmm-pool": lambda o, s, options: _Rmm(
        o, s, options, lambda mr, first: mr.PoolMemoryResource(mr.CudaMemoryResource(), initial_pool_size=first)
    ),
    "rmm-arena": lambda o, s, options: _Rmm(
        o, s, options, lambda mr, first: mr.ArenaMemoryResource(mr.CudaMemoryResource(), arena_size=first)
    ),
}


def _preempted() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def timed(count: int, loop: Callable[[int], None]) -> dict[str, Any]:
    """Run ``loop(n)`` in batches until `count` is done; leaves out batches in which somebody else had the processor."""
    quiet: list[tuple[int, int]] = []  # ns, operations
    disturbed: list[tuple[int, int]] = []
    done = 0
    while done < count:
        n = min(BATCH, count - done)
        before = _preempted()
        start = time.perf_counter_ns()
        loop(n)
        spent = time.perf_counter_ns() - start
        (quiet if _preempted() == before else disturbed).append((spent, n))
        done += n
    counted = quiet or disturbed
    batches = sorted(ns / n for ns, n in counted)
    operations = sum(n for _, n in counted)

    def quantile(q: float) -> float:
        return batches[int(q * (len(batches) - 1) + 0.5)]

    return {
        "ns": [sum(ns for ns, _ in counted) / operations],
        "p50": quantile(0.5),
        "p99": quantile(0.99),
        "left_out": 1 - operations / count,
    }


def _pair(peer: Any, size: int, count: int) -> dict[str, Any]:
    alloc, free = peer.alloc, peer.free

    def loop(n: int) -> None:
        for _ in range(n):
            block = alloc(size, 0)
            free(block, size, 0)
            del block

    return timed(count, loop)


def _window(peer: Any, seed: int, count: int) -> dict[str, Any]:
    """Run the pattern of patterns.hpp: the same generator, sizes and steps."""
    live: list[tuple[Any, int] | None] = [None] * _WINDOW
    alloc, free = peer.alloc, peer.free
    x = (seed * 2654435761 + 1) & 0xFFFFFFFF

    def loop(n: int) -> None:
        nonlocal x
        for _ in range(n):
            x ^= (x << 13) & 0xFFFFFFFF
            x ^= x >> 17
            x ^= (x << 5) & 0xFFFFFFFF
            place = x % _WINDOW
            old = live[place]
            if old is not None:
                free(old[0], old[1], 0)
                live[place] = old = None
            size = (512 << ((x >> 8) % 12)) + (x >> 16) % 512
            live[place] = alloc(size, 0), size

    result = timed(count, loop)
    for entry in live:
        if entry is not None:
            free(entry[0], entry[1], 0)
    return result


def _replay(peer: Any, file: str, warm: int, sample: bool) -> dict[str, Any]:
    """Replay as replay.hpp does, from the same file."""
    with open(file, "rb") as source:
        magic, events = struct.unpack("<8sQ", source.read(16))
        if magic != b"SPTRACE1":
            raise ValueError(f"{file} is no trace for a worker")
        arrays = [struct.unpack(f"<{events}{kind}", source.read(events * struct.calcsize(kind))) for kind in "BIQI"]
    rows = list(zip(*arrays, strict=True))
    peer.restart()
    blocks: dict[int, tuple[Any, int, int]] = {}
    alloc, free = peer.alloc, peer.free
    held, peak, cold = -1, 0, 0.0
    times: list[float] = []
    batches: list[float] = []
    for turn in range(warm + 1):
        live = at = 0

        def loop(n: int) -> None:
            nonlocal live, at, held, peak
            for action, block, size, stream in rows[at : at + n]:
                if action:
                    blocks[block] = alloc(size, stream), size, stream
                    if sample:
                        live += size
                        peak, held = max(peak, live), max(held, peer.held())
                else:
                    old = blocks.pop(block)
                    free(old[0], old[1], stream)
                    if sample:
                        live -= old[1]
                    del old
            at += n

        result = timed(events, loop)
        for old in blocks.values():
            free(*old)
        blocks.clear()
        peer.settle()
        if turn == 0:
            cold = result["ns"][0]
        else:
            times += result["ns"]
            batches.append(result["p50"])
            batches.append(result["p99"])
    p50, p99 = sorted(batches[::2]), sorted(batches[1::2])
    middle = len(p50) // 2
    return {
        "cold": cold,
        "ns": times,
        "p50": p50[middle] if p50 else 0,
        "p99": p99[middle] if p99 else 0,
        "left_out": 0.0,
        "held": held,
        "peak_live": peak,
    }


def _measure(peer: Any, loops: dict[str, Callable[[int], None]], command: str) -> dict[str, Any]:
    what, *words = command.split()
    if what == "call":
        return timed(int(words[1]), loops[words[0]])
    if what == "pair":
        return _pair(peer, int(words[0]), int(words[1]))
    if what == "window":
        return _window(peer, int(words[0]), int(words[1]))
    if what == "replay":
        return _replay(peer, words[0], int(words[1]), words[2] == "bytes")
    raise ValueError(f"this worker does not know the command {what!r}")


def main(arguments: list[str]) -> int:
    """Serve until standard input ends."""
    name, *rest = arguments
    given = dict(zip(rest[::2], rest[1::2], strict=True))
    device = given.get("--device", "sim:0")
    say: Callable[[dict[str, Any]], None] = lambda answer: print(json.dumps(answer), flush=True)  # noqa: E731
    try:
        peer, loops = None, {}
        options = given.get("--options", "")
        if name.startswith("calls:"):
            loops = calls.loops_of(name.removeprefix("calls:"), device, options)
        else:
            peer = _PEERS[name](int(device.partition(":")[2] or 0), int(given.get("--streams", 1)), options)
    except Exception as error:  # whatever a library does when it starts is the answer
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    say({"ready": True, "version": ""})
    for line in sys.stdin:
        try:
            say(_measure(peer, loops, line))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
