"""Pools as Python sees them: settings by name, results as objects, findings handed to the session that watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streampool import _core, _on_fault, config, session
from streampool._sizes import format_size, parse_size
from streampool.device import driver_of
from streampool.errors import LeakError

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
    on_fault
        What happens when a fault is found: ``"report"`` (it is kept for `faults` and the report), ``"raise"``
        (``FaultError``), ``"abort"`` (the report of it goes to standard error, and the process ends by ``SIGABRT``),
        or a function, which is called with each `faults.Fault`: see `set_fault_callback`. None: as the other options
        say.
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
    _fault_callback: Callable[[Fault], object] | None = None
    _untold: Sequence[dict[str, Any]] = ()  # faults that the function is still to be told of
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
        on_fault: str | Callable[[Fault], object] | None = None,
        **options: Any,
    ) -> None:
        if callable(on_fault):
            self._fault_callback = on_fault
            on_fault = "callback"
        if on_fault is not None:
            options["on_fault"] = on_fault
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
            Faults were found, and ``on_fault=raise``. With a function, what it raises.
        """
        result = CheckResult(super().check(timeout))
        if self._findings is not None:
            self._findings.observe(self)
        elif self.options["track"] == "true":
            self._epochs().observe(self.live_blocks())
        _on_fault.tell(self)
        if result["faults"]:
            session.drain_logs()
        return result

    def take_faults(self) -> list[dict[str, Any]]:
        """Give the faults found since the last call, as plain facts. `faults` gives them as objects."""
        taken = super().take_faults()
        if self._findings is not None:
            self._findings.faults += taken
        return taken

    def faults(self) -> list[Fault]:
        """Give the faults found since the last call, as objects with both stacks resolved."""
        return _on_fault.as_objects(self, self.take_faults())

    def set_fault_callback(self, callback: Callable[[Fault], object] | None) -> None:
        """Have `callback` called with each fault, on a pool whose ``on_fault`` is a function or ``"callback"``.

        It runs on the thread whose call is told of the fault, before that call does anything: the pool's next
        ``allocate``, ``allocate_raw``, ``free_raw``; `check` and `close`; and a wrong free itself, after it was
        refused. No lock is held: it may use the pool, and what is found meanwhile is told when it has returned. Two
        threads may be in it at once. What it raises comes out of that call; the faults that it was then not told of
        are told with the next one, at the latest by `check` or `close`.

        Parameters
        ----------
        callback
            The function; None: faults are kept, as with ``on_fault=report``, until there is one.

        Raises
        ------
        ValueError
            The pool has another ``on_fault``, which is fixed when a pool is made.
        TypeError
            `callback` cannot be called.
        """
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be something to call, or None, not {callback!r}")
        if (what := self.options["on_fault"]) != "callback":
            raise ValueError(f"on_fault={what}: a pool that is to call a function is made with on_fault=function")
        self._fault_callback = callback

    def leaks(self, *, chains: bool = False) -> Leaks:
        """Give the live blocks by class and by the line that allocated them: lost, growing, held.

        Growing are sites whose live bytes rose from each `check` to the next; under ``streampool run`` also from one
        half second to the next.

        Parameters
        ----------
        chains
            Also look for the chain of Python objects that holds one block of each line. That takes some looks at every
            object of the process.
        """
        return self._leaks_of(self.live_blocks(), self._epochs(), chains)

    @contextmanager
    def expect_no_leaks(self) -> Iterator[None]:
        """Have every block that is allocated inside freed by the end: else raise.

        Reference cycles are collected first. Blocks from before, and what other pools hold, do not count. Blocks of
        other threads do, where these use this pool meanwhile. An exception of the body goes out as it is.

        Raises
        ------
        LeakError
            Blocks are still live; its `leaks` has them by class and line, each with the chain that holds it.
        ValueError
            The pool does not know which block is which: it needs ``track=true``, as in mode ``debug``.
        """
        import gc

        if self.options["track"] != "true":
            raise ValueError(f"pool {self.name!r} does not track its blocks: use mode='debug', or track=True")
        before = {block["serial"] for block in self.live_blocks()}
        yield
        gc.collect()
        left = [block for block in self.live_blocks() if block["serial"] not in before]
        if leaks := self._leaks_of(left, None, chains=True):
            lines = "\n".join(leak.line for leak in leaks)
            error = LeakError(f"{leaks.summary} of pool {self.name!r}\n{lines}")
            error.leaks = leaks
            raise error

    def _leaks_of(self, blocks: list[dict[str, Any]], epochs: Epochs | None, chains: bool) -> Leaks:
        from streampool import _referrers
        from streampool.leaks import find_leaks

        return find_leaks(
            blocks,
            epochs=epochs,
            chains=_referrers.chains(self, _referrers.some_serials(blocks)) if chains else None,
            now=self.driver.now(),
            pool=self.name,
            device=self.driver.name,
        )

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

        Labels of each sample: ``pool``, ``device``, ``kind`` and, where blocks have one, ``tag``.

        In production these are estimates without bias from the sampled allocations (``sample_bytes``); where every call
        stack is kept they are exact, and what was allocated and freed again is not counted. Looks at every live block.
        """
        from streampool.metrics.holders import Holder, PoolHolders
        from streampool.metrics.pprof import encode

        holders = [Holder(*held) for held in self.holders(by_tag=True)]
        return encode([PoolHolders(self.driver.name, self.name, self.kind, self._sample_bytes(), holders)])

    def _sample_bytes(self) -> int:
        """How many bytes a sampled call stack stands for; 0: every one is kept."""
        return 0 if self.options["stack_depth"] != "0" else parse_size(self.options["sample_bytes"])

    def snapshot(self) -> dict[str, Any]:
        """Give the whole pool as plain data, ready for JSON: settings, counters, who holds memory, live blocks.

        ``stacks`` has the call stacks of their numbers in words. `streampool.snapshots` reads it again in any process,
        and ``streampool report FILE`` makes text, a page or a profile of it. Looks at every live block.
        """
        from streampool.snapshots import take

        return take(self)

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
        _on_fault.tell(self, found)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A pool that is only dropped is looked at as one that is closed, but waits for nothing: this may be any thread.
        findings = getattr(self, "_findings", None)  # absent: the constructor raised
        if findings is not None and session.active() is not None:
            findings.gather(self, "collected", timeout=0.0)
