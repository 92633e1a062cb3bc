"""A server in simulated time, a minute at a time: prints what its metrics page said each minute, as JSON.

    python tests/paging_program.py SCENARIO MINUTES START

START is the minute at which the process begins. Scenarios: leak (ends with its out-of-memory error), steady (95 % of
the limit in use), sawtooth, idle, library (PyTorch leaks, not we; ends with its out-of-memory error).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import inference_server as server
import libraries

import streampool as sp
from streampool._observe import _cupy
from streampool.metrics import Page, _devices, _reading
from streampool.metrics.holders import history

MINUTE = 60.0
REQUESTS = 10  # a minute
STEP, STEPS = 128 << 20, 10  # of the sawtooth


def series(page: bytes) -> dict[str, str]:
    lines = (line.rpartition(" ") for line in page.decode().splitlines() if not line.startswith("#"))
    return {name: value for name, _, value in lines if "allocation_size" not in name}


def remember(library: libraries.Torch) -> None:
    library.allocate(1 << 20)  # what leaks in a library, when told to


def main() -> None:
    scenario, minutes = sys.argv[1], int(sys.argv[2])
    sp.sim.configure(devices=1, memory="80GiB")
    device = sp.Device("sim:0")
    sp.sim.clock.advance(MINUTE * int(sys.argv[3]))
    fixed = server.WEIGHTS + server.ACTIVATIONS + (server.SESSIONS + 1) * server.KV_CACHE
    limit = "4GiB" if scenario != "steady" else str(int(fixed / 0.95))
    model = server.Model(device, limit=limit, leak=scenario == "leak")
    # Beside it a library that is observed and steady, of PyTorch's shape, with a limit of its own.
    library = libraries.Torch().install()
    library.fraction = 0.25
    library.allocate(64 << 20)
    cupy = libraries.CuPy((1 << 20, 2 << 20))
    cupy.limit = 1 << 30
    sys.modules["cupy"] = cupy
    _cupy.in_use = lambda ordinal: ordinal == 0
    sp.observe(stacks=True)
    page = Page()
    kept: list[Any] = []
    seen: list[dict[str, str]] = []
    holders: list[str] = []
    failed_at = None
    for minute in range(minutes):
        try:
            if scenario in ("leak", "steady"):
                for _ in range(REQUESTS):
                    model.infer()
            elif scenario == "sawtooth":
                kept = [] if len(kept) == STEPS else [*kept, model.pool.allocate(STEP, stream=model.stream)]
            elif scenario == "library":
                remember(library)
        except MemoryError:
            failed_at = minute
        sp.sim.settle()
        _devices.sample()
        reading = _reading.read()
        reading.time = sp.sim.clock.now()  # as a Prometheus of simulated time sees it
        seen.append(series(page.render_reading(reading)))
        if minute % 5 == 0:
            holders.append(history.text())
        if failed_at is not None:
            break
        sp.sim.clock.advance(MINUTE)
    names = {name for row in seen for name in row}
    values = {name: [row.get(name) for row in seen] for name in sorted(names)}
    print(json.dumps({"values": values, "failed_at": failed_at, "holders": holders}))


main()
