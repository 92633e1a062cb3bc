"""A program with three mistakes, none of which crashes it.

Run it alone and all seems well; then let streampool watch it:

    streampool run --mode debug examples/find_overrun_and_leak.py

The report names each mistake with the line that allocated the block and the line that freed it. The lines that it must
name are marked `planted:`. `--device sim` needs no GPU; `--device cuda` insists on one.
"""

from __future__ import annotations

import argparse
from typing import Any

import streampool as sp


def write(device: Any, stream: Any, address: int, count: int) -> None:
    """Queue a write of `count` bytes at a raw address: what a kernel with a wrong index does."""
    if isinstance(device, sp.sim.Device):
        stream.launch(lambda bytes_: bytes_.fill(0x41), writes=[(address, count)])
        return
    from cuda.bindings import driver

    (error,) = driver.cuMemsetD8Async(address, 0x41, count, stream.handle)
    assert error == driver.CUresult.CUDA_SUCCESS, error


def one_byte_too_far(device: Any, pool: sp.Pool, stream: Any) -> None:
    scores = pool.allocate(1000, stream=stream)  # planted: overrun
    write(device, stream, scores.handle, 1001)
    stream.sync()
    scores.close(stream)


def kept_a_pointer(device: Any, pool: sp.Pool, stream: Any) -> None:
    cache = pool.allocate(4096, stream=stream)  # planted: write_after_free
    pointer = cache.handle
    cache.close(stream)
    pool.check()  # the freed block is filled with the pattern now; a write before that would pass unseen
    write(device, stream, pointer + 16, 8)
    stream.sync()


def forgot_to_free(pool: sp.Pool, stream: Any) -> None:
    pool.allocate_raw(64 << 10, stream=stream)  # planted: leak


def main() -> None:
    parser = argparse.ArgumentParser(description="Three planted memory mistakes.")
    parser.add_argument("--device", default="auto", help="auto, cuda or sim")
    device = sp.Device(parser.parse_args().device)
    stream = device.create_stream()
    pool = sp.Pool(device, name="demo")
    pool.register_stream(stream)

    one_byte_too_far(device, pool, stream)
    kept_a_pointer(device, pool, stream)
    forgot_to_free(pool, stream)

    stream.sync()
    pool.forget_stream(stream)
    pool.close()
    print(f"done on {pool.driver.name}; nothing crashed")


if __name__ == "__main__":
    main()
