"""Devices by name: the ``Device`` factory, and the driver behind any object that names a device."""

from __future__ import annotations

from typing import Any

from streampool import _core
from streampool.errors import DriverError, DriverNotFoundError, StreamPoolError

__all__ = ["Device", "check_name", "default_family", "driver_of", "override_default"]

_LARGEST = 2**31 - 1  # ordinals are C's int, here and in the driver

_default = "auto"


def override_default(name: str | None) -> None:
    """Set what ``Device()`` gives in this process (``streampool run --device``); None restores ``'auto'``."""
    global _default
    if name is not None:
        _parse(name)
    _default = name or "auto"


def default_family() -> str:
    """Give the family of devices that other libraries' memory is on: ``"sim"`` where ``Device()`` was set to that."""
    return "sim" if _parse(_default)[0] == "sim" else "cuda"


def Device(name: str | int | None = None) -> Any:  # noqa: N802 - a factory under the name of what it makes
    """Give a device: ``cuda.core.Device`` when there is a GPU, else a simulated one with the same face.

    Parameters
    ----------
    name
        ``"cuda:1"``, ``"cuda"`` (the current device, else the first), ``"sim:0"``, ``"sim"``, a CUDA ordinal; None
        or ``"auto"``: the GPU, and ``sim:0`` only where there is no CUDA driver library or no device.

    Raises
    ------
    DriverNotFoundError
        A CUDA device was asked for by name, and there is no driver library or no device.
    DriverError
        The driver is there and fails: a broken driver is never hidden by falling back to the simulation.
    ValueError
        Not a device's name, or an ordinal that no device can have.

    Notes
    -----
    On CUDA the device is made current in the calling thread.
    """
    family, ordinal = _parse(_default if name is None else name)
    if family == "sim":
        return _simulated(ordinal or 0)
    if family == "auto":
        try:
            _core.open_device("cuda:0")
        except DriverNotFoundError:
            return _simulated(0)
        return _cuda(None)
    _core.open_device(f"cuda:{ordinal or 0}")  # our own errors, in our words, before cuda.core's
    return _cuda(ordinal)


def check_name(name: str) -> str:
    """Give `name` if it can name a device, here or on another machine; else raises ``ValueError``."""
    _parse(name)
    return name


def driver_of(device: Any) -> _core.Driver:
    """Give the driver of a device, whatever names it: an object, a name, None (as ``Device()``), or a driver itself."""
    if isinstance(device, _core.Driver):
        return device
    if device is None or isinstance(device, (str, int)):
        device = Device(device)
    own = getattr(device, "driver", None)
    if isinstance(own, _core.Driver):
        return own
    ordinal = getattr(device, "device_id", None)
    if isinstance(ordinal, int) and type(device).__module__.partition(".")[0] == "cuda":
        return _core.open_device(f"cuda:{ordinal}")
    raise TypeError(
        "a device is sp.Device(...), cuda.core.Device, sp.sim.Device or a name such as 'cuda:0', "
        f"not {type(device).__name__}"
    )


def _parse(name: str | int) -> tuple[str, int | None]:
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise TypeError(f"a device's name is text such as 'cuda:0', or an ordinal, not {type(name).__name__}")
    family, colon, ordinal = ("cuda", ":", f"{name}") if isinstance(name, int) else name.strip().partition(":")
    if family not in ("auto", "cuda", "sim") or (colon and family == "auto"):
        raise ValueError(f"unknown device {name!r}: expected 'cuda', 'cuda:1', 'sim', 'sim:0' or 'auto'")
    if not colon:
        return family, None
    is_number = ordinal.isascii() and ordinal.isdecimal() and len(ordinal.lstrip("0")) <= len(str(_LARGEST))
    if not is_number or int(ordinal) > _LARGEST:
        raise ValueError(
            f"no device is called {name!r}: behind '{family}:' stands a number from 0 to {_LARGEST}; {_present(family)}"
        )
    return family, int(ordinal)


def _present(family: str) -> str:
    """Say which devices of a family there are here. Starts no device."""
    if family == "sim":
        count = _core.sim.device_count()
        return "there is one simulated device here: sim:0" if count == 1 else f"here are sim:0 to sim:{count - 1}"
    nowhere = f"cuda:{_LARGEST}"
    try:
        _core.open_device(nowhere)
    except (StreamPoolError, ValueError) as error:  # it says which there are, or why there is none
        return str(error).removeprefix(f"{nowhere} was asked for, but ").rstrip(".")
    raise AssertionError(f"{nowhere} cannot be")


def _simulated(ordinal: int) -> Any:
    from streampool import sim

    return sim.Device(ordinal)


def _cuda(ordinal: int | None) -> Any:
    try:
        from cuda import core
    except ImportError as error:
        raise DriverError(
            "there is a CUDA device, but cuda.core cannot be imported: install streampool[cu12] or streampool[cu13], "
            f"whichever your environment uses ({error})"
        ) from error
    device = core.Device() if ordinal is None else core.Device(ordinal)
    device.set_current()
    return device
