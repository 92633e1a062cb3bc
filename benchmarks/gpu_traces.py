"""Replays the shipped traces on a GPU, in production and debug mode, plain and verified, and writes the figures down.

    python benchmarks/gpu_traces.py                       # results/DATE-GPU-traces.json beside this file
    python benchmarks/gpu_traces.py --device sim --out . --passes 1

Each figure is of one process on one machine. What counts is the ratio of reserved to live bytes, which is exact, and
the cost of debug mode against production mode in the same run. Ends with 1 if a replay fails or a ratio is too high.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import streampool as sp
from streampool import _core

HERE = Path(__file__).resolve().parent
TRACES = HERE.parent / "examples" / "traces"
MODES = ("production", "debug")
BAR = 1.3  # reserved / live in production mode
PACKAGES = ("streampool", "cuda-core", "cuda-bindings", "numpy", "nanobind")


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Give the commit of this tree, with a + where files differ from it."""
    if given := os.environ.get("STREAMPOOL_COMMIT"):
        return given

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(HERE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def machine(device: Any) -> dict[str, Any]:
    with sp.Pool(device) as pool:
        driver = pool.driver
        _, total = driver.memory_info()
        return {
            "device": driver.name,
            "gpu": str(device.name),
            "memory_bytes": total,
            "driver": driver.version,
            "processor": processor(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "compiler": _core.build_info(),
            "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        }


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
    facts = machine(device)
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

    now = datetime.datetime.now(datetime.UTC)
    gpu = re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower().replace("nvidia", "")).strip("-")
    report = {
        "what": "replay of examples/traces: allocations and frees in a native loop, nothing queued between them",
        "command": f"python benchmarks/gpu_traces.py --device {arguments.device} --passes {arguments.passes}",
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": facts,
        "bar": {"production reserved / live": BAR},
        "problems": bad,
        "results": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"{now:%Y-%m-%d}-{gpu}-traces.json"
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {file}")
    for problem in bad:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
