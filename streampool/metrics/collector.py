"""The catalogue as a collector of Prometheus's client library, for registries of any kind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from streampool.metrics import _devices, _reading
from streampool.metrics._text import number_text
from streampool.metrics.catalogue import CATALOGUE, Metric, Type

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

__all__ = ["MULTIPROCESS", "Collector", "families", "register"]

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


class Collector:
    """Gives all metrics of the catalogue to whoever collects them.

    It holds no pool, makes no driver call and never raises: where reading fails, ``streampool_last_collect_success`` is
    0 and what is known is given. Safe from several threads.
    """

    def describe(self) -> Iterable[Family]:
        """Give the families without samples; reads nothing."""
        return [_family(metric) for metric in CATALOGUE]

    def collect(self) -> Iterator[Family]:
        """Give the families with their samples, from one reading."""
        return families(_reading.read())


def families(reading: _reading.Reading) -> Iterator[Family]:
    """Give the families of a reading, with their samples."""
    for metric in CATALOGUE:
        family = _family(metric)
        try:
            _fill(family, metric, reading)
        except Exception:  # one metric must not take a whole program's page with it
            _reading.failed(reading)
        yield family


def register(registry: CollectorRegistry | None = None, *, sample_devices: bool = True) -> Collector:
    """Add streampool's metrics to a registry of Prometheus's client library.

    Parameters
    ----------
    registry
        None: the library's default one, which ``prometheus_client.start_http_server`` and most frameworks show.
    sample_devices
        Whether a thread asks the devices for their free memory every 5 seconds; without it the series of
        ``streampool_device_free_bytes`` are absent, and headroom does not know of other users of the device.

    Returns
    -------
    Collector
        To be unregistered with ``registry.unregister``.

    Raises
    ------
    prometheus_client.registry.DuplicateTimeseries
        The registry (a ``ValueError`` in older versions) has streampool's metrics already.
    TypeError
        `registry` is none.
    """
    from prometheus_client import REGISTRY

    if registry is not None and not callable(getattr(registry, "register", None)):
        raise TypeError(f"registry must be a prometheus_client.CollectorRegistry or None, not {registry!r}")
    if MULTIPROCESS in os.environ:
        warnings.warn(
            f"{MULTIPROCESS} is set: prometheus-client's multi-process mode takes no collectors, so streampool's "
            f"metrics would be missing there, or those of whichever process answers. Give each process a port of its "
            f"own instead: streampool.metrics.start_server(0), with a file_sd folder for Prometheus "
            f"(docs/monitoring.md, 'Many processes')",
            RuntimeWarning,
            stacklevel=2,
        )
    collector = Collector()
    (REGISTRY if registry is None else registry).register(collector)
    if sample_devices:
        _devices.start_sampling()
    return collector


def _family(metric: Metric) -> Family:
    from prometheus_client import core

    makers = {
        Type.GAUGE: core.GaugeMetricFamily,
        Type.COUNTER: core.CounterMetricFamily,
        Type.HISTOGRAM: core.HistogramMetricFamily,
        Type.INFO: core.InfoMetricFamily,
    }
    return makers[metric.type](metric.family, metric.help, labels=metric.labels)  # type: ignore[no-any-return]


def _fill(family: Family, metric: Metric, reading: _reading.Reading) -> None:
    for labels, value in _reading.series_of(metric, reading):
        if isinstance(value, _reading.Bins):
            buckets = [
                (number_text()(bound), count)
                for bound, count in zip(_reading.bounds(metric), value.cumulated, strict=True)
            ]
            family.add_metric(labels, buckets=buckets, sum_value=value.sum)  # type: ignore[attr-defined]
        elif metric.type is Type.INFO:
            family.add_metric(labels, {})  # type: ignore[attr-defined]
        else:
            family.add_metric(labels, float(value))  # type: ignore[attr-defined, arg-type]
