"""CuPy's own pools: the default memory pool of each device in use, and the pinned pool.

CuPy says how many bytes a pool has and how many of them are in use, and of the pinned pool how many blocks are free. It
keeps no call stacks, and its hooks see only the thread that installed them, so holders are not told apart.
"""

from __future__ import annotations

import sys
from typing import Any

from streampool._contexts import in_use
from streampool._observe._model import HOST, LibraryPool, LiveBlock

__all__ = ["CuPy"]

_DEVICES = 64  # at most asked about


class CuPy:
    """See `streampool._observe.Library`."""

    name = "cupy"

    def begin(self, *, stacks: bool) -> None:
        """Nothing to do: pools count by themselves."""

    def end(self) -> None:
        """Nothing to do."""

    def pools(self) -> list[LibraryPool]:
        """Give a pool a device that has memory, and the pinned one where it keeps blocks."""
        cupy = sys.modules.get("cupy")
        if cupy is None or not hasattr(cupy, "get_default_memory_pool"):
            return []
        devices = [ordinal for ordinal in range(_DEVICES) if in_use(ordinal)]
        pool = cupy.get_default_memory_pool()
        found = [held for ordinal in devices if (held := _pool(cupy, pool, ordinal)).reserved]
        if devices and (free := int(cupy.get_default_pinned_memory_pool().n_free_blocks())):
            # How many bytes they have CuPy does not say.
            found.append(LibraryPool("cupy", HOST, "pinned", None, None, free_blocks=free))
        return found

    def blocks(self) -> list[LiveBlock]:
        """Give one block for all that is in use on each device."""
        return [
            LiveBlock(pool.device, pool.kind, 0, pool.used, tag="CuPy's memory pool, all blocks, no call stack")
            for pool in self.pools()
            if pool.used
        ]


def _pool(cupy: Any, pool: Any, ordinal: int) -> LibraryPool:
    with cupy.cuda.Device(ordinal):
        return LibraryPool(
            "cupy",
            f"cuda:{ordinal}",
            "device",
            int(pool.used_bytes()),
            int(pool.total_bytes()),
            limit=int(pool.get_limit()) or None,
            free_blocks=int(pool.n_free_blocks()),
        )
