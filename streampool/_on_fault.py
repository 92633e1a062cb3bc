"""What a call does that is told of a fault (option ``on_fault``): nothing, an error, the process's end, a function.

The core asks for it before a call of a pool with something to tell (`_core._fault_hook`); `check` and `close` ask
themselves.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from streampool import _core

if TYPE_CHECKING:
    from streampool.faults import Fault
    from streampool.pool import Pool

__all__ = ["as_objects", "tell"]

_telling = threading.local()  # .pools: those whose function this thread is in


def tell(pool: Pool, found: Sequence[dict[str, Any]] = ()) -> None:
    """Do what `pool` was asked to do with `found`, and with the faults that nobody has taken yet."""
    what = pool.options["on_fault"]
    if what == "report" or (what == "callback" and pool._fault_callback is None):
        return
    pools = _telling.__dict__.setdefault("pools", set())
    if id(pool) in pools:  # from inside the function: when it has returned
        return
    untold, pool._untold = pool._untold, ()
    waiting = [*untold, *found, *pool.take_faults()]
    if not waiting:
        return
    if what == "raise":
        _raise(as_objects(pool, waiting))
    if what == "abort":
        _abort(pool, waiting)
    pools.add(id(pool))
    try:
        while waiting:
            _call(pool, waiting)
            waiting = pool.take_faults()
    finally:
        pools.discard(id(pool))
        pool._untold = waiting  # the function raised, or was taken away


def as_objects(pool: _core.Pool, faults: Sequence[dict[str, Any]]) -> list[Fault]:
    """Give plain facts of faults as objects."""
    from streampool.faults import Fault

    return [Fault.from_dict(fault, pool=pool.name, device=pool.driver.name) for fault in faults]


def _call(pool: Pool, waiting: list[dict[str, Any]]) -> None:
    """Call the function for each fault, and take those out of `waiting` that it was told of."""
    while waiting and pool._fault_callback is not None:
        (fault,) = as_objects(pool, [waiting.pop(0)])
        pool._fault_callback(fault)


def _raise(faults: list[Fault]) -> NoReturn:
    """Raise ``FaultError``; its ``faults`` are the objects."""
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    first = faults[0]
    error = _core.FaultError(f"{first}{more}; {first.summary} ({first.page})")
    error.faults = faults
    raise error


def _abort(pool: Pool, waiting: list[dict[str, Any]]) -> NoReturn:
    """Print the report of these faults on standard error, and end the process as ``abort()`` does."""
    from streampool._findings import PoolFindings
    from streampool._terminal import wants_color
    from streampool.report import Report

    try:
        findings = PoolFindings.of(pool)
        findings.faults = waiting
        findings.count(pool)
        report = Report.from_findings([findings], leaks="off")
        print(report.to_text(color=wants_color(sys.stderr)), file=sys.stderr)
        print("streampool: aborting (on_fault=abort)", file=sys.stderr, flush=True)
    finally:
        os.abort()


def _hook(pool: _core.Pool) -> None:
    from streampool.pool import Pool

    if isinstance(pool, Pool):
        tell(pool)


_core._fault_hook = _hook
