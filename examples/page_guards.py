"""A read behind the end of a block, at the very access: the device stops, and the records say which block was meant.

    python examples/page_guards.py [--device sim|cuda]

The mistake is made in a process of its own, since its device can do nothing more. On the simulated device, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import streampool as sp
from streampool.page_guards import read_records


def read(device: Any, stream: Any, address: int) -> None:
    """Queue a read of one byte at an address: what a kernel with a wrong index does."""
    if isinstance(device, sp.sim.Device):
        stream.launch(reads=[(address, 1)])
        return
    from cuda.bindings import driver

    scratch = sp.Pool(device).allocate(1, stream=stream)
    (error,) = driver.cuMemcpyAsync(scratch.handle, address, 1, stream.handle)
    assert error == driver.CUresult.CUDA_SUCCESS, error


def the_program(device: Any, records: str) -> None:
    """Read one byte too far, and die of it."""
    pool = sp.Pool(device, mode="debug", page_guards="all", page_guard_side="right", page_guard_records=records)
    stream = device.create_stream()
    weights = pool.allocate(1024, stream=stream, tag="weights")
    scores = pool.allocate(4096, stream=stream, tag="scores")
    read(device, stream, scores.handle + 4095)  # the last byte: all is well
    stream.sync()
    read(device, stream, scores.handle + 4096)
    stream.sync()  # raises: the device is lost
    del weights


def main() -> None:
    """Run the program in a child, then read what it left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="sim, cuda, or a name; the GPU where there is one")
    parser.add_argument("--records", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.records:
        the_program(sp.Device(given.device), given.records)
        return
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "guards.jsonl"
        arguments = ["--records", str(records), *(["--device", given.device] if given.device else [])]
        child = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
        assert child.returncode != 0, "nothing stopped the program"
        print(f"the program died: {child.stderr.strip().splitlines()[-1]}")
        print()
        print(read_records(records).to_text())


if __name__ == "__main__":
    main()
