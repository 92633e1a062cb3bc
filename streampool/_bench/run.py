"""One run from settings to a result: peers are found, kinds are planned and measured, promises are checked."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from streampool import _core
from streampool._bench import budgets, machine, peers
from streampool._bench.engine import Engine
from streampool._bench.kinds import KINDS, Settings, write_for_workers
from streampool.device import Device, driver_of
from streampool.traces import Trace, read_trace

__all__ = ["SCHEMA", "Wanted", "run", "shipped_traces"]

SCHEMA = 1  # of the result: bench_schema.json


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run is asked for."""

    kinds: Sequence[str]
    device: str = "auto"
    peers: frozenset[str] | None = None
    repetitions: int | None = None
    operations: int = 200_000
    threads: int = 16
    options: str = ""
    traces: Sequence[Path] = ()
    native: Path | None = None
    cache: Path | None = None
    compile_missing: bool = True


class MissingPeerError(Exception):
    """A peer that was asked for by name is not here."""


def shipped_traces() -> list[Path]:
    """Give the traces that came with the package, or those of the source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_demo" / "traces", package.parent / "examples" / "traces"):
        if found := sorted(folder.glob("*.csv.gz")):
            return found
    return []


def run(
    wanted: Wanted,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
    *,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure, and give the result as plain data (bench_schema.json).

    Parameters
    ----------
    progress
        Called with (measurements done, in all, what is being done).
    arguments
        The command's, for the result to say how it was made.

    Raises
    ------
    MissingPeerError
        A peer of ``wanted.peers`` is not here.
    DriverError
        The device cannot be used.
    TraceError, OSError
        A trace cannot be read.
    """
    device = Device(wanted.device)
    driver = driver_of(device)
    traces = [read_trace(path) for path in wanted.traces or shipped_traces()] if "replay" in wanted.kinds else []
    table = [*peers.PEERS, *_variants(wanted)]
    chosen = [
        peer
        for peer in table
        if peer.kinds & set(wanted.kinds)
        and (wanted.peers is None or peer.name in wanted.peers or peer.name.startswith("streampool"))
    ]
    found = peers.find(
        chosen,
        driver.name,
        native=wanted.native,
        cache=wanted.cache,
        compile_missing=wanted.compile_missing,
        progress=lambda text: progress(0, 0, text),
    )
    if wanted.peers is not None:
        for one in found:
            if one.absent and one.peer.name in wanted.peers:
                raise MissingPeerError(f"{one.peer.name} cannot be measured here: {one.absent}")

    settings = Settings(
        driver.name, wanted.operations, wanted.threads, wanted.options, wanted.repetitions, peers=wanted.peers
    )
    with tempfile.TemporaryDirectory(prefix="streampool-bench-") as folder:
        settings = replace(settings, traces=_written(traces, Path(folder)))
        engine = Engine(settings, progress)
        try:
            engine.run({name: (KINDS[name], KINDS[name].plan(found, settings)) for name in wanted.kinds})
        except KeyboardInterrupt:  # what was measured so far is worth having
            engine.interrupted()

    rows = [asdict(row) for row in engine.rows]
    return {
        "schema": SCHEMA,
        "benchmark": "streampool bench",
        "command": shlex.join(["streampool", "bench", *arguments]),
        "date": machine.date(),
        "commit": machine.commit(),
        "machine": machine.facts(device),
        "versions": machine.versions(),
        "kinds": list(wanted.kinds),
        "settings": {
            "device": driver.name,
            "options": wanted.options,
            "repetitions": wanted.repetitions,
            "operations": wanted.operations,
            "threads": wanted.threads,
        },
        "peers": [
            {
                "name": one.peer.name,
                "label": one.peer.label,
                "interface": one.interface,
                "version": one.version or engine.versions.get(one.peer.label, ""),
                "options": one.peer.options,
                "absent": one.absent,
            }
            for one in found
        ],
        "budgets": [{**asdict(one), "kept": one.kept} for one in budgets.check(rows, os.cpu_count() or 1)],
        "rows": rows,
        "failures": [asdict(one) for one in engine.failures],
    }


def _variants(wanted: Wanted) -> list[peers.Peer]:
    """Give streampool with each other source of segments, for replays: the promises are of the default."""
    if "segments=" in wanted.options:
        return []
    (choices,) = [option.choices for option in _core.option_table() if option.name == "segments"]
    return [peers.streampool_with(f"segments={c}", ["replay"]) for c in choices if c not in ("auto", "vmm")]


def _written(traces: Sequence[Trace], folder: Path) -> list[tuple[Trace, Path]]:
    written = []
    for number, trace in enumerate(traces):
        path = folder / f"{number}.trace"
        write_for_workers(trace, path)
        written.append((trace, path))
    return written
