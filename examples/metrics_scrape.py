"""Serves metrics, scrapes them as Prometheus would, and shows what they say while memory comes and goes.

python examples/metrics_scrape.py --device sim
"""

from __future__ import annotations

import argparse
import urllib.request

import streampool as sp
from streampool import metrics

SHOWN = ("used_bytes", "pending_bytes", "cached_bytes", "reserved_bytes", "headroom_bytes", "live_allocations")


def scrape(url: str) -> dict[str, float]:
    """Give the series of the page that this example is about, by their text."""
    with urllib.request.urlopen(url) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        series, _, value = line.rpartition(" ")
        if series.startswith(tuple(f"streampool_{name}{{" for name in SHOWN)) and 'pool="example"' in series:
            found[series] = float(value)
    return found


def show(when: str, found: dict[str, float]) -> None:
    print(f"-- {when}")
    for series, value in found.items():
        print(f"{series} {value:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="cuda, sim, ...; the GPU where there is one")
    device = sp.Device(parser.parse_args().device)
    with metrics.start_server(0) as server, sp.Pool(device, name="example", limit="256MiB") as pool:
        print(f"metrics at {server.url}")
        stream = device.create_stream()
        blocks = [pool.allocate(1 << 20, stream=stream) for _ in range(100)]
        show("100 blocks of 1 MiB", scrape(server.url))
        for block in blocks[:60]:
            block.close(stream)
        show("60 of them freed", scrape(server.url))
        try:
            pool.allocate(1 << 30, stream=stream)
        except sp.OutOfMemoryError as error:
            print(f"-- {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
