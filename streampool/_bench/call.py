"""What a call from Python is: a row of a table, with a tight loop over an allocation and its free.

A call belongs to a process: calls that change what others measure (PyTorch's history, RMM's current resource, a library
that streampool serves) have one of their own. Only the worker makes the loops, so listing a table imports no library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SIZE", "Call", "Loop", "check", "ordinal_of", "settings_of"]

SIZE = 4096

Loop = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Call:
    """One row: `make(device, options)` gives the loop, in the process called `process`."""

    name: str
    label: str
    kind: str
    peer: str  # as --peers names it
    process: str
    module: str  # that must be importable
    make: Callable[[str, str], Loop]
    cuda: bool = True
    served: bool = False  # the library's memory is streampool's: its options are told too
    facts: Mapping[str, Any] = field(default_factory=dict)  # of its row, beside its name

    @property
    def has_options(self) -> bool:
        """Whether streampool's pools serve it."""
        return self.served or self.peer == "streampool"


def check(result: tuple[Any, ...]) -> Any:
    """Give what a call of cuda.bindings gave, or raise what went wrong."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"the driver says {error!r}")
    return values[0] if len(values) == 1 else tuple(values)


def ordinal_of(device: str) -> int:
    """Give N of ``cuda:N``."""
    return int(device.partition(":")[2] or 0)


def settings_of(options: str, mode: str = "production") -> dict[str, str]:
    """Read ``name=value:name=value``; `mode` is what they do not say."""
    return {"mode": mode, **dict(item.partition("=")[::2] for item in options.split(":") if item)}
