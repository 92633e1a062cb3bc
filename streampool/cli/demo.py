"""``streampool demo``: planted faults are found at their lines, and a real trace is replayed. 0 only if all holds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streampool.cli._common import DEVICE
from streampool.device import Device, driver_of

if TYPE_CHECKING:
    from streampool.replay import ReplayResult

__all__ = ["command"]

_SCRIPT = "find_overrun_and_leak.py"
_TRACE = "traces/resnet50_train.csv.gz"
_PLANTED = re.compile(r"#\s*planted: ([\w ]+?)\s*$", re.MULTILINE)


@click.command(
    "demo",
    epilog="""\b
Examples:
  streampool demo
  streampool demo --device sim
  streampool demo --json

\b
Exit codes: 0 all is as planted, 1 something is not, 2 wrong use, or a device that cannot be used.""",
)
@click.option("--device", type=DEVICE, default="auto", show_default=True, help="Where to run: auto, cuda, sim.")
@click.option(
    "--examples",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the examples to show, such as a source tree's; without it, what was installed.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: what was planted and found, and the replay."
)
def command(device: str, examples: Path | None, as_json: bool) -> None:
    """Find planted faults in a program, then replay the allocations of a real training run."""
    say = _nothing if as_json else click.echo
    if examples is not None:
        for name in (_SCRIPT, _TRACE):
            if not (examples / name).is_file():
                raise click.BadParameter(f"{examples} has no {name}", param_hint="--examples")
    driver = driver_of(Device(device))
    kind = "simulated device, in host memory: no GPU was found" if driver.simulated else "GPU"
    if driver.simulated and device != "auto":
        kind = "simulated device, in host memory"
    say(f"Using {driver.name} ({kind}).\n")
    with tempfile.TemporaryDirectory() as copies:
        folder = examples or _shipped(Path(copies))
        planted = _find_faults(folder / _SCRIPT, driver.name, say, quiet=as_json)
        say("")
        result = _replay(folder / _TRACE, driver.name, say, quiet=as_json)
    if as_json:
        facts = {"device": driver.name, "simulated": driver.simulated, "planted": planted, "replay": result.to_dict()}
        click.echo(json.dumps(facts, indent=1))


def _nothing(_: str) -> None: ...


def _shipped(copies: Path) -> Path:
    """Copy the installed examples out of the package, whose own frames no report shows; or find the source tree's."""
    package = Path(__file__).resolve().parent.parent
    if (package / "_demo").is_dir():
        return shutil.copytree(package / "_demo", copies / "examples")
    if (package.parent / "examples").is_dir():
        return package.parent / "examples"
    raise click.ClickException("the examples are missing: this installation is not whole")


def _find_faults(script: Path, device: str, say: Callable[[str], object], *, quiet: bool) -> list[dict[str, Any]]:
    """Run the program and hold its report against what it plants: each planted thing with its line."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        arguments = ["run", "--mode", "debug", "--report", str(report), str(script), "--device", device]
        say(f"$ streampool {' '.join(arguments)}")
        # -P: the current folder may hold a streampool of its own, such as the source tree's, which cannot run.
        done = subprocess.run([sys.executable, "-P", "-m", "streampool", *arguments], check=False, capture_output=quiet)
        if done.returncode != 1:
            raise click.ClickException(f"`streampool run` ended with {done.returncode}, where findings give 1")
        if not report.is_file():
            raise click.ClickException("`streampool run` ended without a report; its own words above tell why")
        found = _found(json.loads(report.read_text()), script)
    planted = _planted(script)
    for what, line in sorted(planted, key=lambda pair: pair[1]):
        say(f"planted at {script.name}:{line}: {what}: {'found' if (what, line) in found else 'NOT FOUND'}")
    if sorted(found) != sorted(planted):
        raise click.ClickException(f"expected exactly {sorted(planted)}, the report has {sorted(found)}")
    say(f"Exactly the {len(planted)} planted findings, each at its line, and exit code 1.")
    return [{"file": script.name, "line": line, "what": what} for what, line in planted]


def _planted(script: Path) -> list[tuple[str, int]]:
    """Read what a script plants: ``# planted: overrun`` stands at the line that a finding must name."""
    text = script.read_text(encoding="utf-8")
    return [(match[1], text.count("\n", 0, match.start()) + 1) for match in _PLANTED.finditer(text)]


def _found(report: dict[str, Any], script: Path) -> list[tuple[str, int]]:
    """Give (kind, line of the script) of each finding: a fault is named by its block's allocation, and so is a leak."""

    def line(frames: list[dict[str, Any]]) -> int:
        own = (frame["line"] for frame in frames if Path(frame["file"]).name == script.name)
        return next(own, 0)

    faults = [(fault["kind"], line((fault["block"] or {}).get("allocated_at", []))) for fault in report["faults"]]
    return faults + [("leak", line(leak["allocated_at"])) for leak in report["leaks"]]


def _replay(trace: Path, device: str, say: Callable[[str], object], *, quiet: bool) -> ReplayResult:
    from streampool.cli.replay import print_result
    from streampool.replay import replay

    say(f"$ streampool replay {trace} --device {device} --mode production")
    result = replay(trace, device, "production")
    if not quiet:
        print_result(result)
    if not result.is_clean:
        raise click.ClickException("the replay is not clean")
    return result
