"""A small ASGI server whose requests take device memory from a pool, with its metrics, and a leak to switch on.

    python examples/inference_server.py --device sim --port 8000
    curl http://127.0.0.1:8000/infer            # one request
    curl http://127.0.0.1:8000/metrics          # what Prometheus scrapes
    curl http://127.0.0.1:8000/debug/holders    # who holds memory

`--metrics-port` serves the metrics on a port of their own too; `--leak` forgets to drop what each request leaves in a
session; `--load N` makes N requests a second by itself. The server is an ASGI app (`app`), so any ASGI server runs it;
the one in here is a few lines of asyncio, enough for an example.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import streampool as sp
from streampool import metrics

WEIGHTS = 1 << 30  # bytes
ACTIVATIONS = 48 << 20  # bytes a request
KV_CACHE = 2 << 20  # bytes that a session keeps from request to request
SESSIONS = 64  # kept at a time; the oldest goes
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Model:
    """Weights that stay, activations that come and go, and a cache for each session."""

    def __init__(self, device: Any, *, limit: str = "4GiB", leak: bool = False) -> None:
        self.pool = sp.Pool(device, name="inference", limit=limit)
        self.stream = device.create_stream()
        self.pool.register_stream(self.stream)
        self.leak = leak
        self.weights = self.pool.allocate(WEIGHTS, stream=self.stream, tag="weights")
        self.sessions: list[sp.Buffer] = []
        self.forgotten: list[sp.Buffer] = []

    def infer(self) -> int:
        """Serve one request; gives the bytes in use. Raises ``OutOfMemoryError``."""
        with self.pool.allocate(ACTIVATIONS, stream=self.stream):
            self.remember()
        return int(self.pool.stats().in_use)

    def remember(self) -> None:
        """Keep the session's cache for its next request, and let go of the oldest session."""
        cache = self.pool.allocate(KV_CACHE, stream=self.stream)  # what leaks, when told to
        cache.fill(0, stream=self.stream)
        self.sessions.append(cache)
        if len(self.sessions) > SESSIONS:
            oldest = self.sessions.pop(0)
            if self.leak:
                self.forgotten.append(oldest)  # "somebody else will close it"
            else:
                oldest.close(self.stream)


def make_app(model: Model) -> Callable[[dict[str, Any], Receive, Send], Awaitable[None]]:
    """Give the ASGI app: ``/infer``, ``/metrics``, ``/debug/holders``."""
    site = metrics.Site()
    metrics.sample_devices()

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, kind, body = 200, "text/plain; charset=utf-8", b""
        if scope["path"] == "/infer":
            try:
                body = f"{model.infer()} bytes in use\n".encode()
            except sp.OutOfMemoryError as error:
                status, body = 503, f"{error}\n".encode()
        else:
            answer = site.answer(scope["path"])
            status, kind, body = answer.status, answer.content_type, answer.body
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": int(status), "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


async def serve(app: Callable[[dict[str, Any], Receive, Send], Awaitable[None]], port: int, load: float) -> None:
    """Serve an ASGI app over HTTP/1.1, one request a connection."""

    async def never() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                lines = [f"HTTP/1.1 {message['status']} ".encode(), b"connection: close"]
                lines += [name + b": " + value for name, value in message["headers"]]
                writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
            else:
                writer.write(message["body"])

        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout=5)
            method, path = head.decode("latin-1").split(" ")[:2]
            await app({"type": "http", "method": method, "path": path.partition("?")[0]}, never, send)
            await writer.drain()
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    print(f"serving on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)

    async def drop(message: dict[str, Any]) -> None:
        pass

    while True:
        if load > 0:
            await app({"type": "http", "method": "GET", "path": "/infer"}, never, drop)
        await asyncio.sleep(1 / load if load > 0 else 3600)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="cuda, sim, ...; the GPU where there is one")
    parser.add_argument("--port", type=int, default=8000, help="of the server; 0: any free one")
    parser.add_argument("--metrics-port", type=int, help="serve the metrics on a port of their own too")
    parser.add_argument("--limit", default="4GiB", help="the most memory the pool may take")
    parser.add_argument("--leak", action="store_true", help="forget to drop sessions")
    parser.add_argument("--load", type=float, default=0.0, help="requests a second that the server makes itself")
    options = parser.parse_args(args)
    model = Model(sp.Device(options.device), limit=options.limit, leak=options.leak)
    if options.metrics_port is not None:
        print(f"metrics at {metrics.start_server(options.metrics_port).url}", flush=True)
    try:
        asyncio.run(serve(make_app(model), options.port, options.load))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
