"""Replays the shipped traces on a GPU, in production and debug mode, plain and verified, and writes the figures down.

    python benchmarks/gpu_traces.py                       # results/DATE-GPU-traces.json beside this file
    python benchmarks/gpu_traces.py --device sim --out . --passes 1

Each figure is of one process on one machine. What counts is the ratio of reserved to live bytes, which is exact, and
the cost of debug mode against production mode in the same run. Ends with 1 if a replay fails or a ratio is too high.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import streampool as sp
from streampool._bench import machine, reports

HERE = Path(__file__).resolve().parent
TRACES = HERE.parent / "examples" / "traces"
MODES = ("production", "debug")
BAR = 1.3  # reserved / live in production mode


def row_of(result: sp.replay.ReplayResult) -> dict[str, Any]:
    """Give what is worth keeping of a replay."""
    plain = result.to_dict()
    names = (
        "trace mode verified events streams passes ns_per_event_cold ns_per_event peak_live_bytes peak_reserved_bytes "
        "ratio live_at_end_bytes failures verify_errors faults own_allocator own_ratio reuse notes verdict"
    )
    return {name: plain[name] for name in names.split()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Replay the shipped traces on a GPU.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    arguments = parser.parse_args()

    device = sp.Device(arguments.device)
    facts = {**machine.facts(device), "packages": machine.versions()}
    rows, bad = [], []
    for path in sorted(TRACES.glob("*.csv.gz")):
        trace = sp.traces.read_trace(path)
        for mode in MODES:
            for verify in (False, True):
                result = sp.replay.replay(trace, device, mode, verify=verify, passes=arguments.passes)
                gc.collect()  # the pool is dropped before the next one is made
                rows.append(row_of(result))
                print(
                    f"{trace.name:22} {mode:10} {'verified' if verify else '':8} "
                    f"cold {result.ns_per_event_cold:9.0f} ns, warm {result.ns_per_event:9.0f} ns per event; "
                    f"reserved / live {result.ratio:.3f}; faults {result.faults}, failures {result.failures}",
                    flush=True,
                )
                if not result.is_clean:
                    bad.append(f"{trace.name}, {mode}: {result.verdict}")
                if mode == "production" and result.ratio > BAR:
                    bad.append(f"{trace.name}: reserved is {result.ratio:.3f} times live, above {BAR}")

    return reports.write(
        arguments.out,
        "traces",
        what="replay of examples/traces: allocations and frees in a native loop, nothing queued between them",
        command=f"python benchmarks/gpu_traces.py --device {arguments.device} --passes {arguments.passes}",
        facts=facts,
        bar={"production reserved / live": BAR},
        rows=rows,
        problems=bad,
    )


if __name__ == "__main__":
    sys.exit(main())
