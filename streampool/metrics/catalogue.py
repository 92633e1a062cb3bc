"""The one table of metrics: collector, page, docs/METRICS.md, dashboards, rules and tests come from it.

Names follow Prometheus: base units, a unit suffix, ``_total`` last. Once released, a name is kept: it is marked as
deprecated for a minor version before it goes. Counters of a closed set of words exist from the first scrape on, with 0:
a counter that is born with 1 is invisible to ``increase()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["CATALOGUE", "DEVICE", "LIBRARY", "POOL", "PREFIX", "PROCESS", "Metric", "Type", "find"]

PREFIX = "streampool_"

# What a series is about, as labels. A device is a word such as "cuda:0" or "sim:0"; a pool's name is one of at most 32
# a device, else "_other"; kind is "device", "pinned" or "managed".
POOL = ("device", "pool", "kind")
LIBRARY = ("library", "device", "kind")  # another library's own pool that is observed: "torch", "cupy"
DEVICE = ("device",)
PROCESS = ()


class Type(StrEnum):
    """A metric's type, in Prometheus's words."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row: what it is called, what it means, and where its numbers come from.

    Parameters
    ----------
    name
        Without the prefix; as it stands in a query, so counters end in ``_total`` and infos in ``_info``.
    type, unit, help
        ``unit`` is ``"bytes"``, ``"seconds"`` or empty; ``help`` is one sentence for the operator.
    scope
        `POOL`, `LIBRARY`, `DEVICE` or `PROCESS`: the labels of each series, before those of `words`.
    label, words
        One more label of a closed set: word -> columns of the core that are added up
        (`streampool._core.pulse_columns`); for metrics without such a label, ``{"": (columns...)}``. Empty, or words
        without columns: the reading computes it (`_reading`).
    absent
        When there is no series. An absent series means "cannot be known", 0 means "none".
    facts
        Labels of an info.
    since
        The version that brought it.
    """

    name: str
    type: Type
    unit: str
    help: str
    scope: tuple[str, ...] = POOL
    label: str = ""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: str = ""
    facts: tuple[str, ...] = ()
    since: str = "0.1"

    @property
    def full_name(self) -> str:
        """The name in a query."""
        return PREFIX + self.name

    @property
    def family(self) -> str:
        """The name that Prometheus's client library wants: without ``_total`` and ``_info``."""
        return self.full_name.removesuffix("_total").removesuffix("_info")

    @property
    def labels(self) -> tuple[str, ...]:
        """All label names of a series, but ``le``."""
        return (*self.scope, *((self.label,) if self.label else ()), *self.facts)


def _gauge(name: str, unit: str, help: str, *columns: str, **more: object) -> Metric:
    words = {"": columns} if columns else {}
    return Metric(name, Type.GAUGE, unit, help, words=words, **more)  # type: ignore[arg-type]


def _counter(name: str, unit: str, help: str, *columns: str, **more: object) -> Metric:
    words = {"": columns} if columns else {}
    return Metric(name, Type.COUNTER, unit, help, words=words, **more)  # type: ignore[arg-type]


def _split(name: str, help: str, label: str, words: dict[str, tuple[str, ...]], **more: object) -> Metric:
    kind = Type.COUNTER if name.endswith("_total") else Type.GAUGE
    unit = "bytes" if "bytes" in name else ""
    return Metric(name, kind, unit, help, label=label, words=words, **more)  # type: ignore[arg-type]


def _among(name: str, help: str, label: str, words: tuple[str, ...], **more: object) -> Metric:
    return _split(name, help, label, dict.fromkeys(words, ()), **more)


def _library(name: str, unit: str, help: str, **more: object) -> Metric:
    kind = Type.COUNTER if name.endswith("_total") else Type.GAUGE
    return Metric(name, kind, unit, help, scope=LIBRARY, **more)  # type: ignore[arg-type]


CATALOGUE: tuple[Metric, ...] = (
    # -- what the pools hold: used + guard + quarantined + pending + cached = reserved ---------------------------------
    _gauge("used_bytes", "bytes", "Memory of live blocks, rounded up to what they take.", "requested", "rounding"),
    _gauge("requested_bytes", "bytes", "Memory of live blocks as it was asked for.", "requested"),
    _gauge("guard_bytes", "bytes", "Guards around live blocks (debug mode).", "guards"),
    _gauge("quarantined_bytes", "bytes", "Freed memory that debug mode keeps back until it is checked.", "quarantined"),
    _gauge(
        "quarantine_limit_bytes",
        "bytes",
        "The most that debug mode keeps back once it is checked; 0: nothing.",
        "quarantine_limit",
    ),
    _gauge(
        "page_guarded_bytes",
        "bytes",
        "Memory behind blocks with pages of their own, in used_bytes, guard_bytes and quarantined_bytes.",
        "page_guarded",
    ),
    _split(
        "pending_bytes",
        "Freed memory that is not known to be complete; own_stream: its own stream may take it at once; waiting: "
        "nobody may before queued work is done. A ceiling, as of the last look at fences.",
        "reuse",
        {"own_stream": ("pending_own",), "waiting": ("pending_waiting",)},
    ),
    _gauge("cached_bytes", "bytes", "Free memory that any stream may take.", "cached"),
    _gauge(
        "reserved_bytes",
        "bytes",
        "Memory that pools hold from the driver; others on the device see it as used.",
        "reserved",
    ),
    _gauge("limit_bytes", "bytes", "The most that pools of this name may reserve; +Inf where one has no limit."),
    _gauge(
        "headroom_bytes",
        "bytes",
        "How much can still be allocated before an out-of-memory error: what is free or pending here, plus what limit "
        "and device still give. Of several pools on one device each may use the device's rest, so do not add them up.",
        absent="pinned and managed memory without a limit, without the sampling thread",
    ),
    _gauge("largest_free_block_bytes", "bytes", "The largest piece of free memory in one place.", "largest_free"),
    _gauge("live_allocations", "", "Blocks that are allocated and not freed.", "live_blocks"),
    _gauge("pools", "", "Pools of this name that are open, or closed with blocks still live.", "live_pools"),
    _gauge("streams", "", "Streams that pools of this name know.", "streams"),
    _gauge(
        "unfinished_streams",
        "",
        "Streams with frees that are not known to be complete, as of the last look at fences.",
        "busy_streams",
    ),
    _gauge(
        "requested_peak_bytes", "bytes", "Highest requested_bytes of any one pool since it was made.", "requested_peak"
    ),
    _gauge(
        "requested_window_peak_bytes",
        "bytes",
        "Highest requested_bytes of any one pool in the running and the last full window of 60 seconds.",
        "requested_recent_peak",
    ),
    _gauge(
        "reserved_peak_bytes", "bytes", "Highest reserved_bytes of any one pool since it was made.", "reserved_peak"
    ),
    _gauge(
        "suspected_leaks",
        "",
        "Call sites whose live bytes rose in each quarter of the last hour, by more than sampling explains, as of the "
        "last look; /debug/holders names them.",
        absent="without the sampling thread, and before its first look at the pool",
    ),
    _gauge(
        "suspected_leak_bytes",
        "bytes",
        "How much those call sites grew in the last hour.",
        absent="as streampool_suspected_leaks",
    ),
    _gauge(
        "left_over_sites",
        "",
        "Call sites that free nine of ten of what they allocate and hold blocks older than an hour, as of the last "
        "look; /debug/holders names them.",
        absent="as streampool_suspected_leaks",
    ),
    _gauge(
        "left_over_bytes",
        "bytes",
        "What they hold that is older than an hour; estimated from the sampled allocations.",
        absent="as streampool_suspected_leaks",
    ),
    # -- what happens --------------------------------------------------------------------------------------------------
    _split(
        "allocations_total",
        "Allocations, by where their memory came from.",
        "source",
        {
            word: (f"path_{word}",)
            for word in (
                "own",
                "completed",
                "fresh",
                "waited",
                "host_waited",
                "grown",
                "moved",
                "quarantine",
                "called_back",
            )
        },
    ),
    _counter("frees_total", "", "Blocks freed.", "frees"),
    _counter("allocated_bytes_total", "bytes", "Requested bytes of all allocations.", "allocated_bytes"),
    _counter("freed_bytes_total", "bytes", "Requested bytes of all blocks freed.", "freed_bytes"),
    _split(
        "allocation_failures_total",
        "Allocations that ended in an out-of-memory error, by why.",
        "reason",
        {word: (f"failed_{word}",) for word in ("driver", "limit", "fragmentation", "pending", "capture")},
    ),
    _split(
        "growth_refusals_total",
        "Times that the pool's own limit, or the driver, gave no new memory and the pool had to look further.",
        "reason",
        {"limit": ("refused_limit",), "driver": ("refused_driver",)},
    ),
    _counter("host_waits_total", "", "Allocations that made their thread wait for pending frees.", "waits_on_host"),
    _counter("wait_edges_total", "", "Times that a stream was made to wait for another one's free.", "wait_edges"),
    _counter(
        "context_events_total",
        "",
        "Events over a whole context, made for memory that no stream would complete.",
        "context_events",
    ),
    _counter("fences_total", "", "Events recorded behind frees.", "fences"),
    _counter("fence_failures_total", "", "Events that the driver would not record.", "fences_failed"),
    _counter("fence_polls_total", "", "Questions to the driver whether an event is done.", "polls"),
    _counter(
        "legacy_fences_total", "", "Events on the legacy stream, which order all blocking streams.", "legacy_fences"
    ),
    _counter("stream_lookups_total", "", "Questions to the driver which stream a handle is.", "stream_lookups"),
    _counter("trimmed_bytes_total", "bytes", "Memory given back to the driver.", "trimmed_bytes"),
    _counter("moved_handles_total", "", "Idle handles mapped to where a run of memory was needed.", "moved_handles"),
    _split(
        "invalid_frees_total",
        "Frees that were refused because they were wrong, by what was wrong.",
        "reason",
        {
            word: (f"misuse_{word}",)
            for word in (
                "double_free",
                "foreign_free",
                "interior_free",
                "wrong_pool",
                "size_mismatch",
                "trampled_record",
            )
        },
    ),
    _counter("faults_total", "", "Faults found by debug mode.", "faults"),
    _counter(
        "trampled_records_total",
        "",
        "Free slots given up because their record was overwritten in host memory.",
        "trampled",
    ),
    Metric(
        "allocation_size_bytes",
        Type.HISTOGRAM,
        "bytes",
        "Requested sizes. Where most allocations take the fast path, estimated from the sampled ones (one in "
        "sample_bytes), without bias; else exact.",
        absent="mode off, and pools with sample_bytes=0 and no call stacks",
    ),
    # -- other libraries' own pools: used + pending + cached = reserved ------------------------------------------------
    _library("library_used_bytes", "bytes", "Memory of live blocks in the library's own pool, rounded as it does."),
    _library("library_requested_bytes", "bytes", "Memory of its live blocks as it was asked for.", absent="cupy"),
    _library("library_pending_bytes", "bytes", "Memory that is freed and that other streams may still use."),
    _library("library_cached_bytes", "bytes", "Free memory that the library keeps for later."),
    _library(
        "library_reserved_bytes", "bytes", "Memory that the library holds from the driver; others see it as used."
    ),
    _library(
        "library_reserved_peak_bytes",
        "bytes",
        "Highest library_reserved_bytes, since the program last reset it.",
        absent="cupy",
    ),
    _library(
        "library_headroom_bytes",
        "bytes",
        "How much the library can still allocate before an out-of-memory error: what it keeps free or pending, plus "
        "what its own limit and the device still give. Others may use the device's rest, so do not add them up.",
    ),
    _library("library_live_allocations", "", "Blocks that are allocated and not freed.", absent="cupy"),
    _library("library_free_blocks", "", "Free blocks that the library keeps.", absent="torch"),
    _library(
        "library_allocations_total",
        "",
        "Allocations from the library's pool, since the program last reset its statistics.",
        absent="cupy",
    ),
    _library(
        "library_allocation_failures_total", "", "Out-of-memory errors of the library.", absent="cupy, pinned memory"
    ),
    _library(
        "library_growth_refusals_total",
        "",
        "Times that the driver gave no memory, and the library gave back what it kept and asked again.",
        absent="cupy, pinned memory",
    ),
    _library(
        "library_suspected_leaks",
        "",
        "Call sites whose live bytes rose in each quarter of the last hour, as of the last look; /debug/holders names "
        "them. Where the library keeps no call stacks, a size of blocks or the whole pool is a site.",
        absent="before the first look",
    ),
    _library(
        "library_suspected_leak_bytes",
        "bytes",
        "How much those call sites grew in the last hour.",
        absent="as streampool_library_suspected_leaks",
    ),
    _library("library_sample_timestamp_seconds", "seconds", "When the library was last looked at, in Unix time."),
    # -- devices -------------------------------------------------------------------------------------------------------
    Metric(
        "driver_call_duration_seconds",
        Type.HISTOGRAM,
        "seconds",
        "Time in the driver's calls for memory, by sort of work.",
        scope=DEVICE,
        label="op",
    ),
    _gauge(
        "device_free_bytes",
        "bytes",
        "Free memory of the device, as of the last sample.",
        scope=DEVICE,
        absent="without the sampling thread",
    ),
    _gauge("device_total_bytes", "bytes", "Memory of the device.", scope=DEVICE),
    _gauge(
        "device_sample_timestamp_seconds",
        "seconds",
        "When the device's free memory was sampled, in Unix time.",
        scope=DEVICE,
        absent="without the sampling thread",
    ),
    Metric(
        "device_info",
        Type.INFO,
        "",
        "What the device is: 1. Join on uuid with other exporters, never on the ordinal.",
        scope=DEVICE,
        facts=("uuid", "gpu_uuid", "gpu_instance", "pci_bus_id", "name", "driver"),
    ),
    _among(
        "process_device_bytes",
        "Device memory that this process holds, whoever in it allocated it, as of the last sample. process: the "
        "driver's own figure for it; device: all that is in use there, by other processes too: a ceiling.",
        "basis",
        ("process", "device"),
        scope=DEVICE,
        absent="without the sampling thread; one of the two words at a time",
    ),
    _among(
        "outside_bytes",
        "What of process_device_bytes is in no pool, ours or an observed library's: CUDA contexts, kernels, libraries "
        "that are not observed.",
        "basis",
        ("process", "device"),
        scope=DEVICE,
        absent="as streampool_process_device_bytes",
    ),
    # -- the process and the exporter itself -------------------------------------------------------------------------
    Metric("build_info", Type.INFO, "", "The running version: 1.", scope=PROCESS, facts=("version",)),
    _gauge("last_collect_success", "", "Whether the last reading of the numbers went well: 1 or 0.", scope=PROCESS),
    _gauge("collect_duration_seconds", "seconds", "How long the last reading of the numbers took.", scope=PROCESS),
    _counter("collect_failures_total", "", "Readings that failed.", scope=PROCESS),
    _counter("device_sample_failures_total", "", "Samples of the devices' free memory that failed.", scope=PROCESS),
    _among(
        "library_sample_failures_total",
        "Times that an observed library could not be read.",
        "library",
        ("cupy", "torch"),
        scope=PROCESS,
    ),
    _gauge(
        "debug_host_bytes",
        "bytes",
        "Host memory of what debug mode knows of blocks, live or in quarantine; without call stacks.",
        "debug_host",
        scope=PROCESS,
    ),
    _counter("events_dropped_total", "", "Events of the log that found no room, or no reader.", scope=PROCESS),
    _counter(
        "unnamed_pools_total",
        "",
        "Pools that are counted under _other, since 32 names of their device were taken.",
        scope=PROCESS,
    ),
)


def find(name: str) -> Metric:
    """Give the row of a metric's full name, or of a series of a histogram. Raises ``KeyError``."""
    for metric in CATALOGUE:
        if metric.full_name == name:
            return metric
        if metric.type is Type.HISTOGRAM and name in {metric.full_name + end for end in ("_bucket", "_sum", "_count")}:
            return metric
    raise KeyError(name)
