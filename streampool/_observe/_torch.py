"""PyTorch's own allocator: its statistics by device and of pinned memory, and its snapshots.

Written against PyTorch 2.14; statistics are read by name, and one that another version lacks is not known there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from streampool import _fork
from streampool._imports import when_imported
from streampool._observe._model import HOST, LibraryPool, LiveBlock, intern
from streampool._sizes import format_size
from streampool.faults import Frame

__all__ = ["Torch", "read_snapshot"]

_LIVE = "active_allocated"


class Torch:
    """See `streampool._observe.Library`."""

    name = "torch"

    def __init__(self) -> None:
        self._lock = _fork.lock()
        self._wanted = False
        self._recording = False  # by us

    def begin(self, *, stacks: bool) -> None:
        """Have PyTorch keep call stacks from its first allocation on; where it is not imported yet, once it is."""
        with self._lock:
            before, self._wanted = self._wanted, stacks
        if stacks and not before:
            when_imported("torch", self._imported)

    def end(self) -> None:
        """Switch off the history that we switched on."""
        with self._lock:
            self._wanted = False
            recording, self._recording = self._recording, False
        if recording:
            sys.modules["torch"].cuda.memory._record_memory_history(enabled=None)

    def _imported(self) -> None:
        # Now where CUDA is in use, else at the end of its start, by the thread that starts it.
        sys.modules["torch"].cuda._lazy_call(self._record)

    def _record(self) -> None:
        torch = sys.modules["torch"]
        with self._lock, contextlib.suppress(Exception):  # what is raised here would end the start of CUDA
            if not self._wanted or self._recording or _is_recording(torch):
                return
            torch.cuda.memory._record_memory_history("state", context="state", stacks="python", max_entries=1)
            self._recording = True

    def pools(self) -> list[LibraryPool]:
        """Give a pool a device that has ever had memory, and one of pinned memory where PyTorch counts it."""
        torch = _ready()
        if torch is None:
            return []
        found = []
        for ordinal in range(torch.cuda.device_count()):
            numbers = torch.cuda.memory_stats(ordinal)
            if numbers.get("reserved_bytes.all.peak", 0):
                found.append(_pool(f"cuda:{ordinal}", "device", numbers, _limit(torch, ordinal)))
        pinned: Mapping[str, int] = getattr(torch.cuda, "host_memory_stats", dict)()
        if pinned.get("allocated_bytes.peak", 0):
            found.append(_pinned(pinned))
        return found

    def blocks(self) -> list[LiveBlock]:
        """Give the live blocks of a snapshot without its trace."""
        torch = _ready()
        if torch is None:
            return []
        try:
            segments = torch.cuda.memory_snapshot(include_traces=False)
        except TypeError:  # before 2.11 it has no such parameter
            segments = torch.cuda.memory_snapshot()
        return read_snapshot(segments, own=os.path.dirname(torch.__file__ or "") + os.sep)


def _ready() -> Any:
    """Give the module where the program imported it and uses CUDA with PyTorch's own allocator; else None."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not getattr(cuda, "is_initialized", bool)():
        return None
    return None if cuda.memory.get_allocator_backend() == "pluggable" else torch


def _is_recording(torch: Any) -> bool:
    asked = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(asked()) if asked is not None else False


def _limit(torch: Any, ordinal: int) -> int | None:
    """Give what `set_per_process_memory_fraction` allows; None for the whole device."""
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(ordinal)
    return None if fraction >= 1 else int(fraction * torch.cuda.get_device_properties(ordinal).total_memory)


def _pool(device: str, kind: str, numbers: Mapping[str, int], limit: int | None) -> LibraryPool:
    used, reserved = numbers["allocated_bytes.all.current"], numbers["reserved_bytes.all.current"]
    return LibraryPool(
        "torch",
        device,
        kind,
        used,
        reserved,
        requested=numbers.get("requested_bytes.all.current"),
        pending=max(min(numbers.get("active_bytes.all.current", used), reserved) - used, 0),
        limit=limit,
        reserved_peak=numbers.get("reserved_bytes.all.peak"),
        live=numbers.get("allocation.all.current"),
        allocations=numbers.get("allocation.all.allocated"),
        frees=numbers.get("allocation.all.freed"),
        failures=numbers.get("num_ooms"),
        refusals=numbers.get("num_alloc_retries"),
    )


def _pinned(numbers: Mapping[str, int]) -> LibraryPool:
    """Give the pinned pool. What it holds is counted rightly; what of that is in use, not by every version."""
    held = numbers["allocated_bytes.current"]
    used = numbers.get("active_bytes.current", held)
    return LibraryPool(
        "torch",
        HOST,
        "pinned",
        min(max(used, 0), held),
        held,
        reserved_peak=numbers.get("allocated_bytes.peak"),
        allocations=numbers.get("active_requests.allocated"),
        frees=numbers.get("active_requests.freed"),
    )


def read_snapshot(segments: Sequence[Mapping[str, Any]], *, own: str = "") -> list[LiveBlock]:
    """Give the live blocks of a snapshot's segments.

    Parameters
    ----------
    segments
        As ``torch.cuda.memory_snapshot()`` gives them, or ``"segments"`` of a saved snapshot.
    own
        A folder whose frames are left out where a stack begins, since they are PyTorch's and not the program's.
    """
    found = []
    known: dict[int, int] = {}  # PyTorch shares the frames of equal stacks: by id, within one snapshot
    for segment in segments:
        device = f"cuda:{segment['device']}"
        address = int(segment["address"])
        for block in segment["blocks"]:
            here, address = address, address + int(block["size"])
            if block["state"] != _LIVE:
                continue
            frames = block.get("frames") or _older_frames(block)
            stack = known.get(id(frames))
            if stack is None:
                stack = known[id(frames)] = intern(_own_frames(frames, own))
            size = int(block.get("requested_size") or block["size"])
            tag = "" if stack else f"PyTorch's blocks of {format_size(int(block['size']))}, no call stack"
            found.append(LiveBlock(device, "device", here, size, stack, tag))
    return found


def _older_frames(block: Mapping[str, Any]) -> Any:
    """Give the frames where PyTorch 2.0 put them."""
    history = block.get("history") or ()
    return history[0].get("frames", ()) if history else ()


def _own_frames(frames: Sequence[Mapping[str, Any]], own: str) -> list[Frame]:
    stack = [Frame(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in frames]
    first = next((i for i, frame in enumerate(stack) if not own or not frame.file.startswith(own)), 0)
    return stack[first:]
