"""``streampool report``: a saved report as text, JSON, HTML, rules or a profile; snapshots; records of page guards."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streampool._terminal import wants_color
from streampool.cli._common import echo, read_suppressions

if TYPE_CHECKING:
    from streampool.report import Report

__all__ = ["command"]


@click.command(
    "report",
    epilog="""\b
Examples:
  streampool run --mode debug --report out.json train.py
  streampool report out.json
  streampool report out.json --format html --output out.html
  streampool report out.json --format suppressions > known.txt
  streampool report pool.json --format pprof --output pool.pb.gz       (json.dumps(pool.snapshot()))
  streampool report guards.jsonl --format html --output guards.html    (page_guard_records)

\b
Exit codes: 0 it was printed, 2 wrong use, or a file that is no whole report.""",
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "html", "suppressions", "pprof"]),
    default="text",
    show_default=True,
    help="What to print; suppressions: a ready rule for each finding; pprof: who holds memory, as a gzipped profile.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--suppressions",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Rules, one a line, to hold against the findings beside those of the run.",
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write it here and not to standard output."
)
@click.option("-f", "--force", is_flag=True, help="Overwrite the output where it exists.")
def command(file: Path, form: str, as_json: bool, suppressions: Path | None, output: Path | None, force: bool) -> None:
    """Print the saved report in FILE, as `streampool run --report FILE.json` writes it.

    The page of HTML is one file without scripts. Text on a terminal is coloured, unless NO_COLOR is set.

    FILE may also be a pool's snapshot, as `json.dumps(pool.snapshot())` gives it: then it says what the pool holds and
    who holds it. A profile of a report is of what was still live.

    FILE may also be the records of page guards, which option page_guard_records names: then the blocks are listed that
    the access which stopped the device may have been meant for.
    """
    from streampool import page_guards, snapshots
    from streampool.report import Report

    form = "json" if as_json else form
    data = _read(file)
    schema = _schema_of(data)
    if schema == page_guards.SCHEMA_ID:
        _put(_records(file, form, suppressions), output, force=force)
        return
    text = _decoded(data, file)
    if schema == snapshots.SCHEMA_ID:
        _put(_of_snapshot(text, file, form, suppressions), output, force=force)
        return
    try:
        report = Report.from_json(text)
    except json.JSONDecodeError as error:
        raise click.UsageError(f"{file} is no JSON report: {_no_json(text, error)}") from None
    except ValueError as error:
        raise click.UsageError(f"{file} is JSON, but no whole streampool report: {error}") from None
    if suppressions is not None:
        report = report.suppress(read_suppressions(suppressions))
    made: str | bytes
    match form:
        case "json":
            made = report.to_json()
        case "html":
            made = report.to_html()
        case "suppressions":
            made = _rules(report)
        case "pprof":
            made = _profile(report)
        case _:
            made = report.to_text(color=output is None and wants_color(sys.stdout))
    _put(made, output, force=force)


def _rules(report: Report) -> str:
    """Give a file of rules for what was found, each with what it is about."""
    lines = [line for rule, about in report.suggested_rules.items() for line in (f"# {about}", rule)]
    return "\n".join(lines or ["# nothing was found that counts"])


def _profile(report: Report) -> bytes:
    """Give the blocks that were live at the end, by the line that allocated them."""
    from streampool.metrics.pprof import encode
    from streampool.snapshots import Holding, Saved

    kinds = {(pool.name, pool.device): pool.kind for pool in report.pools}
    return encode(
        [
            Saved(leak.pool, kinds.get((leak.pool, leak.device), ""), leak.device, 0, (held,))
            for leak in report.leaks
            for held in [Holding(leak.bytes, leak.blocks, tag=leak.tag, frames=leak.allocated_at)]
        ]
    )


def _schema_of(data: bytes) -> object:
    """Give the schema that the first line names, or the whole text; None: neither does."""
    for part in (data.partition(b"\n")[0], data):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(part)
            return found.get("schema") if isinstance(found, dict) else None
    return None


def _of_snapshot(text: str, file: Path, form: str, suppressions: Path | None) -> str | bytes:
    from streampool.snapshots import Snapshot

    try:
        snapshot = Snapshot.from_json(text)
    except ValueError as error:
        raise click.UsageError(f"{file} is JSON, but no whole streampool snapshot: {error}") from None
    if form == "suppressions" or suppressions is not None:
        raise click.UsageError(f"{file} is a pool's snapshot, which has no findings to suppress")
    made: dict[str, Callable[[], str | bytes]] = {
        "json": snapshot.to_json,
        "html": snapshot.to_html,
        "pprof": snapshot.to_pprof,
    }
    return made.get(form, snapshot.to_text)()


def _records(file: Path, form: str, suppressions: Path | None) -> str:
    """Give what the records of page guards say: the candidates for an access that stopped the device."""
    from streampool.page_guards import read_records

    if form == "suppressions" or suppressions is not None:
        raise click.UsageError(
            f"{file} holds records of page guards, whose finding cannot be suppressed: nothing works after it"
        )
    if form == "pprof":
        raise click.UsageError(f"{file} holds records of page guards: nothing of it is a profile")
    try:
        records = read_records(file)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return {"json": records.to_json, "html": records.to_html}.get(form, records.to_text)()


def _put(made: str | bytes, output: Path | None, *, force: bool) -> None:
    """Print, or write to a file that does not exist yet."""
    if output is None:
        if force:
            raise click.UsageError("--force goes with --output.")
        if isinstance(made, str):
            echo(made, color=wants_color(sys.stdout))
            return
        if sys.stdout.isatty():
            raise click.UsageError("a profile is no text for a terminal: --output FILE.pb.gz")
        click.echo(made, nl=False)
        return
    data = made if isinstance(made, bytes) else (made + "\n").encode(errors="backslashreplace")
    try:
        with output.open("wb" if force else "xb") as to:
            to.write(data)
    except FileExistsError:
        raise click.UsageError(f"{output} exists: --force overwrites it") from None
    except OSError as error:
        raise click.BadParameter(f"{output} cannot be written: {error.strerror}", param_hint="--output") from None
    click.echo(f"streampool: written to {output}", err=True)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from None


def _decoded(data: bytes, file: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file} is no JSON report: byte {error.start:,} is not text in UTF-8") from None


def _no_json(text: str, error: json.JSONDecodeError) -> str:
    """Say what is wrong with a text that is no JSON."""
    written = text.rstrip()
    if not written:
        return "it is empty"
    if "SUMMARY: streampool:" in written:
        return "it is a report as text already; `streampool run --report FILE.json` writes JSON"
    where = f"line {error.lineno}, column {error.colno}"
    if error.pos >= len(written) or error.msg.startswith("Unterminated"):
        return f"it is cut: it ends in the middle of what begins at {where} or before"
    return f"{where}: {error.msg}"
