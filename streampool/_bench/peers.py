"""The allocators: one table, and which of them are here, or why not."""

from __future__ import annotations

import ctypes.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from streampool import _core, _paths
from streampool._bench import builds
from streampool._versions import installed
from streampool.attach._table import LIBRARIES
from streampool.errors import StreamPoolError

__all__ = ["ALL_NAMES", "PEERS", "Found", "Peer", "find", "streampool_with"]

_LOOPS = frozenset({"pairs", "window"})
_NATIVE = _LOOPS | {"threads", "freelist", "replay"}
_HUGE = "initial=68719476736"  # 64 GiB: an arena does not grow


@dataclass(frozen=True, slots=True)
class Peer:
    """One allocator.

    ``program`` is the worker that measures it: ``worker`` ships with the package, those of `builds.FAMILIES` are
    compiled where they can be, ``python`` is ``python_worker``. ``fallback`` is its name there, for where a program
    cannot be compiled. ``options`` are its worker's, and may differ by kind.
    """

    name: str
    label: str
    program: str
    arguments: tuple[str, ...]
    kinds: frozenset[str]
    device: str = "cuda"  # "cuda", "any", "host"
    fallback: str = ""
    module: str = ""  # that a Python worker imports
    packages: tuple[str, ...] = ()  # one of them tells the version
    environment: Mapping[str, str] = field(default_factory=dict)
    options: str = ""
    options_by_kind: Mapping[str, str] = field(default_factory=dict)
    most_pieces: int = 100_000  # of the kind freelist: more would take minutes, or much of the host's memory
    fixed: bool = False  # holds what it was given, whatever is live

    def options_of(self, kind: str) -> str:
        """Give what its worker is told in that kind."""
        return self.options_by_kind.get(kind, self.options)


_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_LIBRMM = ("librmm-cu13", "librmm-cu12")

PEERS: tuple[Peer, ...] = (
    Peer("glibc", "glibc malloc", "worker", ("glibc",), _NATIVE, "host", most_pieces=10_000),
    Peer("mimalloc", "mimalloc", "worker", ("mimalloc",), _NATIVE, "host", most_pieces=10_000),
    Peer("streampool", "streampool", "worker", ("streampool",), _NATIVE | {"ordering"}, "any"),
    Peer("streampool-raw", "streampool, raw handle", "worker", ("streampool-raw",), _LOOPS | {"threads"}, "any"),
    Peer(
        "streampool-debug", "streampool, debug", "worker", ("streampool",), frozenset({"debug"}), "any",
        options="mode=debug",
    ),
    Peer("cuda-malloc", "cudaMalloc", "worker", ("driver-malloc",), _LOOPS),
    Peer("async-0", "cudaMallocAsync, threshold 0", "worker", ("driver-pool",), _NATIVE),
    Peer("async-max", "cudaMallocAsync, threshold max", "worker", ("driver-pool",), _NATIVE, options="threshold=max"),
    Peer("cub", "cub::CachingDeviceAllocator", "cub", ("cub",), _NATIVE, most_pieces=10_000),
    Peer(
        "rmm-pool", "RMM pool", "rmm", ("pool",), _NATIVE | {"debug"}, fallback="rmm-pool", module="rmm",
        packages=_LIBRMM, options="initial=268435456", most_pieces=10_000,
    ),
    Peer(
        "rmm-arena", "RMM arena", "rmm", ("arena",), _NATIVE, fallback="rmm-arena", module="rmm", packages=_LIBRMM,
        options="initial=1073741824", options_by_kind={"replay": _HUGE, "freelist": _HUGE}, fixed=True,
        most_pieces=1_000,
    ),
    Peer(
        "rmm-tracking", "RMM pool + tracking", "rmm", ("tracking",), frozenset({"debug"}), packages=_LIBRMM,
    ),
    Peer(
        "rmm-stacks", "RMM pool + tracking with stacks", "rmm", ("stacks",), frozenset({"debug"}), packages=_LIBRMM,
    ),
    Peer(
        "torch", "PyTorch", "torch", ("torch",), _NATIVE, fallback="torch", module="torch", packages=("torch",),
        environment={"PYTORCH_CUDA_ALLOC_CONF": ""},
    ),
    Peer(
        "torch-expandable", "PyTorch, expandable segments", "torch", ("torch",), _NATIVE, fallback="torch",
        module="torch", packages=("torch",), environment=_EXPANDABLE,
    ),
    Peer(
        "cupy", "CuPy MemoryPool", "python", ("cupy",), _LOOPS | {"replay"}, module="cupy", packages=_CUPY,
    ),
    Peer(
        "cupy-async", "CuPy MemoryAsyncPool", "python", ("cupy-async",), _LOOPS | {"replay"}, module="cupy",
        packages=_CUPY,
    ),
    *(
        Peer(
            name, f"through {row.title}", "python", (name,), frozenset({"libraries"}),
            module=row.module.replace("numba.cuda", "numba"), packages=row.distributions,
        )
        for name, row in zip(("torch", "cupy", "numba", "rmm-pool", "cuda-core"), LIBRARIES, strict=True)
    ),
)  # fmt: skip

# Measured in the kinds python and debug only: see `calls`.
_CALLED = ("cuda-bindings", "empty")
ALL_NAMES = (*dict.fromkeys(peer.name for peer in PEERS), *_CALLED)


def streampool_with(options: str, kinds: Iterable[str]) -> Peer:
    """Give streampool under other options, as a peer of itself."""
    shown = options.replace(":", ", ")
    return Peer(
        f"streampool:{options}", f"streampool, {shown}", "worker", ("streampool",), frozenset(kinds), "any",
        options=options,
    )  # fmt: skip


@dataclass(slots=True)
class Found:
    """A peer that is here, with the command that starts its worker; or why it is not."""

    peer: Peer
    command: list[str] = field(default_factory=list)
    interface: str = "C++"
    version: str = ""
    absent: str = ""


def find(
    wanted: Iterable[Peer],
    device: str,
    *,
    native: Path | None = None,
    cache: Path | None = None,
    compile_missing: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Found]:
    """Look for each of `wanted` on this machine, compiling what has to be.

    Parameters
    ----------
    device
        ``cuda:N`` or ``sim:N``.
    native
        Folder of the workers' sources, benchmarks/native of a source tree; None: those that came with the package.
    cache
        Folder that keeps what is compiled; None: `builds.default_cache`.
    compile_missing
        False: nothing is compiled, and the Python faces are measured instead.
    progress
        Told what is being compiled.
    """
    peers = list(wanted)
    needed = {peer.program for peer in peers if _problem(peer, device) is None} & set(builds.FAMILIES)
    if compile_missing:
        built = builds.build_all(sorted(needed), native, cache, progress)
    else:
        built = dict.fromkeys(needed, "--no-compile was given")
    return [_find(peer, device, built) for peer in peers]


def _problem(peer: Peer, device: str) -> str | None:
    """Say why a peer cannot run on that device, whatever is installed."""
    if peer.device == "cuda" and not device.startswith("cuda"):
        try:
            _core.open_device("cuda:0")
        except StreamPoolError as error:
            return f"needs a GPU: {str(error).removeprefix('cuda:0 was asked for, but ').partition(' (')[0]}"
        return f"needs a GPU, and {device} was asked for"
    return None


def _find(peer: Peer, device: str, built: Mapping[str, Path | str]) -> Found:
    found = Found(peer, version=installed(*peer.packages) or "")
    problem = _problem(peer, device)
    if problem is not None:
        found.absent = problem
    elif peer.program == "worker":
        _find_worker(found)
    elif peer.program == "python":
        _find_python(found, peer.arguments[0])
    else:
        program = built[peer.program]
        if isinstance(program, Path):
            found.command = [str(program), *peer.arguments]
        elif peer.fallback:
            _find_python(found, peer.fallback)
            if found.absent:
                found.absent = program
        else:
            found.absent = program
    return found


def _find_worker(found: Found) -> None:
    program = _paths.bench_worker_path()
    if not program.is_file():
        found.absent = f"{program} is missing: this installation is not whole"
        return
    found.command = [str(program), *found.peer.arguments]
    if found.peer.name == "mimalloc":
        library = ctypes.util.find_library("mimalloc")
        if library is None:
            found.absent = "libmimalloc was not found"
        else:
            found.command += ["--library", library]


def _find_python(found: Found, name: str) -> None:
    module = found.peer.module
    try:
        here = find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        here = False
    if not here:
        found.absent = f"the package {module} is not installed"
        return
    found.interface = "Python"
    found.command = [sys.executable, "-P", "-m", "streampool._bench.python_worker", name]
