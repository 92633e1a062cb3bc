"""The libraries that can be served: one row each."""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import dataclass

from streampool._versions import installed

__all__ = ["LIBRARIES", "Library", "find", "parse_list", "problem_of_version", "version_of"]


@dataclass(frozen=True, slots=True)
class Library:
    """A library: what `install` calls it, how texts do, and what serves it."""

    name: str
    title: str
    module: str  # whose import is the moment to take over
    adapter: str  # the module of ours, with ``make(pools)``
    distributions: tuple[str, ...]  # that may have brought it, for its version
    oldest: tuple[int, int]  # what is older is refused
    aliases: tuple[str, ...] = ()


LIBRARIES: tuple[Library, ...] = (
    Library("torch", "PyTorch", "torch", "streampool.attach.torch", ("torch",), (2, 4), ("pytorch",)),
    Library(
        "cupy",
        "CuPy",
        "cupy",
        "streampool.attach.cupy",
        ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        (13, 0),
    ),
    Library("numba", "Numba", "numba.cuda", "streampool.attach.numba", ("numba-cuda", "numba"), (0, 20)),
    Library("rmm", "RMM", "rmm", "streampool.attach.rmm", ("rmm-cu13", "rmm-cu12", "rmm"), (25, 2)),
    Library(
        "cuda.core",
        "cuda.core",
        "cuda.core",
        "streampool.attach.cuda_core",
        ("cuda-core",),
        (1, 2),
        ("cuda_core", "cuda-core"),
    ),
)


_NOT_SERVED = {
    "numpy": "its arrays are not allocated from a pool; pool.allocate(size).numpy(dtype) is one that is",
    "jax": "it takes no other allocator; jax.dlpack.from_dlpack(buffer) gives it memory of a pool",
    "tensorflow": "it takes no other allocator; tf.experimental.dlpack.from_dlpack gives it memory of a pool",
}
"""Libraries that programs ask for, and what they do instead."""


def find(name: str) -> Library:
    """Give the row of a library; ``ValueError`` names those there are."""
    if not isinstance(name, str):
        raise TypeError(f"a library is named by text such as 'torch', not {type(name).__name__}")
    for row in LIBRARIES:
        if name.lower() in (row.name, *row.aliases):
            return row
    if name.lower() in _NOT_SERVED:
        raise ValueError(f"{name} cannot be served: {_NOT_SERVED[name.lower()]}")
    names = [row.name for row in LIBRARIES]
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"no library {name!r} can be served: there are {', '.join(names)}{hint}")


def parse_list(text: str) -> tuple[str, ...]:
    """Read ``auto``, ``none`` or names with commas between them; ``ValueError`` says what is wrong."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["auto"]:
        return tuple(row.name for row in LIBRARIES)
    if words == ["none"]:
        return ()
    if not words:
        raise ValueError("no library is named: give names such as 'torch,cupy', 'auto' or 'none'")
    if "auto" in words or "none" in words:
        raise ValueError(f"{text!r}: 'auto' and 'none' stand alone")
    return tuple(dict.fromkeys(find(word).name for word in words))


def version_of(row: Library) -> str:
    """Give the version of an imported library: its own word, else its distribution's; empty where neither says it."""
    module = sys.modules.get(row.module)
    own = getattr(module, "__version__", None) or getattr(
        sys.modules.get(row.module.partition(".")[0]), "__version__", None
    )
    if row.name != "numba" and isinstance(own, str):
        return own
    return installed(*row.distributions) or (own if isinstance(own, str) else "")


def problem_of_version(row: Library, version: str) -> str | None:
    """Say why a version cannot be served; None: it can, or is not known."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= row.oldest:
        return None
    least = ".".join(map(str, row.oldest))
    return f"{row.title} {version} is too old to be served: it needs {least} or newer"
