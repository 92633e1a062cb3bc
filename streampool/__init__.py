"""streampool: the GPU memory pool you can leave debugging on.

>>> import streampool as sp
>>> dev = sp.Device()                                  # the GPU, or the simulated device where there is none
>>> pool = sp.Pool(dev, mode="debug")
>>> with pool.allocate(4096, stream=dev.create_stream()) as buf:
...     ...

Importing loads the native core and these modules only; cuda.core, NumPy and the rest come on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    from streampool._core import parse_size
except ModuleNotFoundError as error:
    if error.name != "streampool._core":
        raise
    from streampool._paths import without_core

    raise without_core() from None

from streampool._sizes import format_size
from streampool.buffer import Buffer
from streampool.config import Mode
from streampool.device import Device
from streampool.errors import (
    CaptureError,
    DoubleFreeError,
    DriverError,
    DriverNotFoundError,
    FaultError,
    ForeignFreeError,
    ForkedProcessError,
    InteriorFreeError,
    InvalidFreeError,
    LeakError,
    OutOfMemoryError,
    PoolClosedError,
    SizeMismatchError,
    StreamError,
    StreamPoolError,
    TraceError,
    TrampledRecordError,
    WrongPoolError,
)
from streampool.pool import CheckResult, Pool, PoolStats
from streampool.scopes import scope
from streampool.streams import current_stream, stream

if TYPE_CHECKING:
    from streampool import faults, leaks, logs, metrics, postmortem, replay, report, sim, snapshots, traces
    from streampool._observe import observe, observed, unobserve
    from streampool._paths import cmake_dir, include_dir, library_path
    from streampool.attach import AttachError, install, installed, uninstall

__all__ = [
    "AttachError",
    "Buffer",
    "CaptureError",
    "CheckResult",
    "Device",
    "DoubleFreeError",
    "DriverError",
    "DriverNotFoundError",
    "FaultError",
    "ForeignFreeError",
    "ForkedProcessError",
    "InteriorFreeError",
    "InvalidFreeError",
    "LeakError",
    "Mode",
    "OutOfMemoryError",
    "Pool",
    "PoolClosedError",
    "PoolStats",
    "SizeMismatchError",
    "StreamError",
    "StreamPoolError",
    "TraceError",
    "TrampledRecordError",
    "WrongPoolError",
    "cmake_dir",
    "current_stream",
    "faults",
    "format_size",
    "include_dir",
    "install",
    "installed",
    "leaks",
    "library_path",
    "logs",
    "metrics",
    "observe",
    "observed",
    "parse_size",
    "postmortem",
    "replay",
    "report",
    "scope",
    "sim",
    "snapshots",
    "stream",
    "traces",
    "uninstall",
    "unobserve",
]

_ON_FIRST_USE = frozenset(
    {"faults", "leaks", "logs", "metrics", "postmortem", "replay", "report", "sim", "snapshots", "traces"}
)
_ELSEWHERE = {
    **dict.fromkeys(("cmake_dir", "include_dir", "library_path"), "streampool._paths"),
    **dict.fromkeys(("AttachError", "install", "installed", "uninstall"), "streampool.attach"),
    **dict.fromkeys(("observe", "observed", "unobserve"), "streampool._observe"),
}


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"streampool.{name}")
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("streampool")
        except PackageNotFoundError:
            return "unknown"  # run from a build tree
    raise AttributeError(f"module 'streampool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
