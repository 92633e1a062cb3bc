"""Replay the allocations of a real training run, and see how much memory this pool needs for them.

    python examples/replay_a_log.py                      # a shipped trace of ResNet-50 training
    python examples/replay_a_log.py my_rmm_log.csv --device sim --mode debug

The same as `streampool replay`, from a program.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import streampool as sp

SHIPPED = Path(__file__).parent / "traces" / "resnet50_train.csv.gz"


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: 1 stream, 2 streams."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay an allocation trace.")
    parser.add_argument("trace", nargs="?", type=Path, default=SHIPPED)
    parser.add_argument("--device", default="auto", help="auto, cuda or sim")
    parser.add_argument("--mode", default="production")
    arguments = parser.parse_args()

    trace = sp.traces.read_trace(arguments.trace)
    print(f"{trace.name}: {counted(trace.events, 'event')} on {counted(len(trace.stream_names), 'stream')}")
    live = counted(trace.live_at_end_blocks, "block")
    print(f"peak live {sp.format_size(trace.peak_live_bytes)}, {live} live at the end")

    result = sp.replay.replay(trace, arguments.device, arguments.mode, verify=True)
    print(f"peak reserved {sp.format_size(result.peak_reserved_bytes)} on {result.device}")
    print(f"where allocations got their memory, sum of {result.all_passes}:")
    for path, count in result.reuse.items():
        if count:
            print(f"  {path}: {count:,}")
    print(f"{result.verdict}.")


if __name__ == "__main__":
    main()
