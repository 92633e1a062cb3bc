"""Small libraries of the same shape as PyTorch and CuPy, for tests without a GPU: what the programs and tests import.

`Torch` keeps blocks in segments and says of them what PyTorch 2.14 says, under the same names; `CuPy` has the pools of
CuPy 14. Neither allocates anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["CuPy", "Torch"]

MIB = 1 << 20


class Torch(ModuleType):
    """``torch``, as far as memory goes: one device, a segment for each stream, blocks that tests allocate and free."""

    def __init__(self, *, backend: str = "native", total: int = 1 << 30) -> None:
        super().__init__("torch")
        self.__file__ = "/lib/torch/__init__.py"
        self.backend, self.total = backend, total
        self.initialized = False
        self.recording = False
        self.fraction = 1.0
        self.broken = False
        self.blocks: dict[int, dict[str, Any]] = {}
        self.queued: list[Callable[[], None]] = []
        self.settings: list[tuple[Any, ...]] = []
        self.counts = dict.fromkeys(("allocated", "freed", "num_ooms", "num_alloc_retries"), 0)
        self.reserved = self.peak = 0
        memory = SimpleNamespace(
            get_allocator_backend=lambda: self.backend, _record_memory_history=self._record_memory_history
        )
        self._C = SimpleNamespace(_cuda_isHistoryEnabled=lambda: self.recording)
        self.cuda = SimpleNamespace(
            memory=memory,
            is_initialized=lambda: self.initialized,
            device_count=lambda: 1,
            memory_stats=self._memory_stats,
            memory_snapshot=self._memory_snapshot,
            host_memory_stats=lambda: {"allocated_bytes.current": 4096, "allocated_bytes.peak": 8192},
            get_per_process_memory_fraction=lambda device: self.fraction,
            get_device_properties=lambda device: SimpleNamespace(total_memory=self.total),
            _lazy_call=lambda call: call() if self.initialized else self.queued.append(call),
        )

    def install(self, monkeypatch: Any = None) -> Torch:
        """Be what ``import torch`` gives."""
        if monkeypatch is None:
            sys.modules["torch"] = self
        else:
            monkeypatch.setitem(sys.modules, "torch", self)
        return self

    def start(self) -> None:
        """Begin to use CUDA."""
        self.initialized = True
        for call in self.queued:
            call()
        self.queued.clear()

    def allocate(self, size: int) -> int:
        """Take memory; the address. The stack is the caller's, as PyTorch's history would keep it."""
        if not self.initialized:
            self.start()
        held = -(-size // 512) * 512
        if self._sum("size") + held > self.fraction * self.total:
            self.counts["num_ooms"] += 1
            raise MemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        address = max((a + b["size"] for a, b in self.blocks.items()), default=1 << 40)
        frames = []
        frame = sys._getframe(1)
        while self.recording and frame is not None and len(frames) < 8:
            code = frame.f_code
            frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
            frame = frame.f_back  # type: ignore[assignment]
        if frames:  # PyTorch's own come first
            frames.insert(0, {"filename": "/lib/torch/nn/linear.py", "line": 1, "name": "forward"})
        self.blocks[address] = {
            "size": held, "requested_size": size, "address": address, "state": "active_allocated", "frames": frames,
        }  # fmt: skip
        self.counts["allocated"] += 1
        self.reserved = max(self.reserved, -(-sum(b["size"] for b in self.blocks.values()) // (2 * MIB)) * 2 * MIB)
        self.peak = max(self.peak, self.reserved)
        return address

    def free(self, address: int, *, pending: bool = False) -> None:
        """Give memory back, or have another stream still use it."""
        self.counts["freed"] += 1
        if pending:
            self.blocks[address]["state"] = "active_pending_free"
        else:
            del self.blocks[address]

    def _record_memory_history(self, enabled: str | None = "all", *args: Any, **named: Any) -> None:
        self.settings.append((enabled, named))
        self.recording = enabled is not None

    def _sum(self, key: str, *states: str) -> int:
        return sum(block[key] for block in self.blocks.values() if not states or block["state"] in states)

    def _memory_stats(self, device: int) -> dict[str, int]:
        if self.broken:
            raise RuntimeError("told to fail")
        live = [block for block in self.blocks.values() if block["state"] == "active_allocated"]
        return {
            "allocated_bytes.all.current": self._sum("size", "active_allocated"),
            "active_bytes.all.current": self._sum("size"),
            "requested_bytes.all.current": self._sum("requested_size", "active_allocated"),
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.peak,
            "allocation.all.current": len(live),
            "allocation.all.allocated": self.counts["allocated"],
            "allocation.all.freed": self.counts["freed"],
            "num_ooms": self.counts["num_ooms"],
            "num_alloc_retries": self.counts["num_alloc_retries"],
        }

    def _memory_snapshot(self, mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
        assert not include_traces, "a trace of a long run is gigabytes"
        if not self.blocks:
            return []
        first = min(self.blocks)
        rest = self.reserved - self._sum("size")
        free = {"size": rest, "requested_size": 0, "address": first - rest, "state": "inactive", "frames": []}
        return [
            {
                "device": 0, "address": first - rest, "total_size": self.reserved, "stream": 0,
                "allocated_size": self._sum("size", "active_allocated"), "active_size": self._sum("size"),
                "requested_size": self._sum("requested_size"), "segment_type": "large", "segment_pool_id": (0, 0),
                "is_expandable": False, "frames": [],
                "blocks": [free, *(self.blocks[address] for address in sorted(self.blocks))],
            }
        ]  # fmt: skip


class CuPy(ModuleType):
    """``cupy``: pools that say how much they hold on the current device."""

    def __init__(self, *held: tuple[int, int]) -> None:
        super().__init__("cupy")
        self.held = list(held)  # used and total bytes, by device
        self.limit = 0
        self.pinned_blocks = 3
        self.current = 0
        self.visited: list[int] = []
        self.cuda = SimpleNamespace(Device=self._device)
        self.get_default_memory_pool = lambda: SimpleNamespace(
            used_bytes=lambda: self.held[self.current][0],
            total_bytes=lambda: self.held[self.current][1],
            n_free_blocks=lambda: 5,
            get_limit=lambda: self.limit,
        )
        self.get_default_pinned_memory_pool = lambda: SimpleNamespace(n_free_blocks=lambda: self.pinned_blocks)

    def _device(self, ordinal: int) -> Any:
        library = self

        class Current:
            def __enter__(self) -> None:
                library.visited.append(ordinal)
                library.current = ordinal

            def __exit__(self, *_: object) -> None:
                library.current = 0

        return Current()
