"""One planted access that stops the device, in a process of its own: prints what was found as JSON.

python page_guard_cell.py CELL SIZE, with CELL one of `CELLS`. Works on the simulated device too (`--device sim:0`).
Started by tests/page_guard_cells.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import streampool as sp

CELLS = ["past", "before", "far", "after_free", "eight_streams"]
GUARDED = {"past": "right", "before": "left", "far": "right", "after_free": "random", "eight_streams": "random"}


class Touch:
    """Writes a byte from a kernel, or from simulated work."""

    def __init__(self, device: Any) -> None:
        self._kernels = None
        if not isinstance(device, sp.sim.Device):
            from gpu.kernels import Kernels

            self._kernels = Kernels(device)

    def __call__(self, stream: Any, address: int) -> None:
        if self._kernels is None:
            stream.launch(writes=[(address, 1)])
        else:
            self._kernels.write_byte(stream, address, 1)


def outside(block: Any) -> int:
    """The first byte beyond a block's pages, on its guarded side."""
    facts = block.facts()
    return int(facts["begin"] + facts["reserved"] if facts["pages"] == "right" else facts["begin"] - 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cell", choices=CELLS)
    parser.add_argument("size", type=int)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--records", default="")
    parser.add_argument("--alignment", type=int, default=256)
    given = parser.parse_args()
    device = sp.Device(given.device)
    touch = Touch(device)
    pool = sp.Pool(
        device,
        mode="debug",
        page_guards="all",
        check_every=1,
        page_guard_side=GUARDED[given.cell],
        page_guard_records=given.records,
        stack_depth=3,
    )
    streams = [device.create_stream() for _ in range(8)]
    for stream in streams:
        pool.register_stream(stream)
    idle: set[int] = set()
    if given.cell == "eight_streams":
        blocks = [(n % 8, pool.allocate(given.size + n, stream=streams[n % 8])) for n in range(1000)]
        for n, block in blocks:
            touch(streams[n], block.handle)
        for stream in streams:
            stream.sync()
        pool.check()
        idle = {block.facts()["serial"] for n, block in blocks if n != 7}
        block = blocks[-1][1]
        block.record_stream(streams[7])  # the pool is called for it, then it works
        planted = block.facts()["serial"]
        touch(streams[7], outside(block))
    else:
        stream = streams[0]
        block = pool.allocate(given.size, stream=stream, alignment=given.alignment)
        planted = block.facts()["serial"]
        touch(stream, block.handle)
        touch(stream, block.handle + given.size - 1)
        stream.sync()
        assert pool.check().faults == 0
        address = outside(block)
        if given.cell == "far":
            address += 1 << 20
        if given.cell == "after_free":
            address = block.handle
            block.close(stream)
            pool.check()
        touch(stream, address)
    errors = []
    for call in (streams[7 if given.cell == "eight_streams" else 0].sync, pool.check):
        try:
            call()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    faults = pool.faults()
    named = [candidate.block.serial for fault in faults for candidate in fault.candidates]
    print(
        json.dumps(
            {
                "errors": errors,
                "faults": [str(fault.kind) for fault in faults],
                "planted": planted,
                "candidates": named,
                "idle_named": len(idle & set(named)),
                "note": faults[0].note if faults else "",
                "device": pool.driver.name,
            }
        ),
        flush=True,
    )
    # What is left needs the device, which does nothing any more.
    os._exit(0)


if __name__ == "__main__":
    main()
