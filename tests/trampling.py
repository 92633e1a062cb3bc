"""Finds blocks' records in this process's memory, as a stray write would by luck, and overwrites them."""

from __future__ import annotations

import ctypes
import os

# native/src/pool/record.hpp: the state of a block, with its generation above it and its size behind.
LIVE = 0xA11FEB10
FREED = 0xF4EED0B1
_MIB = 1 << 20


def records(state: int, size: int) -> list[int]:
    """Give the addresses of all records of a state and a size; memory that was freed may still hold old ones."""
    found = []
    buffer = bytearray(_MIB)  # one for all, so that no copies of records lie about
    own = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    wanted = state.to_bytes(4, "little")
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps.readlines():
            span, access, *rest = line.split()
            begin, end = (int(part, 16) for part in span.split("-"))
            named = rest[3] if len(rest) > 3 else ""
            if not access.startswith("rw") or end - begin > 1024 * _MIB or named.startswith(("/", "[stack", "[v")):
                continue
            for chunk in range(begin, end, _MIB):
                try:
                    length = os.preadv(memory.fileno(), [buffer], chunk)
                except OSError:
                    break
                at = buffer.find(wanted, 0, length)
                while at >= 0:
                    here = chunk + at
                    alike = here % 64 == 0 and buffer[at + 8 : at + 16] == size.to_bytes(8, "little")
                    if alike and not own <= here < own + _MIB:
                        found.append(here)
                    at = buffer.find(wanted, at + 1, length)
    return found


def trample(address: int, value: bytes) -> bytes:
    """Overwrite bytes; gives what was there."""
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        whole = os.pread(memory.fileno(), len(value), address)
        os.pwrite(memory.fileno(), value, address)
    return whole
