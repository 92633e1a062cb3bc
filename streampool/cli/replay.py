"""``streampool replay``: how a pool serves what another allocator once served."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from streampool._sizes import format_count, format_size
from streampool.cli._common import AMOUNT, DEVICE, MODE, OPTION, console, is_terminal
from streampool.replay import DEFAULT_PASSES, ReplayResult, replay
from streampool.traces import TraceError, read_trace

__all__ = ["command", "print_result"]


@click.command(
    "replay",
    epilog="""\b
Examples:
  streampool replay examples/traces/resnet50_train.csv.gz
  streampool replay rmm_log.csv --mode debug --verify
  streampool replay snapshot.pickle --device cuda --json

\b
Exit codes:
  0  all served and clean
  1  failures or faults
  2  wrong use, a broken trace, or a device that cannot be used""",
)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--device",
    type=DEVICE,
    default="auto",
    show_default=True,
    help="Device to replay on: auto, cuda, cuda:1, sim, sim:0.",
)
@click.option("--mode", type=MODE, help="Mode of the pool: production (the default), debug, paranoid, observe, off.")
@click.option(
    "--verify/--no-verify", default=False, show_default=True, help="Stamp each block, and check the stamps at its free."
)
@click.option(
    "--passes", type=click.IntRange(1, 1000), default=DEFAULT_PASSES, show_default=True, help="Warm passes to time."
)
@click.option("--limit", type=AMOUNT, help="The most that the pool may hold: 4GiB, or 80% of the device's memory.")
@click.option(
    "--option",
    "options",
    type=OPTION,
    multiple=True,
    metavar="NAME=VALUE",
    help="Any option of the pool; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    trace: Path,
    device: str,
    mode: str | None,
    verify: bool,
    passes: int,
    limit: str | None,
    options: tuple[tuple[str, str], ...],
    as_json: bool,
) -> None:
    """Replay the allocations and frees of TRACE, and say how much memory and time they take.

    TRACE is the CSV log of RMM's logging_resource_adaptor or a PyTorch memory snapshot pickle, plain or gzip. Each of
    its streams is a stream of its own here.
    """
    settings: dict[str, object] = dict(options)
    if limit is not None:
        settings["limit"] = limit
    try:
        read = read_trace(trace)
    except (TraceError, OSError) as error:
        raise click.UsageError(str(error)) from None
    with _progress(read.name) as progress:
        result = replay(read, device, mode, verify=verify, passes=passes, options=settings, progress=progress)
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1))
    else:
        print_result(result)
    sys.exit(0 if result.is_clean else 1)


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar while a person watches; give None in a pipe, so that the native loop calls nobody."""
    if not is_terminal():
        yield None
        return
    from rich.progress import Progress

    with Progress(console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"replay {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_result(result: ReplayResult) -> None:
    """Print the table, the notes and the verdict."""
    from rich.table import Table

    table = Table(
        title=f"{result.trace} on {result.device}, mode {result.mode}", title_justify="left", show_header=False
    )
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _rows(result):
        table.add_row(name, value)
    out = console()
    out.print(table)
    for note in result.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)
    out.print(f"{result.verdict}.", markup=False, soft_wrap=True)


def _rows(result: ReplayResult) -> Iterator[tuple[str, str]]:
    verified = ", stamps verified" if result.verified else ""
    yield "events", f"{result.events:,} on {format_count(result.streams, 'stream')}{verified}"
    yield "ns per event, cold pass", f"{result.ns_per_event_cold:,.0f}"
    yield (
        f"ns per event, median of {format_count(result.passes, 'warm pass', 'warm passes')}",
        f"{result.ns_per_event:,.0f}",
    )
    yield "peak live", format_size(result.peak_live_bytes)
    yield "peak reserved", format_size(result.peak_reserved_bytes)
    yield "reserved / live", f"{result.ratio:.3f}"
    yield "live at the end", format_size(result.live_at_end_bytes)
    skipped: list[tuple[int, Any]] = [
        (result.skipped_failures, "failed allocations in the log, skipped"),
        (result.skipped_frees, "frees of unknown pointers, skipped"),
        (result.skipped_null, "rows about null pointers, skipped"),
        (result.reallocations, "frees missing in the log, put in"),
    ]
    for count, name in skipped:
        if count:
            yield name, f"{count:,}"
    yield f"allocations in {result.all_passes}", f"{sum(result.reuse.values()):,}"
    for path, count in result.reuse.items():
        if count:
            yield f"  of these from: {path.replace('_', ' ')}", f"{count:,}"
    yield "failures, all passes", f"{result.failures:,}"
    yield "faults, all passes", f"{result.faults:,}"
