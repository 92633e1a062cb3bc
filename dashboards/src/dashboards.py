"""Writes dashboards/grafana/*.json with Grafana's own builders.

pip install grafana-foundation-sdk
python dashboards/src/dashboards.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FOLDER = Path(__file__).parent.parent / "grafana"
PROCESS = 'job=~"$job", instance=~"$instance"'
DEVICE = PROCESS + ', device=~"$device"'
POOL = DEVICE + ', pool=~"$pool"'
SOURCE = model.DataSourceRef(type_val="prometheus", uid="$datasource")
OURS = 'kind="device"'
WHERE = "{{instance}} {{device}} {{pool}}"
THEIRS = "{{instance}} {{device}} {{library}} {{kind}}"


class Look(StrEnum):
    """How a panel shows its queries."""

    LINES = "lines"
    STACK = "stack"
    NUMBER = "number"
    HEATMAP = "heatmap"
    TABLE = "table"


@dataclass(frozen=True)
class Panel:
    """A panel: what it is called, what it tells, in which unit, and its queries: (PromQL, legend)."""

    title: str
    tells: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    look: Look = Look.LINES
    wide: int = 8  # of 24
    red_from: float | None = None
    signed: bool = False  # values below zero mean something


@dataclass(frozen=True)
class Row:
    """A row of panels under a title."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    tells: str
    rows: tuple[Row, ...]
    since: str = "now-6h"
    annotations: tuple[tuple[str, str], ...] = field(default=())


def series(name: str, labels: str = POOL, more: str = "") -> str:
    """Give a selector under the dashboard's variables."""
    return f"streampool_{name}{{{labels}{', ' + more if more else ''}}}"


def rate(name: str, labels: str = POOL, more: str = "") -> str:
    """Give the rate of a counter."""
    return f"rate({series(name, labels, more)}[$__rate_interval])"


def increase(name: str, span: str, labels: str = POOL) -> str:
    """Give what a counter grew by."""
    return f"sum(increase({series(name, labels)}[{span}]))"


def recorded(name: str) -> str:
    """Give a recorded series under the variables."""
    return f"job_instance_device_pool_kind:streampool_{name}{{{POOL}}}"


POOL_OF = "job, instance, device, pool, kind"
HEALTH = Row(
    "Health",
    (
        Panel("Out of memory, 24 h", "Allocations that failed: anything but 0 wants a look.", "short",
              ((increase("allocation_failures_total", "24h"), "failed"),), Look.NUMBER, 4, 1),
        Panel("Growth refused, 24 h", "How often limit or driver gave nothing: what comes before out of memory.", "short",
              ((increase("growth_refusals_total", "24h"), "refused"),), Look.NUMBER, 4, 1),
        Panel("Wrong frees, 24 h", "Frees that were refused as wrong: double, foreign, inside a block.", "short",
              ((increase("invalid_frees_total", "24h"), "wrong"),), Look.NUMBER, 4, 1),
        Panel("Faults and overwritten records, 24 h", "What debug mode found, and records that a stray host write hit.", "short",
              ((increase("faults_total", "24h"), "faults"), (increase("trampled_records_total", "24h"), "records")),
              Look.NUMBER, 4, 1),
        Panel("Least headroom", "The pool that can give least before an out-of-memory error.", "bytes",
              ((f"min({series('headroom_bytes')})", "headroom"),), Look.NUMBER, 4),
        Panel("Highest use of a limit", "The pool that is nearest to its limit.", "percentunit",
              ((f"max({series('used_bytes')} / {series('limit_bytes')})", "used"),), Look.NUMBER, 4, 0.95),
    ),
)  # fmt: skip
CAPACITY = Row(
    "Capacity",
    (
        Panel("What the pools hold", "The parts add up to what is reserved, which others on the device see as used.", "bytes",
              ((f"sum({series('used_bytes')})", "used"), (f"sum({series('guard_bytes')})", "guards"),
               (f"sum({series('quarantined_bytes')})", "quarantined"),
               (f"sum by (reuse) ({series('pending_bytes')})", "pending, {{reuse}}"),
               (f"sum({series('cached_bytes')})", "cached")), Look.STACK, 12),
        Panel("Reserved and limit", "What each pool holds, and the most that it may; pools without a limit have no line for it.",
              "bytes", ((series("reserved_bytes"), WHERE), (f"{series('limit_bytes')} < +Inf", WHERE + " limit")), wide=12),
        Panel("Headroom", "How much can still be allocated before an error. A line that only falls is a leak.", "bytes",
              ((series("headroom_bytes"), WHERE),), wide=12),
        Panel("Device", "What is free, what the pools hold, and what others hold: other libraries and processes.", "bytes",
              ((f"sum by (instance, device) ({series('device_free_bytes', DEVICE)})", "{{instance}} {{device}} free"),
               (f"sum by (instance, device) ({series('reserved_bytes', DEVICE, OURS)})",
                "{{instance}} {{device}} pools"),
               (f"sum by (job, instance, device) ({series('device_total_bytes', DEVICE)} - {series('device_free_bytes', DEVICE)})"
                f" - sum by (job, instance, device) ({series('reserved_bytes', DEVICE, OURS)})",
                "{{instance}} {{device}} others")), Look.STACK, 12),
        Panel("Peaks", "The highest use of any one pool: in the last minute or two, and since it was made.", "bytes",
              ((series("requested_window_peak_bytes"), WHERE + " recent"), (series("requested_peak_bytes"), WHERE + " ever"),
               (series("reserved_peak_bytes"), WHERE + " reserved, ever"))),
        Panel("Blocks and pools", "How many blocks live, in how many pools.", "short",
              ((series("live_allocations"), WHERE + " blocks"), (series("pools"), WHERE + " pools"))),
        Panel("Streams", "Streams that the pools know, and those with frees not known to be complete.", "short",
              ((series("streams"), WHERE), (series("unfinished_streams"), WHERE + " unfinished"))),
    ),
)  # fmt: skip
DEBUG = Row(
    "Debug mode",
    (
        Panel("Kept back", "Freed memory in quarantine, with what still waits for its work, and the most that stays there.", "bytes",
              ((series("quarantined_bytes"), WHERE), (series("quarantine_limit_bytes"), WHERE + " limit"))),
        Panel("What debug mode takes of the device", "Guards, and memory behind blocks with pages of their own.", "bytes",
              ((series("guard_bytes"), WHERE + " guards"), (series("page_guarded_bytes"), WHERE + " pages"))),
        Panel("What it takes of the host", "Facts of blocks, live or in quarantine.", "bytes",
              ((series("debug_host_bytes", PROCESS), "{{instance}}"),)),
    ),
)  # fmt: skip
FRAGMENTS = Row(
    "Fragmentation",
    (
        Panel("Outside of blocks", "The part of free memory that is not in its largest piece.", "percentunit",
              ((f"1 - {recorded('largest_free_block_per_cached:ratio')}", WHERE),)),
        Panel("Inside of blocks", "The part of used memory that was not asked for.", "percentunit",
              ((f"1 - {series('requested_bytes')} / ({series('used_bytes')} > 0)", WHERE),)),
        Panel("Largest free piece", "What can be had in one place without moving anything.", "bytes",
              ((series("largest_free_block_bytes"), WHERE),)),
    ),
)  # fmt: skip
TRAFFIC = Row(
    "Traffic",
    (
        Panel("Allocations by where memory came from", "own and fresh are quick; waited, host_waited, grown, moved are slow.", "ops",
              ((f"sum by (source) ({rate('allocations_total')})", "{{source}}"),), Look.STACK, 12),
        Panel("Frees", "Blocks freed a second.", "ops", ((f"sum by (instance) ({rate('frees_total')})", "{{instance}}"),), wide=6),
        Panel("Churn", "Bytes allocated and freed a second; where the lines part, use grows or falls.", "Bps",
              ((f"sum({rate('allocated_bytes_total')})", "allocated"), (f"sum({rate('freed_bytes_total')})", "freed")), wide=6),
        Panel("Sizes", "How large the requests are.", "bytes",
              ((f"sum by (le) (increase({series('allocation_size_bytes_bucket')}[$__rate_interval]))", "{{le}}"),), Look.HEATMAP, 12),
        Panel("Slow allocations", "The part of allocations that asked the driver or waited.", "percentunit",
              ((recorded("slow_allocations_per_allocations:ratio_rate5m"), WHERE),), wide=12),
    ),
)  # fmt: skip
COST = Row(
    "Cost",
    (
        Panel("Driver calls, 99 of 100", "How long the driver takes for memory.", "s",
              ((f"histogram_quantile(0.99, sum by (op, le) ({rate('driver_call_duration_seconds_bucket', DEVICE)}))", "{{op}}"),)),
        Panel("Time in driver calls", "Seconds a second.", "percentunit",
              ((f"sum by (op) ({rate('driver_call_duration_seconds_sum', DEVICE)})", "{{op}}"),)),
        Panel("Given back", "Memory returned to the driver. With many slow allocations: what is given back is needed again.",
              "Bps", ((f"sum({rate('trimmed_bytes_total')})", "given back"),)),
        Panel("Waits and moves", "Threads that waited in an allocation, streams made to wait for another one, memory moved.", "ops",
              ((f"sum({rate('host_waits_total')})", "threads"), (f"sum({rate('wait_edges_total')})", "streams"),
               (f"sum({rate('context_events_total')})", "events over a context"),
               (f"sum({rate('moved_handles_total')})", "handles moved"))),
        Panel("Fences", "Events recorded behind frees, and questions whether they are done.", "ops",
              ((f"sum({rate('fences_total')})", "recorded"), (f"sum({rate('fence_polls_total')})", "asked"),
               (f"sum({rate('fence_failures_total')})", "failed"), (f"sum({rate('legacy_fences_total')})", "on the legacy stream"))),
        Panel("Stream look-ups", "Questions to the driver which stream a handle is; registered streams need none.", "ops",
              ((f"sum({rate('stream_lookups_total')})", "look-ups"),)),
    ),
)  # fmt: skip
LIBRARIES = Row(
    "This process's other memory",
    (
        Panel("Device memory by who holds it",
              "What the driver says this process holds: our pools, the own pools of observed libraries, and what is in neither. "
              "Where the driver does not say it for this process alone, other processes are in the last part.", "bytes",
              ((f"sum by (instance, device) ({series('reserved_bytes', DEVICE, OURS)})", "{{instance}} {{device}} our pools"),
               (f"sum by (instance, device, library) ({series('library_reserved_bytes', DEVICE, OURS)})",
                "{{instance}} {{device}} {{library}}"),
               (f"sum by (instance, device, basis) ({series('outside_bytes', DEVICE)})",
                "{{instance}} {{device}} outside ({{basis}})")), Look.STACK, 12),
        Panel("What observed libraries hold", "The parts of each library's own pool, which add up to what it has reserved.", "bytes",
              ((f"sum by (library) ({series('library_used_bytes', DEVICE)})", "{{library}} used"),
               (f"sum by (library) ({series('library_pending_bytes', DEVICE)})", "{{library}} pending"),
               (f"sum by (library) ({series('library_cached_bytes', DEVICE)})", "{{library}} cached")), Look.STACK, 12),
        Panel("Headroom of observed libraries", "How much each can still allocate before an error.", "bytes",
              ((series("library_headroom_bytes", DEVICE), THEIRS),), wide=12),
        Panel("Requests and peaks of observed libraries", "What was asked for, and the most that was ever reserved.", "bytes",
              ((series("library_requested_bytes", DEVICE), THEIRS + " requested"),
               (series("library_reserved_peak_bytes", DEVICE), THEIRS + " peak")), wide=12),
        Panel("Blocks of observed libraries", "Live ones, and free ones that are kept.", "short",
              ((series("library_live_allocations", DEVICE), THEIRS + " live"),
               (series("library_free_blocks", DEVICE), THEIRS + " free"))),
        Panel("Allocations of observed libraries", "How many a second.", "ops",
              ((f"sum by (instance, device, library, kind) ({rate('library_allocations_total', DEVICE)})", THEIRS),)),
        Panel("Failures of observed libraries, 1 h", "Out-of-memory errors, and times that the driver refused.", "short",
              ((f"sum by (library) (increase({series('library_allocation_failures_total', DEVICE)}[1h]))", "{{library}} failed"),
               (f"sum by (library) (increase({series('library_growth_refusals_total', DEVICE)}[1h]))", "{{library}} refused"))),
    ),
)  # fmt: skip
EXPORTER = Row(
    "Exporter",
    (
        Panel("Reading the numbers", "How long a reading takes, and whether it goes well.", "s",
              ((series("collect_duration_seconds", PROCESS), "{{instance}}"),)),
        Panel("Failures", "Readings and samples that failed, 1 h.", "short",
              ((f"sum by (instance) (increase({series('collect_failures_total', PROCESS)}[1h]))", "{{instance}} readings"),
               (f"sum by (instance) (increase({series('device_sample_failures_total', PROCESS)}[1h]))", "{{instance}} samples"),
               (f"sum by (instance) (increase({series('events_dropped_total', PROCESS)}[1h]))", "{{instance}} events"),
               (f"sum by (instance, library) (increase({series('library_sample_failures_total', PROCESS)}[1h]))",
                "{{instance}} {{library}}"),
               (f"1 - {series('last_collect_success', PROCESS)}", "{{instance}} failing now"))),
        Panel("Age of device samples", "How old the free memory of the device is; 5 seconds are normal.", "s",
              ((f"time() - {series('device_sample_timestamp_seconds', DEVICE)}", "{{instance}} {{device}}"),
               (f"time() - {series('library_sample_timestamp_seconds', DEVICE)}", THEIRS))),
    ),
)  # fmt: skip
LEAKS = (
    Row(
        "Does it grow?",
        (
            Panel("Used, and the least of the last quarter of an hour",
                  "The lower line is what stays when work comes and goes: if it climbs, something is kept.", "bytes",
                  ((series("used_bytes"), WHERE), (recorded("used_bytes:min15m"), WHERE + " least")), wide=24),
            Panel("Headroom, the most of the last quarter of an hour",
                  "The alert StreampoolMemoryRunsOut looks at this line. Extended, it shows when memory is gone.", "bytes",
                  ((recorded("headroom_bytes:max15m"), WHERE),), wide=12),
            Panel("Headroom in an hour, at this pace", "Below zero: out of memory by then.", "bytes",
                  ((f"predict_linear({recorded('headroom_bytes:max15m')}[30m], 3600)", WHERE),), wide=12, signed=True),
        ),
    ),
    Row(
        "What grows?",
        (
            Panel("Live blocks", "Many small things, or few large ones?", "short", ((series("live_allocations"), WHERE),)),
            Panel("Suspected leaks", "Call sites that grew in each quarter of the last hour; /debug/holders names them.", "short",
                  ((series("suspected_leaks"), WHERE),)),
            Panel("Grown by suspects", "How many bytes more they hold than an hour ago.", "bytes",
                  ((series("suspected_leak_bytes"), WHERE),)),
            Panel("Left over", "Call sites that free nine of ten of what they allocate and hold blocks older than an hour.", "short",
                  ((series("left_over_sites"), WHERE),)),
            Panel("Left over, bytes", "What they hold that is older than an hour: forgotten requests, sessions that never end.",
                  "bytes", ((series("left_over_bytes"), WHERE),)),
            Panel("Suspected leaks in observed libraries",
                  "Call sites that grew in each quarter of the last hour; /debug/holders names them.", "short",
                  ((series("library_suspected_leaks", DEVICE), THEIRS),)),
            Panel("Grown by suspects in observed libraries", "How many bytes more they hold than an hour ago.", "bytes",
                  ((series("library_suspected_leak_bytes", DEVICE), THEIRS),)),
            Panel("Memory outside of all pools, the least of the last quarter of an hour",
                  "What rises here is in no pool: a library that is not observed, or raw allocations.", "bytes",
                  ((f"job_instance_device_basis:streampool_outside_bytes:min15m{{{DEVICE}}}", "{{instance}} {{device}} {{basis}}"),)),
            Panel("Bytes a block", "The size of what is kept, on average.", "bytes",
                  ((f"{series('requested_bytes')} / ({series('live_allocations')} > 0)", WHERE),)),
            Panel("Allocated beyond freed", "What stays, a second. The call sites stand under /debug/holders of the instance.", "Bps",
                  ((f"{rate('allocated_bytes_total')} - {rate('freed_bytes_total')}", WHERE),), signed=True),
        ),
    ),
)  # fmt: skip
FLEET = (
    Row(
        "Processes",
        (
            Panel("Processes and devices", "Who runs what, on which device.", "short",
                  ((f"sum by (instance, device, name, uuid, gpu_uuid, gpu_instance, pci_bus_id, driver) ({series('device_info', DEVICE)})",
                    ""),), Look.TABLE, 12),
            Panel("Versions", "How many processes run which version.", "short",
                  ((f"count by (version) ({series('build_info', PROCESS)})", "{{version}}"),), Look.TABLE, 4),
            Panel("Pools counted under _other", "Names beyond 32 a device have no series of their own.", "short",
                  ((f"sum by (instance) ({series('unnamed_pools_total', PROCESS)} > 0)", "{{instance}}"),), Look.TABLE, 8),
        ),
    ),
    Row(
        "Memory",
        (
            Panel("Reserved", "By process and device.", "bytes",
                  ((f"sum by (instance, device) ({series('reserved_bytes', DEVICE)})", "{{instance}} {{device}}"),), wide=12),
            Panel("Least headroom", "By process and device.", "bytes",
                  ((f"min by (instance, device) ({series('headroom_bytes', DEVICE)})", "{{instance}} {{device}}"),), wide=12),
            Panel("Out of memory", "By process, failures an hour.", "short",
                  ((f"sum by (instance) (increase({series('allocation_failures_total', DEVICE)}[1h]))", "{{instance}}"),), wide=12),
            Panel("Held by each process", "By the driver's own figure; device: of all processes there together.", "bytes",
                  ((series("process_device_bytes", DEVICE), "{{instance}} {{device}} ({{basis}})"),), wide=12),
            Panel("Used by others, beside DCGM",
                  "What NVIDIA's DCGM exporter sees as used on a GPU or MIG instance and no pool of ours holds. Needs its metrics in "
                  "the same Prometheus; joined on the GPU's UUID and the MIG instance's number, as DCGM names them.", "bytes",
                  (("sum by (UUID, GPU_I_ID) (DCGM_FI_DEV_FB_USED * 1048576) - sum by (UUID, GPU_I_ID) ("
                    f"{series('reserved_bytes', DEVICE, OURS)}"
                    " * on (job, instance, device) group_left (UUID, GPU_I_ID) label_replace(label_replace("
                    f"{series('device_info', DEVICE)}"
                    ', "UUID", "$1", "gpu_uuid", "(.+)"), "GPU_I_ID", "$1", "gpu_instance", "(.+)"))', "{{UUID}} {{GPU_I_ID}}"),),
                  wide=12, signed=True),
        ),
    ),
)  # fmt: skip

BOARDS = (
    Board("streampool-overview", "streampool: overview", "What the pools hold, why, and whether it ends well.",
          (HEALTH, CAPACITY, LIBRARIES, FRAGMENTS, TRAFFIC, COST, DEBUG, EXPORTER),
          annotations=(("Out of memory", f"sum by (instance, pool) (increase({series('allocation_failures_total')}[1m])) > 0"),)),
    Board("streampool-leaks", "streampool: leak hunt", "Does memory in use grow, where, and until when?", LEAKS, "now-24h"),
    Board("streampool-fleet", "streampool: fleet", "All processes and devices side by side.", FLEET),
)  # fmt: skip


def panel(spec: Panel) -> Any:
    """Build one panel."""
    makers = {Look.NUMBER: stat.Panel, Look.HEATMAP: heatmap.Panel, Look.TABLE: table.Panel}
    made = makers.get(spec.look, timeseries.Panel)().title(spec.title).description(spec.tells).unit(spec.unit)
    made = made.datasource(SOURCE).span(spec.wide).height(8 if spec.look is not Look.NUMBER else 4)
    if spec.look is Look.STACK:
        made = made.stacking(StackingConfig().mode(common.StackingMode.NORMAL)).fill_opacity(30)
    if spec.look in (Look.LINES, Look.STACK):
        made = made.legend(
            VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        if not spec.signed:
            made = made.min(0)
    if spec.look is Look.NUMBER:
        made = made.reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
    if spec.red_from is not None:
        made = made.thresholds(
            build.ThresholdsConfig()
            .mode(model.ThresholdsMode.ABSOLUTE)
            .steps([model.Threshold(color="green", value=None), model.Threshold(color="red", value=spec.red_from)])
        )
    for number, (expr, legend) in enumerate(spec.queries):
        query = (
            prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + number)).datasource(SOURCE)
        )
        if spec.look is Look.TABLE:
            query = query.instant().format(PromQueryFormat.TABLE)
        elif spec.look is Look.HEATMAP:
            query = query.range().format(PromQueryFormat.HEATMAP)
        else:
            query = query.range()
        made = made.with_target(query)
    return made  # fmt: skip


def variable(name: str, label: str, query: str) -> Any:
    """Build a variable that lists the values of a label."""
    return (
        build.QueryVariable(name).label(label).datasource(SOURCE).query(query).multi(True).include_all(True)
        .all_value(".+").refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.ALPHABETICAL_ASC)
    )  # fmt: skip


def board(spec: Board) -> dict[str, Any]:
    """Build one dashboard, as JSON."""
    made = (
        build.Dashboard(spec.title).uid(spec.uid).description(spec.tells).tags(["streampool", "gpu", "memory"])
        .readonly().time(spec.since, "now").timezone("browser").refresh("1m").tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(variable("job", "Job", "label_values(streampool_build_info, job)"))
        .with_variable(variable("instance", "Instance", 'label_values(streampool_build_info{job=~"$job"}, instance)'))
        .with_variable(variable("device", "Device",
                                'label_values(streampool_reserved_bytes{job=~"$job", instance=~"$instance"}, device)'))
        .with_variable(variable("pool", "Pool",
                                'label_values(streampool_reserved_bytes{job=~"$job", instance=~"$instance"}, pool)'))
        .link(build.DashboardLink("streampool").type(model.DashboardLinkType.DASHBOARDS).tags(["streampool"])
              .as_dropdown(True).include_vars(True).keep_time(True))
    )  # fmt: skip
    for name, expr in spec.annotations:
        made = made.annotation(
            build.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color("red").expr(expr)
        )
    for row in spec.rows:
        made = made.with_row(build.Row(row.title))
        for item in row.panels:
            made = made.with_panel(panel(item))
    made_json: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(made.build()))
    for number, item in enumerate(made_json["panels"], 1):
        item["id"] = number
    return made_json


def files() -> Iterator[tuple[Path, str]]:
    """Give each file and its text."""
    for spec in BOARDS:
        yield FOLDER / f"{spec.uid}.json", json.dumps(board(spec), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in files():
        path.write_text(text)
