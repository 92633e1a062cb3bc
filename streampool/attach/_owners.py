"""The objects of a library that own blocks of its pools, for naming what holds them (streampool/_referrers.py)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["objects_at"]


_MOST = 4  # objects of one block that are looked at


def objects_at(kind: type, address_of: Callable[[Any], int], serials: Mapping[int, int]) -> dict[int, object]:
    """Give an object of type `kind` for each block, by the block's number; `serials` has these by address.

    Of several that share a block, as a tensor and its views do, the one that most others hold.
    """
    found: dict[int, list[object]] = {}
    for candidate in gc.get_objects():
        # By type(): an object may claim another class, and do something to find out.
        if issubclass(type(candidate), kind):
            try:
                serial = serials.get(address_of(candidate))
            except Exception:  # an object without memory
                continue
            if serial is not None and len(sharing := found.setdefault(serial, [])) < _MOST:
                sharing.append(candidate)
    candidate = None
    return {serial: max(sharing, key=_holders) if sharing[1:] else sharing[0] for serial, sharing in found.items()}


def _holders(one: object) -> int:
    return len(gc.get_referrers(one))
