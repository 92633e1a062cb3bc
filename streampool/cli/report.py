"""``streampool report``: a saved report as text or JSON."""

from __future__ import annotations

import json
from pathlib import Path

import click

__all__ = ["command"]


@click.command(
    "report",
    epilog="""\b
Examples:
  streampool run --mode debug --report out.json train.py
  streampool report out.json""",
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="What to print."
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def command(file: Path, form: str, as_json: bool) -> None:
    """Print the saved report in FILE, as `streampool run --report FILE.json` writes it."""
    from streampool.report import Report

    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise click.UsageError(f"{file} is not a JSON report: {error}") from None
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from None
    try:
        report = Report.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        raise click.UsageError(f"{file} is JSON, but not a streampool report: {error}") from None
    click.echo(report.to_json() if as_json or form == "json" else report.to_text())
