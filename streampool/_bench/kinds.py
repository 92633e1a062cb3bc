"""What is measured: a kind is a row of the table at the end, and a function that plans who is asked for what."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from sys import executable
from typing import Any

from streampool._bench.call import Call
from streampool._bench.calls import CALLS
from streampool._bench.peers import Found
from streampool.traces import Trace

__all__ = ["FEATURES_PATTERN", "KINDS", "Group", "Kind", "Manner", "Row", "Settings", "Task", "write_for_workers"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"4 KiB": 4 * KIB, "1 MiB": MIB}
PIECES = (100, 1_000, 10_000, 100_000)
ORDERS = ("address", "reverse", "random")
WARM_PASSES = 3
FREELIST_OPERATIONS = 4096
ORDERING_OPERATIONS = 20_000
FEATURES_PATTERN = "4 KiB pair from Python, 10 frames deep, with each part of debug mode"


class Manner(StrEnum):
    """How the tasks of a group are run."""

    TURNS = "turns"  # all processes live, and are asked in turns
    ALONE = "alone"  # one process after another: they would hold too much memory together
    REPLAY = "replay"  # alone too, and asked for times and for bytes
    ORDERING = "ordering"  # one process, one answer with many rows


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose."""

    device: str
    operations: int  # most of one measurement
    threads: int  # most
    options: str  # of streampool's pools: "name=value:name=value"
    repetitions: int | None = None
    budget_ns: float = 5e7  # what one measurement should take
    traces: Sequence[tuple[Trace, Path]] = ()  # with the file that workers read
    peers: frozenset[str] | None = None  # None: all


@dataclass(slots=True)
class Task:
    """One measurement of one peer: `ask(n)` is the command for n operations."""

    command: list[str]
    environment: Mapping[str, str]
    peer: str
    label: str
    interface: str
    parameters: dict[str, Any]
    ask: Callable[[int], str]
    host: bool = False
    fixed: bool = False

    @property
    def process(self) -> str:
        """What tells its process from others: tasks with one process share it."""
        return "\0".join([*self.command, *(f"{name}={value}" for name, value in self.environment.items())])


@dataclass(slots=True)
class Group:
    """Measurements that are compared with each other."""

    pattern: str
    unit: str
    tasks: list[Task]
    manner: Manner = Manner.TURNS
    readings: tuple[str, ...] = ("",)  # parts of an answer, a row each
    most: int | None = None  # operations; None: as the settings say


@dataclass(slots=True)
class Row:
    """A figure. Times in nanoseconds, sizes in bytes; ``ratio`` is of the median to that of the row ``baseline``."""

    kind: str
    pattern: str
    peer: str
    label: str
    interface: str
    unit: str
    parameters: dict[str, Any]
    median: float
    p50: float
    p99: float
    repetitions: list[float]
    ratio: float | None = None
    baseline: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kind:
    """One word of ``streampool bench``."""

    name: str
    title: str
    text: str
    repetitions: int
    plan: Callable[[Sequence[Found], Settings], list[Group]]
    baseline: Callable[[Row, Sequence[Row]], Row | None]


def _task(
    found: Found, kind: str, settings: Settings, ask: Callable[[int], str], *, streams: int = 1, **given: Any
) -> Task:
    peer = found.peer
    options = peer.options_of(kind)
    if peer.name.startswith("streampool"):
        options = ":".join(text for text in (settings.options, options) if text)
    command = [*found.command, "--device", settings.device, "--streams", str(streams)]
    if options:
        command += ["--options", options]
    return Task(
        command, peer.environment, peer.name, peer.label, found.interface, given, ask,
        host=peer.device == "host", fixed=peer.fixed,
    )  # fmt: skip


def _of(kind: str, found: Iterable[Found], *, native: bool = False) -> list[Found]:
    """Give who takes part; `native`: without those whose loops are Python's."""
    return [
        one for one in found if kind in one.peer.kinds and not one.absent and not (native and one.interface == "Python")
    ]


# -- pairs, window, threads --------------------------------------------------------------------------------------------


def _pairs(found: Sequence[Found], settings: Settings) -> list[Group]:
    def ask(size: int) -> Callable[[int], str]:
        return lambda n: f"pair {size} {n} 1 own"

    return [
        Group(
            f"{name} pair", "ns a pair",
            [_task(one, "pairs", settings, ask(size), size=size) for one in _of("pairs", found)],
        )
        for name, size in SIZES.items()
    ]  # fmt: skip


def _window(found: Sequence[Found], settings: Settings) -> list[Group]:
    tasks = [_task(one, "window", settings, lambda n: f"window 7 {n}", live=256) for one in _of("window", found)]
    return [Group("256 live, random sizes to 1 MiB", "ns a pair", tasks)]


def _threads(found: Sequence[Found], settings: Settings) -> list[Group]:
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= settings.threads]
    groups = []

    def ask(size: int, threads: int, streams: str) -> Callable[[int], str]:
        return lambda n: f"pair {size} {n} {threads} {streams}"

    for name, size in SIZES.items():
        for streams, words in (("own", "each on its own stream"), ("one", "all on one stream")):
            for threads in counts:
                tasks = [
                    _task(
                        one, "threads", settings, ask(size, threads, streams), streams=counts[-1], size=size,
                        threads=threads, streams_of=streams,
                    )
                    for one in _of("threads", found, native=True)
                    if not (one.peer.device == "host" and streams == "one") and not (streams == "one" and threads == 1)
                ]  # fmt: skip
                if tasks:
                    groups.append(Group(f"{name} pair, {words}", "ns a pair, slowest thread", tasks))
    return groups


def _glibc(row: Row, rows: Sequence[Row]) -> Row | None:
    return next((r for r in rows if r.peer == "glibc" and r.pattern == row.pattern), None)


def _one_thread(row: Row, rows: Sequence[Row]) -> Row | None:
    """Give the same peer with one thread."""
    same = (r for r in rows if r.peer == row.peer and r.parameters["size"] == row.parameters["size"])
    return next((r for r in same if r.parameters["threads"] == 1), None)


# -- freelist, replay, ordering ----------------------------------------------------------------------------------------


def _freelist(found: Sequence[Found], settings: Settings) -> list[Group]:
    def ask(pieces: int, order: str) -> Callable[[int], str]:
        return lambda n: f"freelist {pieces} {order} {n}"

    return [
        Group(
            f"{pieces:,} free extents, {order} order", "ns",
            [
                _task(one, "freelist", settings, ask(pieces, order), pieces=pieces, order=order)
                for one in _of("freelist", found, native=True)
                if pieces <= one.peer.most_pieces
            ],
            Manner.ALONE, ("alloc", "free"), FREELIST_OPERATIONS,
        )
        for order in ORDERS
        for pieces in PIECES
    ]  # fmt: skip


def _few_pieces(row: Row, rows: Sequence[Row]) -> Row | None:
    """Give the same with the fewest free extents."""
    return next(
        (r for r in rows if r.peer == row.peer and r.parameters == {**row.parameters, "pieces": PIECES[0]}),
        None,
    )


def _replay(found: Sequence[Found], settings: Settings) -> list[Group]:
    def ask(path: Path) -> Callable[[int], str]:
        return lambda n: f"replay {path} {WARM_PASSES} {'times' if n else 'bytes'}"

    return [
        Group(
            trace.name, "ns an event",
            [
                _task(one, "replay", settings, ask(path), streams=len(trace.stream_names), trace=trace.name)
                for one in _of("replay", found)
            ],
            Manner.REPLAY,
        )
        for trace, path in settings.traces
    ]  # fmt: skip


def _fastest_peer(row: Row, rows: Sequence[Row]) -> Row | None:
    """Give the fastest GPU allocator that is not ours; without a GPU, the faster of the host's."""
    same = [r for r in rows if r.pattern == row.pattern and not r.peer.startswith("streampool")]
    on_gpu = [r for r in same if r.peer not in ("glibc", "mimalloc")]
    return min(on_gpu or same, key=lambda r: r.median, default=None)


def _ordering(found: Sequence[Found], settings: Settings) -> list[Group]:
    count = min(settings.operations, ORDERING_OPERATIONS)
    tasks = [
        _task(one, "ordering", settings, lambda n: f"ordering {count}")
        for one in _of("ordering", found)
        if one.peer.name == "streampool"
    ]
    return [Group("ordering", "ns a call", tasks, Manner.ORDERING)]


# -- python, debug -----------------------------------------------------------------------------------------------------


def _is_here(call: Call, settings: Settings) -> bool:
    if call.cuda and not settings.device.startswith("cuda"):
        return False
    if settings.peers is not None and call.peer not in settings.peers | {"streampool", "empty"}:
        return False
    try:
        return not call.module or find_spec(call.module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def _called(kind: str, settings: Settings) -> list[Task]:
    def ask(name: str) -> Callable[[int], str]:
        return lambda n: f"call {name} {n}"

    return [
        Task(
            [
                executable, "-P", "-m", "streampool._bench.python_worker", f"calls:{call.process}",
                "--device", settings.device, "--options", settings.options if call.has_options else "",
            ],
            {}, call.peer, call.label, "Python", {"call": call.name, **call.facts}, ask(call.name),
        )
        for call in CALLS
        if call.kind == kind and _is_here(call, settings)
    ]  # fmt: skip


def _python(found: Sequence[Found], settings: Settings) -> list[Group]:
    return [Group("4 KiB pair from Python", "ns a pair", _called("python", settings))]


def _libraries(found: Sequence[Found], settings: Settings) -> list[Group]:
    here = {one.peer.name for one in _of("libraries", found)}
    tasks = [task for task in _called("libraries", settings) if task.peer in here | {"streampool"}]
    return [Group("4 KiB pair through each library", "ns a pair", tasks)]


def _own_pool(row: Row, rows: Sequence[Row]) -> Row | None:
    """Give the same call on the library's own pool."""
    how = row.parameters.get("how")
    same = (r for r in rows if how is not None and r.parameters.get("how") == how)
    return next((r for r in same if r.parameters["memory"] == "own"), None)


def _debug(found: Sequence[Found], settings: Settings) -> list[Group]:
    native = [
        _task(one, "debug", settings, lambda n: f"pair {4 * KIB} {n} 1 own", size=4 * KIB)
        for one in _of("debug", found, native=True)
    ]
    return [
        Group("4 KiB pair from Python, 10 frames deep", "ns a pair", _called("debug", settings)),
        Group("4 KiB pair from C++", "ns a pair", native),
        Group(FEATURES_PATTERN, "ns a pair", _called("features", settings)),
    ]


def _debug_baseline(row: Row, rows: Sequence[Row]) -> Row | None:
    if row.pattern == FEATURES_PATTERN:
        return _call("feature-none")(row, rows)
    return _call("rmm-tracking-raw", "rmm-stacks")(row, rows)


def _call(name: str, peer: str = "") -> Callable[[Row, Sequence[Row]], Row | None]:
    def baseline(row: Row, rows: Sequence[Row]) -> Row | None:
        same = (r for r in rows if r.pattern == row.pattern)
        return next((r for r in same if r.parameters.get("call") == name or (peer and r.peer == peer)), None)

    return baseline


def _nobody(row: Row, rows: Sequence[Row]) -> Row | None:
    return None


def write_for_workers(trace: Trace, path: Path) -> None:
    """Write a trace as benchmarks/native/replay.hpp reads it."""
    with path.open("wb") as out:
        out.write(struct.pack("=8sQ", b"SPTRACE1", trace.events))
        for array in (trace.actions, trace.ids, trace.sizes, trace.streams):
            out.write(array.tobytes())


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "pairs", "one allocation and its free, 4 KiB and 1 MiB, one thread",
            "An allocation and its free on one stream, again and again, of 4 KiB and of 1 MiB, with nothing queued. "
            "glibc's malloc comes first, in a fresh process with one thread, and is what every ratio is of.",
            9, _pairs, _glibc,
        ),
        Kind(
            "threads", "the same by 1 to 16 threads, on streams of their own and on one stream",
            "Pairs of 4 KiB and of 1 MiB by more and more threads (--threads), each on a stream of its own, and all "
            "on one. The figure is the slowest thread's; a ratio is of the same allocator with one thread.",
            5, _threads, _one_thread,
        ),
        Kind(
            "window", "256 live blocks of random sizes",
            "256 blocks live, of 512 bytes to 1 MiB: each step frees one and allocates one of another size. Ratios "
            "are of glibc's malloc on the same pattern.",
            9, _window, _glibc,
        ),
        Kind(
            "replay", "traces of real programs: time and memory",
            "Every allocation and free of a trace, each stream on a stream of its own, with nothing queued: one pass "
            "that is shown as cold, and the median of three more on the same pool. Then, with everything given back to "
            "the driver, the same passes again, looking after each allocation at the bytes that are gone by the "
            "driver's count (cuMemGetInfo; on the simulated device by the pool's own): the most of them, over the most "
            "live bytes. Ratios of times are of the fastest GPU allocator that is not ours (without a GPU, of the "
            "faster of the host's).",
            1, _replay, _fastest_peer,
        ),
        Kind(
            "python", "what a pair costs from Python",
            "An allocation of 4 KiB and its free by the calls that Python programs make. Ratios are of a pair of "
            "native methods with the same arguments that do nothing.",
            7, _python, _call("empty"),
        ),
        Kind(
            "libraries", "what a pair costs through PyTorch, CuPy, Numba, RMM and cuda.core",
            "An allocation of 4 KiB and its free by each library's own call, from the library's own pool and from "
            "streampool after sp.install, with --option for its pools; and RMM's way of calling back into Python by "
            "itself, over RMM's own pool. Ratios are of the library's own pool. streampool's own calls stand beside "
            "them.",
            7, _libraries, _own_pool,
        ),
        Kind(
            "debug", "what debug mode costs beside other allocators' tracking",
            "A pair of 4 KiB in debug mode (guards, fill, quarantine) with Python stacks of depth 10, from Python "
            "raw calls ten frames deep and from C++, beside RMM's tracking and PyTorch's memory history. Ratios are "
            "of RMM's tracking with stacks, where it is here. Then the same pair with each part of debug mode by "
            "itself; those ratios are of production mode.",
            7, _debug, _debug_baseline,
        ),
        Kind(
            "ordering", "what ordering costs: id, record, poll, wait edge, context event",
            "Each driver call that the pool may make to order streams, alone, and pairs that make some of them, with "
            "how many they make.",
            1, _ordering, _nobody,
        ),
        Kind(
            "freelist", "allocation and free among 100 to 100 000 free extents, in three orders",
            "As many free extents as said, of 64.5 to 96 KiB, none beside another; then blocks of such sizes are "
            "allocated and freed, in the order of addresses, in reverse, and at random. Ratios are of the same "
            "allocator with 100 free extents.",
            3, _freelist, _few_pieces,
        ),
    )
}  # fmt: skip
