"""Writes dashboards/rules/tests/: for each alert the series that fire it and those that do not.

    python dashboards/src/rule_tests.py

The tests ask for ALERTS, so that they stand for what fires and not for the wording; one test shows the texts as they come
out. Run them with ``promtool test rules dashboards/rules/tests/*.yml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).parent.parent / "rules/tests/alerts.yml"
L = 'job="j", instance="i:1", device="cuda:0"'
P = L + ', pool="default", kind="device"'
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """An alert, series as promtool writes them, and whether it fires at a time."""

    alert: str
    what: str
    series: dict[str, str]
    fires: bool
    at: str = "2h"
    clears: str = ""  # a later time, at which it fires no more


def metric(name: str, labels: str = P, **more: str) -> str:
    """Give a series."""
    own = "".join(f', {label}="{word}"' for label, word in more.items())
    return f"streampool_{name}{{{labels}{own}}}"


def falling(start: int, step: int, times: int = 120) -> str:
    """Give a gauge that goes down, a value a minute."""
    return f"{start}-{step}x{times}"


def saw(low: int, high: int, minutes: int, hours: int = 3) -> str:
    """Give a gauge that rises for `minutes` and falls back, a value a minute."""
    step = (high - low) // minutes
    return " ".join(f"{low}+{step}x{minutes - 1}" for _ in range(hours * 60 // minutes))


FAILS = metric("allocation_failures_total", reason="limit")
FREES = metric("invalid_frees_total", reason="double_free")
REFUSED = metric("growth_refusals_total", reason="limit")
OWN = metric("allocations_total", source="own")
GROWN = metric("allocations_total", source="grown")
SUCCESS = 'streampool_last_collect_success{job="j", instance="i:1"}'
UNNAMED = 'streampool_unnamed_pools_total{job="j", instance="i:1"}'
T = 'job="j", instance="i:1", library="torch", device="cuda:0", kind="device"'
ROOM = metric("library_headroom_bytes", T)
OUTSIDE = metric("outside_bytes", L, basis="process")
USED, LIMIT, HEADROOM = metric("used_bytes"), metric("limit_bytes"), metric("headroom_bytes")

CASES = (
    Case("MemoryRunsOut", "headroom falls steadily to nothing, until somebody restarts it",
         {HEADROOM: falling(24 * GIB, GIB // 8, 160) + f" {24 * GIB}x120"}, True, "160m", "220m"),
    Case("MemoryRunsOut", "a slow fall is no page yet", {HEADROOM: falling(24 * GIB, GIB // 100, 180)}, False, "3h"),
    Case("MemoryRunsOut", "a model was loaded once and little is left", {HEADROOM: f"{24 * GIB}x20 {GIB}x160"}, False, "40m"),
    Case("MemoryRunsOut", "two steps down, half an hour apart",
         {HEADROOM: f"{24 * GIB}x30 {12 * GIB}x30 {GIB}x90"}, False, "80m"),
    Case("MemoryRunsOut", "headroom rises and falls with the work", {HEADROOM: saw(GIB, 20 * GIB, 10)}, False),
    Case("MemoryRunsOut", "a process that began just now", {HEADROOM: f"_x100 {20 * GIB}-{GIB}x19"}, False, "119m"),
    Case("MemoryRunsOut", "an idle process", {HEADROOM: f"{GIB}x180"}, False, "3h"),
    Case("OutOfMemory", "one allocation failed", {FAILS: "0x10 1x110"}, True, "12m"),
    Case("OutOfMemory", "it goes on for ten minutes after the last failure", {FAILS: "0x10 1x110"}, True, "24m", "2h"),
    Case("OutOfMemory", "old failures of a process that goes on", {FAILS: "7x120"}, False),
    Case("OutOfMemory", "a restart begins to count anew", {FAILS: "9x60 0x60"}, False, "62m"),
    Case("InvalidFree", "a double free", {FREES: "0x10 1x200"}, True, "15m", "2h"),
    Case("InvalidFree", "none", {FREES: "0x120"}, False),
    Case("RecordOverwritten", "a record was overwritten", {metric("trampled_records_total"): "0x10 1x200"}, True, "15m", "2h"),
    Case("RecordOverwritten", "none", {metric("trampled_records_total"): "0x120"}, False),
    Case("FaultsFound", "debug mode found something", {metric("faults_total"): "0x10 2x200"}, True, "15m", "2h"),
    Case("FaultsFound", "none", {metric("faults_total"): "0x120"}, False),
    Case("FloorRising", "used memory grows slowly for hours", {USED: f"{GIB}+{GIB // 100}x240 {4 * GIB}x180"}, True, "4h", "6h"),
    Case("FloorRising", "a sawtooth", {USED: saw(GIB, 20 * GIB, 10, 5)}, False, "4h"),
    Case("FloorRising", "steady at whatever height", {USED: f"{20 * GIB}x300"}, False, "4h"),
    Case("FloorRising", "one model more", {USED: f"{GIB}x120 {9 * GIB}x180"}, False, "150m"),
    Case("SuspectedLeak", "a line grows", {metric("suspected_leak_bytes"): f"0x60 {GIB}x60 0x60"}, True, "2h", "150m"),
    Case("SuspectedLeak", "a line grows by little", {metric("suspected_leak_bytes"): "1000000x120"}, False),
    Case("SuspectedLeak", "no line grows", {metric("suspected_leak_bytes"): "0x120"}, False),
    Case("LeftOver", "old blocks of a busy line stay", {metric("left_over_bytes"): f"0x60 {GIB}x60 0x60"}, True, "2h", "150m"),
    Case("LeftOver", "few of them", {metric("left_over_bytes"): "1000000x120"}, False),
    Case("LibraryMemoryRunsOut", "headroom falls steadily to nothing, until somebody restarts it",
         {ROOM: falling(24 * GIB, GIB // 8, 160) + f" {24 * GIB}x120"}, True, "160m", "220m"),
    Case("LibraryMemoryRunsOut", "a model was loaded once and little is left", {ROOM: f"{24 * GIB}x20 {GIB}x160"}, False, "40m"),
    Case("LibraryMemoryRunsOut", "headroom rises and falls with the work", {ROOM: saw(GIB, 20 * GIB, 10)}, False),
    Case("LibraryMemoryRunsOut", "an idle process", {ROOM: f"{GIB}x180"}, False, "3h"),
    Case("LibraryOutOfMemory", "one allocation failed",
         {metric("library_allocation_failures_total", T): "0x10 1x110"}, True, "12m", "2h"),
    Case("LibraryOutOfMemory", "old failures of a process that goes on",
         {metric("library_allocation_failures_total", T): "7x120"}, False),
    Case("LibraryOutOfMemory", "the program reset the statistics",
         {metric("library_allocation_failures_total", T): "9x60 0x60"}, False, "62m"),
    Case("LibrarySuspectedLeak", "a line grows", {metric("library_suspected_leak_bytes", T): f"0x60 {GIB}x60 0x60"}, True, "2h",
         "150m"),
    Case("LibrarySuspectedLeak", "no line grows", {metric("library_suspected_leak_bytes", T): "0x120"}, False),
    Case("LibraryGrowthRefused", "refused all the time", {metric("library_growth_refusals_total", T): "0+1x120 120x60"}, True,
         "2h", "150m"),
    Case("LibraryGrowthRefused", "refused once", {metric("library_growth_refusals_total", T): "0x60 1x60"}, False),
    Case("OutsideRising", "something outside leaks", {OUTSIDE: f"{GIB}+{GIB // 100}x240 {4 * GIB}x180"}, True, "4h", "6h"),
    Case("OutsideRising", "a library that was loaded late", {OUTSIDE: f"{GIB}x120 {4 * GIB}x180"}, False, "150m"),
    Case("OutsideRising", "steady", {OUTSIDE: f"{GIB}x300"}, False, "4h"),
    Case("OutsideRising", "other processes on the device, where our own part is not known",
         {metric("outside_bytes", L, basis="device"): f"{GIB}+{GIB // 100}x300"}, False, "4h"),
    Case("LibraryUnread", "reading fails",
         {'streampool_library_sample_failures_total{job="j", instance="i:1", library="torch"}': "0+12x120 1440x60"}, True,
         "2h", "150m"),
    Case("LibraryUnread", "all is well",
         {'streampool_library_sample_failures_total{job="j", instance="i:1", library="torch"}': "0x120"}, False),
    Case("GrowthRefused", "refused all the time", {REFUSED: "0+1x120 120x60"}, True, "2h", "150m"),
    Case("GrowthRefused", "refused once", {REFUSED: "0x60 1x60"}, False),
    Case("DeviceAlmostFull", "1 % left", {metric("device_free_bytes", L): "1x120 50x60", metric("device_total_bytes", L): "100x180",
                                           metric("cached_bytes"): "0x180"}, True, "2h", "150m"),
    Case("DeviceAlmostFull", "little left, but the pool could give back",
         {metric("device_free_bytes", L): "1x120", metric("device_total_bytes", L): "100x120", metric("cached_bytes"): "9x120"},
         False),
    Case("PendingBacklog", "a third waits", {metric("pending_bytes", reuse="waiting"): "33x120 1x60",
                                             metric("reserved_bytes"): "100x180"}, True, "2h", "150m"),
    Case("PendingBacklog", "all is pending, but its own stream may take it",
         {metric("pending_bytes", reuse="own_stream"): "90x120", metric("pending_bytes", reuse="waiting"): "1x120",
          metric("reserved_bytes"): "100x120"}, False),
    Case("SlowAllocations", "one in ten grows the pool", {OWN: "0+5400x120 648000+6000x60", GROWN: "0+600x120 72000x60"}, True,
         "2h", "150m"),
    Case("SlowAllocations", "one in a hundred", {OWN: "0+5940x120", GROWN: "0+60x120"}, False),
    Case("SlowAllocations", "nobody allocates", {OWN: "10x120", GROWN: "10x120"}, False),
    Case("SlowAllocations", "a process that grows and does little else", {OWN: "0+1x120", GROWN: "0+1x120"}, False),
    Case("HostWaits", "a wait a second", {metric("host_waits_total"): "0+60x120 7200x60"}, True, "2h", "150m"),
    Case("HostWaits", "a wait an hour", {metric("host_waits_total"): "0x60 1x60"}, False),
    Case("CollectFailing", "readings fail", {SUCCESS: "1x10 0x110 1x60"}, True, "2h", "150m"),
    Case("CollectFailing", "all is well", {SUCCESS: "1x120"}, False),
    Case("DeviceSampleStale", "the sample stays what it was", {metric("device_sample_timestamp_seconds", L): "60x120 7260+60x60"}, True,
         "2h", "150m"),
    Case("DeviceSampleStale", "it comes along", {metric("device_sample_timestamp_seconds", L): "0+60x120"}, False),
    Case("NearLimit", "95 %", {USED: "95x120 50x60", LIMIT: "100x180"}, True, "2h", "150m"),
    Case("NearLimit", "without a limit", {USED: f"{20 * GIB}x120", LIMIT: "Inf " * 120 + "Inf"}, False),
    Case("Fragmentation", "many small pieces",
         {metric("largest_free_block_bytes"): "10x120 90x60", metric("cached_bytes"): "100x180", metric("reserved_bytes"): "200x180"},
         True, "2h", "150m"),
    Case("Fragmentation", "one piece",
         {metric("largest_free_block_bytes"): "90x120", metric("cached_bytes"): "100x120", metric("reserved_bytes"): "200x120"}, False),
    Case("Fragmentation", "nothing is cached",
         {metric("largest_free_block_bytes"): "0x120", metric("cached_bytes"): "0x120", metric("reserved_bytes"): "0x120"}, False),
    Case("Rounding", "half is rounding", {metric("requested_bytes"): f"{GIB}x120 {2 * GIB}x60", USED: f"{2 * GIB}x180"}, True,
         "2h", "150m"),
    Case("Rounding", "half of very little", {metric("requested_bytes"): "100x120", USED: "200x120"}, False),
    Case("SlowDriverCalls", "a second each",
         {metric("driver_call_duration_seconds_bucket", L, op="alloc", le="1e-05"): "0x120 0+60x60",
          metric("driver_call_duration_seconds_bucket", L, op="alloc", le="0.65536"): "0x120 0+60x60",
          metric("driver_call_duration_seconds_bucket", L, op="alloc", le="+Inf"): "0+60x180"}, True, "2h", "150m"),
    Case("SlowDriverCalls", "quick ones",
         {metric("driver_call_duration_seconds_bucket", L, op="alloc", le="1e-05"): "0+60x120",
          metric("driver_call_duration_seconds_bucket", L, op="alloc", le="+Inf"): "0+60x120"}, False),
    Case("UnnamedPools", "names without end", {UNNAMED: "0+1x120 120x120"}, True, "2h", "4h"),
    Case("UnnamedPools", "some long ago", {UNNAMED: "5x120"}, False),
)  # fmt: skip

TEXTS = f"""
  - name: the texts of a page as they come out
    interval: 1m
    input_series:
      - series: '{FAILS}'
        values: 0x10 1x110
    alert_rule_test:
      - alertname: StreampoolOutOfMemory
        eval_time: 12m
        exp_alerts:
          - exp_labels:
              severity: critical
              job: j
              instance: i:1
              device: cuda:0
              pool: default
              kind: device
            exp_annotations:
              summary: Allocations fail with out-of-memory errors.
              description: >-
                1 allocations of pool default (device memory) on cuda:0 of i:1 failed in five minutes. The error's text names the
                call sites that hold the memory; so does http://i:1/debug/holders.
              runbook: dashboards/README.md#streampooloutofmemory
"""


def text() -> str:
    """Give the file of tests."""
    out = [
        "# Written by dashboards/src/rule_tests.py.\n",
        "rule_files: [../streampool.rules.yml]\n",
        "evaluation_interval: 1m\n",
        "tests:\n",
    ]
    for case in CASES:
        verb = "fires and clears" if case.clears else "fires" if case.fires else "stays quiet"
        out.append(f"  - name: '{case.alert} {verb}: {case.what}'\n    interval: 1m\n    input_series:\n")
        for series, values in case.series.items():
            out.append(f"      - series: '{series}'\n        values: '{values.strip()}'\n")
        out.append("    promql_expr_test:\n")
        name = f"Streampool{case.alert}"
        for at, fires in ((case.at, case.fires), *(((case.clears, False),) if case.clears else ())):
            out.append(
                f"""      - expr: 'count by (alertname) (ALERTS{{alertname="{name}", alertstate="firing"}})'\n"""
            )
            samples = f"""[{{labels: '{{alertname="{name}"}}', value: 1}}]""" if fires else "[]"
            out.append(f"        eval_time: {at}\n        exp_samples: {samples}\n")
    return "".join(out) + TEXTS.lstrip("\n")


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text())
