"""The committed PTX belongs to the kernels' source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parent.parent / "tools" / "make_ptx.py"


def test_the_committed_ptx_was_made_from_the_kernels_as_they_are() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
