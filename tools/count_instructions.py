"""Counts the instructions of an allocation and its free under callgrind, and says which functions they belong to.

    python tools/count_instructions.py                                   # prints a table
    python tools/count_instructions.py --json > benchmarks/results/NAME.json

Each pattern runs twice with a different number of operations: the difference has no start-up in it. Needs valgrind, and
the installed streampool.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from streampool import _paths
from streampool._bench import machine

PATTERNS = {  # name: peer, command for n operations, two numbers of operations
    "4 KiB pair, lasting stream": ("streampool", "pair 4096 {} 1 own", (1_000, 11_000)),
    "4 KiB pair, glibc malloc": ("glibc", "pair 4096 {} 1 own", (1_000, 11_000)),
    "1 MiB pair, lasting stream": ("streampool", "pair 1048576 {} 1 own", (1_000, 11_000)),
    "256 live, random sizes, a step": ("streampool", "window 7 {}", (10_000, 40_000)),
    "256 live, random sizes, a step, glibc malloc": ("glibc", "window 7 {}", (10_000, 40_000)),
    "4 KiB pair, raw handle": ("streampool-raw", "pair 4096 {} 1 own", (1_000, 11_000)),
}
_LEAST = 1.0  # instructions of a function that is listed by name
_LINE = re.compile(r"^\s*([\d,]+)\s+\(\s*[\d.]+%\)\s+(\S*?):(.+?)(?: \[[^\]]*\])?$")


def parse(text: str) -> dict[str, int]:
    """Give the instructions of each function in callgrind_annotate's table."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            name = short(match[3])
            found[name] = found.get(name, 0) + int(match[1].replace(",", ""))
    return found


def short(name: str) -> str:
    """Give a function's name without arguments and template arguments."""
    if name.startswith("_ZN5bench"):  # too long for callgrind's own demangler
        return "the benchmark's loop"
    name = re.sub(r"\s*\[clone [^\]]*\]", "", name).replace("(anonymous namespace)::", "").replace("'2", "")
    for opening, closing in ("<>", "()"):
        while (end := name.find(closing)) != -1:
            start = name.rfind(opening, 0, end)
            if start == -1:
                break
            name = name[:start] + name[end + 1 :]
    name = name.removesuffix(" const").replace("streampool::", "").split(" ")[-1]
    return "the benchmark's loop" if name in ("bench::pair", "bench::window", "bench::timed") else name


def count(peer: str, command: str, device: str) -> dict[str, int]:
    """Run one command in a worker and give what callgrind counted."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        worker = [str(_paths.bench_worker_path()), peer, "--device", device]
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", *worker],
            input=f"{command}\n", capture_output=True, text=True, check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout.splitlines()[-1])
        if "error" in answer:
            raise SystemExit(f"{peer}, {command}: {answer['error']}")
        annotate = ["callgrind_annotate", "--threshold=100", "--auto=no", str(out)]
        return parse(subprocess.run(annotate, capture_output=True, text=True, check=True).stdout)


def measure(what: str, device: str) -> dict[str, Any]:
    """Give the instructions an operation of one pattern, by function."""
    peer, command, (few, many) = PATTERNS[what]
    fewer, more = (count(peer, command.format(n), device) for n in (few, many))
    each = {name: (more.get(name, 0) - fewer.get(name, 0)) / (many - few) for name in {*fewer, *more}}
    each.pop("TOTALS", None)
    listed = sorted(((name, c) for name, c in each.items() if c >= _LEAST), key=lambda item: -item[1])
    if rest := sum(c for c in each.values() if c < _LEAST):
        listed.append(("others", rest))
    return {
        "what": what,
        "instructions": sum(each.values()),
        "functions": [{"function": name, "instructions": c} for name, c in listed],
    }


def main() -> int:
    """Count every pattern and print what was found."""
    parser = argparse.ArgumentParser(description="Count the instructions of an allocation and its free.")
    parser.add_argument("--device", default="sim:0")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    for tool in ("valgrind", "callgrind_annotate"):
        if shutil.which(tool) is None:
            print(f"{tool} was not found: install valgrind", file=sys.stderr)
            return 2
    patterns = [measure(what, arguments.device) for what in PATTERNS]
    if arguments.json:
        version = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout.strip()
        facts = {
            "benchmark": "instructions", "date": machine.date(), "commit": machine.commit(),
            "device": arguments.device, "processor": machine.processor(), "valgrind": version,
            "versions": machine.versions(), "patterns": patterns,
        }  # fmt: skip
        print(json.dumps(facts, indent=1))
        return 0
    for pattern in patterns:
        print(f"{pattern['what']}: {pattern['instructions']:.1f} instructions")
        for function in pattern["functions"]:
            print(f"  {function['instructions']:8.1f}  {function['function']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
