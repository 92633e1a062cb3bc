"""What verbs share: parameter types with suggestions, and when output goes to a person."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from streampool import config
from streampool._sizes import parse_size

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from streampool.suppressions import Suppressions

__all__ = ["AMOUNT", "DEVICE", "MODE", "OPTION", "SIZE", "console", "echo", "fail", "is_terminal", "read_suppressions"]


class _Mode(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    name = "mode"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return config.check_option("mode", value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Device(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from streampool.device import check_name

        try:
            return check_name(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Size(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)


class _Amount(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    name = "size or %"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return config.check_option("limit", value)
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)


class _Option(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, setting = value.partition("=")
        if not equals:
            self.fail(f"{value!r} is not name=value", param, ctx)
        try:
            return name, config.check_option(name, setting)
        except ValueError as error:
            self.fail(str(error), param, ctx)


MODE = _Mode()
DEVICE = _Device()
SIZE = _Size()
AMOUNT = _Amount()
OPTION = _Option()


def is_terminal() -> bool:
    """Say whether a person watches: progress is shown on standard error only then."""
    return sys.stderr.isatty()


def echo(text: str, *, color: bool | None = None) -> None:
    """Print `text`; what the output's encoding cannot say, such as a file name that is no text, is escaped.

    `color`: whether colours in it are kept; None: on a terminal.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding), color=color)


def console(*, stderr: bool = False) -> Console:
    """Give a console that never wraps in a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 160, highlight=False)


def read_suppressions(path: Path) -> Suppressions:
    """Read a file of rules; a wrong one is wrong use."""
    from streampool.suppressions import Suppressions

    try:
        return Suppressions.read(path)
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--suppressions") from None


def fail(message: str) -> click.UsageError:
    """Give the error of wrong use: exit code 2."""
    return click.UsageError(message)
