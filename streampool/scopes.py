"""Named scopes of a program: what it was doing, for the window of a fault."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from streampool import _core

__all__ = ["scope"]


class scope:  # noqa: N801 - used as a verb: `with sp.scope("decode"):`
    """Say what the program does while the block runs.

    A fault that is found later names the scopes that were open between the last check that found its bytes whole and
    the first that found them bad. Costs well under a microsecond; the latest 4096 scopes of the process are kept.

    Parameters
    ----------
    name
        What reports show; equal names are shown once, with a count. Of at most 200 bytes, the rest is cut.

    Examples
    --------
    >>> for step, batch in enumerate(batches):
    ...     with sp.scope(f"step {step}"):
    ...         with sp.scope("decode"):
    ...             decode(batch)

    Scopes may nest and overlap, in threads and tasks, and end in any order. A scope object may be used again, and
    inside itself.
    """

    __slots__ = ("_entered", "name")

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a scope's name is a str, not {type(name).__name__}")
        self.name = name
        self._entered: list[int] = []

    def __enter__(self) -> Self:
        self._entered.append(_core.enter_scope(self.name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._entered:
            raise RuntimeError(f"scope {self.name!r} is left more often than it was entered")
        _core.leave_scope(self._entered.pop())

    def __repr__(self) -> str:
        return f"<streampool.scope {self.name!r}>"
