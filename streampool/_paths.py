"""Where the installed package keeps what C++ programs and other loaders need."""

from __future__ import annotations

from pathlib import Path

__all__ = ["cmake_dir", "include_dir", "library_path"]

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
