"""The parent's end of a worker: start it, ask it in the words of benchmarks/native/serve.hpp, bear with its failing."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["Worker", "WorkerError"]

_STARTS_IN = 180.0  # seconds: importing a framework and making a context take their time
_ANSWERS_IN = 180.0
_ENDS_IN = 10.0


class WorkerError(Exception):
    """A worker did not start, did not answer, or could not measure what it was asked."""


class Worker:
    """One allocator in a process of its own. `close` it in the end."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **environment},
            )
        except OSError as error:
            self._errors.close()
            raise WorkerError(f"{command[0]} does not start: {error.strerror}") from None
        self._rest = b""
        self._hello: dict[str, Any] | None = None
        self._failed: WorkerError | None = None  # to start

    def hello(self) -> dict[str, Any]:
        """Wait until it is ready; gives what it says of itself."""
        if self._failed is not None:
            raise self._failed
        if self._hello is None:
            try:
                self._hello = self._answer(_STARTS_IN)
            except WorkerError as error:
                self._failed = error
                raise
        return self._hello

    def ask(self, command: str) -> dict[str, Any]:
        """Give the answer to a command."""
        self.hello()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerError(self._last_words()) from None
        return self._answer(_ANSWERS_IN)

    def _answer(self, seconds: float) -> dict[str, Any]:
        line = self._line(seconds)
        try:
            answer: Any = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise WorkerError(f"it answered {line[:200]!r}")
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        return answer

    def _line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        ends = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, ends - time.monotonic())):
                    self.close(at_once=True)
                    raise WorkerError(f"it did not answer within {seconds:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise WorkerError(self._last_words())
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """Say how it ended."""
        code = self._process.wait()
        if self._errors.closed:
            return f"it ended with {code}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"it ended with {code}" + (f": {lines[-1].strip()}" if lines else "")

    def close(self, *, at_once: bool = False) -> None:
        """End it; twice is harmless."""
        if at_once:
            self._process.kill()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=_ENDS_IN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
