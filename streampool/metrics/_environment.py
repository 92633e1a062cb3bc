"""Metrics of processes that start no server themselves: children and ranks, told by the environment.

``streampool run --metrics-port`` sets these variables, so that what the program starts is seen too; they work without
it.
"""

from __future__ import annotations

import os
import warnings

from streampool.metrics.server import Server, start_server

__all__ = ["ADDRESS", "FOLDER", "PORT", "export", "serve", "serve_from_environment"]

PORT = "STREAMPOOL_METRICS_PORT"
ADDRESS = "STREAMPOOL_METRICS_ADDR"
FOLDER = "STREAMPOOL_METRICS_FOLDER"

_served: int | None = None  # by which process


def export(port: int, addr: str, folder: str | None) -> None:
    """Tell the processes that this one starts."""
    os.environ[PORT] = str(port)
    os.environ[ADDRESS] = addr
    if folder is not None:
        os.environ[FOLDER] = os.path.abspath(folder)


def serve(port: int, addr: str, folder: str | None) -> Server:
    """Serve this process: at `port` plus its local rank. Raises as `start_server` does."""
    global _served
    rank = os.environ.get("LOCAL_RANK", "")
    if port != 0 and rank.isdecimal():
        port += int(rank)
    server = start_server(port, addr, sd_folder=folder)
    _served = os.getpid()
    return server


def serve_from_environment() -> None:
    """Serve this process as the environment says, once. A program is never ended by what goes wrong: it is a warning.

    A port that is taken, by the parent most likely, gives way to any free one where a folder tells Prometheus which.
    """
    global _served
    if _served == os.getpid():
        return
    _served = os.getpid()
    text, addr, folder = os.environ[PORT], os.environ.get(ADDRESS, "127.0.0.1"), os.environ.get(FOLDER)
    try:
        if not text.isdecimal():
            raise ValueError(f"{PORT} is {text!r}, not a port")
        try:
            serve(int(text), addr, folder)
        except OSError:
            if folder is None:
                raise
            serve(0, addr, folder)
    except (OSError, ValueError) as error:
        hint = "" if folder is not None else f"; with {FOLDER} set, any free port would do"
        warnings.warn(f"no metrics of this process are served: {error}{hint}", RuntimeWarning, stacklevel=2)
