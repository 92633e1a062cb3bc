"""Logs: what happens to pools, as events with typed fields, to whatever logging the program has set up.

The core writes events into a ring of fixed size; Python empties it when a pool is made or closed, when somebody calls
`drain`, at exit, and every few seconds where the metrics' thread runs. An event goes to structlog where the program
has configured it, else to the logger ``streampool`` of the standard library. Nothing is configured here and nothing is
printed: a program without logging stays silent, and neither library is imported for it.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from streampool import _core, _fork

__all__ = ["EVENTS", "Event", "Level", "drain", "emit", "example_config"]


class Level(StrEnum):
    """How much an event matters."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"  # the highest: what went wrong is also raised, and whether it is an error its caller knows


@dataclass(frozen=True, slots=True)
class Event:
    """One kind of event: its word, its level, its fields beside those that all have, and what it means."""

    word: str
    level: Level
    fields: tuple[str, ...]
    meaning: str


COMMON = ("device", "pool", "memory_kind", "at")  # at: Unix time in seconds
EVENTS: tuple[Event, ...] = (
    Event("pool.created", Level.DEBUG, ("limit_bytes",), "A pool was made; limit_bytes 0: without a limit."),
    Event("pool.closed", Level.DEBUG, ("live_allocations", "reserved_bytes"), "A pool was closed."),
    Event("pool.grown", Level.DEBUG, ("bytes", "reserved_bytes"), "Memory was taken from the driver."),
    Event("pool.trimmed", Level.DEBUG, ("bytes", "reserved_bytes"), "A trim gave memory back to the driver."),
    Event(
        "growth.refused",
        Level.WARNING,
        ("bytes", "reserved_bytes", "reason"),
        "The pool's limit, or the driver, gave no memory; it is looked for elsewhere.",
    ),
    Event(
        "alloc.failed",
        Level.WARNING,
        ("requested_bytes", "reserved_bytes", "reason"),
        "An allocation ended in an out-of-memory error.",
    ),
    Event("free.invalid", Level.WARNING, ("reason",), "A free was refused because it was wrong."),
    Event(
        "fault.found",
        Level.WARNING,
        ("address", "bad_bytes", "reason"),
        "A fault was found; reason is its kind, a word of docs/faults.",
    ),
    Event(
        "leak.suspected",
        Level.WARNING,
        ("sites", "bytes"),
        "So many call sites rose in each quarter of the last hour, by so many bytes; /debug/holders names them.",
    ),
    Event(
        "leak.left_over",
        Level.INFO,
        ("sites", "bytes"),
        "So many call sites free nine of ten of what they allocate and hold so many bytes older than an hour.",
    ),
    Event("events.dropped", Level.WARNING, ("count",), "The ring was full: so many events were lost."),
    Event(
        "events.suppressed", Level.INFO, ("event_word", "count"), "More events of a kind came at once than are shown."
    ),
)
_BY_WORD = {event.word: event for event in EVENTS}
_MOST = 10  # of one kind, each time the ring is emptied

_lock = _fork.lock()
_dropped = 0


def drain() -> int:
    """Empty the ring into the program's logs; gives how many events there were. Never raises."""
    global _dropped
    if not _is_wanted():
        return 0
    with contextlib.suppress(Exception):
        with _lock:  # and none of ours is held while a program's handlers run
            events = _core.drain_events()
            dropped = _core.read_pulse()[3]
            lost, _dropped = dropped - _dropped, dropped
        shown: dict[str, int] = {}
        for word, kind, device, pool, reason, numbers, at in events:
            shown[word] = shown.get(word, 0) + 1
            if shown[word] > _MOST:
                continue
            fields: dict[str, Any] = {"device": device, "pool": pool, "memory_kind": kind, "at": at, **numbers}
            if reason:
                fields["reason"] = reason
            emit(word, **fields)
        for word, count in shown.items():
            if count > _MOST:
                emit("events.suppressed", event_word=word, count=count - _MOST)
        if lost > 0:
            emit("events.dropped", count=lost)
        return len(events)
    return 0


def emit(word: str, **fields: Any) -> None:
    """Log one event of the list. Never raises: a program must not fail by its logs."""
    with contextlib.suppress(Exception):
        level = _BY_WORD[word].level.value
        structlog = sys.modules.get("structlog")
        if structlog is not None and structlog.is_configured():
            getattr(structlog.get_logger("streampool"), level)(word, **fields)
            return
        logging = sys.modules.get("logging")
        if logging is None:
            return
        logger = logging.getLogger("streampool")
        number = getattr(logging, level.upper())
        if logger.isEnabledFor(number) and logger.hasHandlers():  # without handlers Python would print
            text = " ".join([word, *(f"{name}={value}" for name, value in fields.items())])
            logger.log(number, "%s", text, extra={"event": word, **fields})


def example_config(*, json: bool = False) -> dict[str, Any]:
    """Give arguments for ``structlog.configure``, for programs that have no logging yet.

    >>> structlog.configure(**sp.logs.example_config(json=True))
    """
    import structlog

    renderers = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    return {
        "processors": [
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(renderers if json else [structlog.dev.ConsoleRenderer()]),
        ]
    }


def _is_wanted() -> bool:
    """Say whether anybody could hear: else events stay in the ring, which costs nothing."""
    structlog = sys.modules.get("structlog")
    if structlog is not None and structlog.is_configured():
        return True
    logging = sys.modules.get("logging")
    return logging is not None and logging.getLogger("streampool").hasHandlers()
