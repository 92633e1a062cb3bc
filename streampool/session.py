"""What ``streampool run`` watches: every pool of the process, closed, collected or alive, and what is to be said of it.

Without a session nothing is gathered and nothing is printed.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from streampool import _core

if TYPE_CHECKING:
    from streampool._findings import PoolFindings, Session

__all__ = [
    "active",
    "before_each_look",
    "begin",
    "drain_logs",
    "end",
    "exiting",
    "look",
    "pool_made",
    "pools",
    "register_exit",
]

_session: Session | None = None
_pools: weakref.WeakSet[_core.Pool] = weakref.WeakSet()
_exit_registered = False

before_each_look: list[Callable[[], None]] = []
"""Called before a session asks its pools: whoever has pools that Python did not make makes them known."""


def active() -> Session | None:
    """Give the session of this process, if one is watched. A forked child's is its parent's, and not given."""
    return _session if _session is not None and _session.pid == os.getpid() else None


def begin() -> Session:
    """Start watching the pools made from now on."""
    from streampool import config
    from streampool._findings import Session

    global _session
    register_exit()
    _session = Session()
    _core.watch_c_pools(config.mode_override())
    return _session


def end() -> None:
    """Stop watching."""
    global _session
    _session = None
    _core.forget_c_pools()


def look() -> None:
    """Make known what pools there are that Python did not make."""
    for hook in tuple(before_each_look):
        hook()


def pool_made(pool: _core.Pool) -> PoolFindings | None:
    """Note a new pool: the exit hook comes with the first of the process, never with the import."""
    register_exit()
    _pools.add(pool)
    drain_logs()
    if "STREAMPOOL_POSTMORTEM" in os.environ:
        from streampool import postmortem

        postmortem.enable_from_environment()
    if "STREAMPOOL_METRICS_PORT" in os.environ:
        from streampool.metrics import _environment

        _environment.serve_from_environment()
    session = active()
    return None if session is None else session.watch(pool)


def drain_logs() -> None:
    """Empty the core's events into the program's logs. Imports nothing for a program that has none."""
    if "logging" in sys.modules or "structlog" in sys.modules:
        from streampool import logs

        logs.drain()


def pools() -> list[_core.Pool]:
    """Give the pools that Python made and that still are."""
    for _ in range(8):
        try:
            return list(_pools)
        except RuntimeError:  # another thread made one meanwhile
            continue
    return []


def register_exit() -> None:
    """Have the core told when the process ends: the first pool does so, whoever makes it."""
    global _exit_registered
    if not _exit_registered:
        _exit_registered = True
        atexit.register(_at_exit)


def _at_exit() -> None:
    """Tell the core, unless a session watches: its owner calls `exiting` after the report, which is later than this."""
    drain_logs()
    if active() is None:
        exiting()


def exiting() -> None:
    """Tell the core that the process ends: from here on no driver call is made, and frees are harmless."""
    _core.set_exiting()
