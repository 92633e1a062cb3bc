"""Finds blocks' records in this process's memory, as a stray write would by luck, and overwrites them."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

# native/src/pool/record.hpp: the state of a block, with its generation above it and its size behind.
LIVE = 0xA11FEB10
FREED = 0xF4EED0B1
_MIB = 1 << 20
_LARGEST = 1024 * _MIB  # of a map that is looked at
_PAGE = resource.getpagesize()
_THERE = np.uint64(3 << 62)  # in /proc/self/pagemap: present, or swapped out


def records(state: int, size: int) -> list[int]:
    """Give the addresses of all records of a state and a size; memory that was freed may still hold old ones."""
    found = []
    buffer = bytearray(_MIB)  # one for all, so that no copies of records lie about
    own = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    wanted = state.to_bytes(4, "little")
    with open("/proc/self/mem", "rb", buffering=0) as memory, open("/proc/self/pagemap", "rb", buffering=0) as pages:
        for begin, end in _writable_maps():
            for chunk, length in _touched(pages, begin, end):
                try:
                    length = os.preadv(memory.fileno(), [memoryview(buffer)[:length]], chunk)
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


def _writable_maps() -> Iterator[tuple[int, int]]:
    with open("/proc/self/maps") as maps:
        lines = maps.readlines()
    for line in lines:
        span, access, *rest = line.split()
        begin, end = (int(part, 16) for part in span.split("-"))
        named = rest[3] if len(rest) > 3 else ""
        if access.startswith("rw") and end - begin <= _LARGEST and not named.startswith(("/", "[stack", "[v")):
            yield begin, end


def _touched(pages: BinaryIO, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Give the parts of a map, each of at most 1 MiB, that somebody has touched: most simulated memory nobody has."""
    entries = os.pread(pages.fileno(), 8 * ((end - begin) // _PAGE), 8 * (begin // _PAGE))
    there = np.flatnonzero(np.frombuffer(entries, np.uint64) & _THERE)
    for run in np.split(there, np.flatnonzero(np.diff(there) != 1) + 1) if there.size else ():
        first, last = begin + int(run[0]) * _PAGE, begin + (int(run[-1]) + 1) * _PAGE
        for chunk in range(first, last, _MIB):
            yield chunk, min(_MIB, last - chunk)
