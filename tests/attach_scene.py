"""Programs for tests of `streampool.attach`: each in a process of its own, since libraries are taken over for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOKALIKES = Path(__file__).parent / "lookalikes"


@dataclass
class Ended:
    """What a program left."""

    code: int
    out: str
    err: str
    report_at: Path | None = None

    @property
    def report(self) -> dict[str, Any]:
        """The report, as data."""
        assert self.report_at is not None
        loaded: dict[str, Any] = json.loads(self.report_at.read_text())
        return loaded

    def library(self, name: str) -> dict[str, Any]:
        """What the report says of a library's coverage."""
        (found,) = [entry for entry in self.report["coverage"]["libraries"] if entry["library"] == name]
        return dict(found)


def environment(*, lookalikes: bool, **more: str) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("STREAMPOOL_OPTIONS", "STREAMPOOL_WATCHED_BY", "NUMBA_CUDA_MEMORY_MANAGER", "PYTHONSAFEPATH")
    }
    if lookalikes:
        rest = env.get("PYTHONPATH")
        env["PYTHONPATH"] = os.pathsep.join([str(LOOKALIKES), rest] if rest else [str(LOOKALIKES)])
    return {**env, **more}


def python(source: str, *arguments: object, lookalikes: bool = True, **more: str) -> Ended:
    """Run a program with python."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(source), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=environment(lookalikes=lookalikes, **more),
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def watched(
    folder: Path, source: str, *options: object, lookalikes: bool = True, device: str = "sim", **more: str
) -> Ended:
    """Run a program under ``streampool run``."""
    script, report = folder / "program.py", folder / "report.json"
    script.write_text(textwrap.dedent(source))
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "streampool", "run", "--device", device, "--report", report),
            *map(str, options),
            script,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=folder,
        env=environment(lookalikes=lookalikes, **more),
    )
    return Ended(done.returncode, done.stdout, done.stderr, report)
