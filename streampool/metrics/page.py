"""The page that Prometheus scrapes, rendered ahead: only what changed since the last page is written anew.

The same bytes as ``prometheus_client.generate_latest`` makes of a `Collector`, many times faster.
"""

from __future__ import annotations

import os
from typing import Any

from streampool import _fork
from streampool.metrics import _reading
from streampool.metrics._text import number_text
from streampool.metrics.catalogue import CATALOGUE, Metric, Type

__all__ = ["CONTENT_TYPE", "Page"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Series:
    """The lines of one computed metric for one subject: their beginnings stay, values are written when they change."""

    __slots__ = ("_begins", "_lines", "_values", "text")

    def __init__(self, begins: list[list[str]]) -> None:
        self._begins = begins
        self._values: list[_reading.Value] = [None] * len(begins)
        self._lines = [""] * len(begins)
        self.text = ""

    def update(self, values: list[_reading.Value]) -> str:
        before = self._values
        if values != before:
            for i, value in enumerate(values):
                if value != before[i]:
                    self._lines[i] = "" if value is None else _lines(self._begins[i], value)
            self._values = values
            self.text = "".join(self._lines)
        return self.text


class _Row:
    """The lines of one pool's row: the columns as they were written last, and which lines each column is in."""

    __slots__ = ("lines_of", "values")

    def __init__(self) -> None:
        self.values: list[int] = []
        self.lines_of: dict[int, list[tuple[int, str, tuple[int, ...]]]] = {}  # where, how it begins, its columns

    def add(self, at: int, begin: str, columns: tuple[int, ...]) -> None:
        for column in columns:
            self.lines_of.setdefault(column, []).append((at, begin, columns))

    def update(self, values: list[int], parts: list[str]) -> None:
        before = self.values
        if values == before:
            return
        for column, lines in self.lines_of.items():
            if not before or values[column] != before[column]:
                for at, begin, columns in lines:
                    parts[at] = f"{begin}{number_text()(sum([values[i] for i in columns]))}\n"
        self.values = values


class _Layout:
    """A page for one set of subjects: which line stands where. It is made anew when subjects come or go."""

    def __init__(self, reading: _reading.Reading) -> None:
        self.parts: list[str] = []
        self._rows = [_Row() for _ in reading.rows]
        self._computed: list[tuple[Metric, list[tuple[int, _Series]]]] = []
        row_of = {id(row): at for row, at in zip(reading.rows, self._rows, strict=True)}
        for metric in CATALOGUE:
            self.parts.append(_head(metric))
            columns = _reading.columns_of(metric)
            entries: list[tuple[int, _Series]] = []
            for names, subject in _reading.subjects(metric, reading):
                facts = _reading.facts_of(metric, subject) if metric.facts else ()
                begins = [
                    _begins(metric, (*names, *((word,) if metric.label else ()), *facts))
                    for word in _reading.words_of(metric)
                ]
                if not columns:
                    entries.append((len(self.parts), _Series(begins)))
                    self.parts.append("")
                for begin, of in zip(begins, columns, strict=False):
                    row_of[id(subject)].add(len(self.parts), begin[0], of)
                    self.parts.append("")
            if not columns:
                self._computed.append((metric, entries))

    def text(self, reading: _reading.Reading) -> str:
        """Give the page of a reading of the same subjects."""
        parts = self.parts
        for row, at in zip(reading.rows, self._rows, strict=True):
            at.update(row.values, parts)
        subjects: dict[tuple[object, bool], list[tuple[tuple[str, ...], Any]]] = {}
        for metric, entries in self._computed:
            sort = (metric.scope, metric.type is Type.GAUGE)
            if sort not in subjects:
                subjects[sort] = _reading.subjects(metric, reading)
            try:
                for (slot, series), (_, subject) in zip(entries, subjects[sort], strict=True):
                    parts[slot] = series.update(_reading.values_of(metric, subject, reading))
            except Exception:  # one metric must not take the page with it
                _reading.failed(reading)
                for slot, _ in entries:
                    parts[slot] = ""
        return "".join(parts)


class Page:
    """Renders pages. Safe from several threads: one page is made at a time."""

    def __init__(self) -> None:
        self._lock = _fork.lock()
        self._pid = os.getpid()
        self._subjects: object = None
        self._layout: _Layout | None = None

    def render(self) -> bytes:
        """Read the numbers and give the page."""
        return self.render_reading(_reading.read())

    def render_reading(self, reading: _reading.Reading) -> bytes:
        """Give the page of a reading."""
        if self._pid != os.getpid():  # forked, perhaps in the middle of a page
            self._pid, self._layout = os.getpid(), None
        subjects = _reading.all_subjects(reading)
        with self._lock:
            if self._layout is None or self._subjects != subjects:
                self._layout, self._subjects = _Layout(reading), subjects
            return self._layout.text(reading).encode()


def _head(metric: Metric) -> str:
    kind = "gauge" if metric.type is Type.INFO else metric.type.value
    return f"# HELP {metric.full_name} {_escape_help(metric.help)}\n# TYPE {metric.full_name} {kind}\n"


def _begins(metric: Metric, labels: tuple[str, ...]) -> list[str]:
    """Give the lines of one series up to their values: one, or those of a histogram."""
    named = dict(zip(metric.labels, labels, strict=True))
    if metric.type is not Type.HISTOGRAM:
        return [_begin(metric.full_name, named)]
    buckets = [
        _begin(f"{metric.full_name}_bucket", {**named, "le": number_text()(bound)}) for bound in _reading.bounds(metric)
    ]
    return [*buckets, _begin(f"{metric.full_name}_count", named), _begin(f"{metric.full_name}_sum", named)]


def _begin(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{label}="{_escape(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{inside}}} " if inside else f"{name} "


def _lines(begins: list[str], value: float | _reading.Bins) -> str:
    if not isinstance(value, _reading.Bins):
        return f"{begins[0]}{number_text()(value)}\n"
    number = number_text()
    values = (*value.cumulated, value.cumulated[-1], value.sum)
    return "".join([f"{begin}{number(part)}\n" for begin, part in zip(begins, values, strict=True)])


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
