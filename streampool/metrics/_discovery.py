"""Targets for Prometheus's file-based service discovery: a file a process, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
from pathlib import Path

__all__ = ["remove", "write"]

_RANKS = ("RANK", "LOCAL_RANK")  # as torchrun and its like set them


def write(folder: Path, target: str, *, tls: bool) -> Path:
    """Write this process's target, and take away those of processes of this machine that are gone (``kill -9``).

    Raises
    ------
    OSError
        The folder cannot be written; an older file of this process stays as it was.
    """
    labels = {"__meta_streampool_pid": str(os.getpid())}  # for relabelling only: not a label of any series
    if tls:
        labels["__scheme__"] = "https"
    for name in _RANKS:
        if value := os.environ.get(name):
            labels[name.lower()] = value
            break
    path = folder / f"{_prefix()}{os.getpid()}.json"
    text = json.dumps([{"targets": [target], "labels": labels}], indent=1) + "\n"
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A name that file_sd's pattern *.json does not meet.
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, prefix=f".{path.name}.", suffix=".part", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # Prometheus is another user
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise OSError(
            error.errno, f"metrics: the file_sd folder {folder} cannot be written: {error.strerror}"
        ) from None
    _sweep(folder)
    return path


def remove(path: Path) -> None:
    """Take a target away; that it is gone already is fine."""
    with contextlib.suppress(OSError):
        path.unlink()


def _prefix() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname()) or "_"
    return f"streampool-{host}-"


def _sweep(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{_prefix()}*.json"):
            pid = path.name.removeprefix(_prefix()).removesuffix(".json")
            if pid.isdecimal() and not _lives(int(pid)):
                remove(path)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
