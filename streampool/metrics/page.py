"""The page that Prometheus scrapes, rendered ahead: only what changed since the last page is written anew.

The same bytes as ``prometheus_client.generate_latest`` makes of a `Collector`, many times faster.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from streampool.metrics import _reading
from streampool.metrics._text import number_text
from streampool.metrics.catalogue import CATALOGUE, Metric, Type

__all__ = ["CONTENT_TYPE", "Page"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Series:
    """The lines of one metric for one subject: their beginnings stay, values are written when they change."""

    __slots__ = ("_begins", "_lines", "_text", "_values")

    def __init__(self, metric: Metric, names: tuple[str, ...], subject: Any) -> None:
        facts = _reading.facts_of(metric, subject) if metric.facts else ()
        self._begins = [
            _begins(metric, (*names, *((word,) if metric.label else ()), *facts)) for word in _reading.words_of(metric)
        ]
        self._values: list[_reading.Value] = [None] * len(self._begins)
        self._lines = [""] * len(self._begins)
        self._text = ""

    def update(self, values: list[_reading.Value]) -> str:
        before = self._values
        if values != before:
            for i, value in enumerate(values):
                if value != before[i]:
                    self._lines[i] = "" if value is None else _lines(self._begins[i], value)
            self._values = values
            self._text = "".join(self._lines)
        return self._text


class Page:
    """Renders pages. Safe from several threads: one page is made at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._heads = [_head(metric) for metric in CATALOGUE]
        self._series: list[dict[tuple[str, ...], _Series]] = [{} for _ in CATALOGUE]

    def render(self) -> bytes:
        """Read the numbers and give the page."""
        return self.render_reading(_reading.read())

    def render_reading(self, reading: _reading.Reading) -> bytes:
        """Give the page of a reading."""
        if self._pid != os.getpid():  # forked: whoever had the lock is not here to let go of it
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            out: list[str] = []
            for metric, head, known in zip(CATALOGUE, self._heads, self._series, strict=True):
                out.append(head)
                try:
                    self._render(metric, known, reading, out)
                except Exception:
                    _reading.failed(reading)
            return "".join(out).encode()

    def _render(
        self, metric: Metric, known: dict[tuple[str, ...], _Series], reading: _reading.Reading, out: list[str]
    ) -> None:
        subjects = _reading.subjects(metric, reading)
        if metric.facts or len(known) > 2 * len(subjects) + 16:
            known.clear()  # facts are part of the lines, and may have become known; subjects that are gone are let go
        for names, subject in subjects:
            series = known.get(names)
            if series is None:
                series = known[names] = _Series(metric, names, subject)
            out.append(series.update(_reading.values_of(metric, subject, reading)))


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
