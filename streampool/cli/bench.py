"""``streampool bench``: what allocation and free cost, beside every allocator that is on this machine."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from streampool._bench import peers, plot, tables
from streampool._bench.kinds import KINDS
from streampool._bench.run import MissingPeerError, Wanted, run
from streampool._sizes import format_count
from streampool.cli._common import DEVICE, OPTION, console, is_terminal
from streampool.errors import TraceError

__all__ = ["command", "show"]


class _Bench(click.Command):
    """Gives a kind's own help for ``streampool bench KIND --help``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = [word for word in args if word in KINDS]
        if named and {"-h", "--help"} & set(args):
            for word in named:
                click.echo(_help_of(word, ctx))
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Kinds"):
            formatter.write_dl([(kind.name, kind.title) for kind in KINDS.values()])
        super().format_options(ctx, formatter)


def _help_of(word: str, ctx: click.Context) -> str:
    kind = KINDS[word]
    formatter = ctx.make_formatter()
    formatter.write_usage(ctx.command_path, f"{word} [OPTIONS]")
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(
            f"{kind.text} {format_count(kind.repetitions, 'repetition')}, unless --repetitions says another number."
        )
    taking_part = [peer.name for peer in peers.PEERS if word in peer.kinds]
    if taking_part:
        with formatter.section("Peers"):
            formatter.write_text(", ".join(taking_part))
    with formatter.section("Example"):
        formatter.write_text(f"streampool bench {word} --device cuda --json")
    return formatter.getvalue()


class _Peers(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    name = "peers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> frozenset[str]:
        if isinstance(value, frozenset):
            return value
        names = frozenset(name.strip() for name in str(value).split(",") if name.strip())
        for name in sorted(names):
            if name not in peers.ALL_NAMES:
                near = difflib.get_close_matches(name, peers.ALL_NAMES, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(peers.ALL_NAMES)}"
                self.fail(f"no peer is called {name!r}; {hint}", param, ctx)
        return names


@click.command(
    "bench",
    cls=_Bench,
    epilog="""\b
Examples:
  streampool bench                                      everything, on the GPU where there is one
  streampool bench pairs window --device sim            two kinds, without a GPU
  streampool bench replay --device cuda --peers torch-expandable,rmm-pool,async-max
  streampool bench pairs --json > pairs.json
  streampool bench replay --help                        what a kind measures

\b
Exit codes:
  0  everything was measured
  1  a measurement failed; the others are shown
  2  wrong use, or a device or a named peer that cannot be used""",
)
@click.argument("kinds", nargs=-1, type=click.Choice([*KINDS, "all"]), metavar="[KIND]...")
@click.option(
    "--device",
    type=DEVICE,
    default="auto",
    show_default=True,
    help="Device to measure on: auto, cuda, cuda:1, sim, sim:0.",
)
@click.option(
    "--peers",
    "named",
    type=_Peers(),
    metavar="NAME,...",
    help=f"Only these beside streampool: {', '.join(name for name in peers.ALL_NAMES if name[:6] != 'stream')}.",
)
@click.option("--repetitions", type=click.IntRange(1, 1000), help="Timed repetitions; each kind has its own default.")
@click.option(
    "--pairs",
    type=click.IntRange(16, 100_000_000),
    default=200_000,
    show_default=True,
    help="The most operations of one measurement; a slow peer makes fewer.",
)
@click.option(
    "--threads", type=click.IntRange(1, 64), default=16, show_default=True, help="The most threads of the kind threads."
)
@click.option(
    "--option",
    "options",
    type=OPTION,
    multiple=True,
    metavar="NAME=VALUE",
    help="Any option of streampool's pools; may be repeated.",
)
@click.option(
    "--trace",
    "traces",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A trace to replay instead of those that came with the package; may be repeated.",
)
@click.option(
    "--native",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the C++ workers' sources (benchmarks/native) instead of those that came with the package.",
)
@click.option(
    "--compile/--no-compile",
    "compile_missing",
    default=True,
    show_default=True,
    help="Compile the workers of RMM, PyTorch and CUB where a compiler and their headers are found.",
)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that keeps what was compiled; without it, streampool/bench in the user's cache.",
)
@click.option(
    "--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw the ratios into FILE.png."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    kinds: tuple[str, ...],
    device: str,
    named: frozenset[str] | None,
    repetitions: int | None,
    pairs: int,
    threads: int,
    options: tuple[tuple[str, str], ...],
    traces: tuple[Path, ...],
    native: Path | None,
    compile_missing: bool,
    cache: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Measure allocation and free beside every allocator that is on this machine, in one run and in turns.

    KIND says what is measured; without one, everything is. Each allocator has a process of its own. Ratios come first;
    a figure is the median of repetitions, p50 and p99 are of batches of 256 operations or more. Without a GPU
    streampool is measured on the simulated device, beside the host's allocators.
    """
    if picture is not None:
        _drawable(picture)
    chosen = [name for name in KINDS if not kinds or "all" in kinds or name in kinds]
    wanted = Wanted(
        chosen,
        device,
        named,
        repetitions,
        pairs,
        threads,
        ":".join(f"{name}={value}" for name, value in options),
        traces,
        native,
        cache,
        compile_missing,
    )
    try:
        with _progress() as progress:
            result = run(wanted, progress, arguments=_said())
    except MissingPeerError as error:
        raise click.BadParameter(str(error), param_hint="--peers") from None
    except (TraceError, OSError) as error:
        raise click.UsageError(str(error)) from None
    if picture is not None:
        plot.plot(result, picture)
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        show(result)
    sys.exit(1 if result["failures"] else 0)


_PATHS = ("--cache", "--native", "--plot")  # say nothing of what is measured


def _said() -> list[str]:
    """Give the command's arguments as they were typed, without folders; none where it was called from Python."""
    words = iter(sys.argv[sys.argv.index("bench") + 1 :] if "bench" in sys.argv else [])
    said = []
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in _PATHS:
            said.append(word)
        elif not equals:
            next(words, None)
    return said


def _drawable(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is measured."""
    hint = "--plot"
    if not plot.is_possible():
        raise click.BadParameter("needs matplotlib: pip install 'streampool[plot]'", param_hint=hint)
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise click.BadParameter(
            f"{path} does not end in a format that can be drawn: {', '.join(formats)}", param_hint=hint
        )
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"the folder of {path} does not exist", param_hint=hint)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar while a person watches; nothing in a pipe."""
    if not is_terminal():
        yield lambda done, total, text: None
        return
    from rich.progress import Progress

    with Progress(console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("bench", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total or None, description=text)


def show(result: dict[str, Any]) -> None:
    """Print a result for a person: tables, then who was not measured and why."""
    from rich.table import Table

    out = console()
    machine, settings = result["machine"], result["settings"]

    def say(text: str) -> None:
        out.print(text, markup=False, soft_wrap=True)

    where = f"{machine['gpu']} ({machine['device']})" if machine["gpu"] else machine["device"]
    say(f"{where}, {machine['processor']}, {machine['cores']} cores; options: {settings['options'] or 'the defaults'}")
    for made in tables.tables(result):
        table = Table(title=made.title, title_justify="left")
        for number, heading in enumerate(made.headings):
            table.add_column(heading, justify="right" if number else "left")
        for cells in made.rows:
            table.add_row(*cells)
        out.print()
        out.print(table)
    out.print()
    absent: dict[str, list[str]] = {}
    for peer in result["peers"]:
        if peer["absent"]:
            absent.setdefault(peer["absent"], []).append(peer["label"])
    for reason, labels in absent.items():
        say(f"not measured: {', '.join(labels)}: {reason}")
    for failure in result["failures"]:
        say(f"failed: {failure['kind']}, {failure['pattern']}, {failure['peer']}: {failure['reason']}")
