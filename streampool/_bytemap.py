"""The byte map of a fault: which bytes were written, beside the edge of the block. ``.`` untouched, hex written."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from streampool.faults import Fault, FaultKind

__all__ = ["byte_map", "reads_as"]

_ROW = 16  # bytes
_PLAUSIBLE_FLOAT = (1e-6, 1e6)
_PLAUSIBLE_INT = 1 << 20


def byte_map(fault: Fault) -> list[str]:
    """Give the map's rows: address, distance from the block's edge, and 16 bytes; ``|`` stands at the edge."""
    if not fault.found:
        return []
    edge, name = _edge(fault)
    bad = [at for at in range(len(fault.found)) if fault.found[at] != fault.expected[at]]
    shown_end = fault.shown_from + len(fault.found)
    last_shown = fault.shown_from + (bad[-1] if bad else len(fault.found) - 1)
    first_row = edge + (fault.shown_from - edge) // _ROW * _ROW
    rows = []
    for row in range(first_row, last_shown + 1, _ROW):
        cells = "".join(_cells(fault, row, edge))
        label = f"{name}{row - edge:+d}"
        rows.append(f"{max(row, 0):#014x}  {label:<10}{cells}".rstrip())
    if fault.last >= shown_end:
        rows.append(f"… and on, up to {fault.last:#x} ({name}{fault.last - edge:+d})")
    return rows


def _edge(fault: Fault) -> tuple[int, str]:
    """Give the address that distances are counted from, and what it is called."""
    block = fault.block
    if block is None:
        return fault.shown_from, "byte"
    if fault.kind is FaultKind.OVERRUN or fault.address >= block.end:
        return block.end, "end"
    return block.address, "start"


def _cells(fault: Fault, row: int, edge: int) -> Iterator[str]:
    for address in range(row, row + _ROW):
        yield "|" if address == edge else " "
        at = address - fault.shown_from
        if not 0 <= at < len(fault.found):
            yield "  "
        elif fault.found[at] == fault.expected[at]:
            yield " ."
        else:
            yield f"{fault.found[at]:02x}"


def reads_as(fault: Fault) -> str:
    """Say what the written bytes look like: one byte over and over, int32, float32; empty where nothing fits."""
    start = fault.address - fault.shown_from
    length = min(fault.last, fault.shown_from + len(fault.found) - 1) - fault.address + 1
    written = fault.found[start : start + length] if start >= 0 else b""
    if len(written) > 1 and len(set(written)) == 1:
        return "all zero" if written[0] == 0 else f"all {written[0]:#04x}"
    words = len(written) // 4
    if fault.address % 4 or not words:
        return ""
    ints = struct.unpack_from(f"<{words}i", written)
    if all(abs(value) < _PLAUSIBLE_INT for value in ints):
        return f"int32 {_some(ints)}"
    floats = struct.unpack_from(f"<{words}f", written)
    low, high = _PLAUSIBLE_FLOAT
    if all(value == 0 or low < abs(value) < high for value in floats):
        return f"float32 {_some(floats)}"
    return ""


def _some(values: tuple[int, ...] | tuple[float, ...]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:4])
    return f"{shown}, …" if len(values) > 4 else shown
