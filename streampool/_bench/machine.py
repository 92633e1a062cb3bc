"""Where figures come from: the machine, the versions, the commit."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from streampool import _core
from streampool._versions import installed
from streampool.device import driver_of

__all__ = ["commit", "date", "facts", "processor", "versions"]

_PACKAGES = (
    "streampool",
    "cuda-core",
    "cuda-bindings",
    "numpy",
    "nanobind",
    "torch",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "librmm-cu12",
    "librmm-cu13",
    "rmm-cu12",
    "rmm-cu13",
    "numba-cuda",
)


def versions() -> dict[str, str]:
    """Give the versions of what is measured and what it stands on."""
    found = {name: version for name in _PACKAGES if (version := installed(name))}
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        libc = None
    if libc:
        found["glibc"] = libc.rpartition(" ")[2]
    return found


def date() -> str:
    """Give now, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """Give the commit of the source tree, with a + where files differ from it; None where there is no tree.

    ``STREAMPOOL_COMMIT`` names it where the tree travels without its history.
    """
    if given := os.environ.get("STREAMPOOL_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    """Give the processor's name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def facts(device: Any) -> dict[str, Any]:
    """Give what is worth knowing of the machine that a device is in, as plain data."""
    driver = driver_of(device)
    _, total = driver.memory_info()
    return {
        "device": driver.name,
        "gpu": "" if driver.simulated else str(device.name),
        "memory_bytes": total,
        "driver": driver.version,
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "compiler": _core.build_info(),
    }
