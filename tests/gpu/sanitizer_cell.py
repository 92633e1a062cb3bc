"""One access inside the pool's memory that is nobody's, for compute-sanitizer to name: past a block, or after its free.

    compute-sanitizer --nvtx=yes --destroy-on-device-error=kernel python tests/gpu/sanitizer_cell.py past

Prints the address that was written; `clean` makes only accesses that are allowed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import streampool as sp
from gpu.kernels import Kernels

CELLS = ["clean", "past", "before", "after_free", "before_its_marks"]


def main() -> None:
    (cell,) = sys.argv[1:]
    assert cell in CELLS
    device = sp.Device("cuda:0")
    kernels = Kernels(device)
    pool = sp.Pool(device, mode="debug", nvtx_regions="on", check_every=1)
    assert pool.stats().source == "malloc", "no tool that takes memory regions is attached"
    stream, other = device.create_stream(), device.create_stream()
    pool.register_stream(stream)
    pool.register_stream(other)
    below, block, above = (pool.allocate(1000, stream=stream, tag=tag) for tag in ("below", "scores", "above"))
    for one in (below, block, above):
        kernels.write_pattern(stream, one.handle, one.size, 7)
    stream.sync()
    address = int(block.handle)
    where = {"past": 1000, "before": -1}.get(cell, 0)
    if cell == "before_its_marks":  # allowed: the second stream's use of a freed block is not disturbed
        block.record_stream(other)
        kernels.write_pattern(other, address, 1000, 3)
        block.close(stream)
    if cell == "after_free":
        block.close(stream)
        stream.sync()
        pool.check()
    print(f"writes {address + where:#x}", flush=True)
    if cell in ("past", "before", "after_free"):
        kernels.write_byte(stream, address + where, 1)
    device.sync()
    pool.check()
    assert pool.take_faults() == []


if __name__ == "__main__":
    main()
