"""Where the installed package keeps what C++ programs and other loaders need; and what to say where it is not whole."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = [
    "bench_sources",
    "bench_worker_path",
    "cmake_dir",
    "fault_page",
    "include_dir",
    "library_path",
    "without_core",
]

_ROOT = Path(__file__).parent


def cmake_dir() -> Path:
    """Give the folder of the CMake package: what ``find_package(streampool)`` needs as ``streampool_DIR``."""
    return _ROOT / "cmake"


def include_dir() -> Path:
    """Give the folder to include ``streampool/streampool.h`` from."""
    return _ROOT / "include"


def library_path() -> Path:
    """Give the path of ``libstreampool.so``: the core with its C ABI."""
    return _ROOT / "libstreampool.so"


def fault_page(word: str) -> str:
    """Give the documentation's page of a kind of fault or a class of leaks, as Markdown; empty where it is missing."""
    try:
        return (_ROOT / "_faults" / f"{word}.md").read_text(encoding="utf-8")
    except OSError:
        return ""


def without_core() -> ImportError:
    """Give the error of a package without its native core: the source tree, or a part of an installation."""
    if (_ROOT.parent / "native").is_dir() and (_ROOT.parent / "pyproject.toml").is_file():
        said = (
            f"{_ROOT} is streampool's source, not the installed package: it has no native core. "
            "Start Python with -P, or in another folder, to import the installed package. "
            "To install it: `make build`, which makes .venv/bin/python, or `pip install .`"
        )
    else:
        version = ".".join(map(str, sys.version_info[:2]))
        said = (
            f"{_ROOT} has no native core for this Python {version} ({sys.executable}): the installation is not whole, "
            "or another Python's. Install streampool with this Python"
        )
    return ImportError(said, name="streampool._core", path=str(_ROOT))


def bench_worker_path() -> Path:
    """Give the path of the program that measures allocators for ``streampool bench``."""
    return _ROOT / "_bench_worker"


def bench_sources() -> tuple[Path, ...]:
    """Give where the sources of further such programs may be: in the package, and in the source tree that it is of."""
    return _ROOT / "_bench_native", Path(__file__).resolve().parents[1] / "benchmarks" / "native"
