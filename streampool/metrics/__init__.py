"""Metrics for Prometheus: what the pools hold, why, and whether it ends well.

>>> from streampool import metrics
>>> server = metrics.start_server(9466)        # http://127.0.0.1:9466/metrics
>>> metrics.register()                         # or: into prometheus_client's default registry

Nothing is registered, started or logged at import. docs/METRICS.md lists every metric, docs/monitoring.md tells how to
set things up, dashboards/ has rules, alerts and Grafana dashboards.
"""

from __future__ import annotations

from streampool.metrics._devices import start_sampling as sample_devices
from streampool.metrics.catalogue import CATALOGUE, Metric, Type
from streampool.metrics.collector import Collector, register
from streampool.metrics.page import Page
from streampool.metrics.server import DEFAULT_PORT, Server, start_server
from streampool.metrics.site import Answer, Site, asgi_app, wsgi_app

__all__ = [
    "Answer",
    "CATALOGUE",
    "Collector",
    "DEFAULT_PORT",
    "Metric",
    "Page",
    "Server",
    "Site",
    "Type",
    "asgi_app",
    "register",
    "sample_devices",
    "start_server",
    "wsgi_app",
]
