"""Shared by all tests: helpers importable by name, the Hypothesis profile, and what a test marked `gpu` needs."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import streampool as sp
from streampool import _core

sys.path.insert(0, str(Path(__file__).parent))  # scene.py and profiles.py, in every import mode

import profiles


def pytest_configure() -> None:
    profiles.load()
    # A shell starts its background jobs with Ctrl-C ignored, and so would be every program that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip gpu tests where there is no device. A device that is there and fails is no reason to skip."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    problem = _gpu_problem() if marked else None
    if problem is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=problem))


def pytest_collection_finish() -> None:
    """Take what collection made out of the garbage collector's view: pools collect before they refuse memory."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> Iterator[sp.sim.Device]:
    """Give device 0 of a fresh simulated machine, whose work runs in an order that a seed decides."""
    sp.sim.reset()
    sp.sim.configure(scheduler="seeded", seed=0)
    device = sp.Device("sim:0")
    assert isinstance(device, sp.sim.Device)
    yield device
    sp.sim.reset()


def _gpu_problem() -> str | None:
    try:
        _core.open_device("cuda:0")
    except _core.DriverNotFoundError as error:
        return str(error)
    return None
