"""PyTorch from streampool: its whole device memory, by entry points in libstreampool.so, without Python on the path.

Once PyTorch has an allocator it keeps it, so this is done before its first CUDA use, and cannot be undone.

PyTorch's interface for other allocators has no statistics: what ``torch.cuda.memory_allocated`` and its kin ask for is
answered from the pools' counters. What the interface cannot do at all raises, and says what to do (`notes`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from streampool import _core, _fork, session
from streampool._paths import library_path
from streampool.attach._coverage import Usage
from streampool.attach._owners import objects_at
from streampool.attach._pools import Pools
from streampool.pool import Pool, PoolStats

__all__ = ["make"]

_SETTERS = {
    "init": "set_init_fn",
    "reset": "set_reset_fn",
    "memory_fraction": "set_memory_fraction_fn",
    "base_alloc": "set_base_alloc_fn",
    "record_stream": "set_record_stream_fn",
    "begin_allocate_to_pool": "set_begin_allocate_to_pool",
    "end_allocate_to_pool": "set_end_allocate_to_pool_fn",
    "release_pool": "set_release_pool",
}

_NOTES = [
    "torch.cuda.memory_snapshot, torch.cuda.memory._record_memory_history and memory_viz: PyTorch's own allocator "
    "only; pool.snapshot() and pool.holders() say who holds memory",
    "torch.cuda.MemPool and torch.compile(mode='reduce-overhead') need PyTorch's own allocator",
    "torch.backends.cudnn.benchmark stays off: cuDNN's search asks PyTorch's allocator for its largest free block",
    "CUDA tensors cannot be shared between processes (torch.multiprocessing): PyTorch's interface has no way",
    "expandable_segments and the other settings of PYTORCH_CUDA_ALLOC_CONF have no effect",
]


def make(pools: Pools) -> TorchAdapter:
    """Give the adapter; PyTorch is imported."""
    return TorchAdapter(pools)


class _ServedPool(Pool):
    """The pool of a device, which was made when PyTorch first allocated there."""

    def __init__(self, ordinal: int, options: dict[str, str]) -> None:
        _core.Pool.__init__(self, torch_device=ordinal, options=options)
        self._findings = session.pool_made(self)


class TorchAdapter:
    """PyTorch's allocator, and the answers to its questions about memory."""

    def __init__(self, pools: Pools) -> None:
        self.notes = list(_NOTES)
        self._pools = pools
        self._torch: Any = sys.modules["torch"]
        self._options = self._options_of(pools)
        self._accumulated: dict[int, dict[str, int]] = {}
        self._warned: set[str] = set()
        self._adopting = _fork.lock()
        self._adopted: set[int] = set()  # devices whose pool is known, or being made known
        self._kept: list[Any] = []  # PyTorch holds the functions for the rest of the process

    def install(self) -> None:
        """Make PyTorch allocate from our pools."""
        from streampool.attach import AttachError

        torch = self._torch
        if not hasattr(torch._C, "_cuda_customAllocator"):
            raise AttachError("this build of PyTorch has no CUDA: there is nothing to serve")
        if torch.version.cuda is None and torch.version.hip is not None:
            raise AttachError("this build of PyTorch is for ROCm: only CUDA is served")
        if torch.cuda.is_initialized():
            raise AttachError(
                "PyTorch has used CUDA already and keeps its allocator: install before its first CUDA call, or run the "
                "program under `streampool run`"
            )
        self._configure()
        memory = torch.cuda.memory
        allocator = memory.CUDAPluggableAllocator(str(library_path()), "sp_torch_alloc", "sp_torch_free")
        functions = _core.torch_functions()
        for name, setter in _SETTERS.items():
            take = getattr(allocator.allocator(), setter, None)
            if take is not None:
                take(functions[name])
            elif name == "record_stream":
                raise AttachError(
                    f"PyTorch {torch.__version__} has no hook for Tensor.record_stream, and memory would be "
                    "reused too early: use a newer PyTorch"
                )
            else:
                self.notes.append(f"PyTorch {torch.__version__} has no hook for {name}: what needs it does not work")
        try:
            memory.change_current_allocator(allocator)
        except RuntimeError as error:
            raise AttachError(f"PyTorch refuses another allocator: {error}") from error
        self._kept.append(allocator)
        self._answer_questions()
        self._register_streams()
        session.before_each_look.append(self._adopt)
        session.register_exit()

    def serve_from(self, pools: Pools) -> None:
        """Go on with other pools: PyTorch keeps the allocator, which has made none yet."""
        from streampool.attach import AttachError

        if _core.torch_served():
            raise AttachError(
                "PyTorch has a pool already, from its first allocation, and keeps it: call install('torch', ...) "
                "before that, or give the options to `streampool run` (STREAMPOOL_OPTIONS)"
            )
        self._options = self._options_of(pools)
        self._pools = pools
        self._configure()

    def uninstall(self) -> None:
        """Refuse: PyTorch changes its allocator once."""
        from streampool.attach import AttachError

        raise AttachError("PyTorch keeps an allocator for the rest of the process: start a new process without it")

    def usage(self) -> Usage:
        """Count our pools. PyTorch has no other device memory; its pinned host memory is its own."""
        self._adopt()
        count, first = _core.torch_problems()
        why = f"{count:,} calls were refused; the first: {first}" if count else ""
        return Usage(self._pools.peak(), 0, why)

    # -- pools and streams

    def _options_of(self, pools: Pools) -> dict[str, str]:
        pools.find_objects = self._tensors
        # One piece of driver memory a segment: what IPC handles, NCCL and sanitizers can work with.
        return pools.resolved(segments="malloc")

    def _configure(self) -> None:
        from streampool.attach import AttachError

        _core.torch_configure(self._pools.family, self._pools.library, self._options)
        given = self._pools.given
        if given is not None and not _core.torch_give_pool(given.driver.ordinal, given):
            raise AttachError(f"PyTorch has memory from another pool on {given.driver.name} already")

    def _adopt(self) -> None:
        """Make the pools that PyTorch's allocations made known to reports."""
        with self._adopting:
            known = {pool.driver.ordinal for pool in self._pools.made()}
            for ordinal in _core.torch_served():
                if ordinal in known or ordinal in self._adopted:
                    continue
                self._adopted.add(ordinal)  # first: a signal's handler may come here on this thread
                try:
                    self._pools.add(_ServedPool(ordinal, self._options))
                except BaseException:
                    self._adopted.discard(ordinal)
                    raise

    def _tensors(self, serials: Mapping[int, int]) -> dict[int, object]:
        def address_of(tensor: Any) -> int:
            storage = getattr(tensor, "untyped_storage", None)
            return int((storage() if storage is not None else tensor).data_ptr())

        return objects_at(self._torch.Tensor, address_of, serials)

    def _register_streams(self) -> None:
        """Register PyTorch's own streams as Python sees them made: they live as long as the process.

        Any other, also those that only PyTorch's C++ code makes, is served as a stream whose owner may destroy it.
        """
        stream_type = self._torch.cuda.Stream
        made = stream_type.__new__

        def new(cls: Any, device: Any = None, priority: int = 0, **given: Any) -> Any:
            stream = made(cls, device, priority, **given)
            if not given:  # neither an external stream nor a copy of another object
                _core.torch_add_stream(stream.device_index, stream.cuda_stream)
            return stream

        stream_type.__new__ = staticmethod(new)

    # -- torch.cuda's questions

    def _answer_questions(self) -> None:
        binding = self._torch._C
        binding._cuda_memoryStats = self._memory_stats
        binding._cuda_resetPeakMemoryStats = self._reset_peaks
        binding._cuda_resetAccumulatedMemoryStats = self._reset_accumulated
        binding._cuda_memorySnapshot = self._no_snapshot
        binding._cuda_record_memory_history = self._no_history
        binding._cuda_record_memory_history_legacy = self._no_history
        binding._cuda_getMemoryFraction = self._memory_fraction
        binding._set_cudnn_benchmark = self._set_benchmark
        # The module has bound the function already.
        flag: Any = vars(type(getattr(getattr(self._torch, "backends", None), "cudnn", None))).get("benchmark")
        if hasattr(flag, "setter"):
            flag.setter = self._set_benchmark

    def _pool(self, ordinal: int) -> Pool | None:
        self._adopt()
        return next((pool for pool in self._pools.made() if pool.driver.ordinal == ordinal), None)

    def _memory_stats(self, ordinal: int) -> dict[str, Any]:
        pool = self._pool(ordinal)
        stats = PoolStats() if pool is None else pool.stats()
        since = self._accumulated.get(ordinal, {})

        def number(name: str) -> int:
            return int(stats.get(name, 0))

        def group(current: int, peak: int, total: int = 0, what: str = "") -> dict[str, dict[str, int]]:
            total -= since.get(what, 0)
            line = {
                "current": current,
                "peak": max(peak, current),
                "allocated": total,
                "freed": max(total - current, 0),
            }
            return {"all": line, "small_pool": dict.fromkeys(line, 0), "large_pool": dict(line)}

        used, peak = number("in_use"), number("in_use_peak")
        live, calls = number("live_blocks"), number("allocations")
        reserved, total = number("reserved"), number("allocated_bytes")
        cached = number("cached")
        counts = group(live, live, calls, "allocations")
        sizes = group(used, peak, total, "allocated_bytes")
        none = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
        return {
            "allocation": counts,
            "active": counts,
            "segment": group(number("segments"), number("segments")),
            "inactive_split": group(0, 0),
            "allocated_bytes": sizes,
            "requested_bytes": sizes,
            "active_bytes": group(used + number("pending"), peak, total, "allocated_bytes"),
            "reserved_bytes": group(reserved, number("reserved_peak")),
            "inactive_split_bytes": group(cached, cached),
            "oversize_allocations": none,
            "oversize_segments": dict(none),
            "max_split_size": -1,
            "num_alloc_retries": number("host_waits"),
            "num_ooms": number("out_of_memory"),
            "num_sync_all_streams": 0,
            "num_device_alloc": number("segments"),
            "num_device_free": 0,
        }

    def _reset_peaks(self, ordinal: int) -> None:
        pool = self._pool(ordinal)
        if pool is not None:
            pool.reset_peaks()

    def _reset_accumulated(self, ordinal: int) -> None:
        pool = self._pool(ordinal)
        if pool is not None:
            stats = pool.stats()
            self._accumulated[ordinal] = {name: stats[name] for name in ("allocations", "allocated_bytes")}

    def _memory_fraction(self, ordinal: int) -> float:
        pool = self._pool(ordinal)
        if pool is None:
            return 1.0
        total = pool.driver.memory_info()[1]
        limit = int(pool.stats().limit or 0)
        return min(limit / total, 1.0) if limit and total else 1.0

    def _no_snapshot(self, *_: Any) -> Any:
        raise RuntimeError(
            "PyTorch's memory comes from streampool, so its own snapshots are empty: use pool.snapshot(), "
            "pool.holders() or the report of `streampool run` (docs/libraries/torch.md)"
        )

    def _no_history(self, enabled: Any = None, *_: Any, **__: Any) -> None:
        if enabled:
            self._warn(
                "PyTorch's memory history is not recorded: its memory comes from streampool, which keeps call stacks"
            )

    def _set_benchmark(self, on: bool) -> None:
        if on:
            self._warn(
                "torch.backends.cudnn.benchmark stays off: cuDNN's search asks PyTorch's own allocator for its largest "
                "free block, which the interface for other allocators cannot answer"
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"streampool: {text}", RuntimeWarning, stacklevel=4)
