"""``streampool demo``: planted faults are found at their lines, and a real trace is replayed. 0 only if all holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from streampool.cli._common import DEVICE
from streampool.device import Device, driver_of

__all__ = ["command"]

_SCRIPT = "find_overrun_and_leak.py"
_TRACE = "resnet50_train.csv.gz"
_PLANTED = re.compile(r"#\s*planted: ([\w ]+?)\s*$", re.MULTILINE)


@click.command(
    "demo",
    epilog="""\b
Examples:
  streampool demo
  streampool demo --device sim""",
)
@click.option("--device", type=DEVICE, default="auto", show_default=True, help="Where to run: auto, cuda, sim.")
def command(device: str) -> None:
    """Find planted faults in a program, then replay the allocations of a real training run."""
    driver = driver_of(Device(device))
    kind = "simulated device, in host memory: no GPU was found" if driver.simulated else "GPU"
    if driver.simulated and device != "auto":
        kind = "simulated device, in host memory"
    click.echo(f"Using {driver.name} ({kind}).\n")
    _find_faults(_shipped(_SCRIPT), driver.name)
    click.echo()
    _replay(_shipped(f"traces/{_TRACE}"), driver.name)


def _shipped(name: str) -> Path:
    """Find a shipped example: in the installed package, or in the source tree that this file stands in."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_demo", package.parent / "examples"):
        if (folder / name).exists():
            return folder / name
    raise click.ClickException(f"{name} is missing: this installation is not whole")


def _find_faults(script: Path, device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        arguments = ["run", "--mode", "debug", "--report", str(report), str(script), "--device", device]
        click.echo(f"$ streampool {' '.join(arguments)}")
        done = subprocess.run([sys.executable, "-m", "streampool", *arguments], check=False)
        if done.returncode != 1:
            raise click.ClickException(f"`streampool run` ended with {done.returncode}, where findings give 1")
        found = _found(json.loads(report.read_text()), script)
    planted = _planted(script)
    for what, line in sorted(planted, key=lambda pair: pair[1]):
        click.echo(f"planted at {script.name}:{line}: {what}: {'found' if (what, line) in found else 'NOT FOUND'}")
    if sorted(found) != sorted(planted):
        raise click.ClickException(f"expected exactly {sorted(planted)}, the report has {sorted(found)}")
    click.echo(f"Exactly the {len(planted)} planted findings, each at its line, and exit code 1.")


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


def _replay(trace: Path, device: str) -> None:
    from streampool.cli.replay import print_result
    from streampool.replay import replay

    click.echo(f"$ streampool replay {trace} --device {device} --mode production")
    result = replay(trace, device, "production")
    print_result(result)
    if not result.is_clean:
        raise click.ClickException("the replay is not clean")
