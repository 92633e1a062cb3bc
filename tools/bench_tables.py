"""Writes the tables of benchmarks/README.md and README.md from the files of benchmarks/results.

    python tools/bench_tables.py            # writes them
    python tools/bench_tables.py --check    # ends with 1 where they are not what the files say

A table stands between `<!-- table: FILE PART -->` and `<!-- end of table -->`. FILE is a result; PART is what to show:
a kind of `streampool bench`, `features` (the parts of debug mode, of the kind debug), `budgets`, `machine`, `headline`;
`program` of the program pairs, `traces` of gpu_traces.py, `overlap` of overlap.py, `instructions` of
count_instructions.py. Needs the installed streampool.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from streampool._bench import tables
from streampool._bench.kinds import FEATURES_PATTERN

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "benchmarks" / "README.md", ROOT / "README.md")
_TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

_Result = Mapping[str, Any]


def _kind(part: str) -> Callable[[_Result], str]:
    def show(result: _Result) -> str:
        rows = [row for row in result["rows"] if row["kind"] == part]
        if not rows:
            raise SystemExit(f"the result has no rows of the kind {part}")
        only = {**result, "kinds": [part], "rows": rows, "budgets": []}
        return "\n\n".join(tables.markdown(table) for table in tables.tables(only))

    return show


def _features(result: _Result) -> str:
    """Give what each part of debug mode costs: of the kind debug, that table alone."""
    rows = [row for row in result["rows"] if row["pattern"] == FEATURES_PATTERN]
    if not rows:
        raise SystemExit("the result has no rows of debug mode's parts: `streampool bench debug` measures them")
    return _kind("debug")({**result, "rows": rows})


def _budgets(result: _Result) -> str:
    (table,) = tables.tables({**result, "kinds": []})
    return tables.markdown(table)


def _machine(result: _Result) -> str:
    machine, versions = result["machine"], result["versions"]
    peers = {p["label"].partition(",")[0]: p["version"] for p in result["peers"] if not p["absent"] and p["version"]}
    others = ", ".join(f"{label} {version}" for label, version in peers.items() if not label.startswith("streampool"))
    where = f"{machine['gpu']}, {machine['driver']}" if machine["gpu"] else "the simulated device"
    return (
        f"{where}; {machine['processor']}, {machine['cores']} cores, {machine['system']}; streampool "
        f"{versions['streampool']} at {result['commit']}; {others}. {result['date'][:10]}: `{result['command']}`"
    )


def _headline(result: _Result) -> str:
    """Give the front page's table."""
    rows = result["rows"]
    lines = ["| | streampool | the next |", "| --- | ---: | ---: |"]

    def of(kind: str, **wanted: Any) -> list[_Result]:
        return [r for r in rows if r["kind"] == kind and all(r["parameters"].get(k) == v for k, v in wanted.items())]

    def against(what: str, mine: list[_Result], key: Callable[[_Result], float], show: Callable[[float], str]) -> None:
        ours = next((r for r in mine if r["peer"] == "streampool"), None)
        others = [r for r in mine if not r["peer"].startswith("streampool")]
        if ours is None or not others:
            return
        best = min(others, key=key)
        lines.append(f"| {what} | {show(key(ours))} | {show(key(best))} ({best['label']}) |")

    def time(row: _Result) -> float:
        return float(row["median"])

    def ns(value: float) -> str:
        return f"{tables.number(value)} ns"

    on_gpu = bool(result["machine"]["gpu"])
    gpu = [r for r in rows if r["peer"] not in ("glibc", "mimalloc")] if on_gpu else rows
    rows = gpu
    against("4 KiB, allocated and freed, one thread", of("pairs", size=4096), time, ns)
    against("256 live, random sizes to 1 MiB, a pair", of("window"), time, ns)
    for trace in dict.fromkeys(r["pattern"] for r in of("replay")):
        against(f"{trace}, an event", of("replay", trace=trace), time, ns)
        held = [r for r in of("replay", trace=trace) if "held_ratio" in r["extra"] and r["peer"] != "cub"]
        against(
            f"{trace}, bytes held / peak live", held, lambda r: float(r["extra"]["held_ratio"]), lambda v: f"{v:.3f}"
        )
    return "\n".join(lines)


def _traces(result: _Result) -> str:
    table = tables.Table(
        "Replays in production and debug mode",
        ["", "reserved / live", "the log's own allocator", "debug mode", "warm ns an event", "cold"],
    )
    runs = {(r["trace"], r["mode"], r["verified"]): r for r in result["results"]}
    for trace in sorted({name for name, _, _ in runs}):
        plain, debug = runs[trace, "production", False], runs[trace, "debug", False]
        ratios = (f"{plain['ratio']:.3f}", f"{plain['own_ratio']:.2f}", f"{debug['ratio']:.3f}")
        times = map(tables.number, (plain["ns_per_event"], plain["ns_per_event_cold"]))
        table.rows.append([trace, *ratios, *times])
    return tables.markdown(table)


def _overlap(result: _Result) -> str:
    table = tables.Table(
        "Two overlapped streams: microseconds a step",
        ["host threads, kernel, beside", "shared / separate", "one shared pool", "a pool each", "all in one stream"],
    )
    for run in result["results"]:
        what = f"{run['threads']}, {run['kernel_us']} µs, {run['beside']}"
        times = (run[f"{name}_us_per_step"] for name in ("shared", "separate", "one_stream"))
        table.rows.append([what, f"{run['ratio']:.3f}", *map(tables.number, times)])
    return tables.markdown(table)


def _instructions(result: _Result) -> str:
    made = []
    for pattern in result["patterns"]:
        table = tables.Table(f"{pattern['what']}: {pattern['instructions']:.1f} instructions", ["function", "each"])
        table.rows = [[f"`{f['function']}`", f"{f['instructions']:.1f}"] for f in pattern["functions"]]
        made.append(tables.markdown(table))
    return "\n\n".join(made)


def _program(result: _Result) -> str:
    title = f"The program pairs on {result['device']}, {result['machine']['cores']} cores"
    table = tables.Table(title, ["", "threads", "× glibc malloc", "ns a pair", "least"])  # noqa: RUF001
    for figure in result["figures"]:
        figures = map(tables.number, (figure["against_malloc"], figure["median"], figure["min"]))
        table.rows.append([figure["what"], str(figure["threads"]), *figures])
    return tables.markdown(table)


_PARTS: dict[str, Callable[[_Result], str]] = {
    "features": _features,
    "budgets": _budgets,
    "machine": _machine,
    "headline": _headline,
    "program": _program,
    "traces": _traces,
    "overlap": _overlap,
    "instructions": _instructions,
}


def rendered(page: str) -> str:
    """Give a page with its tables written anew."""

    def one(match: re.Match[str]) -> str:
        head, file, part, end = match.groups()
        result = json.loads((RESULTS / file).read_text())
        show = _PARTS.get(part) or _kind(part)
        return f"{head}{show(result)}\n{end}"

    return _TABLE.sub(one, page)


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description="Write the tables of the benchmarks' pages from their results.")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where a page would change")
    check = parser.parse_args().check
    stale = []
    for path in PAGES:
        text = path.read_text()
        new = rendered(text)
        if new == text:
            continue
        stale.append(path.relative_to(ROOT))
        if not check:
            path.write_text(new)
    for name in stale:
        print(f"{name}: {'its tables are not what the results say' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
