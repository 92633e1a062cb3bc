"""Replay of a trace on any device and mode: the native loop, and what its numbers mean in one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from streampool import _core, config
from streampool._sizes import format_count, format_size
from streampool.device import Device, driver_of
from streampool.pool import Pool
from streampool.traces import Trace, read_trace

__all__ = ["ReplayResult", "replay"]

# On the simulated device a fill is host memory that is touched. Filling only the ends of each block lets a trace replay
# that is larger than the host's memory.
SIMULATED_FILL_EDGE = "4KiB"
DEFAULT_PASSES = 3


@dataclass(slots=True)
class ReplayResult:
    """What a replay measured. Sizes in bytes, times in nanoseconds; an event is one allocation or one free."""

    trace: str
    device: str
    mode: str
    verified: bool
    events: int
    streams: int
    passes: int
    ns_per_event_cold: float
    ns_per_event: float
    peak_live_bytes: int
    peak_reserved_bytes: int
    live_at_end_bytes: int
    failures: int
    verify_errors: int
    faults: int
    first_failure: str = ""
    skipped_failures: int = 0
    skipped_frees: int = 0
    skipped_null: int = 0
    reallocations: int = 0
    own_allocator: str = ""
    own_peak_reserved_bytes: int = 0
    own_ratio: float = 0.0
    reuse: dict[str, int] = field(default_factory=dict)  # by path: allocations of all passes together
    found: list[dict[str, Any]] = field(default_factory=list)  # the faults themselves
    notes: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Reserved over live, at their peaks."""
        return self.peak_reserved_bytes / self.peak_live_bytes if self.peak_live_bytes else 0.0

    @property
    def all_passes(self) -> str:
        """The passes that `reuse` sums, in words: the cold one, the warm ones, and that of ``verify``."""
        count = format_count(1 + self.passes + self.verified, "pass", "passes")
        return f"{count} (1 cold, {self.passes:,} warm{', 1 verifying' if self.verified else ''})"

    @property
    def is_clean(self) -> bool:
        """True when every event was served, every stamp held and nothing was found."""
        return not (self.failures or self.verify_errors or self.faults)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if not self.is_clean:
            bad = [
                format_count(count, one)
                for count, one in (
                    (self.failures, "failed allocation"),
                    (self.verify_errors, "damaged block"),
                    (self.faults, "fault"),
                )
                if count
            ]
            return f"{' and '.join(bad)}" + (f"; the first: {self.first_failure}" if self.first_failure else "")
        if not self.peak_live_bytes:
            return "the log allocates nothing"
        sentence = f"reserved is {self.ratio:.2f} × live"  # noqa: RUF001
        if self.own_allocator:
            sentence += (
                f"; this log's own allocator ({self.own_allocator}) reserved {self.own_ratio:.2f} × its live bytes"  # noqa: RUF001
            )
        return sentence

    def to_dict(self) -> dict[str, Any]:
        """Give the result as plain data, ready for JSON."""
        plain = asdict(self)
        plain["faults_found"] = plain.pop("found")
        return {**plain, "ratio": self.ratio, "verdict": self.verdict}


def replay(
    trace: Trace | str | Path,
    device: Any = None,
    mode: str | None = None,
    *,
    verify: bool = False,
    passes: int = DEFAULT_PASSES,
    options: Mapping[str, object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayResult:
    """Serve every event of a trace from a fresh pool, in a native loop, each stream on a stream of its own.

    Parameters
    ----------
    trace
        A trace, or the path of one.
    device
        As for ``sp.Pool``.
    mode
        As for ``sp.Pool``.
    verify
        Once more, stamping the first and last bytes of each block and checking them at its free. The figures are those
        of the passes before.
    passes
        Timed passes after the first, cold one; their median is ``ns_per_event``.
    options
        Options of the pool; `mode` stands over a ``mode`` there.
    progress
        Called with (events done, events in all) now and then.

    Raises
    ------
    TraceError
        The trace cannot be read.
    ValueError, TypeError
        A setting that does not fit.
    """
    if not isinstance(trace, Trace):
        trace = read_trace(trace)
    if isinstance(device, (str, int)) or device is None:
        device = Device(device)
    driver = driver_of(device)
    settings: dict[str, Any] = dict(options or {})
    named = settings.pop("mode", None)
    mode = named if mode is None else mode
    notes = list(trace.notes) + _bound_fills(driver, mode, settings)

    streams = [device.create_stream() for _ in trace.stream_names]
    pool = Pool(device, mode=mode, name="replay", **settings)
    try:
        for stream in streams:
            pool.register_stream(stream)
        measured = _core.replay(
            pool,
            trace.actions.tobytes(),
            trace.ids.tobytes(),
            trace.sizes.tobytes(),
            trace.streams.tobytes(),
            [int(stream.handle) for stream in streams],
            passes=passes,
            verify=verify,
            progress=progress,
        )
        if progress is not None:
            rounds = 1 + passes + verify
            progress(rounds * trace.events, rounds * trace.events)
        pool.check()
        found = pool.take_faults()
        reuse = reuse_paths(pool.stats())
        for stream in streams:
            pool.forget_stream(stream)
    finally:
        pool.close()
    for stream in streams:
        stream.close()
    found += pool.take_faults()

    own = trace.own
    return ReplayResult(
        trace=trace.name,
        device=driver.name,
        mode=pool.mode,
        verified=verify,
        events=trace.events,
        streams=len(trace.stream_names),
        passes=passes,
        ns_per_event_cold=float(measured["ns_per_event_cold"]),
        ns_per_event=float(measured["ns_per_event"]),
        peak_live_bytes=int(measured["peak_live_bytes"]),
        peak_reserved_bytes=int(measured["peak_reserved_bytes"]),
        live_at_end_bytes=int(measured["live_at_end_bytes"]),
        failures=int(measured["failures"]),
        verify_errors=int(measured["verify_errors"]),
        faults=len(found),
        first_failure=str(measured.get("first_failure") or ""),
        skipped_failures=trace.skipped_failures,
        skipped_frees=trace.skipped_frees,
        skipped_null=trace.skipped_null,
        reallocations=trace.reallocations,
        own_allocator=own.name if own else "",
        own_peak_reserved_bytes=own.peak_reserved_bytes if own else 0,
        own_ratio=own.ratio if own else 0.0,
        reuse=reuse,
        found=found,
        notes=notes,
    )


def reuse_paths(stats: Mapping[str, Any]) -> dict[str, int]:
    """Give the counters that tell where memory came from, out of a pool's counters."""
    return dict(stats["paths"])


def _bound_fills(driver: _core.Driver, mode: str | None, settings: dict[str, Any]) -> list[str]:
    """Bound fills to the edges of blocks on the simulated device, unless somebody said otherwise; give a note of it."""
    resolved = config.resolve(mode, settings)
    if not driver.simulated or resolved["fill"] != "true" or "fill_edge_bytes" in settings:
        return []
    if "fill_edge_bytes=" in os.environ.get(config.ENVIRONMENT, ""):
        return []
    settings["fill_edge_bytes"] = SIMULATED_FILL_EDGE
    edge = format_size(_core.parse_size(SIMULATED_FILL_EDGE))
    return [
        f"fills cover the first and last {edge} of a block, so that the host's memory is enough "
        "(--option fill_edge_bytes=0: whole blocks)"
    ]
