"""A thread that asks what a scrape must not: the devices' free memory, and who holds the pools'."""

from __future__ import annotations

import os
import threading

from streampool import _core, logs
from streampool._device_facts import DeviceFacts, ask
from streampool.metrics.holders import history

__all__ = ["facts", "failures", "start_sampling", "stop_sampling"]

PERIOD = 5.0  # seconds


_facts: dict[str, DeviceFacts] = {}
_failures = 0
_lock = threading.Lock()
_stop: threading.Event | None = None
_pid = 0


def facts(device: str) -> DeviceFacts:
    """Give what the sampling thread found out about a device; nothing is asked here."""
    return _facts.get(device, DeviceFacts())


def failures() -> int:
    """Give how often sampling failed."""
    return _failures


def start_sampling() -> None:
    """Start the thread, once a process. A forked child has no such thread, and nothing to sample."""
    global _stop, _pid
    with _lock:
        if _stop is not None and _pid == os.getpid():
            return
        _stop, _pid = threading.Event(), os.getpid()
        threading.Thread(target=_run, args=(_stop,), name="streampool-device-samples", daemon=True).start()


def stop_sampling() -> None:
    """Stop the thread; the last sample stays, with its time."""
    global _stop
    with _lock:
        if _stop is not None:
            _stop.set()
        _stop = None


def sample() -> None:
    """Sample all devices now, and see who holds memory. Never raises."""
    global _failures
    try:
        history.observe()
        logs.drain()
        if not _core.sample_devices():
            _failures += 1
        for device in _core.read_pulse()[1]:
            if device[0] not in _facts:
                _facts[device[0]] = ask(device[0])
    except Exception:
        _failures += 1


def _run(stop: threading.Event) -> None:
    while True:
        sample()
        if stop.wait(PERIOD):
            return
