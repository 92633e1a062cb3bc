"""A thread that asks what a scrape must not: the devices' memory, other libraries' pools, and who holds the pools'.

Of a device it asks how much is free, and how much of the rest this process holds. Scrapes read what it found, as it is.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from streampool import _core, _fork, _observe, _process_memory, logs
from streampool._device_facts import DeviceFacts, ask
from streampool._observe import LibraryPool
from streampool._process_memory import ProcessMemory
from streampool.metrics.holders import history

__all__ = ["Samples", "facts", "failures", "samples", "start_sampling", "stop_sampling"]

PERIOD = 5.0  # seconds
_PATIENCE = 2.0  # seconds, at exit


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory at one moment. Sizes in bytes."""

    version: str  # of its driver
    free: int
    total: int
    at: float  # on this process's monotonic clock
    process: ProcessMemory | None  # what this process holds of it
    outside: int | None  # and what of that is in no pool, ours or an observed library's


@dataclass(frozen=True, slots=True)
class Samples:
    """What the thread found the last time. Empty before its first look."""

    devices: dict[str, DeviceMemory]
    libraries: tuple[LibraryPool, ...] = ()
    libraries_at: float = 0.0  # Unix time
    host: int | None = None  # bytes that the host can still give


_facts: dict[str, DeviceFacts] = {}
_samples = Samples({})
_failures = 0
_lock = _fork.lock()
_stop: threading.Event | None = None
_thread: threading.Thread | None = None
_pid = 0


def facts(device: str) -> DeviceFacts:
    """Give what the sampling thread found out about a device; nothing is asked here."""
    return _facts.get(device, DeviceFacts())


def samples() -> Samples:
    """Give what the sampling thread found; nothing is asked here."""
    return _samples


def failures() -> int:
    """Give how often sampling failed."""
    return _failures


def start_sampling() -> None:
    """Start the thread, once a process. A forked child has no such thread, and nothing to sample."""
    global _stop, _thread, _pid
    with _lock:
        if _stop is not None and _pid == os.getpid():
            return
        _stop, _pid = threading.Event(), os.getpid()
        _thread = threading.Thread(target=_run, args=(_stop,), name="streampool-device-samples", daemon=True)
        _thread.start()
        atexit.register(_at_exit)


def stop_sampling() -> None:
    """Stop the thread; the last sample stays, with its time."""
    global _stop
    with _lock:
        if _stop is not None:
            _stop.set()
        _stop = None


def _at_exit() -> None:
    """Stop, and let a sample end that is under way: nothing of it may run while the interpreter and libraries end."""
    thread = _thread
    stop_sampling()
    if thread is not None and _pid == os.getpid():
        thread.join(_PATIENCE)


def sample() -> None:
    """Sample everything now. Never raises; what fails does not keep the rest from being sampled."""
    for step in (history.observe, logs.drain, _sample_core, _sample_all):
        _guarded(step)


def _run(stop: threading.Event) -> None:
    while True:
        sample()
        if stop.wait(PERIOD):
            return


def _guarded(step: Callable[[], object]) -> None:
    global _failures
    try:
        step()
    except Exception:
        _failures += 1


def _sample_core() -> None:
    global _failures
    if not _core.sample_devices():
        _failures += 1


def _sample_all() -> None:
    """Look at libraries first, at devices next: what is allocated in between is outside for five seconds, not less."""
    global _samples
    at = time.time()
    libraries = tuple(_observe.pools())
    rows, devices, *_ = _core.read_pulse()
    kept = _reserved_index()
    in_pools: dict[str, int] = {}
    for device, _, kind, _, _, _, values in rows:
        if kind == "device":
            in_pools[device] = in_pools.get(device, 0) + values[kept]
    for pool in libraries:
        if pool.kind == "device":
            in_pools[pool.device] = in_pools.get(pool.device, 0) + (pool.reserved or 0)
    # A device on which no pool is left is not asked.
    names = {device[0] for device in devices if device[4] >= 0}
    names |= {pool.device for pool in libraries if pool.kind == "device"}
    found: dict[str, DeviceMemory] = {}
    for name in sorted(names):
        _guarded(lambda name=name: found.__setitem__(name, _ask_memory(name, in_pools.get(name, 0))))  # type: ignore[misc]
    _samples = Samples(found, libraries, at, _host_available())


def _ask_memory(name: str, in_pools: int) -> DeviceMemory:
    if name not in _facts:
        _facts[name] = ask(name)
    driver = _core.open_device(name)
    free, total = driver.memory_info()
    process = _process_memory.read(name, _facts[name])
    outside = None if process is None else process.outside(in_pools)
    return DeviceMemory(driver.version, free, total, time.monotonic(), process, outside)


def _reserved_index() -> int:
    return [name for name, _ in _core.pulse_columns()].index("reserved")


def _host_available() -> int | None:
    """Give what Linux says can still be allocated without swapping."""
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
