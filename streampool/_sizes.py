"""Sizes as people write them: ``parse_size("2GiB")`` and back."""

from __future__ import annotations

from streampool._core import parse_size

__all__ = ["format_count", "format_size", "parse_size"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_size(size: int | float) -> str:
    """Write a number of bytes for a person: ``1536`` is ``'1.50 KiB'``; whole numbers of bytes stay whole."""
    value = float(size)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{int(size)} B"
    return f"{int(value)} {unit}" if value == int(value) else f"{value:.2f} {unit}"


def format_count(count: int, one: str, many: str | None = None) -> str:
    """``format_count(1, 'block')`` is ``'1 block'``; ``format_count(2, 'block')`` is ``'2 blocks'``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
