"""Which CUDA devices this process uses already: asked so that nothing is started by the question."""

from __future__ import annotations

import ctypes
import itertools
import os

__all__ = ["all_in_use", "in_use"]


def _state(ordinal: int) -> bool | None:
    """Say whether the device's primary context exists; None: there is no driver, or no such device.

    It loads no driver, starts none (so that the program may still fork), and makes no context.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)) != 0:  # not initialized, or no such device
            return None
        asked = cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    except (OSError, AttributeError):
        return None
    return asked == 0 and active.value != 0


def in_use(ordinal: int) -> bool:
    """Say whether the device's primary context exists in this process. Starts nothing."""
    return bool(_state(ordinal))


def all_in_use() -> list[str]:
    """Give the devices whose primary context exists in this process, as ``cuda:N``. Starts nothing."""
    states = itertools.takewhile(lambda state: state is not None, map(_state, itertools.count()))
    return [f"cuda:{ordinal}" for ordinal, state in enumerate(states) if state]
