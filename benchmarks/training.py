"""What a training script costs under ``streampool run``, beside plain PyTorch: in turns, in one run, on one machine.

    python benchmarks/training.py --json result.json

Each script of ``training/`` knows nothing of streampool and prints its step time and its peaks. It is run plain, plain
with PyTorch's expandable segments, and under ``streampool run`` in production and debug mode, in every repetition in
another order, so that what the machine does meanwhile meets them all. PyTorch's own sanitizer and compute-sanitizer,
where it is found, are run once, with fewer steps. ``--seconds`` bounds it all: what was measured by then is shown, and
what was not is named. Ends with 1 where a run failed that is not a checker's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "training"
FEW_STEPS = 9  # of a checker that makes a step many times longer
CHECKERS_PART = 0.2  # of all the time, at most, for one of them
GUESS = 20.0  # seconds that a run takes, before one is known


@dataclass(frozen=True)
class Way:
    """A way to run a script, and what it is compared with."""

    name: str
    prefix: tuple[str, ...] = ()  # after python
    environment: tuple[tuple[str, str], ...] = ()
    under: str = ""  # a program that runs python
    under_options: tuple[str, ...] = ()
    once: bool = False


RUN = ("-P", "-m", "streampool", "run", "--device", "cuda")
PLAIN, EXPANDABLE = "plain", "plain, expandable segments"
PRODUCTION, VMM, DEBUG = "streampool, production", "streampool, production, segments=vmm", "streampool, debug"
WAYS = (
    Way(PLAIN, environment=(("PYTORCH_CUDA_ALLOC_CONF", ""),)),
    Way(EXPANDABLE, environment=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)),
    Way(PRODUCTION, (*RUN, "--mode", "production")),
    Way(VMM, (*RUN, "--mode", "production"), (("STREAMPOOL_OPTIONS", "segments=vmm"),)),
    Way(DEBUG, (*RUN, "--mode", "debug")),
    Way("PyTorch's CUDA sanitizer", environment=(("TORCH_CUDA_SANITIZER", "1"),), once=True),
    Way(
        "compute-sanitizer memcheck",
        under="compute-sanitizer",
        under_options=("--tool", "memcheck", "--error-exitcode", "0"),
        once=True,
    ),
)

# What the project promises of a script: a figure of a way, at most so much of another way's.
PROMISES = (
    ("step time in production", "step_ms", PRODUCTION, PLAIN, 1.02, ""),
    ("peak reserved in production", "peak_reserved", PRODUCTION, PLAIN, 1.0, ""),
    ("peak reserved with segments=vmm", "peak_reserved", VMM, EXPANDABLE, 1.0, ""),
    ("step time in debug mode", "step_ms", DEBUG, PLAIN, 1.25, "resnet18"),
)


def find_program(name: str) -> str | None:
    """Give a program of the CUDA toolkit, which need not be on the PATH."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    return shutil.which(name) or next((p for home in homes if home and (p := shutil.which(f"{home}/bin/{name}"))), None)


def measure(script: Path, way: Way, arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run a script once: what it says of itself and its exit code; or, under ``failed``, why there is nothing."""
    found: dict[str, Any] = {"script": script.stem, "way": way.name}
    began = time.monotonic()
    under = find_program(way.under) if way.under else ""
    if under is None:
        return {**found, "absent": f"{way.under} was not found"}
    steps = ["--steps", str(FEW_STEPS)] if way.once else []
    command = [*([under, *way.under_options] if under else []), sys.executable, *way.prefix, str(script)]
    try:
        done = subprocess.run(
            [*command, *arguments, *steps],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env={**os.environ, **dict(way.environment)},
        )
    except subprocess.TimeoutExpired:
        return {**found, "failed": f"it did not end within {timeout:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        return {
            **found,
            "failed": f"no result, exit code {done.returncode}: {last[0][:300]}",
            "said": done.stderr[-2000:],
        }
    said: dict[str, Any] = json.loads(lines[-1])
    return {**said, **found, "exit_code": done.returncode, "seconds": round(time.monotonic() - began, 1)}


@dataclass
class Session:
    """One run of the benchmark: which script is run which way next, until all is done or the time is up."""

    scripts: Sequence[Path]
    repetitions: int
    seconds: float
    run: Callable[[Path, Way, float], dict[str, Any]]
    clock: Callable[[], float] = time.monotonic
    ways: Sequence[Way] = WAYS
    runs: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def plan(self) -> Iterator[tuple[Path, Way]]:
        """Give every script each way once before anything is repeated; the checkers after the first repetition."""
        turning = [way for way in self.ways if not way.once]
        for repetition in range(self.repetitions):
            turn = repetition % len(turning)
            for script in self.scripts:
                for way in (*turning[turn:], *turning[:turn]):
                    yield script, way
            if repetition == 0:
                for way in self.ways:
                    if way.once:
                        yield self.scripts[0], way

    def go(self, say: Callable[[str], None]) -> None:
        """Do it. What failed once is not tried again; what would not end in time is not begun."""
        ends = self.clock() + self.seconds
        took: dict[str, float] = {}
        given_up: set[tuple[str, str]] = set()
        late = 0
        for script, way in self.plan():
            if (script.stem, way.name) in given_up:
                continue
            left = ends - self.clock()
            if left < took.get(way.name, max(took.values(), default=GUESS)):
                late += 1
                continue
            began = self.clock()
            one = self.run(script, way, min(left, self.seconds * CHECKERS_PART) if way.once else left)
            took[way.name] = max(took.get(way.name, 0.0), self.clock() - began)
            why = one.get("failed") or one.get("absent")
            if why:
                given_up.add((script.stem, way.name))
                note = f"{script.stem}, {way.name}: {why}"
                if "failed" in one and not way.once:
                    self.problems.append(note)
                say(note)
            else:
                say(f"{script.stem}, {way.name}: {one['step_ms']:.2f} ms")
            self.runs.append(one)
        if late:
            say(f"{late} runs were not begun: the time was up (--seconds {self.seconds:.0f})")


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give a row for each script and way: medians, and ratios to plain PyTorch's."""
    order = {way.name: place for place, way in enumerate(WAYS)}
    measured = sorted((r for r in runs if "step_ms" in r), key=lambda run: order.get(run["way"], len(order)))
    rows = []
    for script in dict.fromkeys(run["script"] for run in measured):
        of_script = [run for run in measured if run["script"] == script]
        base: dict[str, Any] | None = None
        for way in dict.fromkeys(run["way"] for run in of_script):
            mine = [run for run in of_script if run["way"] == way]
            row: dict[str, Any] = {
                "script": script,
                "way": way,
                "step_ms": statistics.median(run["step_ms"] for run in mine),
                "peak_reserved": max(run["peak_reserved"] for run in mine),
                "exit_codes": sorted({run["exit_code"] for run in mine}),
                "loss": mine[0]["loss"],
                "runs": len(mine),
            }
            if way == PLAIN:
                base = row
            row["step_ratio"] = row["step_ms"] / base["step_ms"] if base else None
            row["reserved_ratio"] = (
                row["peak_reserved"] / base["peak_reserved"] if base and base["peak_reserved"] else None
            )
            rows.append(row)
    return rows


def promises(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hold the rows against what the project promises: where both ways were measured."""
    found = {(row["script"], row["way"]): row for row in rows}
    made = []
    for what, figure, ours, other, bar, only in PROMISES:
        for script in dict.fromkeys(row["script"] for row in rows):
            a, b = found.get((script, ours)), found.get((script, other))
            if a is None or b is None or not b[figure] or (only and script != only):
                continue
            ratio = a[figure] / b[figure]
            made.append(
                {"what": f"{script}: {what}, of {other}", "value": ratio, "bar": bar, "kept": bool(ratio <= bar)}
            )
    return made


def table(rows: list[dict[str, Any]]) -> str:
    """Give the rows as a table of Markdown, ratios first."""
    lines = [
        "| script | | step, of plain | peak reserved, of plain | step, ms | peak reserved, MiB | runs | exit code |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        codes = ", ".join(map(str, row["exit_codes"]))
        ratios = ("" if row[key] is None else f"{row[key]:.3f}" for key in ("step_ratio", "reserved_ratio"))
        lines.append(
            f"| {row['script']} | {row['way']} | {' | '.join(ratios)} | {row['step_ms']:.2f} "
            f"| {row['peak_reserved'] / 2**20:.0f} | {row['runs']} | {codes} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table and what is promised of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", default="resnet18,gpt", help="names in benchmarks/training, or files of yours")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240, help="for everything")
    parser.add_argument("--json", type=Path, help="write all runs, the summary and the promises here")
    parser.add_argument("arguments", nargs="*", help="for the scripts: -- --steps 30")
    options = parser.parse_args()
    scripts = [Path(name) if name.endswith(".py") else SCRIPTS / f"{name}.py" for name in options.scripts.split(",")]
    for script in scripts:
        if not script.exists():
            parser.error(f"there is no {script}")
    if options.repetitions < 1:
        parser.error("--repetitions is at least 1")
    session = Session(
        scripts, options.repetitions, options.seconds, lambda s, way, left: measure(s, way, options.arguments, left)
    )
    session.go(lambda text: print(text, file=sys.stderr, flush=True))
    rows = summary(session.runs)
    held = promises(rows)
    print(table(rows))
    print()
    for one in held:
        print(f"{'kept' if one['kept'] else 'NOT KEPT'}: {one['what']}: {one['value']:.3f}, at most {one['bar']}")
    for problem in session.problems:
        print(f"failed: {problem}")
    if options.json is not None:
        found = {"runs": session.runs, "summary": rows, "promises": held, "problems": session.problems}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if session.problems or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
