"""Which stream a call means when it names none: the innermost ``with stream(s):``, else the library default."""

from __future__ import annotations

import os
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

from streampool import _core

__all__ = ["current_stream", "default_stream", "stream"]

_LEGACY = 1  # CU_STREAM_LEGACY
_PER_THREAD = 2  # CU_STREAM_PER_THREAD
_PER_THREAD_SWITCH = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"  # read by cuda.core too

_current: ContextVar[object] = ContextVar("streampool.stream", default=None)


class stream:  # noqa: N801 - used as a verb: `with sp.stream(s):`
    """Make `s` the stream of every call in this context that names none.

    Follows the rules of context variables: threads start without one, tasks inherit a copy. May be nested and reused.

    Parameters
    ----------
    s
        Anything with ``__cuda_stream__``, or an int handle. The object is kept alive while it is current.

    Examples
    --------
    >>> with sp.stream(s):
    ...     buf = pool.allocate(4096)      # on s
    """

    def __init__(self, s: Any) -> None:
        if s is None or isinstance(s, bool) or not (isinstance(s, int) or hasattr(s, "__cuda_stream__")):
            raise TypeError(f"a stream is an object with __cuda_stream__ or an int handle, not {type(s).__name__}")
        self._stream = s
        self._tokens: list[Token[object]] = []

    def __enter__(self) -> Any:
        self._tokens.append(_current.set(self._stream))
        return self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._tokens:
            raise RuntimeError("a stream is left more often than it was entered: use `with sp.stream(s):`")
        _current.reset(self._tokens.pop())


def default_stream(*, simulated: bool) -> int:
    """Give the handle of the library default stream, the one that ``cuda.core.default_stream()`` names.

    The legacy stream on a simulated device; on CUDA the legacy stream, or the per-thread one where
    ``CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM`` is set to a number that is not 0.
    """
    if simulated:
        return _LEGACY
    switch = os.environ.get(_PER_THREAD_SWITCH, "")
    return _PER_THREAD if switch.isdecimal() and int(switch) != 0 else _LEGACY


def current_stream(pool: _core.Pool) -> Any:
    """Give the stream that a call on `pool` means when it names none."""
    return _chosen(pool.driver.simulated)


def _chosen(simulated: bool) -> Any:
    chosen = _current.get()
    return default_stream(simulated=simulated) if chosen is None else chosen


_core.set_current_stream_hook(_chosen)  # asked by every call whose stream is None
