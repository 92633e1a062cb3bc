"""``streampool report``: a saved report as text or JSON, or what records of page guards say."""

from __future__ import annotations

import json
from pathlib import Path

import click

from streampool.cli._common import echo

__all__ = ["command"]


@click.command(
    "report",
    epilog="""\b
Examples:
  streampool run --mode debug --report out.json train.py
  streampool report out.json

\b
Exit codes: 0 it was printed, 2 wrong use, or a file that is no whole report.""",
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="What to print."
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def command(file: Path, form: str, as_json: bool) -> None:
    """Print the saved report in FILE, as `streampool run --report FILE.json` writes it.

    FILE may also be the records of page guards, which option page_guard_records names: then the blocks are listed that
    the access which stopped the device may have been meant for.
    """
    from streampool import page_guards
    from streampool.report import Report

    text = _read(file)
    if page_guards.SCHEMA_ID in text.partition("\n")[0] and "schema" in text:
        _records(file, as_json=as_json or form == "json")
        return
    try:
        report = Report.from_json(text)
    except json.JSONDecodeError as error:
        raise click.UsageError(f"{file} is no JSON report: {_no_json(text, error)}") from None
    except ValueError as error:
        raise click.UsageError(f"{file} is JSON, but no whole streampool report: {error}") from None
    echo(report.to_json() if as_json or form == "json" else report.to_text())


def _records(file: Path, *, as_json: bool) -> None:
    """Print the records of page guards: the candidates for an access that stopped the device."""
    from streampool.page_guards import read_records

    if as_json:
        raise click.UsageError(f"{file} holds records of page guards, one JSON object a line: there is only their text")
    echo(read_records(file).to_text())


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file} is no JSON report: byte {error.start:,} is not text in UTF-8") from None
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from None


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
