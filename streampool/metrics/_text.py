"""Numbers as the client library writes them, so that our page and its are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

__all__ = ["number_text"]


@cache
def number_text() -> Callable[[float], str]:
    """Give the function that writes a number; loads the client library on first use."""
    from prometheus_client.utils import floatToGoString

    write: Callable[[float], str] = floatToGoString
    return write
