"""The metrics server: small, and hard to hold up.

Every connection has a thread of a bounded number, and a deadline for all it does; TLS handshakes happen there and not
in the accept loop, so an idle client holds up nobody. A forked child lets go of the listening socket.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import socket
import ssl
import threading
import time
import weakref
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streampool.metrics import _devices, _discovery
from streampool.metrics.site import Answer, Site

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["DEFAULT_PORT", "Server", "start_server"]

DEFAULT_PORT = 9466
_DEADLINE = 5.0  # seconds for a connection, from its acceptance to its last byte
_MOST_CONNECTIONS = 16  # at a time; more are closed at once
_LONGEST_HEAD = 16 << 10  # bytes of a request
_BACKLOG = 64

_servers: weakref.WeakSet[Server] = weakref.WeakSet()


class Server:
    """A running metrics server; `stop` it, or let it end with the process.

    Attributes
    ----------
    port
        The port it listens on, also where 0 was asked for.
    url
        Where the metrics are.
    """

    def __init__(self, listener: socket.socket, site: Site, context: ssl.SSLContext | None) -> None:
        self._listener = listener
        self._site = site
        self._context = context
        self._pid = os.getpid()
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._discovery: Path | None = None
        self.address, self.port = listener.getsockname()[:2]
        host = f"[{self.address}]" if ":" in self.address else self.address
        self.target = f"{host}:{self.port}"
        self.url = f"{'http' if context is None else 'https'}://{self.target}/metrics"
        self._thread = threading.Thread(target=self._accept, name="streampool-metrics", daemon=True)
        self._stopping = False
        _servers.add(self)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<streampool metrics at {self.url}{', stopped' if self._stopping else ''}>"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening, and take the target out of the file_sd folder. Answers under way are finished."""
        if self._stopping or self._pid != os.getpid():
            return
        self._stopping = True
        if self._discovery is not None:
            _discovery.remove(self._discovery)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accept loop
        self._thread.join(timeout=_DEADLINE)
        self._listener.close()
        atexit.unregister(self.stop)

    def announce(self, folder: str | os.PathLike[str]) -> Path:
        """Write the target into a folder that Prometheus's file_sd reads (``FOLDER/*.json``); it goes with `stop`.

        Raises
        ------
        OSError
            The folder cannot be written, with its name.
        """
        self._discovery = _discovery.write(Path(folder), self.target, tls=self._context is not None)
        return self._discovery

    def _forked(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._stopping or error.errno in (errno.EBADF, errno.EINVAL):
                    return
                time.sleep(0.1)  # no file descriptors left, and the like: the connection waits in the backlog
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="streampool-scrape", daemon=True).start()
            except RuntimeError:  # no thread can be started
                connection.close()
                self._free.release()

    def _serve(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _DEADLINE
        try:
            with connection:
                if self._context is None:
                    self._talk(connection, deadline)
                else:
                    connection.settimeout(_left(deadline))
                    with self._context.wrap_socket(connection, server_side=True) as secure:
                        self._talk(secure, deadline)
        except (OSError, ValueError):  # it went away, was too slow, or speaks no TLS
            pass
        finally:
            self._free.release()

    def _talk(self, connection: socket.socket, deadline: float) -> None:
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            connection.settimeout(_left(deadline))
            part = connection.recv(4096)
            if not part or len(head) > _LONGEST_HEAD:
                return
            head += part
        connection.settimeout(_left(deadline))
        connection.sendall(_Request(head, self._site).response())
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Request(BaseHTTPRequestHandler):
    """One request that was read already: the standard library's parser over bytes."""

    server_version = "streampool"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def __init__(self, head: bytes, site: Site) -> None:
        self._site = site
        self.rfile = io.BytesIO(head)
        self.wfile = io.BytesIO()
        self.client_address = ("", 0)

    def response(self) -> bytes:
        self.handle_one_request()
        return self.wfile.getvalue()  # type: ignore[attr-defined, no-any-return]

    def do_GET(self) -> None:
        self._send(self._site.answer(self.path), body=True)

    def do_HEAD(self) -> None:
        self._send(self._site.answer(self.path), body=False)

    def _send(self, answer: Answer, *, body: bool) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if body:
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a library does not print."""


def start_server(
    port: int = DEFAULT_PORT,
    addr: str = "127.0.0.1",
    *,
    certfile: str | os.PathLike[str] | None = None,
    keyfile: str | os.PathLike[str] | None = None,
    client_cafile: str | os.PathLike[str] | None = None,
    registry: CollectorRegistry | None = None,
    sample_devices: bool = True,
    sd_folder: str | os.PathLike[str] | None = None,
    debug_pages: bool = True,
) -> Server:
    """Serve streampool's metrics under ``/metrics``, in a daemon thread, until the process ends or `Server.stop`.

    Parameters
    ----------
    port
        0: any free one (`Server.port` says which).
    addr
        The address to listen on. The default is reached from this machine only; ``"0.0.0.0"`` and ``"::"`` from
        everywhere.
    certfile, keyfile
        A PEM certificate chain and its key: TLS. The key may stand in `certfile`.
    client_cafile
        Certificate authorities of which a client must show a certificate (mutual TLS).
    registry
        None: streampool's metrics alone. A registry of Prometheus's client library: all of it; add
        streampool's with ``metrics.register(registry)``.
    sample_devices
        Whether a thread asks the devices for their free memory every 5 seconds.
    sd_folder
        A folder that Prometheus's file_sd reads: the server's target is written there as a file of its own.
    debug_pages
        Whether ``/debug/holders`` and ``/debug/pprof/heap`` are there: which lines of the program hold memory. They
        show the names of its files.

    Raises
    ------
    OSError
        The port is taken or may not be used, or the folder cannot be written; the message says which, and what to do.
    ValueError
        The certificate or its key cannot be used, or the port is none.
    """
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise ValueError(f"port {port!r}: a port is a number from 0 (any free one) to 65535")
    if not isinstance(addr, str):
        raise TypeError(f"addr {addr!r}: an address is text such as '127.0.0.1'")
    context = _tls(certfile, keyfile, client_cafile)
    listener = _listen(addr, port)
    server = Server(listener, Site(registry, debug=debug_pages), context)
    if sd_folder is not None:
        try:
            server.announce(sd_folder)
        except OSError:
            server.stop()
            raise
    atexit.register(server.stop)
    if sample_devices:
        _devices.start_sampling()
    return server


def _listen(addr: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((addr, port), family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise OSError(
            errno.EADDRNOTAVAIL, f"metrics: {addr!r} is no address of this machine: {error.strerror}"
        ) from None
    except OverflowError as error:
        raise ValueError(str(error)) from None
    except OSError as error:
        what = {
            errno.EADDRINUSE: "is in use: stop who has it, or choose another port (0 is any free one)",
            errno.EACCES: "may not be used by this user: choose a port above 1023",
            errno.EADDRNOTAVAIL: "cannot be listened on: the address is none of this machine's",
        }.get(error.errno or 0, f"cannot be listened on: {error.strerror}")
        raise OSError(error.errno, f"metrics: port {port} of {addr} {what}") from None


def _tls(
    certfile: str | os.PathLike[str] | None,
    keyfile: str | os.PathLike[str] | None,
    client_cafile: str | os.PathLike[str] | None,
) -> ssl.SSLContext | None:
    if certfile is None:
        if keyfile is not None or client_cafile is not None:
            raise ValueError("metrics: keyfile and client_cafile go with a certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password: asking for one on a terminal would hold up the program.
        context.load_cert_chain(certfile, keyfile, password=lambda: b"")
    except (OSError, ValueError) as error:
        named = os.fspath(certfile) + (f" with key {os.fspath(keyfile)}" if keyfile is not None else "")
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ValueError(f"metrics: the certificate {named} cannot be used: {why}") from None
    if client_cafile is not None:
        try:
            context.load_verify_locations(client_cafile)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"metrics: the client authorities {os.fspath(client_cafile)} cannot be used: {error}"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _after_fork() -> None:
    for server in list(_servers):
        server._forked()


os.register_at_fork(after_in_child=_after_fork)
