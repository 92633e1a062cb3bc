"""What a mode's debug features take in memory, in words: for ``doctor``, and for ``run`` before the program starts."""

from __future__ import annotations

from collections.abc import Mapping

from streampool import _core
from streampool._sizes import format_size

__all__ = ["debug_memory", "page_guard_line"]

_ALIGNMENT = 256  # of every block: the front guard is rounded up to it


def debug_memory(options: Mapping[str, str]) -> list[str]:
    """Give a line for each feature of `options` that takes memory; empty where none does."""
    lines = []
    guard = int(options["guard_bytes"])
    if guard:
        front = -(-guard // _ALIGNMENT) * _ALIGNMENT
        lines.append(f"guards: {format_size(front + guard)} of a block, before its size is rounded")
    quarantine = int(options["quarantine_bytes"])
    if quarantine:
        bounds = [f"at most {format_size(quarantine)}"]
        if int(options["quarantine_blocks"]):
            bounds.append(f"{int(options['quarantine_blocks']):,} blocks")
        if float(options["quarantine_age"]):
            bounds.append(f"{float(options['quarantine_age']):g} s")
        lines.append(
            f"quarantine: {', '.join(bounds)}, and freed blocks whose work is not done; "
            "given up before an out-of-memory error"
        )
    if options["track"] == "true":
        lines.append(
            f"facts: {_core.BLOCK_FACTS_BYTES} B of host memory a block, live or in quarantine, beside the "
            f"{_core.BLOCK_RECORD_BYTES} B that every mode keeps"
        )
    if line := page_guard_line(options):
        lines.append(line)
    return lines


def page_guard_line(options: Mapping[str, str]) -> str:
    """Say what page guards take, and with which seed; empty where they are off."""
    which = options["page_guards"]
    if which == "off":
        return ""
    least, most = int(options["page_guard_min"]), int(options["page_guard_max"])
    sizes = [f"from {format_size(least)}"] * bool(least) + [f"to {format_size(most)}"] * bool(most)
    of = f" of {' '.join(sizes)}" if sizes else ""
    where = f" at {options['page_guard_sites']}" if options["page_guard_sites"] else ""
    each = "each block" if which == "all" else f"one block in {format_size(int(options['page_guard_sample']))}"
    seed = int(options["page_guard_seed"]) or _core.page_guard_seed()
    return (
        f"page guards: {each} of device memory{of}{where} takes whole pages of its own (2 MiB or more) between "
        f"two that stay unmapped, up to {format_size(int(options['page_guard_cap']))}; further blocks get guard bytes. "
        f"An access beyond them stops the device. page_guard_seed={seed}"
    )
