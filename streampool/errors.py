"""The exceptions of streampool, from one base.

``StreamPoolError`` is above all of them. Nonsense arguments raise ``ValueError`` and ``TypeError``, as everywhere in
Python. The classes are created by the native core, which raises them; this module is where they are imported from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streampool._core import (
    CaptureError,
    DoubleFreeError,
    DriverError,
    DriverNotFoundError,
    FaultError,
    ForeignFreeError,
    ForkedProcessError,
    InteriorFreeError,
    InvalidFreeError,
    OutOfMemoryError,
    PoolClosedError,
    SizeMismatchError,
    StreamError,
    StreamPoolError,
    TrampledRecordError,
    WrongPoolError,
)

if TYPE_CHECKING:
    from streampool.leaks import Leaks

__all__ = [
    "CaptureError",
    "DoubleFreeError",
    "DriverError",
    "DriverNotFoundError",
    "FaultError",
    "ForeignFreeError",
    "ForkedProcessError",
    "InteriorFreeError",
    "InvalidFreeError",
    "LeakError",
    "OutOfMemoryError",
    "PoolClosedError",
    "SizeMismatchError",
    "StreamError",
    "StreamPoolError",
    "TraceError",
    "TrampledRecordError",
    "WrongPoolError",
]


class LeakError(StreamPoolError, AssertionError):
    """Blocks allocated between two marks are still live. `leaks` has them by class and line."""

    leaks: Leaks


class TraceError(StreamPoolError, ValueError):
    """A trace or snapshot file cannot be read: says where in the file, and what is wrong there."""
