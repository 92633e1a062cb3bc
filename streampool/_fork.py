"""Locks that hold up neither a forked child nor a thread that meets itself.

A thread that is not there may have held them at the fork. And a signal's handler or a finalizer, which come between any
two instructions of Python, may need what its own thread holds.
"""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["lock"]

_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def lock() -> threading.RLock:
    """Give a lock that the thread that has it may take again, and that is free in a forked child, whoever held it.

    In either case what it guards may be half done: so no more than one assignment at a time should depend on it.
    """
    made = threading.RLock()
    _locks.add(made)
    return made


def _after_fork() -> None:
    for made in list(_locks):
        made._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does with its own


os.register_at_fork(after_in_child=_after_fork)
