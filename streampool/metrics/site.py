"""What is served, whatever serves it: the metrics page, a health page, a landing page; and as WSGI and ASGI apps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from streampool.metrics import _devices
from streampool.metrics.holders import history
from streampool.metrics.page import CONTENT_TYPE, Page
from streampool.metrics.pprof import heap_profile

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["Answer", "Site", "asgi_app", "wsgi_app"]

_TEXT = "text/plain; charset=utf-8"
_LANDING = b"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>streampool</title></head>
<body><h1>streampool</h1>
<p><a href="/metrics">Metrics</a> for Prometheus; <a href="/debug/holders">who holds memory</a>;
<a href="/-/healthy">health</a>.</p></body></html>
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the site."""

    status: HTTPStatus
    content_type: str
    body: bytes


class Site:
    """Answers requests. Safe from several threads.

    Parameters
    ----------
    registry
        None: streampool's metrics alone, by the fast page. Else the page is all of that registry, as
        Prometheus's client library renders it; add streampool's with ``metrics.register(registry)``.
    debug
        Whether there are ``/debug/holders`` and ``/debug/pprof/heap``, which show file names and lines of the program.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, debug: bool = True) -> None:
        self._registry = registry
        self._debug = debug
        self._page = Page()

    def metrics(self) -> Answer:
        """Give the page of metrics; what is wrong with a foreign registry's collectors is the answer's text."""
        if self._registry is None:
            return Answer(HTTPStatus.OK, CONTENT_TYPE, self._page.render())
        from prometheus_client import generate_latest

        try:
            return Answer(HTTPStatus.OK, CONTENT_TYPE, generate_latest(self._registry))
        except Exception as error:
            text = f"a collector of the registry failed: {type(error).__name__}: {error}\n"
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, text.encode())

    def answer(self, path: str) -> Answer:
        """Answer a request for `path`, whose query is not looked at."""
        path = path.partition("?")[0]
        if path == "/metrics":
            return self.metrics()
        if path == "/-/healthy":  # looks at no pool
            return Answer(HTTPStatus.OK, _TEXT, b"healthy\n")
        if path == "/debug/holders" and self._debug:
            return Answer(HTTPStatus.OK, _TEXT, history.text().encode(errors="backslashreplace"))
        if path == "/debug/pprof/heap" and self._debug:
            return Answer(HTTPStatus.OK, "application/octet-stream", heap_profile())
        if path == "/":
            return Answer(HTTPStatus.OK, "text/html; charset=utf-8", _LANDING)
        return Answer(HTTPStatus.NOT_FOUND, _TEXT, b"not found; the metrics are under /metrics\n")


def wsgi_app(
    registry: CollectorRegistry | None = None, *, sample_devices: bool = True
) -> Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]:
    """Give a WSGI app that answers every path with the metrics: mount it at ``/metrics``.

    Parameters
    ----------
    registry, sample_devices
        As for `streampool.metrics.start_server`.
    """
    site = Site(registry)
    if sample_devices:
        _devices.start_sampling()

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method = environ.get("REQUEST_METHOD", "GET")
        if method not in ("GET", "HEAD"):
            refused = [("Content-Type", _TEXT), ("Allow", "GET, HEAD"), ("Content-Length", "0")]
            start_response("405 Method Not Allowed", refused)
            return [b""]
        answer = site.metrics()
        headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body)))]
        start_response(f"{answer.status.value} {answer.status.phrase}", headers)
        return [b"" if method == "HEAD" else answer.body]

    return app


def asgi_app(
    registry: CollectorRegistry | None = None, *, sample_devices: bool = True
) -> Callable[[dict[str, Any], Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]]], Awaitable[None]]:
    """Give an ASGI app that answers every path with the metrics: mount it at ``/metrics``.

    The page is made on the event loop where that takes about a millisecond, a foreign registry's in a thread.

    Parameters
    ----------
    registry, sample_devices
        As for `streampool.metrics.start_server`.
    """
    site = Site(registry)
    if sample_devices:
        _devices.start_sampling()

    async def app(
        scope: dict[str, Any], receive: Callable[..., Awaitable[Any]], send: Callable[..., Awaitable[Any]]
    ) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        if scope["type"] != "http":
            raise ValueError(f"the metrics are served over HTTP, not {scope['type']!r}")
        if scope["method"] not in ("GET", "HEAD"):
            await send({"type": "http.response.start", "status": 405, "headers": [(b"allow", b"GET, HEAD")]})
            await send({"type": "http.response.body", "body": b""})
            return
        if registry is None:
            answer = site.metrics()
        else:
            import asyncio

            answer = await asyncio.to_thread(site.metrics)
        headers = [
            (b"content-type", answer.content_type.encode()),
            (b"content-length", str(len(answer.body)).encode()),
        ]
        await send({"type": "http.response.start", "status": answer.status.value, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})

    return app
