"""What the design promises of speed and memory, one row each: a figure out of a result, and the bar it is held to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Check", "check"]

_Row = Mapping[str, Any]
_TIGHT = ("torch-expandable", "rmm-pool", "async-max")  # whose bytes are the bar


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, held against a result. ``unit`` is ns, or the sign of a ratio."""

    what: str
    value: float
    bar: float
    unit: str
    note: str = ""

    @property
    def kept(self) -> bool:
        """Whether the figure is within the bar."""
        return self.value <= self.bar


class _Rows:
    def __init__(self, rows: Iterable[_Row], cores: int) -> None:
        self._rows = list(rows)
        self.cores = cores

    def where(self, kind: str, peer: str = "", **parameters: Any) -> list[_Row]:
        return [
            row
            for row in self._rows
            if row["kind"] == kind
            and (not peer or row["peer"] == peer)
            and all(row["parameters"].get(name) == value for name, value in parameters.items())
        ]

    def one(self, kind: str, peer: str, **parameters: Any) -> float | None:
        found = self.where(kind, peer, **parameters)
        return float(found[0]["median"]) if found else None


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _pairs(rows: _Rows) -> Iterator[Check | None]:
    small = {"size": 4096}
    ours = rows.one("pairs", "streampool", **small)
    yield _made("4 KiB pair, against glibc malloc", _over(ours, rows.one("pairs", "glibc", **small)), 0.75)
    raw = rows.one("pairs", "streampool-raw", **small)
    yield _made(
        "4 KiB pair on a raw handle, against RMM arena", _over(raw, rows.one("pairs", "rmm-arena", **small)), 0.6
    )
    yield _made("1 MiB pair", rows.one("pairs", "streampool", size=1 << 20), 150, "ns")
    ours, floor = rows.one("window", "streampool"), rows.one("window", "glibc")
    yield _made("256 live, random sizes, against glibc malloc", _over(ours, floor), 0.6)


def _threads(rows: _Rows) -> Iterator[Check | None]:
    counts = {row["parameters"]["threads"] for row in rows.where("threads", "streampool")}
    most = max((count for count in counts if count <= rows.cores), default=1)
    if most == 1:
        return
    for size, words, bar in ((4096, "4 KiB", 1.5), (1 << 20, "1 MiB", 2.0)):
        alone = rows.one("threads", "streampool", size=size, threads=1)
        many = rows.one("threads", "streampool", size=size, threads=most, streams_of="own")
        yield _made(f"{words} pair, {most} threads on their own streams, against one", _over(many, alone), bar)
    shared = rows.one("threads", "streampool", size=4096, threads=most, streams_of="one")
    yield _made(f"4 KiB pair, {most} threads on one stream, slowest", shared, 2000, "ns")


def _freelist(rows: _Rows) -> Iterator[Check | None]:
    worst: tuple[float, str] | None = None
    for row in rows.where("freelist", "streampool", pieces=100_000):
        ratio = row["ratio"]
        if ratio is not None and (worst is None or ratio > worst[0]):
            worst = ratio, f"{row['parameters']['part']}, {row['parameters']['order']} order"
    yield _made("100 000 free extents, against 100", worst and worst[0], 3.0, note=worst[1] if worst else "")


def _replay(rows: _Rows) -> Iterator[Check | None]:
    for row in rows.where("replay", "streampool"):
        trace = row["parameters"]["trace"]
        others = rows.where("replay", trace=trace)
        if not any(other["peer"] in _TIGHT for other in others):
            continue
        yield _made(f"{trace}, time an event, against {row['baseline']}", row["ratio"], 1 / 3)
        held = {
            o["label"]: o["extra"]["held_ratio"] for o in others if o["peer"] in _TIGHT and "held_ratio" in o["extra"]
        }
        if held and "held_ratio" in row["extra"]:
            best = min(held, key=lambda label: held[label])
            yield _made(f"{trace}, bytes held / peak live", row["extra"]["held_ratio"], held[best], note=f"of {best}")


def _python(rows: _Rows) -> Iterator[Check | None]:
    empty = rows.one("python", "empty", call="empty")
    yield _made(
        "Python raw pair, against an empty method pair", _over(rows.one("python", "streampool", call="raw"), empty), 2.5
    )
    buffer = rows.one("python", "streampool", call="buffer")
    yield _made("Python Buffer, made and dropped, against an empty method pair", _over(buffer, empty), 4.0)
    debug = rows.one("debug", "streampool", call="debug-raw")
    yield _made("debug mode pair from Python, stacks of depth 10", debug, 2000, "ns")
    tracking = rows.one("debug", "rmm-stacks", call="rmm-tracking-raw")
    yield _made("debug mode pair from Python, against RMM tracking with stacks", _over(debug, tracking), 1.0)


def _made(what: str, value: float | None, bar: float, unit: str = "×", note: str = "") -> Check | None:  # noqa: RUF001
    return None if value is None else Check(what, value, bar, unit, note)


_PROMISES: tuple[Callable[[_Rows], Iterator[Check | None]], ...] = (_pairs, _threads, _freelist, _replay, _python)


def check(rows: Iterable[_Row], cores: int) -> list[Check]:
    """Give every promise that the rows of a result, as plain data, say something about: on a machine of `cores`."""
    found = _Rows(rows, cores)
    return [made for promise in _PROMISES for made in promise(found) if made is not None]
