"""One block of memory as an object: made by ``Pool.allocate``, freed by ``close``, ``with`` or its last reference."""

from __future__ import annotations

from streampool._core import Buffer

__all__ = ["Buffer"]
