"""A gate for GPU work: what is queued on a stream behind it cannot run until the host opens it.

A stream waits for a word of mapped host memory (`cuStreamWaitValue32`), so a shut gate takes no multiprocessor. Nothing
may leave a machine stuck: leaving the block opens the gate, and so does a timer after `LONGEST` seconds, and the end of
the process. `timed_out` says that it was the timer: then what the test saw while it held the gate proves nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import threading
from types import TracebackType
from typing import Any, Self

from gpu import driver

__all__ = ["LONGEST", "Gate", "line"]

LONGEST = 20.0  # seconds
_PAGE = 64 * 1024
_SHUT, _OPEN = 0, 1


class _Words:
    """Host memory that the device reads, a word a gate. Taken once: allocating it could wait for work that is stuck."""

    def __init__(self) -> None:
        from cuda.bindings import driver as cuda

        flags = cuda.CU_MEMHOSTALLOC_PORTABLE | cuda.CU_MEMHOSTALLOC_DEVICEMAP
        self.host = int(driver.ok(cuda.cuMemHostAlloc(_PAGE, flags)))
        self.device = int(driver.ok(cuda.cuMemHostGetDevicePointer(self.host, 0)))
        ctypes.memset(self.host, _OPEN, _PAGE)
        self.numbers = itertools.cycle(range(_PAGE // 64))  # a cache line each


_words: _Words | None = None
_shut: set[Gate] = set()


def prepare() -> None:
    """Take what gates need of the driver, while nothing is stuck."""
    global _words
    if _words is None:
        _words = _Words()


def line() -> tuple[int, int]:
    """Give the host's and the device's address of a cache line of words, which somebody had before."""
    prepare()
    assert _words is not None
    offset = 64 * next(_words.numbers)
    return _words.host + offset, _words.device + offset


class Gate:
    """Holds streams back until it is opened. As a context manager it opens on exit."""

    def __init__(self, *streams: Any) -> None:
        host, self._address = line()
        self._word = ctypes.c_uint32.from_address(host)
        self._word.value = _SHUT
        self.timed_out = False
        self._timer = threading.Timer(LONGEST, self._give_up)
        self._timer.daemon = True
        _shut.add(self)
        self._timer.start()
        try:
            for stream in streams:
                self.hold(stream)
        except BaseException:
            self.open()
            raise

    def hold(self, stream: Any) -> None:
        """Keep everything queued on `stream` from here on from running while the gate is shut."""
        from cuda.bindings import driver as cuda

        flags = int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        driver.ok(cuda.cuStreamWaitValue32(driver.handle_of(stream), self._address, _OPEN, flags))

    @property
    def is_open(self) -> bool:
        """Whether it was opened, by whomever."""
        return self._word.value != _SHUT

    def open(self) -> None:
        """Let the work go. Opening is final."""
        self._word.value = _OPEN
        self._timer.cancel()
        _shut.discard(self)

    def _give_up(self) -> None:
        self.timed_out = True
        self.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()


@atexit.register
def _open_all() -> None:
    for gate in tuple(_shut):
        gate.open()
