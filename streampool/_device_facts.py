"""What a device is, for joining with other tools: asked of cuda.core, and of NVML where ``nvidia-ml-py`` is installed.

Asking may take a while, so it is done in the background and for reports, never in a scrape. Nothing here raises.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from streampool import _fork

__all__ = ["DeviceFacts", "ask", "nvml", "nvml_handle"]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device is. Empty text: not known, or there is none.

    Of a MIG instance ``uuid`` is its own (``MIG-...``), ``gpu_uuid`` the GPU's that it is a part of, and
    ``gpu_instance`` its number there; of a whole GPU ``gpu_uuid`` is ``uuid`` and ``gpu_instance`` is empty.
    """

    uuid: str = ""
    pci_bus_id: str = ""
    name: str = ""
    gpu_uuid: str = ""
    gpu_instance: str = ""


def ask(device: str) -> DeviceFacts:
    """Ask what the device ``"cuda:0"`` is; where that fails, nothing is known of it."""
    family, _, ordinal = device.partition(":")
    if family != "cuda":
        return DeviceFacts(uuid=device, name="simulated device", gpu_uuid=device)
    try:
        from cuda import core

        found = core.Device(int(ordinal))
        name, uuid, bus = str(found.name), str(found.uuid), str(found.pci_bus_id)
    except Exception:
        return DeviceFacts()
    if not uuid.startswith(("GPU-", "MIG-")):
        uuid = f"{'MIG' if ' MIG ' in f'{name} ' else 'GPU'}-{uuid}"
    if uuid.startswith("GPU-"):
        return DeviceFacts(uuid, bus, name, uuid)
    return DeviceFacts(uuid, bus, name, *_parent(uuid))


def _parent(uuid: str) -> tuple[str, str]:
    """Give the UUID of the GPU that a MIG instance is a part of, and the instance's number; empty where unknown."""
    library, handle = nvml(), nvml_handle(uuid)
    if library is None or handle is None:
        return "", ""
    try:
        gpu = library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return _text(library.nvmlDeviceGetUUID(gpu)), str(int(library.nvmlDeviceGetGpuInstanceId(handle)))
    except Exception:
        return "", ""


def nvml_handle(uuid: str) -> Any:
    """Give NVML's handle of the device with that UUID, or None."""
    library = nvml()
    if library is None or not uuid:
        return None
    try:
        return library.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:
        return None


def nvml() -> Any:
    """Give NVIDIA's module ``pynvml``, started, or None. It makes no CUDA context."""
    with _lock:
        return _start(os.getpid())


_lock = _fork.lock()


@cache
def _start(_pid: int) -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no such library, no driver
        return None
    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
