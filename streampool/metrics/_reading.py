"""One reading of the core's numbers, and what each series of the catalogue is worth in it.

A reading makes no driver call, takes no lock of a pool's fast path, and never raises: what went wrong is a metric.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from streampool import _core, _observe, _process_memory
from streampool._observe import LibraryPool
from streampool.metrics import _devices
from streampool.metrics.catalogue import CATALOGUE, DEVICE, LIBRARY, POOL, Metric, Type
from streampool.metrics.holders import LIBRARY as LIBRARY_PREFIX
from streampool.metrics.holders import Suspects, history

__all__ = [
    "Bins",
    "Reading",
    "Value",
    "all_subjects",
    "bounds",
    "columns_of",
    "failed",
    "facts_of",
    "read",
    "series_of",
    "subjects",
    "values_of",
    "words_of",
]


class Row(NamedTuple):
    """The numbers of all pools of one device, name and kind, or of one pool; as the core gives them."""

    device: str
    pool: str
    kind: str
    live: bool
    limit: int | None  # bytes; None: no limit, or not live
    sized: bool
    values: list[int]  # by _core.pulse_columns()


class Device(NamedTuple):
    """What is known of one device without asking it."""

    name: str
    version: str
    simulated: bool
    total: int  # bytes
    now: float  # seconds on its clock; -1: nobody to ask
    sample: tuple[int, int, float] | None  # free, total (bytes), when (on its clock)
    times: list[tuple[list[int], float]]  # by _core.pulse_bounds(): counts, sum in seconds


@dataclass(frozen=True, slots=True)
class Bins:
    """A histogram: counts up to each bound, all of them last, and the sum."""

    cumulated: tuple[float, ...]
    sum: float


@dataclass(slots=True)
class Reading:
    """All numbers at one moment. Empty where reading them failed."""

    rows: list[Row] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    unnamed: int = 0
    dropped: int = 0  # events of the log
    time: float = 0.0  # Unix time
    duration: float = 0.0  # seconds
    failed: bool = False
    suspects: dict[tuple[str, str, str], Suspects] = field(default_factory=dict)
    # Bytes that each device can still give, as far as known.
    device_rest: dict[str, float] = field(default_factory=dict)
    samples: _devices.Samples = field(default_factory=_devices.samples)


_failures = 0


def read(*, each_pool: bool = False) -> Reading:
    """Read the core's numbers: a row for each name, as series have it, or for each pool. Never raises."""
    begin = time.perf_counter()
    reading = Reading(time=time.time())
    try:
        rows, devices, reading.unnamed, reading.dropped = _core.read_pulse(each_pool)
        reading.rows = sorted((Row(*row) for row in rows), key=lambda row: row[:3])
        reading.devices = [Device(*device) for device in devices]
        reading.devices += _beside(reading)
        reading.device_rest = _rest(reading)
        reading.suspects = history.suspects()
    except Exception:
        failed(reading)
    reading.duration = time.perf_counter() - begin
    return reading


def failed(reading: Reading) -> None:
    """Note that something went wrong with a reading."""
    global _failures
    _failures += 1
    reading.failed = True


def _beside(reading: Reading) -> list[Device]:
    """Give the devices on which only other libraries have memory."""
    own, now = {device.name for device in reading.devices}, time.monotonic()
    return [
        Device(name, memory.version, False, memory.total, now, (memory.free, memory.total, memory.at), [])
        for name, memory in reading.samples.devices.items()
        if name not in own
    ]


def _rest(reading: Reading) -> dict[str, float]:
    reserved = _column_index()["reserved"]
    rest = {}
    for device in reading.devices:
        held = sum(row.values[reserved] for row in reading.rows if row.device == device.name and row.kind == "device")
        rest[device.name] = float(device.sample[0] if device.sample else max(device.total - held, 0))
    return rest


# -- what a series is worth ------------------------------------------------------------------------------------------
# A value is a number, Bins, or None where there is no series. Each row of the catalogue gives, for one subject (a row,
# a device, the reading), the values of its words in order.

Value = float | int | Bins | None


@cache
def _column_index() -> dict[str, int]:
    return {name: index for index, (name, _) in enumerate(_core.pulse_columns())}


def bounds(metric: Metric) -> tuple[float, ...]:
    """Give the upper bounds of a histogram's buckets, the infinite one last."""
    return _bounds()[metric.scope != POOL]


@cache
def _bounds() -> tuple[tuple[float, ...], tuple[float, ...]]:
    sizes, seconds, _, _ = _core.pulse_bounds()
    return (*map(float, sizes), math.inf), (*seconds, math.inf)


@cache
def _work() -> tuple[str, ...]:
    return tuple(_core.pulse_bounds()[3])


@cache
def _count_unit() -> int:
    return int(_core.pulse_bounds()[2])


def words_of(metric: Metric) -> tuple[str, ...]:
    """Give the words of a metric's own label; one empty word where it has none."""
    if metric.words:
        return tuple(metric.words)
    return _work() if metric.label else ("",)


def columns_of(metric: Metric) -> tuple[tuple[int, ...], ...]:
    """Give the columns that are added up for each word of a metric; empty where the reading computes it."""
    return () if metric.name in _COMPUTED else _columns(metric.name)


@cache
def _columns(name: str) -> tuple[tuple[int, ...], ...]:
    at = _column_index()
    (metric,) = (metric for metric in CATALOGUE if metric.name == name)
    return tuple(tuple(at[column] for column in columns) for columns in metric.words.values())


def _limit(row: Row, _: Reading) -> Value:
    return math.inf if row.limit is None else row.limit


def _headroom(row: Row, reading: Reading) -> Value:
    at = _column_index()
    held = row.values[at["reserved"]]
    own = held - sum(row.values[at[name]] for name in ("requested", "rounding", "guards"))
    rest = min(_within(row.limit, held), _given(row.device, row.kind, reading))
    return None if math.isinf(rest) else own + rest


def _within(limit: int | None, held: int) -> float:
    return math.inf if limit is None else float(max(limit - held, 0))


def _given(device: str, kind: str, reading: Reading) -> float:
    """Give what device and host can still give; managed memory may lie in either."""
    on_device = reading.device_rest.get(device, math.inf)
    on_host = math.inf if reading.samples.host is None else float(reading.samples.host)
    return {"device": on_device, "pinned": on_host}.get(kind, on_device + on_host)


def _library_headroom(pool: LibraryPool, reading: Reading) -> Value:
    if pool.reserved is None or pool.used is None:
        return None
    rest = min(_within(pool.limit, pool.reserved), _given(pool.device, pool.kind, reading))
    return None if math.isinf(rest) else pool.reserved - pool.used + rest


def _sizes(row: Row, _: Reading) -> Value:
    if not row.sized:
        return None
    first = _column_index()["size_512"]
    counts = row.values[first : first + len(_bounds()[0])]
    unit = _count_unit()
    total, cumulated = 0, []
    for count in counts:
        total += count
        cumulated.append(float((total + unit // 2) // unit))  # whole numbers, as OpenMetrics wants them; still rising
    return Bins(tuple(cumulated), float(row.values[first + len(counts)]))


def _sample_time(device: Device, reading: Reading) -> Value:
    if device.sample is None:
        return None
    age = max(device.now - device.sample[2], 0.0) if device.now >= 0 else 0.0
    return reading.time - age


def _suspects(row: Row, reading: Reading) -> Suspects | None:
    return reading.suspects.get((row.device, row.pool, row.kind))


def _library_suspects(pool: LibraryPool, reading: Reading) -> Suspects | None:
    return reading.suspects.get((pool.device, LIBRARY_PREFIX + pool.library, pool.kind))


def _by_basis(device: Device, reading: Reading, *, outside: bool) -> list[Value]:
    memory = reading.samples.devices.get(device.name)
    if memory is None or memory.process is None:
        return [None] * len(_process_memory.Basis)
    value = memory.outside if outside else memory.process.bytes
    return [value if basis is memory.process.basis else None for basis in _process_memory.Basis]


# One value, or one a word of the metric's label.
_COMPUTED: dict[str, Callable[[Any, Reading], Value | list[Value]]] = {
    "limit_bytes": _limit,
    "headroom_bytes": _headroom,
    "suspected_leaks": lambda row, reading: getattr(_suspects(row, reading), "sites", None),
    "suspected_leak_bytes": lambda row, reading: getattr(_suspects(row, reading), "bytes", None),
    "left_over_sites": lambda row, reading: getattr(_suspects(row, reading), "aged_sites", None),
    "left_over_bytes": lambda row, reading: getattr(_suspects(row, reading), "aged_bytes", None),
    "allocation_size_bytes": _sizes,
    "device_free_bytes": lambda device, _: device.sample[0] if device.sample else None,
    "device_total_bytes": lambda device, _: device.sample[1] if device.sample else device.total,
    "device_sample_timestamp_seconds": _sample_time,
    "device_info": lambda device, _: 1,
    "driver_call_duration_seconds": lambda device, _: _durations(device),
    "process_device_bytes": lambda device, reading: _by_basis(device, reading, outside=False),
    "outside_bytes": lambda device, reading: _by_basis(device, reading, outside=True),
    "library_used_bytes": lambda pool, _: pool.used,
    "library_requested_bytes": lambda pool, _: pool.requested,
    "library_pending_bytes": lambda pool, _: None if pool.used is None else pool.pending,
    "library_cached_bytes": lambda pool, _: pool.cached,
    "library_reserved_bytes": lambda pool, _: pool.reserved,
    "library_reserved_peak_bytes": lambda pool, _: pool.reserved_peak,
    "library_headroom_bytes": _library_headroom,
    "library_live_allocations": lambda pool, _: pool.live,
    "library_free_blocks": lambda pool, _: pool.free_blocks,
    "library_allocations_total": lambda pool, _: pool.allocations,
    "library_allocation_failures_total": lambda pool, _: pool.failures,
    "library_growth_refusals_total": lambda pool, _: pool.refusals,
    "library_suspected_leaks": lambda pool, reading: getattr(_library_suspects(pool, reading), "sites", None),
    "library_suspected_leak_bytes": lambda pool, reading: getattr(_library_suspects(pool, reading), "bytes", None),
    "library_sample_timestamp_seconds": lambda _, reading: reading.samples.libraries_at,
    "library_sample_failures_total": lambda *_: [_observe.failures()[word] for word in ("cupy", "torch")],
    "build_info": lambda reading, _: 1,
    "last_collect_success": lambda reading, _: 0 if reading.failed else 1,
    "collect_duration_seconds": lambda reading, _: reading.duration,
    "collect_failures_total": lambda reading, _: _failures,
    "device_sample_failures_total": lambda reading, _: _devices.failures(),
    "unnamed_pools_total": lambda reading, _: reading.unnamed,
    "debug_host_bytes": lambda reading, _: sum(row.values[_column_index()["debug_host"]] for row in reading.rows),
    "events_dropped_total": lambda reading, _: reading.dropped,
}


def _durations(device: Device) -> list[Value]:
    if not device.times:  # no pool of ours was ever there
        return [None] * len(_work())
    out: list[Value] = []
    for counts, seconds in device.times:
        total, cumulated = 0, []
        for count in counts:
            total += count
            cumulated.append(float(total))
        out.append(Bins(tuple(cumulated), seconds))
    return out


def values_of(metric: Metric, subject: Any, reading: Reading) -> list[Value]:
    """Give the values of a metric for one subject, by `words_of`."""
    compute = _COMPUTED.get(metric.name)
    if compute is not None:
        value = compute(subject, reading)
        return value if isinstance(value, list) else [value]
    numbers = subject.values
    return [
        numbers[columns[0]] if len(columns) == 1 else sum(numbers[column] for column in columns)
        for columns in _columns(metric.name)
    ]


def subjects(metric: Metric, reading: Reading) -> list[tuple[tuple[str, ...], Any]]:
    """Give what a metric has series of, with the label values that name it."""
    if metric.scope == POOL:
        rows = reading.rows if metric.type is not Type.GAUGE else [row for row in reading.rows if row.live]
        return [((row.device, row.pool, row.kind), row) for row in rows]
    if metric.scope == LIBRARY:
        return [((pool.library, pool.device, pool.kind), pool) for pool in reading.samples.libraries]
    if metric.scope == DEVICE:
        return [((device.name,), device) for device in reading.devices]
    return [((), reading)]


def all_subjects(reading: Reading) -> object:
    """Give what tells two readings apart whose series are not the same: who has series, and their constant labels."""
    return (
        [row[:4] for row in reading.rows],
        [(device.name, device.version, _devices.facts(device.name)) for device in reading.devices],
        [(pool.library, pool.device, pool.kind) for pool in reading.samples.libraries],
    )


def facts_of(metric: Metric, subject: Any) -> tuple[str, ...]:
    """Give the values of an info's own labels."""
    if metric.name == "device_info":
        facts = _devices.facts(subject.name)
        return (facts.uuid, facts.gpu_uuid, facts.gpu_instance, facts.pci_bus_id, facts.name, subject.version)
    if metric.name == "build_info":
        import streampool

        return (str(streampool.__version__),)
    return ()


def series_of(metric: Metric, reading: Reading) -> list[tuple[tuple[str, ...], Value]]:
    """Give each series of a metric that is not absent: its label values, by ``metric.labels``, and what it is worth."""
    out: list[tuple[tuple[str, ...], Value]] = []
    words = words_of(metric)
    for names, subject in subjects(metric, reading):
        facts = facts_of(metric, subject) if metric.facts else ()
        for word, value in zip(words, values_of(metric, subject, reading), strict=True):
            if value is not None:
                out.append(((*names, *((word,) if metric.label else ()), *facts), value))
    return out
