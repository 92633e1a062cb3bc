"""Devices by name, and when the simulated one steps in."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

import streampool as sp
from streampool import _core, device


@pytest.fixture(autouse=True)
def _default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_default", "auto")


def open_device_that(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[str]:
    """Put a driver in place that raises `error` for CUDA; gives the names that were asked for."""
    asked: list[str] = []
    real = _core.open_device

    def open_device(name: str) -> _core.Driver:
        asked.append(name)
        if name.startswith("cuda") and error is not None:
            raise error
        return real(name)

    monkeypatch.setattr(_core, "open_device", open_device)
    return asked


def test_without_a_driver_or_a_device_the_simulated_one_steps_in(monkeypatch: pytest.MonkeyPatch) -> None:
    open_device_that(monkeypatch, _core.DriverNotFoundError("no libcuda.so.1"))
    assert isinstance(sp.Device(), sp.sim.Device)
    assert isinstance(sp.Device("auto"), sp.sim.Device)


def test_a_broken_driver_is_not_hidden_by_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    open_device_that(monkeypatch, _core.DriverError("driver too old"))
    with pytest.raises(sp.DriverError, match="too old"):
        sp.Device()
    with pytest.raises(sp.DriverError, match="too old"):
        sp.Pool(None)


def test_cuda_by_name_never_becomes_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = open_device_that(monkeypatch, _core.DriverNotFoundError("no device"))
    for name in ("cuda", "cuda:3", 2):
        with pytest.raises(sp.DriverNotFoundError):
            sp.Device(name)
    assert asked == ["cuda:0", "cuda:3", "cuda:2"]


def test_a_cuda_device_is_cuda_cores_and_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, tuple[int, ...]]] = []

    class FakeDevice:
        def __init__(self, *ordinal: int) -> None:
            made.append(("made", ordinal))

        def set_current(self) -> None:
            made.append(("current", ()))

    monkeypatch.setattr(_core, "open_device", lambda name: None)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(core=SimpleNamespace(Device=FakeDevice)))
    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(Device=FakeDevice))
    for name, ordinal in ((None, ()), ("auto", ()), ("cuda", ()), ("cuda:1", (1,)), (2, (2,))):
        made.clear()
        assert isinstance(sp.Device(name), FakeDevice)
        assert made == [("made", ordinal), ("current", ())]


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "sim:-1", "auto:1", "cuda:0:1", -1])
def test_a_name_that_is_no_device_is_refused(name: str | int) -> None:
    with pytest.raises(ValueError):
        sp.Device(name)


@pytest.mark.parametrize(
    ("name", "present"),
    [
        ("cuda:99999999999", "there is no CUDA driver here"),
        ("cuda:1.5", "there is no CUDA driver here"),
        (2**31, "there is no CUDA driver here"),
        (-1, "there is no CUDA driver here"),
        ("sim:99999999999999999999", "there is one simulated device here: sim:0"),
        ("sim:-1", "there is one simulated device here: sim:0"),
        ("sim:²", "there is one simulated device here: sim:0"),
    ],
)
def test_an_ordinal_that_no_device_has_is_named_with_the_devices_that_there_are(
    monkeypatch: pytest.MonkeyPatch, name: str | int, present: str
) -> None:
    monkeypatch.setenv("STREAMPOOL_LIBCUDA", "/nowhere/libcuda.so.1")
    for call in (sp.Device, sp.Pool):
        with pytest.raises(ValueError) as caught:
            call(name)
        assert str(caught.value).startswith(f"no device is called {name!r}: ")
        assert present in str(caught.value)


def test_an_ordinal_that_could_be_and_is_not_there_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMPOOL_LIBCUDA", "/nowhere/libcuda.so.1")
    with pytest.raises(sp.DriverNotFoundError, match="cuda:2147483647 was asked for, but there is no CUDA driver"):
        sp.Device("cuda:2147483647")
    for ordinal in (7, -1, 2**31 - 1, 2**31, -(10**30)):
        with pytest.raises(
            sp.DriverNotFoundError, match=f"there is no device sim:{ordinal}: the simulated machine has 1"
        ):
            sp.sim.Device(ordinal)
    assert sp.Device("sim:000").name == "sim:0"


@pytest.mark.parametrize("name", [1.5, True, object(), b"sim"])
def test_a_name_of_another_type_is_refused(name: object) -> None:
    with pytest.raises(TypeError):
        sp.Device(name)  # type: ignore[arg-type]


def test_a_pool_takes_a_device_object_a_name_or_a_driver() -> None:
    for named in (sp.Device("sim:0"), "sim", "sim:0", _core.open_device("sim:0")):
        with sp.Pool(named) as pool:
            assert pool.driver.name == "sim:0"
            assert pool.driver.simulated
    with pytest.raises(TypeError, match="not list"):
        sp.Pool([])


def test_run_can_choose_what_the_default_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device.override_default("sim:0")
    asked = open_device_that(monkeypatch, _core.DriverError("broken"))
    assert isinstance(sp.Device(), sp.sim.Device)
    assert not any(name.startswith("cuda") for name in asked)
    with pytest.raises(ValueError):
        device.override_default("gpu")


def test_importing_loads_the_core_and_our_own_modules_only() -> None:
    script = (
        "import sys; before = set(sys.modules); import streampool; "
        "loaded = {m.partition('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(loaded & {'cuda', 'numpy', 'structlog', 'prometheus_client', 'rich', 'click', 'jsonschema'})); "
        "import streampool._core as c; print([n for n in ('sim', 'report', 'replay', 'traces') "
        "if f'streampool.{n}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_importing_registers_nothing_at_exit() -> None:
    script = (
        "import atexit; hooks = []; atexit.register = lambda f, *a, **k: hooks.append(f) or f; "
        "ours = lambda: [f.__module__ for f in hooks if str(f.__module__).startswith('streampool')]; "
        "import streampool; print(ours()); streampool.Pool('sim:0'); streampool.Pool('sim:0'); print(ours())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['streampool.session']"]
