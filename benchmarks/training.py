"""What a training script costs under ``streampool run``, beside plain PyTorch: in turns, in one run, on one machine.

    python benchmarks/training.py --json result.json

Each script of ``training/`` knows nothing of streampool and prints its step time and its peaks. It is run plain, plain
with PyTorch's expandable segments, and under ``streampool run`` in production and debug mode, in every repetition in
another order, so that what the machine does meanwhile meets them all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "training"


@dataclass(frozen=True)
class Way:
    """A way to run a script, and what it is compared with."""

    name: str
    prefix: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


RUN = ("-P", "-m", "streampool", "run", "--device", "cuda")
WAYS = (
    Way("plain"),
    Way("plain, expandable segments", environment=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)),
    Way("streampool, production", (*RUN, "--mode", "production")),
    Way(
        "streampool, production, segments=vmm",
        (*RUN, "--mode", "production"),
        (("STREAMPOOL_OPTIONS", "segments=vmm"),),
    ),
    Way("streampool, debug", (*RUN, "--mode", "debug")),
)


def measure(script: Path, way: Way, arguments: list[str], timeout: float) -> dict[str, Any]:
    """Run a script once; what it says of itself, and its exit code."""
    done = subprocess.run(
        [sys.executable, *way.prefix, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={**os.environ, **dict(way.environment)},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{script.name}, {way.name}: no result (exit code {done.returncode})\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return {**found, "way": way.name, "exit_code": done.returncode}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give a row for each script and way: medians, and ratios to plain PyTorch's."""
    rows = []
    for script in dict.fromkeys(run["script"] for run in runs):
        of_script = [run for run in runs if run["script"] == script]
        base: dict[str, Any] | None = None
        for way in dict.fromkeys(run["way"] for run in of_script):
            mine = [run for run in of_script if run["way"] == way]
            row = {
                "script": script,
                "way": way,
                "step_ms": statistics.median(run["step_ms"] for run in mine),
                "peak_reserved": max(run["peak_reserved"] for run in mine),
                "exit_codes": sorted({run["exit_code"] for run in mine}),
                "loss": mine[0]["loss"],
            }
            base = base or row
            row["step_ratio"] = row["step_ms"] / base["step_ms"]
            row["reserved_ratio"] = row["peak_reserved"] / base["peak_reserved"]
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Give the rows as a table of Markdown."""
    lines = [
        "| script | | step, ms | of plain | peak reserved, MiB | of plain | exit code |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        codes = ", ".join(map(str, row["exit_codes"]))
        lines.append(
            f"| {row['script']} | {row['way']} | {row['step_ms']:.2f} | {row['step_ratio']:.3f} "
            f"| {row['peak_reserved'] / 2**20:.0f} | {row['reserved_ratio']:.3f} | {codes} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", default="resnet18,gpt", help="names in benchmarks/training, with commas")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    parser.add_argument("--json", type=Path, help="write all runs and the summary here")
    parser.add_argument("arguments", nargs="*", help="for the scripts: -- --steps 30")
    options = parser.parse_args()
    runs = []
    for name in options.scripts.split(","):
        script = SCRIPTS / f"{name}.py"
        if not script.exists():
            parser.error(f"there is no {script}")
        for repetition in range(options.repetitions):
            turn = repetition % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):
                runs.append(measure(script, way, options.arguments, options.timeout))
                print(f"{name}, {way.name}: {runs[-1]['step_ms']:.2f} ms", file=sys.stderr, flush=True)
    order = {way.name: place for place, way in enumerate(WAYS)}
    rows = summary(sorted(runs, key=lambda run: order[run["way"]]))
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps({"runs": runs, "summary": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
