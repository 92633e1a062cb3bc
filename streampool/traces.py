"""Readers of allocation traces: RMM's CSV log and PyTorch's memory snapshot, both into one `Trace` of four arrays.

A reader knows formats and nothing of pools. What cannot be replayed (failures, frees of unknown pointers) is counted,
never guessed at; what cannot be read is a `TraceError` that says where.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import pickle
import zlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from streampool.errors import TraceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["OwnAllocator", "Trace", "TraceError", "read_rmm_csv", "read_torch_snapshot", "read_trace"]

_Bytes: TypeAlias = io.BufferedReader | gzip.GzipFile
_COLUMNS = ("Thread", "Time", "Action", "Pointer", "Size", "Stream")  # RMM's header
_PER_THREAD_HANDLE = "0x2"  # as RMM prints cudaStreamPerThread; a plain "2" is a stream's number
_NULL = frozenset({"(nil)", "0", "0x0", ""})
_SIZE_END = 1 << 64
_FREE, _ALLOCATE = 0, 1


@dataclass(frozen=True, slots=True)
class OwnAllocator:
    """What is known of the allocator that served the program when the trace was taken. Sizes in bytes."""

    name: str
    peak_reserved_bytes: int
    peak_live_bytes: int

    @property
    def ratio(self) -> float:
        """Reserved over live, at their peaks."""
        return self.peak_reserved_bytes / self.peak_live_bytes if self.peak_live_bytes else 0.0


@dataclass(slots=True)
class Trace:
    """Allocations and frees of one device, in program order.

    Event `i` is an allocation (``actions[i] == 1``) of ``sizes[i]`` bytes, or a free (``0``), of block
    number ``ids[i]``, on stream ``streams[i]``, in the log ``stream_names[streams[i]]``. Each block number
    is allocated once, and freed at most once, later.
    """

    name: str
    actions: NDArray[np.uint8]
    ids: NDArray[np.uint32]
    sizes: NDArray[np.uint64]
    streams: NDArray[np.uint32]
    stream_names: list[str]
    peak_live_bytes: int
    live_at_end_bytes: int
    live_at_end_blocks: int
    skipped_failures: int = 0  # rows of allocations that failed
    skipped_frees: int = 0  # frees of pointers that the log never allocated
    skipped_null: int = 0  # rows about no memory: a null pointer
    reallocations: int = 0  # a live pointer allocated again: its free is missing in the log, and is put in
    own: OwnAllocator | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def events(self) -> int:
        """Number of allocations and frees."""
        return len(self.actions)

    @property
    def blocks(self) -> int:
        """Number of allocations."""
        return int(self.actions.sum())


class _Builder:
    """Turns events by pointer into events by block number."""

    def __init__(self) -> None:
        self.actions = bytearray()
        self.ids: list[int] = []
        self.sizes: list[int] = []
        self.streams: list[int] = []
        self.stream_numbers: dict[str, int] = {}
        self.live: dict[object, tuple[int, int, int]] = {}  # pointer -> block, size, stream
        self.blocks = 0
        self.live_bytes = self.peak = 0
        self.failures = self.unknown = self.null = self.reallocations = 0
        self.notes: list[str] = []

    def stream(self, name: str) -> int:
        return self.stream_numbers.setdefault(name, len(self.stream_numbers))

    def allocate(self, pointer: object, size: int, stream: int) -> None:
        if pointer in self.live:
            self.reallocations += 1
            self.free(pointer, self.live[pointer][2])
        self.live[pointer] = (self.blocks, size, stream)
        self._add(_ALLOCATE, self.blocks, size, stream)
        self.blocks += 1
        self.live_bytes += size
        self.peak = max(self.peak, self.live_bytes)

    def free(self, pointer: object, stream: int) -> bool:
        block = self.live.pop(pointer, None)
        if block is None:
            return False
        number, size, _ = block
        self._add(_FREE, number, size, stream)
        self.live_bytes -= size
        return True

    def _add(self, action: int, block: int, size: int, stream: int) -> None:
        self.actions.append(action)
        self.ids.append(block)
        self.sizes.append(size)
        self.streams.append(stream)

    def trace(self, name: str, own: OwnAllocator | None) -> Trace:
        import numpy as np

        return Trace(
            name=name,
            actions=np.frombuffer(bytes(self.actions), dtype=np.uint8),
            ids=np.array(self.ids, dtype=np.uint32),
            sizes=np.array(self.sizes, dtype=np.uint64),
            streams=np.array(self.streams, dtype=np.uint32),
            stream_names=list(self.stream_numbers),
            peak_live_bytes=self.peak,
            live_at_end_bytes=self.live_bytes,
            live_at_end_blocks=len(self.live),
            skipped_failures=self.failures,
            skipped_frees=self.unknown,
            skipped_null=self.null,
            reallocations=self.reallocations,
            own=own,
            notes=self.notes,
        )


def read_trace(path: str | Path) -> Trace:
    """Read a trace file: RMM's CSV log or a PyTorch snapshot pickle, plain or gzip; told apart by their first bytes.

    A JSON file beside it (``app.json`` for ``app.csv.gz``) may say what the log's own allocator needed
    (``torch_peak_reserved``, ``torch_peak_requested`` or ``peak_live``).

    Raises
    ------
    TraceError
        Not a trace, or broken: with the row (CSV) or the byte (pickle) and what is wrong there.
    OSError
        The file cannot be opened.
    """
    path = Path(path)
    with path.open("rb") as raw:
        magic = raw.read(2)
        raw.seek(0)
        if not magic:
            raise TraceError(f"{path}: the file is empty")
        if magic != b"\x1f\x8b":
            return _read(path, raw)
        with gzip.open(raw) as unpacked:
            return _read(path, unpacked)


def _read(path: Path, data: io.BufferedReader | gzip.GzipFile) -> Trace:
    try:
        start = data.peek(2)[:2]
    except _BROKEN_FILE as error:
        raise TraceError(f"{path}: broken at its very start: {_broken(error)}") from error
    if start == b"PK":
        raise TraceError(
            f"{path}: this is a zip archive, as torch.save makes: write snapshots with "
            "torch.cuda.memory._dump_snapshot(file), or pickle.dump(torch.cuda.memory._snapshot(), file)"
        )
    if start[:1] == b"\x80":
        return read_torch_snapshot(data, path)
    return read_rmm_csv(data, path)


_BROKEN_FILE = (EOFError, gzip.BadGzipFile, zlib.error, OSError)


def _broken(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "the gzip data end before their end mark: the file is truncated"
    if isinstance(error, (gzip.BadGzipFile, zlib.error)):
        return f"the gzip data are damaged ({error})"
    return str(error)


# -- RMM's CSV log -----------------------------------------------------------------------------------------------------


def read_rmm_csv(data: _Bytes, path: str | Path = "trace") -> Trace:
    """Read the CSV log of RMM's ``logging_resource_adaptor``, or of our own trace writer.

    A stream is told by its Stream column; the per-thread handle ``0x2`` by Thread and Stream. See `read_trace`.
    """
    builder = _Builder()
    with contextlib.closing(_rows(data, Path(path))) as rows:
        _read_rows(rows, builder, path)
    return builder.trace(_stem(Path(path)), _sidecar(Path(path), builder))


def _read_rows(rows: Iterator[tuple[int, list[str]]], builder: _Builder, path: str | Path) -> None:
    _, header = next(rows, (0, []))
    places = _places(header, path)
    width = len(header)
    thread_at, action_at, pointer_at, size_at, stream_at = (places[c] for c in _COLUMNS if c != "Time")
    for row, fields in rows:
        if len(fields) != width:
            raise TraceError(
                f"{path}, row {row}: {len(fields)} fields where the header has {width}: the row is cut or damaged"
            )
        action, pointer = fields[action_at], fields[pointer_at]
        if action == "allocate failure":
            builder.failures += 1
            continue
        if action not in ("allocate", "free"):
            raise TraceError(
                f"{path}, row {row}: unknown action {action!r}: expected 'allocate', 'allocate failure' or 'free'"
            )
        name = fields[stream_at]
        if not name:
            raise TraceError(f"{path}, row {row}: the Stream field is empty: the row is cut or damaged")
        if pointer in _NULL:
            builder.null += 1
            continue
        if name == _PER_THREAD_HANDLE:
            name = f"{name} of thread {fields[thread_at]}"
        address = _number(pointer, "Pointer", path, row)
        size = _number(fields[size_at], "Size", path, row)
        if action == "allocate":
            builder.allocate(address, size, builder.stream(name))
        elif address in builder.live:
            builder.free(address, builder.stream(name))
        else:
            builder.unknown += 1


def _rows(data: _Bytes, path: Path) -> Generator[tuple[int, list[str]], None, None]:
    """Give (row number from 1, stripped fields) of each row that is not blank."""
    number = 0
    text = io.TextIOWrapper(data, encoding="utf-8", newline="")
    try:
        for number, fields in enumerate(csv.reader(text, strict=True), 1):
            if fields:
                yield number, [field.strip() for field in fields]
    except _BROKEN_FILE as error:
        raise TraceError(f"{path}, after row {number}: {_broken(error)}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}, row {number + 1}: not a row of text ({error})") from error
    finally:
        text.detach()  # the file is its opener's


def _places(header: list[str], path: str | Path) -> dict[str, int]:
    missing = [column for column in _COLUMNS if column not in header]
    if missing:
        raise TraceError(
            f"{path}, row 1: not the header of a trace: {', '.join(missing)} missing; expected {','.join(_COLUMNS)} "
            "(RMM's log), or a PyTorch snapshot pickle"
        )
    return {column: header.index(column) for column in _COLUMNS}


def _number(text: str, column: str, path: str | Path, row: int) -> int:
    try:
        number = int(text, 16) if text[:2] in ("0x", "0X") else int(text)
    except ValueError:
        raise TraceError(f"{path}, row {row}: {column} is {text!r}, not a number") from None
    if not 0 <= number < _SIZE_END:
        raise TraceError(f"{path}, row {row}: {column} is {text}: expected 0 to 2^64 - 1")
    return number


def _stem(path: Path) -> str:
    name = path.name
    for suffix in (".gz", ".csv", ".pickle", ".pkl"):
        name = name.removesuffix(suffix)
    return name


def _sidecar(path: Path, builder: _Builder) -> OwnAllocator | None:
    """Read what the JSON beside a log says of the log's own allocator: a broken one is told, never fatal."""
    beside = path.with_name(_stem(path) + ".json")
    try:
        facts = json.loads(beside.read_text())
        if not isinstance(facts, dict):
            raise TypeError("not an object")
        if "torch_peak_reserved" not in facts:
            return None
        live = facts.get("torch_peak_requested") or facts["peak_live"]
        where = f" on {facts['gpu']}" if "gpu" in facts else ""
        reserved, live = int(facts["torch_peak_reserved"]), int(live)
        if not (0 <= reserved < _SIZE_END and 0 < live < _SIZE_END):
            raise ValueError("its sizes are out of range")
        return OwnAllocator(f"PyTorch {facts.get('torch', '')}".strip() + where, reserved, live)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        builder.notes.append(f"{beside.name} beside the log was not understood ({type(error).__name__}: {error})")
        return None


# -- PyTorch's snapshot ------------------------------------------------------------------------------------------------

_PLAIN_CLASSES = frozenset({"set", "frozenset", "bytearray", "complex"})


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, text and numbers, and runs nothing: no name outside a few plain builtins is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("builtins", "__builtin__") and name in _PLAIN_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, and only plain data (dict, list, text, numbers) are read from a snapshot: "
            "nothing in it is run"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it holds storages, as torch.save writes them: a snapshot has none")


def read_torch_snapshot(data: _Bytes, path: str | Path = "snapshot", device: int | None = None) -> Trace:
    """Read the trace in a pickle of ``torch.cuda.memory._snapshot()``.

    A block is freed where the program asked for it (``free_requested``). `device` is the index in ``device_traces``;
    None takes the one with the most events. See `read_trace`.
    """
    snapshot = _unpickle(data, path)
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(traces, list) or not all(isinstance(entries, list) for entries in traces):
        raise TraceError(f"{path}: not a PyTorch memory snapshot: no 'device_traces' list of lists in it")
    counts = [sum(1 for e in entries if isinstance(e, dict) and e.get("action") == "alloc") for entries in traces]
    if device is None:
        device = max(range(len(counts)), key=counts.__getitem__, default=0)
    if device >= len(counts) or not counts[device]:
        raise TraceError(
            f"{path}: the snapshot holds no allocations: record them first, with "
            "torch.cuda.memory._record_memory_history()"
        )
    builder = _Builder()
    others = sum(counts) - counts[device]
    if others:
        builder.notes.append(f"device {device} of the snapshot; {others:,} allocations of other devices are left out")
    _read_entries(traces[device], builder, path)
    segments = snapshot.get("segments")
    own = _own_reserved(traces[device], segments if isinstance(segments, list) else [], device, builder.peak)
    return builder.trace(_stem(Path(path)), own)


_BROKEN_PICKLE = (
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    MemoryError,
)


def _unpickle(data: _Bytes, path: str | Path) -> Any:
    try:
        return _PlainUnpickler(data).load()
    except pickle.UnpicklingError as error:
        raise TraceError(f"{path}, near byte {_tell(data)}: not a snapshot that can be read: {error}") from error
    except EOFError as error:
        raise TraceError(f"{path}, at byte {_tell(data)}: the file is truncated ({error or 'no end mark'})") from error
    except (gzip.BadGzipFile, zlib.error, OSError) as error:
        raise TraceError(f"{path}, near byte {_tell(data)}: {_broken(error)}") from error
    except _BROKEN_PICKLE as error:
        # What the pickle machine raises on damaged opcodes.
        raise TraceError(
            f"{path}, near byte {_tell(data)}: a damaged pickle ({type(error).__name__}: {error})"
        ) from error


def _tell(data: _Bytes) -> str:
    try:
        return str(data.tell())
    except (OSError, ValueError):
        return "?"


def _read_entries(entries: Iterable[Any], builder: _Builder, path: str | Path) -> None:
    for row, entry in enumerate(entries, 1):
        action = entry.get("action") if isinstance(entry, dict) else None
        if action == "oom":
            builder.failures += 1
        if action not in ("alloc", "free_requested", "free", "free_completed"):
            continue
        try:
            pointer, size, stream = int(entry["addr"]), int(entry["size"]), builder.stream(f"{int(entry['stream']):#x}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(
                f"{path}, entry {row} of the trace: no usable addr, size and stream ({type(error).__name__}: {error})"
            ) from error
        if not 0 <= size < _SIZE_END:
            raise TraceError(f"{path}, entry {row} of the trace: size is {size}: expected 0 to 2^64 - 1")
        if action == "alloc":
            builder.allocate(pointer, size, stream)
        elif not builder.free(pointer, stream) and action != "free_completed":
            # A completed free follows its request, which took the block already.
            builder.unknown += 1


_RESERVED_CHANGE = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _own_reserved(entries: list[Any], segments: list[Any], device: int, peak_live: int) -> OwnAllocator | None:
    """Work out the most that PyTorch held during the trace: from what it held at the end, the changes backwards."""
    try:
        held = sum(int(s["total_size"]) for s in segments if int(s["device"]) == device)
        changes = [
            (_RESERVED_CHANGE[e["action"]], int(e["size"])) for e in entries if e.get("action") in _RESERVED_CHANGE
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    if not held and not changes:
        return None
    peak = held
    for sign, size in reversed(changes):
        held -= sign * size
        peak = max(peak, held)
    return OwnAllocator("PyTorch", peak, peak_live)
