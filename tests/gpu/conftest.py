"""The scene of every GPU test, and a bound on each: a test that is stuck fails, and its gates open by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LONGEST = 60  # seconds a test may take
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.gpu)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LONGEST))


@pytest.fixture(scope="session")
def kernels() -> Any:
    """The kernels, compiled and loaded; and what gates need."""
    import streampool as sp
    from gpu import gate
    from gpu.kernels import Kernels

    device = sp.Device("cuda:0")  # makes its context current
    gate.prepare()
    return Kernels(device)


@pytest.fixture
def gpu(kernels: Any) -> Iterator[Any]:
    """A scene on cuda:0."""
    import streampool as sp
    from gpu.gpu_scene import GpuScene

    scene = GpuScene(sp.Device("cuda:0"), kernels)
    try:
        yield scene
    finally:
        scene.end()
