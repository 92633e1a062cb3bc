"""A kernel that runs, on a multiprocessor, until the host tells it to end. A gate only keeps work from beginning."""

from __future__ import annotations

import ctypes
import time
from types import TracebackType
from typing import Any, Self

from gpu import gate
from gpu.kernels import Kernels

__all__ = ["Running"]

_RUNS, _TOLD = 1, 2


class Running:
    """Such a kernel on a stream. It runs when this is made; as a context manager it is told to end on exit.

    It ends by itself after ``gate.LONGEST`` seconds: then `was_told` is False.
    """

    def __init__(self, kernels: Kernels, stream: Any) -> None:
        host, device = gate.line()
        self._words = (ctypes.c_uint32 * 2).from_address(host)
        self._words[0] = self._words[1] = 0
        kernels.run_until_told(stream, device, int(gate.LONGEST * 1e9))
        latest = time.monotonic() + gate.LONGEST
        while self._words[1] == 0:
            assert time.monotonic() < latest, "the kernel does not begin"

    @property
    def runs(self) -> bool:
        """Whether it is running now."""
        return self._words[1] == _RUNS

    @property
    def was_told(self) -> bool:
        """Whether it ended because it was told to."""
        return self._words[1] == _TOLD

    def end(self) -> None:
        """Tell it to end."""
        self._words[0] = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
