"""How much device memory this process holds, whoever in it allocated it: the driver's figure, no sum over pools.

Metrics take what no pool accounts for from it, and reports their coverage. It asks the driver, so it is called in the
background and for reports, never in a scrape.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

from streampool import _core, _device_facts

__all__ = ["Basis", "ProcessMemory", "read"]


class Basis(StrEnum):
    """What a figure counts."""

    PROCESS = "process"  # this process alone: NVML's figure for it, or a simulated device, which nobody else has
    DEVICE = "device"  # all processes on the device together, from its free memory: a ceiling for this one


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Device memory that this process holds on one device, CUDA context and libraries included."""

    device: str
    bytes: int
    basis: Basis

    @property
    def is_ceiling(self) -> bool:
        """Whether it may count other processes too."""
        return self.basis is not Basis.PROCESS

    def outside(self, accounted: int) -> int:
        """Give what `accounted` bytes of pools leave; 0 where the pools' figure is newer and larger."""
        return max(self.bytes - accounted, 0)


def read(device: str, facts: _device_facts.DeviceFacts | None = None) -> ProcessMemory | None:
    """Give what this process holds on ``"cuda:0"`` or ``"sim:0"``; None where nobody can say. Never raises.

    Ask only about devices that are in use: on others the question may make a CUDA context.

    Parameters
    ----------
    device
        The device's name.
    facts
        What `_device_facts.ask` said of it, for callers that ask often.
    """
    if device.startswith("cuda:"):
        own = _by_nvml((facts or _device_facts.ask(device)).uuid)
        if own is not None:
            return ProcessMemory(device, own, Basis.PROCESS)
    try:
        free, total = _core.open_device(device).memory_info()
    except Exception:
        return None
    return ProcessMemory(device, total - free, Basis.PROCESS if device.startswith("sim:") else Basis.DEVICE)


def _by_nvml(uuid: str) -> int | None:
    """Give NVML's figure for this process; None without NVML, or where it does not list it.

    In a container NVML may list processes by numbers that are not those inside: then none is this one.
    """
    library, handle = _device_facts.nvml(), _device_facts.nvml_handle(uuid)
    if library is None or handle is None:
        return None
    try:
        running = library.nvmlDeviceGetComputeRunningProcesses(handle)
        sizes = [process.usedGpuMemory for process in running if process.pid == os.getpid()]
    except Exception:
        return None
    # None is NVML's "not available".
    return sum(sizes) if sizes and all(isinstance(size, int) for size in sizes) else None
