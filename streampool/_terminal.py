"""Whether text for a stream may be coloured: where a person reads it, and did not ask for plain text."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["wants_color"]


def wants_color(stream: Any) -> bool:
    """Say whether `stream` is a terminal that shows colours.

    ``NO_COLOR`` with any value but an empty one switches them off (https://no-color.org), ``TERM=dumb`` too;
    ``FORCE_COLOR`` switches them on where there is no terminal, as in many CI logs. ``NO_COLOR`` wins.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        return bool(stream.isatty())
    except Exception:  # closed, or no file
        return False
