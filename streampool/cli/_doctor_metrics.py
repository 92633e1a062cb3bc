"""What ``streampool doctor`` says of metrics and of observing other libraries: whether they would work here."""

from __future__ import annotations

import os
import socket
import tempfile
from typing import Any

from streampool import _core, _device_facts, _process_memory, postmortem
from streampool._versions import installed
from streampool.attach._table import find
from streampool.errors import StreamPoolError
from streampool.metrics import _environment
from streampool.metrics.collector import MULTIPROCESS
from streampool.metrics.server import DEFAULT_PORT

__all__ = ["examine", "lines"]

_OBSERVABLE = ("torch", "cupy")


def examine(devices: list[str], broken: list[str]) -> dict[str, Any]:
    """Give what can be found out, as plain data; adds to `broken` what is set up and cannot work.

    Parameters
    ----------
    devices
        Names of the devices that can be used.
    broken
        Sentences about what should work and does not.
    """
    names = (_environment.PORT, _environment.ADDRESS, _environment.FOLDER, postmortem.ENVIRONMENT, MULTIPROCESS)
    environment = {name: os.environ.get(name) for name in names}
    port = environment[_environment.PORT]
    if port is not None and not (port.isdecimal() and int(port) <= 65535):
        broken.append(f"{_environment.PORT} is {port!r}, not a port: no metrics would be served")
    for name in (_environment.FOLDER, postmortem.ENVIRONMENT):
        if (folder := environment[name]) is not None and (problem := _not_writable(folder)) is not None:
            broken.append(f"{name}: the folder {folder} cannot be written: {problem}")
    return {
        "environment": environment,
        "default_port": DEFAULT_PORT,
        "default_port_is_free": _is_free(DEFAULT_PORT),
        "observable": {name: installed(*find(name).distributions) for name in _OBSERVABLE},
        "nvml": _nvml(),
        "process_memory": {name: _basis(name) for name in devices},
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """Give the same for a person."""
    port = facts["default_port"]
    out = [f"metrics: port {port} of 127.0.0.1 is {'free' if facts['default_port_is_free'] else 'in use'}"]
    out += [f"    {name}={value}" for name, value in facts["environment"].items() if value is not None]
    if facts["environment"][MULTIPROCESS] is not None:
        out.append(
            "    prometheus-client's multi-process mode takes no collectors: give each process a port of its own "
            "(docs/monitoring.md)"
        )
    found = [f"{name} {version}" for name, version in facts["observable"].items() if version is not None]
    out.append(f"libraries that can be observed: {', '.join(found) or 'none is installed'}")
    out.append(f"NVML: {facts['nvml']}")
    words = {
        "process": "of this process alone",
        "device": "of all processes together: the driver gives no figure for this one",
        "unknown": "unknown",
    }
    out += [f"    {name}: device memory is known {words[basis]}" for name, basis in facts["process_memory"].items()]
    return out


def _nvml() -> str:
    if _device_facts.nvml() is not None:
        return f"nvidia-ml-py {installed('nvidia-ml-py') or 'of an unknown version'}"
    package = installed("nvidia-ml-py")
    return "nvidia-ml-py is not installed (streampool[nvml])" if package is None else "there is no driver for it"


def _basis(device: str) -> str:
    try:
        _core.open_device(device).memory_info()  # the driver lists a process once it has a context
    except StreamPoolError:
        return "unknown"
    found = _process_memory.read(device)
    return "unknown" if found is None else str(found.basis)


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _not_writable(folder: str) -> str | None:
    """Give why no file can be made there; a folder that is missing would be made by whoever needs it."""
    where = os.path.abspath(folder)
    while not os.path.exists(where):
        where = os.path.dirname(where)
    try:
        with tempfile.TemporaryFile(dir=where):
            return None
    except OSError as error:
        return error.strerror or str(error)
