"""``streampool doctor``: what this machine has, what works, and why not."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import click

import streampool
from streampool import _core, config
from streampool._debug_memory import debug_memory
from streampool._sizes import format_size
from streampool._versions import installed
from streampool.errors import DriverNotFoundError, StreamPoolError

__all__ = ["command", "examine"]

_LIBRARIES = (
    "cuda-core",
    "cuda-bindings",
    "numpy",
    "structlog",
    "prometheus-client",
    "rich",
    "click",
    "jsonschema",
    "nvidia-ml-py",
    "torch",
    "cupy",
)
_LIMITS = {
    "max_map_count": (
        Path("/proc/sys/vm/max_map_count"),
        "mappings of one process; the simulated device keeps under it",
    ),
    "overcommit_memory": (
        Path("/proc/sys/vm/overcommit_memory"),
        "2 refuses large reservations, which the simulated device makes",
    ),
}


@click.command(
    "doctor",
    epilog="""\b
Examples:
  streampool doctor
  streampool doctor --json

\b
Exit codes: 0 nothing is broken (a machine without a GPU is not), 1 something is, such as a driver
that fails, 2 wrong use.""",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Say what this machine has, and what works."""
    facts = examine()
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        _print(facts)
    sys.exit(1 if facts["broken"] else 0)


def examine() -> dict[str, Any]:
    """Give what can be found out, as plain data. ``broken`` lists what should work and does not."""
    from streampool.cli import _doctor_metrics

    broken: list[str] = []
    devices = {"cuda": _devices("cuda", broken), "sim": _devices("sim", broken)}
    usable = [device["name"] for found in devices.values() if not isinstance(found, str) for device in found]
    return {
        "streampool": streampool.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "build": _core.build_info(),
        "stacks": _core.stack_walker(),
        "memory_regions": _core.memory_regions_tool() or "a tool that takes memory regions is attached",
        "libraries": {name: found for name in _LIBRARIES if (found := installed(name)) is not None},
        "devices": devices,
        "limits": {name: _limit(path) for name, (path, _) in _LIMITS.items()},
        "environment": {config.ENVIRONMENT: _environment(broken)},
        "options": [
            {"name": o.name, "type": o.type, "default": o.default, "choices": o.choices, "help": o.help}
            for o in _core.option_table()
        ],
        "modes": _core.presets(),
        "debug_memory": {mode: lines for mode in _core.presets() if (lines := _debug_memory(mode))},
        "metrics": _doctor_metrics.examine(usable, broken),
        "broken": broken,
    }


def _debug_memory(mode: str) -> list[str]:
    return debug_memory(_core.resolve_options({"mode": mode}, None))


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _environment(broken: list[str]) -> str | None:
    text = os.environ.get(config.ENVIRONMENT)
    try:
        _core.resolve_options({}, text)
    except ValueError as error:
        broken.append(str(error))
    return text


def _devices(family: str, broken: list[str]) -> list[dict[str, Any]] | str:
    """Give the devices of one family, or why there is none. Not finding CUDA is no defect; failing is."""
    found: list[dict[str, Any]] = []
    while True:
        name = f"{family}:{len(found)}"
        try:
            driver = _core.open_device(name)
            free, total = driver.memory_info()
        except DriverNotFoundError as error:
            if not found and family == "sim":
                broken.append(f"{name}: {error}")
            return found or f"none: {error}"
        except (StreamPoolError, ValueError) as error:
            if found:  # one past the last device
                return found
            broken.append(f"{name}: {error}")
            return f"broken: {error}"
        found.append(
            {
                "name": name,
                "driver": driver.version,
                "free_bytes": free,
                "total_bytes": total,
                "capabilities": driver.capabilities(),
                "segments": _segments(driver.capabilities()),
            }
        )
        if family == "sim":  # one unless the program configures more
            return found


def _segments(can: dict[str, Any]) -> dict[str, Any]:
    """Give where device memory can come from, and where it comes from unless somebody says otherwise."""
    there = {"vmm": can["virtual_memory"], "malloc": True, "driver": can["driver_pools"]}
    sources = [source for source, available in there.items() if available]
    exports = [name for name in ("posix_fd", "fabric") if can[f"export_{name}"]]
    return {
        "default": sources[0],
        "sources": sources,
        "export": exports,
        "rdma": can["rdma"],
        "peers": can["peers"],
    }


def _value(kind: str, text: str) -> str:
    """Give an option's value as a person writes it."""
    return format_size(int(text)) if kind.startswith("size") and text.isdecimal() and text != "0" else text


def _print(facts: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from streampool.cli import _doctor_metrics
    from streampool.cli._common import console

    out = console()
    build = ", ".join(f"{name} {value}" for name, value in facts["build"].items())
    out.print(
        f"streampool {facts['streampool']}, Python {facts['python']} on {facts['platform']}",
        markup=False,
        soft_wrap=True,
    )
    out.print(f"native core: {build}", markup=False, soft_wrap=True)
    walked = {
        "interpreter": "inside the interpreter",
        "public": "by its public functions, which cost more: this version's frames are not known, or not as expected",
    }
    out.print(
        f"memory regions: {facts['memory_regions']}",
        markup=False,
        soft_wrap=True,
    )
    out.print(f"call stacks are walked {walked[facts['stacks']]}", markup=False, soft_wrap=True)
    out.print(
        "libraries: " + ", ".join(f"{name} {value}" for name, value in facts["libraries"].items()),
        markup=False,
        soft_wrap=True,
    )
    out.print()
    for family, devices in facts["devices"].items():
        if isinstance(devices, str):
            out.print(f"{family}: {devices}", markup=False, soft_wrap=True)
            continue
        for device in devices:
            out.print(
                f"{device['name']}: {format_size(device['free_bytes'])} free of {format_size(device['total_bytes'])}, "
                f"driver {device['driver']}",
                markup=False,
                soft_wrap=True,
            )
            can = ", ".join(f"{name}={value}" for name, value in device["capabilities"].items())
            out.print(f"    {can}", markup=False, soft_wrap=True)
            segments = device["segments"]
            others = [source for source in segments["sources"] if source != segments["default"]]
            extra = [*(f"export={name}" for name in segments["export"]), *(["rdma=true"] if segments["rdma"] else [])]
            extra += [f"peers={','.join(map(str, segments['peers']))}"] if segments["peers"] else []
            out.print(
                f"    segments={segments['default']} unless told otherwise (also: {', '.join(others)})"
                + (f"; its memory can have {', '.join(extra)}" if extra else ""),
                markup=False,
                soft_wrap=True,
            )
    out.print()
    for name, value in facts["limits"].items():
        out.print(f"{name}: {'unknown' if value is None else value} ({_LIMITS[name][1]})", markup=False, soft_wrap=True)
    if facts["environment"][config.ENVIRONMENT]:
        out.print(f"{config.ENVIRONMENT}={facts['environment'][config.ENVIRONMENT]}", markup=False, soft_wrap=True)
    out.print()
    for line in _doctor_metrics.lines(facts["metrics"]):
        out.print(line, markup=False, soft_wrap=True)
    out.print()

    for mode, lines in facts["debug_memory"].items():
        out.print(f"memory of mode {mode}, beside the blocks:", markup=False, soft_wrap=True)
        for line in lines:
            out.print(f"    {line}", markup=False, soft_wrap=True)
    out.print()

    modes = list(facts["modes"])
    table = Table(title="options", title_justify="left")
    for heading in ("option", "type", "default", *(mode for mode in modes if facts["modes"][mode]), "what it does"):
        table.add_column(heading)
    for option in facts["options"]:
        kind = " | ".join(option["choices"]) or option["type"]
        presets = (facts["modes"][mode].get(option["name"], "") for mode in modes if facts["modes"][mode])
        values = (_value(option["type"], value) for value in (option["default"], *presets))
        table.add_row(escape(option["name"]), escape(kind), *map(escape, values), escape(option["help"]))
    out.print(table)
    out.print()
    if facts["broken"]:
        for problem in facts["broken"]:
            out.print(f"broken: {problem}", markup=False, soft_wrap=True)
    else:
        out.print("nothing is broken")
