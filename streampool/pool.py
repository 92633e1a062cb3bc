"""Pools as Python sees them: settings by name, results as objects, findings handed to the session that watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streampool import _core, config, session
from streampool._sizes import format_size, parse_size
from streampool.device import driver_of

if TYPE_CHECKING:
    from streampool._findings import PoolFindings
    from streampool.faults import Fault, Frame
    from streampool.leaks import Epochs, Leaks

__all__ = ["CheckResult", "Pool", "PoolStats", "SiteUsage"]


class PoolStats(dict[str, Any]):
    """Counters of a pool at one moment, in bytes and counts: ``stats.in_use`` and ``stats["in_use"]`` are the same.

    ``source`` says where the pool's segments come from (``"vmm"``, ``"malloc"``, ``"driver"``).

    ``in_use + rounding + guards + quarantined + pending + cached == reserved`` whenever the pool is quiet. The names
    are the core's table of counters.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no counter {name!r}: there are {', '.join(self)}") from None


class CheckResult(dict[str, Any]):
    """What a check looked at.

    ``checked_blocks``, ``checked_bytes``, ``faults`` (how many it found), ``not_checked`` (facts of blocks in use).
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no result {name!r}: there are {', '.join(self)}") from None


@dataclass(frozen=True, slots=True)
class SiteUsage:
    """What one call site allocated, and how much of it was never written. Sizes in bytes."""

    allocated_at: tuple[Frame, ...]
    blocks: int
    bytes: int
    untouched: int

    def __str__(self) -> str:
        written = self.bytes - self.untouched
        part = f" ({100 * written / self.bytes:.0f} %)" if self.bytes else ""
        where = f" at {self.allocated_at[0]}" if self.allocated_at else ""
        size = f"{format_size(self.bytes)} in {self.blocks:,} block{'s' if self.blocks != 1 else ''}"
        return f"allocated {size}, wrote {format_size(written)}{part}{where}"


class Pool(_core.Pool):
    """Owns memory of one kind on one device, and hands it out in stream order.

    Parameters
    ----------
    device
        ``sp.Device(...)``, a ``cuda.core.Device``, a ``sp.sim.Device`` or a name; None is ``sp.Device()``.
    kind
        ``"device"``, ``"pinned"`` or ``"managed"``.
    mode
        ``"off"``, ``"observe"``, ``"production"``, ``"debug"`` or ``"paranoid"``; None is what ``STREAMPOOL_OPTIONS``
        says, else ``"production"``.
    limit
        The most bytes held from the driver: a number, or text (``"2GiB"``), or a part of the device's memory (``0.8``,
        ``"80%"``); None: no limit.
    initial
        Bytes to take from the driver at once.
    name
        The pool's name in reports and metrics.
    **options
        Any option of the table: ``streampool doctor`` or ``STREAMPOOL_OPTIONS=help=1`` lists them.

    Raises
    ------
    ValueError, TypeError
        Unknown option, mode or kind, or a value that does not fit, with what is allowed.
    DriverError, OutOfMemoryError
        The device cannot be used, or `initial` bytes are not to be had.
    """

    _own_epochs: Epochs | None = None  # where no session keeps them
    _findings: PoolFindings | None  # what `streampool run` will say of this pool; None: nobody watches

    def __init__(
        self,
        device: Any = None,
        kind: str = "device",
        mode: str | None = None,
        limit: int | float | str | None = None,
        initial: int | str | None = None,
        *,
        name: str = "default",
        **options: Any,
    ) -> None:
        for option, value in (("limit", limit), ("initial", initial)):
            if value is not None:
                options[option] = value
        resolved = config.resolve(mode, options, pool=name)
        super().__init__(driver_of(device), kind=kind, name=name, options=resolved)
        self._findings = session.pool_made(self)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"mode={self.mode}"
        return f"<streampool.Pool {self.name!r} {self.kind} on {self.driver.name}, {state}>"

    @property
    def mode(self) -> str:
        """The mode's word."""
        return self.options["mode"]

    def stats(self) -> PoolStats:
        """Give the pool's counters. Looks at every free slot: for people and tests, not for hot loops."""
        return PoolStats(super().stats())

    def check(self, timeout: float = 10.0) -> CheckResult:
        """Verify guards and fills of everything that can be verified now.

        Parameters
        ----------
        timeout
            Seconds to wait at most for pending work. Blocks still in use by then are listed as not checked.

        Raises
        ------
        FaultError
            Faults were found, and ``on_fault=raise``.
        """
        result = CheckResult(super().check(timeout))
        if self._findings is not None:
            self._findings.observe(self)
        elif self.options["track"] == "true":
            self._epochs().observe(self.live_blocks())
        if self.options["on_fault"] == "raise":
            _raise_found(self)
        return result

    def take_faults(self) -> list[dict[str, Any]]:
        """Give the faults found since the last call, as plain facts. `faults` gives them as objects."""
        taken = super().take_faults()
        if self._findings is not None:
            self._findings.faults += taken
        return taken

    def faults(self) -> list[Fault]:
        """Give the faults found since the last call, as objects with both stacks resolved."""
        return _as_objects(self, self.take_faults())

    def leaks(self) -> Leaks:
        """Give the live blocks by class and by the line that allocated them: lost, growing, held.

        Growing are sites whose live bytes rose from each `check` to the next; under ``streampool run`` also from one
        half second to the next.
        """
        from streampool.leaks import find_leaks

        return find_leaks(self.live_blocks(), epochs=self._epochs(), pool=self.name, device=self.driver.name)

    def usage(self) -> list[SiteUsage]:
        """Give how much of what each call site allocated was written by the time it was freed, most unwritten first.

        Counted where ``count_untouched`` and ``fill`` of whole blocks are on, in freed blocks whose check is done:
        `check` brings it up to date. Bytes that the program wrote and that happened to hold the pattern (1 in 256)
        count as untouched.
        """
        from streampool.faults import default_resolve, user_frames

        sites = [
            SiteUsage(
                user_frames(default_resolve(site["allocated_at"])) if site["allocated_at"] else (),
                site["blocks"],
                site["bytes"],
                site["untouched"],
            )
            for site in super()._usage()
        ]
        return sorted(sites, key=lambda site: -site.untouched)

    def _epochs(self) -> Epochs:
        if self._findings is not None:
            return self._findings.epochs
        if self._own_epochs is None:
            from streampool.leaks import Epochs

            self._own_epochs = Epochs()
        return self._own_epochs

    def heap_profile(self) -> bytes:
        """Give what the pool's live blocks hold, by the call stack that allocated them, as a gzipped pprof profile.

        In production these are estimates without bias from the sampled allocations (``sample_bytes``); where every call
        stack is kept they are exact, and what was allocated and freed again is not counted. Looks at every live block.
        """
        from streampool.metrics.holders import Holder, PoolHolders
        from streampool.metrics.pprof import encode

        sampled = 0 if self.options["stack_depth"] != "0" else parse_size(self.options["sample_bytes"])
        holders = [Holder(*held) for held in self.holders()]
        return encode([PoolHolders(self.driver.name, self.name, self.kind, sampled, holders)])

    def snapshot(self) -> dict[str, Any]:
        """Give the whole pool as plain data, ready for JSON: settings, counters, live blocks."""
        return {
            "pool": self.name,
            "kind": self.kind,
            "device": self.driver.name,
            "options": dict(self.options),
            "stats": dict(super().stats()),
            "blocks": self.live_blocks(),
        }

    @contextmanager
    def capturing(self, stream: Any) -> Iterator[None]:
        """Declare that `stream` captures a graph from before the block begins until after it ends (R23).

        What the stream allocates, frees and declares inside is the graph's own until no graph made of the capture is
        left and what was launched is done. Streams that join the capture need no declaration of theirs.

        >>> with pool.capturing(s):
        ...     s.begin_capture()
        ...     block = pool.allocate(4096, stream=s)
        ...     graph = s.end_capture()
        """
        self.begin_capturing(stream)
        try:
            yield
        finally:
            self.end_capturing(stream)

    def close(self) -> None:
        """Check everything, take nothing new, give idle memory back. Live blocks stay valid until they are freed."""
        found: list[dict[str, Any]] = []
        if self._findings is not None:
            found += self._findings.gather(self, "closed", timeout=10.0)
        super().close()
        session.drain_logs()
        if self._findings is not None:
            found += self._findings.gather(self, "closed", timeout=0.0)
        if self.options["on_fault"] == "raise":
            _raise(self, found + self.take_faults())

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A pool that is only dropped is looked at as one that is closed, but waits for nothing: this may be any thread.
        findings = getattr(self, "_findings", None)  # absent: the constructor raised
        if findings is not None and session.active() is not None:
            findings.gather(self, "collected", timeout=0.0)


def _as_objects(pool: _core.Pool, faults: list[dict[str, Any]]) -> list[Fault]:
    from streampool.faults import Fault

    return [Fault.from_dict(fault, pool=pool.name, device=pool.driver.name) for fault in faults]


def _raise(pool: _core.Pool, found: list[dict[str, Any]]) -> None:
    """Raise ``FaultError`` for faults, if there are any; its ``faults`` are the objects."""
    if not found:
        return
    faults = _as_objects(pool, found)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    error = _core.FaultError(f"{faults[0]}{more}; {faults[0].summary}")
    error.faults = faults
    raise error


def _raise_found(pool: _core.Pool) -> None:
    _raise(pool, pool.take_faults())


_core._fault_hook = _raise_found  # asked before a call where on_fault=raise
