"""The ``streampool`` command: a verb is a file here, imported when it is called."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

__all__ = ["main"]

_VERBS = {  # name: one line of help, so that listing the verbs imports none of them
    "run": "Run a Python program and report what its pools found.",
    "replay": "Replay an allocation trace on any device and mode.",
    "bench": "Measure allocation and free beside every allocator that is here.",
    "report": "Turn a saved report into text or JSON.",
    "doctor": "Say what this machine has, and what works.",
    "demo": "Find planted faults and replay a real trace, in one minute.",
}


class _NoDevice(click.ClickException):
    """The device that was asked for cannot be used: nothing was found out, as with wrong use."""

    exit_code = 2


class _Verbs(click.Group):
    """Finds a verb in its module, suggests the nearest for a misspelt one, and turns errors of ours into messages."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from streampool import config

        config.show_help_once()  # for every verb, and for none
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        from streampool.errors import DriverError, StreamPoolError

        try:
            return super().invoke(ctx)
        except DriverError as error:
            raise _NoDevice(str(error)) from error
        except StreamPoolError as error:
            raise click.ClickException(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command: click.Command = importlib.import_module(f"streampool.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _VERBS:
            near = difflib.get_close_matches(args[0], _VERBS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(_VERBS)}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        import streampool

        click.echo(f"streampool {streampool.__version__}")
        ctx.exit()


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print the version."
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Run, replay and examine: the GPU memory pool you can leave debugging on."""
    from streampool import config

    if context.invoked_subcommand in ("run", "replay", "bench", "demo"):
        try:
            config.resolve(None, {})
        except ValueError as error:
            raise click.UsageError(str(error)) from None


def main(args: list[str] | None = None) -> Any:
    """Run the command line."""
    return cli.main(args=args, prog_name="streampool")
