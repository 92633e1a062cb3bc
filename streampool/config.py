"""Settings: arguments, over ``STREAMPOOL_OPTIONS``, over a mode's preset, over the defaults of the core's table."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import StrEnum

from streampool import _core

__all__ = [
    "ENVIRONMENT",
    "Mode",
    "check_option",
    "mode_override",
    "options_help",
    "override_mode",
    "resolve",
    "show_help_once",
]

ENVIRONMENT = "STREAMPOOL_OPTIONS"


class Mode(StrEnum):
    """How much a pool looks for: presets of the options. Any mode runs on the same installed wheel."""

    OFF = "off"
    OBSERVE = "observe"
    PRODUCTION = "production"
    DEBUG = "debug"
    PARANOID = "paranoid"


_override: str | None = None
_help_shown = False


def override_mode(mode: str | None) -> None:
    """Set the mode of every pool made from now on, whatever the program asks for (``streampool run --mode``)."""
    global _override
    if mode is not None:
        check_option("mode", mode)
    _override = mode


def mode_override() -> str | None:
    """Give the mode that was set for every pool, if one was."""
    return _override


def check_option(name: str, value: object) -> str:
    """Give `value` in its canonical text, or raise ``ValueError`` that says what is allowed."""
    return _core.resolve_options({name: value}, None)[name]


def from_environment() -> str | None:
    """Give the text of ``STREAMPOOL_OPTIONS``; ``ValueError`` where it is not text."""
    text = os.environ.get(ENVIRONMENT)
    if text is not None and not text.isascii():
        raise ValueError(f"{ENVIRONMENT} is {text!a}: options and their values are plain ASCII")
    return text


def resolve(mode: str | None, arguments: Mapping[str, object], *, pool: str = "default") -> dict[str, str]:
    """Give the value of every option, as text.

    Parameters
    ----------
    mode
        A mode's word, or None: what ``STREAMPOOL_OPTIONS`` says, else ``production``.
    arguments
        Options by name, over the environment and the preset.
    pool
        The pool's name, for the line that tells of an overridden mode.

    Raises
    ------
    ValueError, TypeError
        Unknown option or mode, with the nearest known one; a value that the option does not take.
    """
    given = dict(arguments)
    if mode is not None:
        given["mode"] = check_option("mode", mode)
    environment = from_environment()
    show_help_once()
    resolved = _core.resolve_options(given, environment)
    if _override is None or resolved["mode"] == _override:
        return resolved
    if mode is not None:
        print(
            f"streampool: pool {pool!r}: mode={mode} in the program, overridden by --mode {_override}", file=sys.stderr
        )
    given["mode"] = _override
    return _core.resolve_options(given, environment)


def options_help() -> str:
    """Give every option with its type, default and help, as text."""
    lines = [
        f"Options, for {ENVIRONMENT}=name=value:name=value, for sp.Pool(..., name=value) and for --option name=value:"
    ]
    for option in _core.option_table():
        kind = " | ".join(option.choices) if option.choices else option.type
        lines.append(f"  {option.name} ({kind}; default {option.default or 'none'})")
        lines.append(f"      {option.help}")
    return "\n".join(lines)


def show_help_once() -> None:
    """Print the table where ``help=1`` stands in the variable: once a process."""
    global _help_shown
    if not _help_shown and "help=1" in os.environ.get(ENVIRONMENT, "").split(":"):
        _help_shown = True
        print(options_help(), file=sys.stderr)
