"""Locks that a forked child can take, though a thread that is not there held them at the fork."""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["lock"]

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def lock() -> threading.Lock:
    """Give a lock that is free in a forked child, whoever held it; what it guards may be half done there."""
    made = threading.Lock()
    _locks.add(made)
    return made


def _after_fork() -> None:
    for made in list(_locks):
        made._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does with its own


os.register_at_fork(after_in_child=_after_fork)
