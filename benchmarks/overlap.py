"""Step time of two overlapped streams with one shared pool, beside the same steps with a pool for each of them.

    python benchmarks/overlap.py                          # results/DATE-GPU-overlap.json beside this file

Both streams run kernels of a fixed duration on few multiprocessors, so that they run side by side; before each a block
is allocated, and a few kernels later it is freed. What a shared pool could cost is a wait: for a lock, for the other
stream's work, for growth or a trim. So the ratio of the two step times, measured in turns in one process, is all that
counts. `growth`: a third thread takes and trims memory all the while, from the shared pool, or from one of its own.
Ends with 1 if a ratio is above the bar, or if the streams did not overlap.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streampool as sp
from streampool._bench import machine, reports

HERE = Path(__file__).resolve().parent

BAR = 1.02  # shared / separate
OVERLAP_BAR = 1.6  # the same work in one stream / in two: below it nothing was overlapped
KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 60 * KIB, 300 * KIB, MIB, 3 * MIB, 8 * MIB]
OPERATIONS = 24  # of each stream in a step
LIVE = 4  # blocks of each stream, so many kernels long
WARM_STEPS = 10

# Writes a part of the block and runs for a given time.
SOURCE = r"""
typedef unsigned long long number;
extern "C" __global__ void work(unsigned char* at, number size, number nanoseconds) {
  number begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  for (number i = blockIdx.x * (number)blockDim.x + threadIdx.x; i < size && i < 65536; i += gridDim.x * blockDim.x)
    at[i] = (unsigned char)i;
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - begin < nanoseconds);
}
"""


class Work:
    """The kernel."""

    def __init__(self) -> None:
        from cuda import core

        self._core = core
        self._kernel = core.Program(SOURCE, code_type="c++").compile("cubin").get_kernel("work")
        self._config = core.LaunchConfig(grid=4, block=256)

    def queue(self, stream: Any, address: int, size: int, nanoseconds: int) -> None:
        self._core.launch(stream, self._config, self._kernel, address, size, nanoseconds)


class Lane:
    """One stream's steps."""

    def __init__(self, work: Work, stream: Any, pool: sp.Pool, nanoseconds: int, seed: int) -> None:
        self.work, self.stream, self.pool, self.nanoseconds = work, stream, pool, nanoseconds
        self.choice = random.Random(seed)
        self.live: deque[int] = deque()

    def operation(self) -> None:
        size = self.choice.choice(SIZES)
        address = self.pool.allocate_raw(size, stream=self.stream)
        self.work.queue(self.stream, address, size, self.nanoseconds)
        self.live.append(address)
        if len(self.live) > LIVE:
            self.pool.free_raw(self.live.popleft(), stream=self.stream)

    def step(self) -> None:
        for _ in range(OPERATIONS):
            self.operation()

    def end(self) -> None:
        while self.live:
            self.pool.free_raw(self.live.popleft(), stream=self.stream)


@dataclass(frozen=True)
class Setting:
    """One row: who launches, how long a kernel runs, and what goes on beside."""

    threads: int
    kernel_us: int
    beside: str  # "nothing" or "growth"


def run_steps(lanes: list[Lane], steps: int, threads: int) -> float:
    """Run steps on every lane, from one thread in turns or from a thread for each; give the microseconds of a step."""

    def all_steps(lane: Lane) -> None:
        for _ in range(steps):
            lane.step()

    began = time.perf_counter()
    if threads == 1:
        for _ in range(steps * OPERATIONS):
            for lane in lanes:
                lane.operation()
    else:
        workers = [threading.Thread(target=all_steps, args=(lane,)) for lane in lanes]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for lane in lanes:
        lane.stream.sync()
    return (time.perf_counter() - began) / steps * 1e6


def grow_and_trim(pool: sp.Pool, stream: Any, over: threading.Event) -> None:
    while not over.is_set():
        block = pool.allocate(128 * MIB, stream=stream)
        block.close(stream)
        pool.trim(256 * MIB)
        over.wait(0.002)


def measure(device: Any, work: Work, setting: Setting, repetitions: int, steps: int) -> dict[str, Any]:
    """Measure one setting: shared, separate and one stream for all, in turns."""
    streams = [device.create_stream() for _ in range(3)]
    shared = sp.Pool(device, name="shared")
    own = [sp.Pool(device, name=f"own {i}") for i in range(3)]
    for stream, pool in zip(streams, own, strict=True):
        shared.register_stream(stream)
        pool.register_stream(stream)
    own[0].register_stream(streams[1])
    nanoseconds = setting.kernel_us * 1000

    def lanes(pools: list[sp.Pool], on: list[Any]) -> list[Lane]:
        return [
            Lane(work, stream, pool, nanoseconds, i) for i, (pool, stream) in enumerate(zip(pools, on, strict=True))
        ]

    kinds = {
        "shared": (lanes([shared, shared], streams[:2]), shared),
        "separate": (lanes(own[:2], streams[:2]), own[2]),
        "one stream": (lanes([own[0], own[0]], [streams[0], streams[0]]), own[2]),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, (both, _) in kinds.items():
        run_steps(both, WARM_STEPS, setting.threads if kind != "one stream" else 1)
    before = shared.stats()
    for _ in range(repetitions):
        for kind, (both, pool) in kinds.items():
            over = threading.Event()
            beside = threading.Thread(target=grow_and_trim, args=(pool, streams[2], over))
            if setting.beside == "growth":
                beside.start()
            times[kind].append(run_steps(both, steps, setting.threads if kind != "one stream" else 1))
            over.set()
            if setting.beside == "growth":
                beside.join()
    after = shared.stats()
    for both, _ in kinds.values():
        for lane in both:
            lane.end()
    device.sync()
    result: dict[str, Any] = {"threads": setting.threads, "kernel_us": setting.kernel_us, "beside": setting.beside}
    for kind, values in times.items():
        name = kind.replace(" ", "_")
        result[f"{name}_us_per_step"] = round(statistics.median(values), 1)
        result[f"{name}_us_per_step_range"] = [round(min(values), 1), round(max(values), 1)]
    result["ratio"] = round(statistics.median(times["shared"]) / statistics.median(times["separate"]), 4)
    result["overlap"] = round(statistics.median(times["one stream"]) / statistics.median(times["shared"]), 3)
    result["reserved_bytes"] = {
        "shared": after.reserved_peak, "separate": own[0].stats().reserved_peak + own[1].stats().reserved_peak
    }  # fmt: skip
    for name in ("allocations", "polls", "fences", "wait_edges", "host_waits", "context_events"):
        result[f"shared_{name}"] = after[name] - before[name]
    result["shared_growth"] = after.paths["grown"] - before.paths["grown"]
    for pool in [shared, *own]:
        pool.close()
    for stream in streams:
        stream.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Step time of two overlapped streams, one pool beside two.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="of one measurement")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    arguments = parser.parse_args()

    device = sp.Device(arguments.device)
    facts = {**machine.facts(device), "packages": machine.versions()}
    work = Work()
    rows, bad = [], []
    for beside in ("nothing", "growth"):
        for threads in (1, 2):
            for kernel_us in (100, 40):
                setting = Setting(threads, kernel_us, beside)
                row = measure(device, work, setting, arguments.repetitions, arguments.steps)
                gc.collect()
                rows.append(row)
                print(
                    f"{threads} threads, kernels of {kernel_us:3} us, beside them {beside:8} "
                    f"shared {row['shared_us_per_step']:8.0f} us a step, separate {row['separate_us_per_step']:8.0f}, "
                    f"ratio {row['ratio']:.3f}; all in one stream {row['overlap']:.2f} times that",
                    flush=True,
                )
                if row["ratio"] > BAR:
                    bad.append(f"{setting}: {row['ratio']:.3f} times two separate pools, above {BAR}")
                if row["overlap"] < OVERLAP_BAR:
                    bad.append(f"{setting}: the streams did not overlap ({row['overlap']:.2f})")

    return reports.write(
        arguments.out,
        "overlap",
        what="microseconds of a step of two overlapped streams: one shared pool, a pool each, all in one stream",
        command=(
            "python benchmarks/overlap.py"
            f" --device {arguments.device} --repetitions {arguments.repetitions} --steps {arguments.steps}"
        ),
        facts=facts,
        bar={"shared / separate": BAR, "one stream / shared, at least": OVERLAP_BAR},
        rows=rows,
        problems=bad,
    )


if __name__ == "__main__":
    sys.exit(main())
