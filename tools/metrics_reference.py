"""Writes docs/METRICS.md from the catalogue of metrics.

python tools/metrics_reference.py
"""

from __future__ import annotations

from pathlib import Path

from streampool.metrics import CATALOGUE, Metric, Type
from streampool.metrics.catalogue import DEVICE, LIBRARY, POOL

TARGET = Path(__file__).parent.parent / "docs/METRICS.md"
_HEAD = """# Metrics

Every metric that streampool shows, from `streampool/metrics/catalogue.py` (written by `tools/metrics_reference.py`).
How to set things up: [monitoring.md](monitoring.md). Dashboards, rules and alerts:
[dashboards/](../dashboards/README.md).

* Names and labels are kept from version to version: one that goes is marked as deprecated for a minor version first.
* An absent series means "cannot be known here", 0 means "none".
* `device` is a word such as `cuda:0`, by the ordinal in this process; join other exporters on
  `streampool_device_info`'s `uuid`. `pool` is the pool's name: at most 32 names a device have series of their own,
  later ones share `_other`. `kind` is `device`, `pinned` or `managed`. No label ever holds an address, a stream, a
  thread or a process id.
* Pools of one device, name and kind are one series: gauges add up, of peaks the highest counts. When such pools are
  closed and hold nothing any more, their gauges vanish; counters stay, and go on when a pool of that name is made
  again. Counters begin with the process.
* A scrape makes no driver call and takes no lock that an allocation takes. So `pending_bytes` is a ceiling: what no
  call has found complete yet. While the pool is quiet, `used_bytes + guard_bytes + quarantined_bytes + pending_bytes
  (both) + cached_bytes` is `reserved_bytes`, and `allocated_bytes_total - freed_bytes_total` is `requested_bytes`.
* A library's pool is one of `sp.observe("torch")` or `"cupy"`; its `device` is `host` for pinned memory, which
  libraries keep for all devices together. `library_used_bytes + library_pending_bytes + library_cached_bytes` is
  `library_reserved_bytes`. These, `process_device_bytes` and `outside_bytes` are of the sampling thread's last look, up
  to five seconds old.
"""


def text() -> str:
    """Give the page."""
    parts = [_HEAD]
    titles = (
        ("Pools", POOL),
        ("Other libraries' own pools, where they are observed", LIBRARY),
        ("Devices", DEVICE),
        ("The process and its exporter", ()),
    )
    for title, scope in titles:
        labels = f" Labels of each: {', '.join(f'`{label}`' for label in scope)}." if scope else ""
        parts.append(f"\n## {title}\n\n" + (labels.strip() + "\n\n" if labels else ""))
        parts.append("| metric | type | meaning | since |\n|---|---|---|---|\n")
        parts += [_row(metric) for metric in CATALOGUE if metric.scope == scope]
    return "".join(parts)


def _row(metric: Metric) -> str:
    kind = f"{metric.type}, {metric.unit}" if metric.unit else str(metric.type)
    meaning = metric.help
    if metric.label and metric.words:
        meaning += f" `{metric.label}`: {', '.join(f'`{word}`' for word in metric.words)}."
    elif metric.label:
        meaning += f" `{metric.label}`: `alloc`, `map`, `unmap`, `free`."
    if metric.type is Type.INFO:
        meaning += f" Labels: {', '.join(f'`{fact}`' for fact in metric.facts)}."
    if metric.absent:
        meaning += f" Absent: {metric.absent}."
    return f"| `{metric.full_name}` | {kind} | {meaning} | {metric.since} |\n"


if __name__ == "__main__":
    TARGET.write_text(text())
