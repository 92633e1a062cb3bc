from __future__ import annotations

from . import mr

__version__ = "26.10.00"


class Stream:
    def __init__(self, handle=0):
        self._handle = handle

    def __cuda_stream__(self):
        return (0, self._handle)


class DeviceBuffer:
    def __init__(self, size, stream=None):
        self._mr = mr.get_per_device_resource(0)
        self.size, self._stream = size, stream or Stream()
        self.ptr = self._mr.allocate(size, self._stream)

    def __del__(self):
        if hasattr(self, "ptr"):
            self._mr.deallocate(self.ptr, self.size, self._stream)
