"""Libraries are served when a program imports them, before their first CUDA use: ``streampool run``'s way in."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial

from streampool import _core, _imports, attach, device
from streampool.attach._pools import Pools
from streampool.attach._table import Library, find
from streampool.errors import DriverError, DriverNotFoundError

__all__ = ["expect", "refused"]

refused: dict[str, str] = {}
"""Why a library that was to be served is not, by name."""


def expect(names: Iterable[str]) -> None:
    """Serve these libraries when they are imported, or now where they are already. What cannot be is noted."""
    for row in [find(name) for name in names]:
        _imports.when_imported(row.module, partial(_take_over, row))


def _take_over(row: Library) -> None:
    """Serve a library that is imported whole. The program is not to suffer from what goes wrong."""
    if row.name in attach._served or row.name in attach._asked:
        return
    try:
        attach._take_over(row, Pools(row.name, None, {}), unasked=True)
    except Exception as error:
        refused[row.name] = str(error) or type(error).__name__
        if not _there_is_no_gpu():  # then the library takes no device memory either
            print(f"streampool: {row.title.upper()} IS NOT WATCHED: {refused[row.name]}", file=sys.stderr)


def _there_is_no_gpu() -> bool:
    if device.default_family() != "cuda":
        return False
    try:
        _core.open_device("cuda:0")
    except DriverNotFoundError:
        return True
    except DriverError:
        return False
    return False
