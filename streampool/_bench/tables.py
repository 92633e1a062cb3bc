"""A result as tables: one description, for a terminal or as Markdown. Takes plain data, so saved results will do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streampool._sizes import format_size

__all__ = ["Table", "markdown", "tables"]

_Row = Mapping[str, Any]
_TIMES = "×"  # noqa: RUF001


@dataclass(slots=True)
class Table:
    """Headings and rows of text. The first column stands left, the others right."""

    title: str
    headings: list[str]
    rows: list[list[str]] = field(default_factory=list)


def number(value: float) -> str:
    """Write a figure with three digits that mean something, and no more."""
    if value >= 99.95:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _ratio(row: _Row) -> str:
    return "" if row["ratio"] is None else number(float(row["ratio"]))


def _label(row: _Row) -> str:
    return str(row["label"]) + (
        ", from Python" if row["interface"] == "Python" and "call" not in row["parameters"] else ""
    )


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Give a result's tables: the promises first, then each kind's."""
    rows: Sequence[_Row] = result["rows"]
    found = [_budgets(result["budgets"])] if result["budgets"] else []
    for kind in result["kinds"]:
        mine = [row for row in rows if row["kind"] == kind]
        if mine:
            found += _BY_KIND.get(kind, _plain)(mine)
    return found


def _budgets(checks: Iterable[Mapping[str, Any]]) -> Table:
    table = Table("What the design promises", ["", "figure", "at most", "kept"])
    for one in checks:
        unit = f" {one['unit']}"
        what = one["what"] + (f" ({one['note']})" if one["note"] else "")
        table.rows.append(
            [what, number(one["value"]) + unit, number(one["bar"]) + unit, "yes" if one["kept"] else "no"]
        )
    return table


def _patterns(rows: Sequence[_Row]) -> Iterator[tuple[str, list[_Row]]]:
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        yield pattern, [row for row in rows if row["pattern"] == pattern]


def _plain(rows: Sequence[_Row]) -> list[Table]:
    """Give a table a pattern, the cheapest first: ratio, median, p50, p99."""
    made = []
    for pattern, mine in _patterns(rows):
        baseline = next((row["baseline"] for row in mine if row["baseline"]), "")
        table = Table(pattern, ["", *([f"{_TIMES} {baseline}"] if baseline else []), mine[0]["unit"], "p50", "p99"])
        for row in sorted(mine, key=lambda row: row["median"]):
            ratio = [_ratio(row)] if baseline else []
            table.rows.append([_label(row), *ratio, *map(number, (row["median"], row["p50"], row["p99"]))])
        made.append(table)
    return made


def _libraries(rows: Sequence[_Row]) -> list[Table]:
    """Give one table, library by library: its own pool, and what stands in its place."""
    table = Table(rows[0]["pattern"], ["", f"{_TIMES} its own pool", rows[0]["unit"], "p50", "p99"])
    for row in rows:
        table.rows.append([_label(row), _ratio(row), *map(number, (row["median"], row["p50"], row["p99"]))])
    return [table]


def _debug(rows: Sequence[_Row]) -> list[Table]:
    """Give the plain tables, and for the parts of debug mode what each adds, in the order of their making."""
    made = []
    for pattern, mine in _patterns(rows):
        plain = next((row for row in mine if row["parameters"].get("call") == "feature-none"), None)
        if plain is None:
            made += _plain(mine)
            continue
        table = Table(pattern, ["", f"{_TIMES} {plain['label']}", "adds, ns", mine[0]["unit"], "p50", "p99"])
        for row in mine:
            adds = "" if row is plain else number(max(0.0, row["median"] - plain["median"]))
            figures = map(number, (row["median"], row["p50"], row["p99"]))
            table.rows.append([_label(row), _ratio(row), adds, *figures])
        made.append(table)
    return made


def _threads(rows: Sequence[_Row]) -> list[Table]:
    """Give a table a size and way of sharing: a column a number of threads, with the ratio to one thread at the end."""
    made = []
    for pattern, mine in _patterns(rows):
        counts = sorted({row["parameters"]["threads"] for row in mine})
        table = Table(
            f"{pattern}: {mine[0]['unit']}",
            ["", f"{_TIMES} one thread", *(f"{n} threads" if n > 1 else "1 thread" for n in counts), "p99"],
        )
        last: dict[str, float] = {}
        cells: dict[str, list[str]] = {}
        for label in dict.fromkeys(row["label"] for row in mine):
            by_count = {row["parameters"]["threads"]: row for row in mine if row["label"] == label}
            widest = by_count[max(by_count)]
            last[label] = widest["median"]
            figures = [number(by_count[n]["median"]) if n in by_count else "" for n in counts]
            cells[label] = [label, _ratio(widest), *figures, number(widest["p99"])]
        table.rows = [cells[label] for label in sorted(cells, key=lambda label: last[label])]
        made.append(table)
    return made


def _freelist(rows: Sequence[_Row]) -> list[Table]:
    """Give a table an order: allocation / free by number of free extents, and the ratio of the most to the fewest."""
    made = []
    for order in dict.fromkeys(row["parameters"]["order"] for row in rows):
        mine = [row for row in rows if row["parameters"]["order"] == order]
        counts = sorted({row["parameters"]["pieces"] for row in mine})
        shown = [f"{n:,}".replace(",", " ") for n in counts]
        table = Table(
            f"Free extents, {order} order: ns an allocation / a free",
            ["", f"{_TIMES} {shown[0]} extents", *shown],
        )
        for label in dict.fromkeys(row["label"] for row in mine):
            by = {
                (row["parameters"]["pieces"], row["parameters"]["part"]): row for row in mine if row["label"] == label
            }

            def both(n: int, key: str, by: dict[Any, _Row] = by) -> str:
                found = [by[n, part][key] for part in ("alloc", "free") if (n, part) in by]
                return " / ".join(number(value) for value in found if value is not None)

            most = max(n for n, _ in by)
            table.rows.append([label, both(most, "ratio"), *(both(n, "median") for n in counts)])
        made.append(table)
    return made


def _replay(rows: Sequence[_Row]) -> list[Table]:
    """Give a table a trace: ratio of times, bytes held / peak live, times."""
    made = []
    for trace, mine in _patterns(rows):
        baseline = next((row["baseline"] for row in mine if row["baseline"]), "")
        live = next((row["extra"]["peak_live_bytes"] for row in mine if "peak_live_bytes" in row["extra"]), None)
        title = trace + (f", peak live {format_size(live)}" if live else "")
        table = Table(title, ["", f"{_TIMES} {baseline}", "held / live", "warm, ns an event", "p50", "p99", "cold"])
        for row in sorted(mine, key=lambda row: row["median"]):
            held = f"{row['extra']['held_ratio']:.3f}" if "held_ratio" in row["extra"] else "–"  # noqa: RUF001
            times = map(number, (row["median"], row["p50"], row["p99"], row["extra"]["cold"]))
            table.rows.append([_label(row), _ratio(row), held, *times])
        made.append(table)
    return made


def _ordering(rows: Sequence[_Row]) -> list[Table]:
    table = Table("What ordering costs", ["", "ns", "p50", "p99", "driver calls each"])
    for row in rows:
        calls = ", ".join(
            f"{name} {count:.3g}" if abs(count - 1) > 5e-4 else name for name, count in row["extra"]["calls"].items()
        )
        table.rows.append([row["pattern"], *map(number, (row["median"], row["p50"], row["p99"])), calls or "none"])
    return [table]


_BY_KIND = {
    "libraries": _libraries,
    "debug": _debug,
    "threads": _threads,
    "freelist": _freelist,
    "replay": _replay,
    "ordering": _ordering,
}


def markdown(table: Table) -> str:
    """Write a table as Markdown."""
    lines = [f"**{table.title}**", "", _line(table.headings), _line(["---", *["---:"] * (len(table.headings) - 1)])]
    return "\n".join([*lines, *map(_line, table.rows)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
