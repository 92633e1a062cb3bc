"""Which CUDA devices this process uses already: asked so that nothing is started by the question."""

from __future__ import annotations

import ctypes
import os

__all__ = ["in_use"]


def in_use(ordinal: int) -> bool:
    """Say whether the device's primary context exists in this process.

    It loads no driver, starts none (so that the program may still fork), and makes no context.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)) != 0:  # not initialized, or no such device
            return False
        asked = cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    except (OSError, AttributeError):
        return False
    return asked == 0 and active.value != 0
