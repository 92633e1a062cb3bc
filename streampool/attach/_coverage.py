"""How much of what a program's libraries took came from streampool, and what this process holds beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streampool import _contexts, _process_memory
from streampool.attach._table import LIBRARIES, version_of
from streampool.report import DeviceCoverage, LibraryCoverage, Report

if TYPE_CHECKING:
    from streampool._findings import PoolFindings
    from streampool.suppressions import Suppressions

__all__ = ["Usage", "devices", "libraries", "report"]


_NONE: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes that a library got from streampool at most, and what it holds of other memory by its own count."""

    ours: int
    elsewhere: int = 0
    why: str = ""  # of the memory elsewhere, and what cannot be counted


def report(
    findings: Sequence[PoolFindings],
    observed: Sequence[PoolFindings],
    *,
    leaks: str,
    suppressions: Suppressions | Iterable[str],
) -> Report:
    """Make the report of this process at its end: of our pools, and of libraries' own that were observed."""
    from streampool.attach import _hooks

    all_findings = [*findings, *observed]
    own: dict[str, int] = {}
    for found in observed:
        most = found.stats.get("in_use_peak") or found.stats.get("in_use") or 0
        own[found.name] = own.get(found.name, 0) + int(most)
    held = [(f.device, int(f.stats.get("reserved", 0))) for f in all_findings if f.kind == "device" and f.device]
    return Report.from_findings(
        all_findings,
        leaks=leaks,
        suppressions=suppressions,
        libraries=libraries(_hooks.refused, own),
        devices=devices(held),
    )


def libraries(refused: Mapping[str, str], observed: Mapping[str, int] = _NONE) -> tuple[LibraryCoverage, ...]:
    """Give the coverage of each known library that this process has imported.

    Parameters
    ----------
    refused
        Why a library is not served, by name.
    observed
        Bytes of libraries whose own pools are watched, by name (``run --mode observe``).
    """
    from streampool import attach

    found = []
    for row in LIBRARIES:
        served = attach._served.get(row.name)
        if served is not None:
            found.append(_of_served(served))
        elif row.name in observed:
            size, version = observed[row.name], version_of(row)
            found.append(LibraryCoverage(row.name, True, version, size, why="its own pools, observed"))
        elif row.name in refused:
            found.append(LibraryCoverage(row.name, served=False, why=refused[row.name]))
        elif row.name != "cuda.core" and row.module in sys.modules:  # cuda.core is imported by streampool itself
            found.append(LibraryCoverage(row.name, served=False, why="it was not installed (--libraries, sp.install)"))
    return tuple(found)


def _of_served(served: object) -> LibraryCoverage:
    from streampool import attach

    assert isinstance(served, attach._Served)
    notes = tuple(served.adapter.notes)
    try:
        usage = served.adapter.usage()
    except Exception as error:
        usage = Usage(0, 0, f"its use could not be asked for: {type(error).__name__}: {error}")
    return LibraryCoverage(served.library.name, True, served.version, usage.ours, usage.elsewhere, usage.why, notes)


def devices(reserved: Iterable[tuple[str, int]]) -> tuple[DeviceCoverage, ...]:
    """Give what this process holds on each device, beside `reserved`: (device, bytes) of each pool of device memory.

    Devices without a pool are in it where this process has a CUDA context on them.
    """
    ours: dict[str, int] = dict.fromkeys(_contexts.all_in_use(), 0)
    for device, size in reserved:
        ours[device] = ours.get(device, 0) + size
    found = []
    for device, size in sorted(ours.items()):
        held = _process_memory.read(device)
        if held is not None:
            found.append(DeviceCoverage(device, held.bytes, held.outside(size), held.is_ceiling))
    return tuple(found)
