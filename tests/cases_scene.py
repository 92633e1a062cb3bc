"""What the tests of public bug reports share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from scene import KIB, MIB

import streampool as sp

SIZES = pytest.mark.parametrize("size", [1, 4 * KIB, 700 * KIB, MIB, 5 * MIB])


def take(pool: sp.Pool, stream: Any, size: int, count: int = 5) -> list[sp.Buffer]:
    return [pool.allocate(size, stream=stream) for _ in range(count)]


def in_thread(function: Callable[[], Any]) -> Any:
    out: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            out.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    return out[0]
