"""Result files of the benchmark scripts, which need the source tree: one form for all."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import machine

__all__ = ["write"]


def write(
    folder: Path,
    name: str,
    *,
    what: str,
    command: str,
    facts: Mapping[str, Any],
    bar: Mapping[str, float],
    rows: Sequence[Mapping[str, Any]],
    problems: Sequence[str],
) -> int:
    """Write ``DATE-GPU-NAME.json`` into `folder`, say so, and list the problems; give the exit code, 1 for problems."""
    date = machine.date()
    gpu = re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower().replace("nvidia", "")).strip("-")
    report = {
        "what": what,
        "command": command,
        "date": date,
        "commit": machine.commit(),
        "machine": facts,
        "bar": bar,
        "problems": problems,
        "results": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{date[:10]}-{gpu}-{name}.json"
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {file}")
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0
