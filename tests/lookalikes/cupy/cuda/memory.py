from __future__ import annotations


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        super().__init__(f"Out of memory allocating {size} bytes (allocated so far: {total} bytes).")


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset


class PinnedMemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset


class _Pool:
    """The library's own pool: memory that nobody else sees."""

    def __init__(self):
        self._bytes = 0

    def malloc(self, size):
        self._bytes += size
        return MemoryPointer(UnownedMemory(0xDEAD0000, size, None), 0)

    def total_bytes(self):
        return self._bytes


default_pool = _Pool()
default_pinned_pool = _Pool()
_allocator = default_pool.malloc
_pinned_allocator = default_pinned_pool.malloc


def set_allocator(allocator):
    global _allocator
    _allocator = allocator


def get_allocator():
    return _allocator


def set_pinned_memory_allocator(allocator):
    global _pinned_allocator
    _pinned_allocator = allocator


def alloc(size):
    return _allocator(size)


def alloc_pinned(size):
    return _pinned_allocator(size)
