"""Who holds a buffer: the chain of Python objects from something that lives by itself, as a module does, to it.

Found with ``gc.get_referrers``, which looks at every object, so the number of looks is bounded. Only the names of keys
and attributes are said, never a value of the program's, and no code of the program runs.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import CellType, CoroutineType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from streampool import _core

__all__ = ["chains", "some_serials"]

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_GROUPS = 20  # of blocks, of each of which one is looked for
_LOOKS = 300  # at all objects, for all blocks together
_STEPS = 8  # of a chain
_SHOWN = 40  # characters of a key
_FRAME = {GeneratorType: "gi_frame", CoroutineType: "cr_frame"}


def some_serials(blocks: Iterable[Mapping[str, Any]]) -> set[int]:
    """Give the number of one block, the oldest, of each of the call sites whose objects hold most bytes."""
    held: dict[int, tuple[int, int]] = {}
    for block in blocks:
        if block.get("owner") == "buffer" and block["serial"]:
            size, serial = held.get(block["allocated_at"], (0, block["serial"]))
            held[block["allocated_at"]] = size + block["size"], min(serial, block["serial"])
    return {serial for _, serial in sorted(held.values(), reverse=True)[:_GROUPS]}


def chains(
    pool: _core.Pool, serials: set[int], find: Callable[[], Mapping[int, object]] | None = None
) -> dict[int, tuple[str, ...]]:
    """Give, by the number of a block, the chain that holds its buffer, outermost first; without those not found.

    `find` gives the owners of another library's blocks, in place of buffers.
    """
    if not serials:
        return {}
    frames = _locals_of_frames()
    buffers = _buffers(pool, serials) if find is None else find()
    found: dict[int, tuple[str, ...]] = {}
    looks = _LOOKS
    for serial in sorted(buffers):  # not its items: those would hold what is looked at
        chain, looks = _chain(buffers[serial], frames, looks, {id(buffers)})
        if chain:
            found[serial] = chain
        if looks <= 0:
            break
    return found


def _buffers(pool: _core.Pool, serials: set[int]) -> dict[int, _core.Buffer]:
    found = {}
    for one in gc.get_objects():
        if type(one) is _core.Buffer and not one.is_closed and one.pool is pool:
            serial = one.facts()["serial"]
            if serial in serials:
                found[serial] = one
    return found


def _locals_of_frames() -> dict[int, str]:
    """Say, by the identity of what they hold, which variables of running functions hold something.

    What a running frame holds is not among what the collector sees.
    """
    words: dict[int, str] = {}
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith((_OURS, "<frozen ")):
                where = f"frame of {code.co_qualname} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
                values = frame.f_locals
                if values is not frame.f_globals:
                    words |= {id(value): f"{where}: {name}" for name, value in values.items()}
                    traced = frame.f_trace is not None or sys.gettrace() is not None
                    if type(values) is dict and code.co_flags & inspect.CO_OPTIMIZED and not traced:
                        # Before 3.13 a copy that the frame keeps, and that would hold what it names. Under a debugger
                        # it is written back into the frame.
                        values.clear()
            frame = frame.f_back
    del innermost, frame  # one of the frames is this one: no cycle is left behind
    return words


def _chain(buffer: object, frames: Mapping[int, str], looks: int, ours: set[int]) -> tuple[tuple[str, ...], int]:
    """Search outwards, nearest holders first; gives the chain, and how many looks are left. `ours`: what we hold by."""
    waiting: deque[tuple[object, tuple[str, ...]]] = deque([(buffer, ())])
    seen = {id(buffer), id(waiting), *ours}
    longest: tuple[str, ...] = ()
    while waiting and looks > 0:
        held, path = waiting.popleft()
        if id(held) in frames:
            return (frames[id(held)], *path), looks
        looks -= 1
        holders = gc.get_referrers(held)
        seen.add(id(holders))
        for holder in holders:
            if id(holder) in seen or _is_ours(holder, waiting):
                continue
            if root := _root(holder, held):
                return (root, *path), looks
            seen.add(id(holder))
            longer = (_step(holder, held), *path)
            if len(longer) < _STEPS:
                waiting.append((holder, longer))
            if len(longer) > len(longest):
                longest = longer
    return longest, looks


def _is_ours(holder: object, waiting: Iterable[object]) -> bool:
    """Say whether it is one of the search's own frames, or of its queue."""
    if isinstance(holder, FrameType):
        return holder.f_code.co_filename.startswith((_OURS, "<frozen "))
    return isinstance(holder, tuple) and any(one is holder for one in waiting)  # an entry of the queue


def _root(holder: object, held: object) -> str:
    """Say what lives by itself; empty for what something else holds."""
    if isinstance(holder, dict):
        if (module := _module_of(holder)) is not None:
            return f"module {module}: {_key_of(holder, held)}"
        return ""
    if isinstance(holder, ModuleType):
        return f"module {holder.__name__}"
    if isinstance(holder, type):
        return f"class {holder.__qualname__}"
    return ""


def _module_of(names: dict[Any, Any]) -> str | None:
    if isinstance(name := names.get("__name__"), str) and "__builtins__" in names:
        return name
    return next((m.__name__ for m in list(sys.modules.values()) if getattr(m, "__dict__", None) is names), None)


def _step(holder: object, held: object) -> str:
    """Say how `holder` holds."""
    if isinstance(holder, dict):
        return f"{_key_of(holder, held)} of a dict of {len(holder):,}"
    if isinstance(holder, list | tuple | deque):
        at = next((number for number, one in enumerate(holder) if one is held), None)
        index = "an item" if at is None else f"[{at}]"
        return f"{index} of a {type(holder).__name__} of {len(holder):,}"
    if isinstance(holder, set | frozenset):
        return f"an item of a {type(holder).__name__} of {len(holder):,}"
    if isinstance(holder, GeneratorType | CoroutineType) and (frame := getattr(holder, _FRAME[type(holder)])):
        name = next((name for name, value in frame.f_locals.items() if value is held), "a value")
        return f"{name} in the {type(holder).__name__} {holder.__qualname__}"
    if isinstance(holder, FrameType):  # of a function that ended, kept by an exception's traceback
        where = f"{os.path.basename(holder.f_code.co_filename)}:{holder.f_lineno}"
        name = next((name for name, value in holder.f_locals.items() if value is held), "a value")
        return f"{name} in the kept frame of {holder.f_code.co_qualname} ({where})"
    if isinstance(holder, CellType):
        return "a variable of an enclosing function"
    if isinstance(holder, FunctionType):
        return f"function {holder.__qualname__}"
    return f"{_attribute_of(holder, held)} of a {type(holder).__qualname__}"


def _key_of(names: dict[Any, Any], held: object) -> str:
    for key, value in list(names.items()):
        if value is held:
            return _shown(key)
    return "a key"


def _shown(key: object) -> str:
    """Keys of the plain types only: of others, saying them would run the program's code."""
    if type(key) is str and key.isidentifier():
        text = key
    elif type(key) in (str, int, float, bool, bytes) or key is None:
        text = repr(key)
    else:
        text = f"a key of type {type(key).__qualname__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _attribute_of(holder: object, held: object) -> str:
    """Give the attribute's name without running a property of the program's."""
    try:
        names = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        names = {}
    if names is held:
        return "attributes"
    for name, value in list(names.items()):
        if value is held:
            return f".{name}"
    for name in dir(type(holder)):
        slot = inspect.getattr_static(type(holder), name, None)
        if inspect.ismemberdescriptor(slot):
            try:
                if slot.__get__(holder) is held:
                    return f".{name}"
            except AttributeError:
                continue
    return "a part"
