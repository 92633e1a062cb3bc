"""``streampool run``: a Python program, unchanged, with a report of its pools at the end (R17)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import click

from streampool.cli._common import DEVICE, MODE, read_suppressions

__all__ = ["command"]


@click.command(
    "run",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    epilog="""\b
Examples:
  streampool run --mode debug train.py --epochs 1
  streampool run --mode debug --report out.json -m package.module ARG
  streampool run --mode debug pytest tests/
  streampool run --metrics-port 9466 serve.py
  streampool run --mode observe train.py    (what PyTorch's and CuPy's own pools hold)

\b
Exit codes:
  1 (--error-exitcode)  faults or counted leaks were found
  the program's own     when that is not 0
  3                     no allocation was observed at all
  2                     wrong use, or a --device that cannot be used: the program was not run
  0                     none of these""",
)
@click.option(
    "--mode",
    type=MODE,
    help="Mode of every pool, over `mode=` in the program: off, observe, production, debug, paranoid.",
)
@click.option("--device", type=DEVICE, help="What sp.Device() gives the program: auto, cuda, cuda:1, sim, sim:0.")
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here: .json, .html, else text."
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the report as one JSON object, the last on standard error, not as text.",
)
@click.option(
    "--leaks",
    type=click.Choice(["definite", "all", "off"]),
    default="definite",
    help="Which leaks count: lost and growing ones (definite, the default), also held ones (all), or none.",
)
@click.option(
    "--error-exitcode",
    type=click.IntRange(0, 255),
    default=1,
    show_default=True,
    metavar="N",
    help="Exit code for findings.",
)
@click.option(
    "--suppressions",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Rules, `kind:glob` on function, file, module or tag, one a line: findings that fit do not count.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve metrics for Prometheus under http://ADDR:PORT/metrics, PORT plus LOCAL_RANK where that is set; 0: any "
    "free port.",
)
@click.option(
    "--metrics-addr", default="127.0.0.1", show_default=True, metavar="ADDR", help="The address to serve metrics on."
)
@click.option(
    "--metrics-folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the metrics' targets into this folder for Prometheus's file_sd: this process's and its children's.",
)
@click.option(
    "--libraries",
    default="auto",
    show_default=True,
    metavar="NAMES",
    help="Whose device memory is taken over when the program imports them: torch,cupy,numba,rmm,cuda.core; auto: all; "
    "none.",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module's name, as for python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    mode: str | None,
    device: str | None,
    report: Path | None,
    as_json: bool,
    leaks: str,
    error_exitcode: int,
    suppressions: Path | None,
    metrics_port: int | None,
    metrics_addr: str,
    metrics_folder: Path | None,
    libraries: str,
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT, a Python file or a console script on PATH, and report what its pools found.

    The program runs in this process as `python SCRIPT ARGS` would run it. The report goes to standard error. Python
    programs that it starts are watched too, and are in the same report.
    """
    from streampool.cli import _program, _watch

    named = _named(libraries)
    program = _program.find(script, list(args), is_module=is_module)
    if report is not None:
        report = report.absolute()  # the program may change the directory
        _writable(report)
    rules = None if suppressions is None else read_suppressions(suppressions)
    if device is not None:
        _usable(device)
    _say_page_guards(mode)
    if metrics_port is not None:
        _serve_metrics(metrics_port, metrics_addr, metrics_folder)
    elif metrics_folder is not None:
        raise click.UsageError("--metrics-folder goes with --metrics-port.")
    sys.exit(
        _watch.run(
            program,
            mode=mode,
            device=device,
            report=report,
            as_json=as_json,
            leaks=leaks,
            error_exitcode=error_exitcode,
            suppressions=rules,
            libraries=named,
        )
    )


def _named(libraries: str) -> tuple[str, ...]:
    from streampool.attach import _table

    try:
        return _table.parse_list(libraries)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--libraries") from None


def _say_page_guards(mode: str | None) -> None:
    """Say what page guards take where the settings that are known by now ask for them."""
    from streampool import _core, config
    from streampool._debug_memory import page_guard_line

    with contextlib.suppress(ValueError):  # bad settings are the first pool's to refuse
        line = page_guard_line(_core.resolve_options({"mode": mode} if mode else {}, config.from_environment()))
        if line:
            click.echo(f"streampool: {line}", err=True)


def _serve_metrics(port: int, addr: str, folder: Path | None) -> None:
    """Serve from before the program on; what it starts is told by the environment."""
    from streampool.metrics import _environment

    place = None if folder is None else str(folder.absolute())
    try:
        server = _environment.serve(port, addr, place)
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else str(error)
        raise click.BadParameter(str(text), param_hint="--metrics-port") from None
    _environment.export(port, addr, place)
    click.echo(f"streampool: metrics at {server.url}", err=True)


_NOT_USABLE = 2
_PROBE = f"""
import sys
import streampool
try:
    streampool.Device(sys.argv[1])
except streampool.DriverError as error:
    print(error, end="", file=sys.stderr)
    sys.exit({_NOT_USABLE})
"""


def _usable(device: str) -> None:
    """Refuse a device that cannot be used, before the program runs. The simulated one is the program's to configure."""
    if not device.startswith("cuda"):
        return
    # In a process of its own: the program may still choose among the GPUs by its environment, and may fork.
    probed = subprocess.run([sys.executable, "-P", "-c", _PROBE, device], capture_output=True, text=True, check=False)
    if probed.returncode == _NOT_USABLE:
        raise click.BadParameter(probed.stderr, param_hint="--device")


def _writable(path: Path) -> None:
    """Refuse a report that could not be written, before the program runs and not after."""
    existed = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint="--report") from None
    if not existed:
        path.unlink()
