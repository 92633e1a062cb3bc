"""Versions of installed packages."""

from __future__ import annotations

from importlib import metadata

__all__ = ["installed"]


def installed(*distributions: str) -> str | None:
    """Give the version of the first of these that is installed, None where none is."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
