"""A call when a module has been imported, by whoever imports it and however late."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from streampool import _fork

__all__ = ["when_imported"]


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call once the module `name` is imported whole: now, where it is. What `call` raises is dropped."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _quietly(call)
        return
    with _lock:
        _waiting.setdefault(name, []).append(call)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


_lock = _fork.lock()
_waiting: dict[str, list[Callable[[], None]]] = {}


class _Finder:
    """Finds nothing itself: lets the others find a module that is waited for, and has its loader tell when it is done.

    The loader stays the one that it is: other tools look at its type.
    """

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.name = None
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with contextlib.suppress(AttributeError):
                del loader.exec_module
            execute(module)
            _arrived(name)

        with contextlib.suppress(AttributeError):  # a loader that takes no attributes: nobody is told
            loader.exec_module = exec_module
        return spec


_finder = _Finder()


def _arrived(name: str) -> None:
    with _lock:
        calls = _waiting.pop(name, [])
        if not _waiting and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
    for call in calls:
        _quietly(call)


def _quietly(call: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        call()
