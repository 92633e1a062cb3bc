"""Other libraries' own pools: what is read of them, what they show in metrics and reports, and that nothing is touched.

Small libraries of the same shape stand for PyTorch and CuPy (`libraries`); the real ones are in test_observe_run.py.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from libraries import MIB, CuPy, Torch
from metrics_scene import Series, parse, value, values

import streampool as sp
from streampool import _contexts, _core, _device_facts, _imports, _observe, _process_memory
from streampool._observe import _cupy, _torch
from streampool.metrics import _devices, holders, page

TORCH = {"library": "torch", "device": "cuda:0", "kind": "device"}


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sp.sim.reset()  # with the names of other tests' pools
    for name in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(_observe, "_failures", dict.fromkeys(_observe.LIBRARIES, 0))
    monkeypatch.setattr(_observe, "LIBRARIES", {"torch": _torch.Torch(), "cupy": _cupy.CuPy()})
    monkeypatch.setattr(_devices, "_samples", _devices.Samples({}))
    monkeypatch.setattr(_devices, "_facts", {})
    yield
    sp.unobserve()
    sp.sim.reset()
    for name in ("torch", "cupy"):  # what a test imported under such a name is gone with it
        sys.modules.pop(name, None)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch().install(monkeypatch)


class Card:
    """A driver with one device; what is in use there, this process says."""

    version = "13.0"

    def __init__(self, used: int, total: int = 1 << 30) -> None:
        self.used, self.total = used, total

    def memory_info(self) -> tuple[int, int]:
        return self.total - self.used, self.total


def card(monkeypatch: pytest.MonkeyPatch, used: int) -> Card:
    """Let there be a CUDA device, as far as its driver and cuda.core tell of it."""
    found, real = Card(used), _core.open_device
    monkeypatch.setattr(_core, "open_device", lambda name: found if name.startswith("cuda") else real(name))
    monkeypatch.setattr(_devices, "ask", lambda name: _device_facts.DeviceFacts("GPU-1", "0000:01:00.0", "H", "GPU-1"))
    return found


def series() -> Series:
    return parse(page.Page().render())


def leaking(torch: Torch, size: int = MIB) -> int:
    return torch.allocate(size)


def test_a_library_that_is_not_known_is_named_with_those_that_are() -> None:
    for call in (sp.observe, sp.unobserve):
        with pytest.raises(ValueError, match="cannot observe 'tensorflow': the libraries that can be are torch, cupy"):
            call("tensorflow")


@pytest.mark.parametrize("call", [sp.observe, sp.unobserve])
@pytest.mark.parametrize("given", [["torch"], ("torch",), None, 5, b"torch", {}])
def test_a_library_is_named_by_text(call: Any, given: Any) -> None:
    before = sp.observed()
    with pytest.raises(TypeError, match=r"named by text, as in observe\('torch', 'cupy'\), not .* of type "):
        call("torch", given)
    assert sp.observed() == before


def test_all_known_libraries_are_observed_where_none_is_named_and_none_needs_to_be_there() -> None:
    assert sp.observed() == ()
    sp.observe()
    assert sp.observed() == ("cupy", "torch")
    assert _observe.pools() == []
    assert _observe.blocks() == {}
    sp.unobserve("cupy")
    assert sp.observed() == ("torch",)
    assert _observe.failures() == {"torch": 0, "cupy": 0}


def test_torch_is_read_once_it_uses_cuda_and_its_parts_add_up(torch: Torch) -> None:
    sp.observe("torch")
    assert _observe.pools() == []  # asking would start CUDA in a process that may still fork
    kept = [torch.allocate(size) for size in (1000, 5 * MIB, 700)]
    torch.free(kept[0])
    torch.free(kept[2], pending=True)
    device, pinned = _observe.pools()
    assert (device.device, device.kind, device.used, device.requested) == ("cuda:0", "device", 5 * MIB, 5 * MIB)
    assert (device.pending, device.live, device.allocations, device.frees) == (1024, 1, 3, 2)
    assert device.used is not None
    assert device.cached is not None
    assert device.used + device.pending + device.cached == device.reserved == 6 * MIB
    assert (pinned.device, pinned.kind, pinned.reserved) == ("host", "pinned", 4096)


def test_torchs_own_limit_is_a_part_of_the_device(torch: Torch) -> None:
    sp.observe("torch")
    torch.allocate(1)
    assert _observe.pools()[0].limit is None
    torch.fraction = 0.25
    assert _observe.pools()[0].limit == torch.total // 4


def test_where_torch_allocates_from_somebody_else_there_is_nothing_to_observe(torch: Torch) -> None:
    """PyTorch has no statistics of a pluggable allocator: pytorch/pytorch#133281."""
    sp.observe("torch")
    torch.allocate(1)
    torch.backend = "pluggable"
    assert _observe.pools() == []
    assert _observe.blocks() == {}


def test_a_library_that_fails_is_a_number_and_harms_neither_the_program_nor_the_page(torch: Torch) -> None:
    sp.observe("torch")
    torch.allocate(1)
    torch.broken = True
    _devices.sample()
    found = series()
    assert value(found, "last_collect_success") == 1
    assert value(found, "library_sample_failures_total", library="torch") >= 1
    assert value(found, "library_sample_failures_total", library="cupy") == 0
    assert values(found, "library_used_bytes") == []


def test_call_stacks_are_asked_for_when_cuda_starts_and_given_up_with_the_observation(torch: Torch) -> None:
    sp.observe("torch", stacks=True)
    assert torch.settings == []  # CUDA was not started for it
    torch.start()
    assert torch.settings == [("state", {"context": "state", "stacks": "python", "max_entries": 1})]
    leaking(torch)
    ((key, (block,)),) = _observe.blocks().items()
    assert key == ("cuda:0", "torch", "device")
    frames = _observe._model.resolve(block.stack)
    assert frames[0].function == "leaking"  # PyTorch's own frames are left out
    assert frames[1].function == "test_call_stacks_are_asked_for_when_cuda_starts_and_given_up_with_the_observation"
    sp.unobserve("torch")
    assert torch.settings[-1] == (None, {})


def test_a_history_that_the_program_keeps_is_used_and_left_alone(torch: Torch) -> None:
    torch.start()
    torch.recording = True
    sp.observe("torch", stacks=True)
    leaking(torch)
    assert _observe.blocks()["cuda:0", "torch", "device"][0].stack < 0
    sp.unobserve("torch")
    assert torch.settings == []


def test_without_call_stacks_nothing_is_switched_on_and_blocks_go_by_their_size(torch: Torch) -> None:
    sp.observe("torch")
    leaking(torch, 3 * MIB)
    assert torch.settings == []
    (block,) = _observe.blocks()["cuda:0", "torch", "device"]
    assert (block.stack, block.tag) == (0, "PyTorch's blocks of 3 MiB, no call stack")


def test_a_torch_that_refuses_to_keep_stacks_starts_all_the_same(torch: Torch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("told to fail")

    torch.cuda.memory._record_memory_history = refuse
    sp.observe("torch", stacks=True)
    torch.start()
    leaking(torch)
    assert _observe.blocks()["cuda:0", "torch", "device"][0].stack == 0


def test_a_library_that_comes_later_is_met_at_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(
        "import sys, libraries\nfrom types import ModuleType\n"
        "it = libraries.Torch(); cuda, _C, __file__ = it.cuda, it._C, it.__file__\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    sp.observe("torch", stacks=True)
    module = importlib.import_module("torch")
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"  # as without us
    assert sys.meta_path == finders
    module.it.start()
    assert module.it.recording


def test_an_import_that_fails_or_a_call_that_does_changes_nothing_for_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halfway.py").write_text("raise RuntimeError('its own')")
    monkeypatch.syspath_prepend(str(tmp_path))
    called: list[int] = []
    _imports.when_imported("halfway", lambda: called.append(1))
    with pytest.raises(RuntimeError, match="its own"):
        importlib.import_module("halfway")
    assert called == []
    (tmp_path / "halfway.py").write_text("fine = True  # and longer than before\n")
    importlib.invalidate_caches()
    _imports.when_imported("halfway", lambda: called.append(1 // 0))
    assert importlib.import_module("halfway").fine
    assert called == [1]
    monkeypatch.delitem(sys.modules, "halfway")


def test_a_saved_snapshot_of_pytorch_is_read_as_it_says() -> None:
    """Its form as PyTorch 2.11 writes it (torch.cuda.memory._snapshot), and 2.0, whose stacks lie elsewhere."""
    frames = [
        {"filename": "/lib/torch/functional.py", "line": 3, "name": "einsum"},
        {"filename": "train.py", "line": 7, "name": "step"},
    ]
    blocks = [
        {"address": 4096, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": frames},
        {"address": 5120, "size": 512, "requested_size": 8, "state": "active_pending_free", "frames": frames},
        {"address": 5632, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": frames},
        {"address": 6144, "size": 2048, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    older = [{"size": 512, "state": "active_allocated", "history": [{"addr": 1, "real_size": 400, "frames": frames}]}]
    segments = [
        {"device": 1, "address": 4096, "total_size": 4096, "stream": 0, "segment_type": "small", "blocks": blocks},
        {"device": 0, "address": 8192, "total_size": 512, "stream": 0, "segment_type": "small", "blocks": older},
    ]
    first, second, third = _torch.read_snapshot(segments, own="/lib/torch/")
    assert [(b.device, b.address, b.size) for b in (first, second, third)] == [
        ("cuda:1", 4096, 1000), ("cuda:1", 5632, 500), ("cuda:0", 8192, 512),
    ]  # fmt: skip
    assert first.stack == second.stack == third.stack < 0
    assert [str(frame) for frame in _observe._model.resolve(first.stack)] == ["train.py:7 in step"]


def test_cupy_is_read_on_the_devices_that_the_process_uses_and_on_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = CuPy((10 * MIB, 16 * MIB), (0, 0), (1, 2))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    sp.observe("cupy")
    monkeypatch.setattr(_cupy, "in_use", lambda ordinal: False)
    assert _observe.pools() == []  # nothing was asked: the question would make a context
    assert cupy.visited == []
    monkeypatch.setattr(_cupy, "in_use", lambda ordinal: ordinal in (0, 1))
    device, pinned = _observe.pools()
    assert cupy.visited == [0, 1]
    assert (device.device, device.used, device.cached, device.reserved) == ("cuda:0", 10 * MIB, 6 * MIB, 16 * MIB)
    assert (device.limit, device.free_blocks, device.requested) == (None, 5, None)
    assert (pinned.device, pinned.kind, pinned.used, pinned.free_blocks) == ("host", "pinned", None, 3)
    cupy.limit = 20 * MIB
    assert _observe.pools()[0].limit == 20 * MIB
    (block,) = _observe.blocks()["cuda:0", "cupy", "device"]
    assert (block.size, block.stack) == (10 * MIB, 0)


def test_which_devices_are_in_use_is_asked_without_starting_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        def __init__(self, *, started: bool) -> None:
            self.started = started

        def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
            return 0 if self.started and ordinal.value < 2 else 3  # not initialized

        def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> int:
            active._obj.value = 1
            return 0

    def load(name: str, mode: int) -> Any:
        assert mode & os.RTLD_NOLOAD
        return Cuda(started=name == "libcuda.so.1" and started)

    started = False
    monkeypatch.setattr(_contexts.ctypes, "CDLL", load)
    assert not _contexts.in_use(0)
    started = True
    assert [_contexts.in_use(ordinal) for ordinal in range(3)] == [True, True, False]
    assert _contexts.all_in_use() == ["cuda:0", "cuda:1"]


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_an_observed_library_has_series_of_its_own_and_what_is_in_no_pool_is_outside(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = card(monkeypatch, 500 * MIB)
    monkeypatch.setattr(_process_memory, "_by_nvml", lambda uuid: 200 * MIB)
    sp.observe("torch")
    kept = [torch.allocate(30 * MIB), torch.allocate(50 * MIB)]
    torch.free(kept[0])
    torch.counts |= {"num_ooms": 2, "num_alloc_retries": 7}
    _devices.sample()
    found = series()
    parts = [value(found, f"library_{word}_bytes", **TORCH) for word in ("used", "pending", "cached")]
    assert sum(parts) == value(found, "library_reserved_bytes", **TORCH) == 80 * MIB
    assert value(found, "library_reserved_peak_bytes", **TORCH) == 80 * MIB
    assert value(found, "library_requested_bytes", **TORCH) == 50 * MIB
    assert value(found, "library_live_allocations", **TORCH) == 1
    assert value(found, "library_allocations_total", **TORCH) == 2
    assert value(found, "library_allocation_failures_total", **TORCH) == 2
    assert value(found, "library_growth_refusals_total", **TORCH) == 7
    assert value(found, "library_headroom_bytes", **TORCH) == 30 * MIB + driver.total - driver.used
    assert abs(value(found, "library_sample_timestamp_seconds", **TORCH) - time.time()) < 60
    assert value(found, "process_device_bytes", device="cuda:0", basis="process") == 200 * MIB
    assert value(found, "outside_bytes", device="cuda:0", basis="process") == 120 * MIB
    # The device is there too, though no pool of ours ever was.
    assert value(found, "device_free_bytes", device="cuda:0") == driver.total - driver.used
    assert values(found, "driver_call_duration_seconds_count", device="cuda:0") == []
    info = next(
        dict(labels) for name, labels in found if name == "streampool_device_info" and ("device", "cuda:0") in labels
    )
    assert (info["uuid"], info["gpu_uuid"], info["gpu_instance"], info["driver"]) == ("GPU-1", "GPU-1", "", "13.0")
    torch.fraction = 0.1  # of 1 GiB: 22 MiB more than it has
    _devices.sample()
    assert value(series(), "library_headroom_bytes", **TORCH) == int(0.1 * torch.total) - 50 * MIB


def test_outside_says_when_it_counts_other_processes_too(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, 500 * MIB)
    sp.observe("torch")
    torch.allocate(20 * MIB)
    _devices.sample()
    found = series()
    assert value(found, "process_device_bytes", device="cuda:0", basis="device") == 500 * MIB
    assert value(found, "outside_bytes", device="cuda:0", basis="device") == 480 * MIB
    assert values(found, "outside_bytes", device="cuda:0", basis="process") == []


def test_all_memory_of_the_simulated_device_is_in_pools() -> None:
    with sp.Pool("sim:0", name="inside", initial="32MiB"), sp.Pool("sim:0", name="m", kind="managed", initial="8MiB"):
        _devices.sample()
        found = series()
        assert value(found, "outside_bytes", device="sim:0", basis="process") == 0
        assert value(found, "process_device_bytes", device="sim:0", basis="process") >= 32 * MIB


def test_headroom_of_pinned_memory_is_what_the_host_has_left() -> None:
    with sp.Pool("sim:0", name="pinned", kind="pinned") as pool:
        pool.allocate(MIB).close()
        _devices.sample()
        room = value(series(), "headroom_bytes", pool="pinned", kind="pinned")
        assert 0 < room < 1 << 50


def test_a_scrape_reads_what_was_sampled_and_asks_nobody(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, 100 * MIB)
    sp.observe("torch")
    torch.allocate(MIB)
    _devices.sample()

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked in a scrape")

    for name in ("memory_stats", "memory_snapshot", "is_initialized", "device_count"):
        setattr(torch.cuda, name, never)
    for module, name in ((_core, "open_device"), (_core, "sample_devices"), (_process_memory, "read")):
        monkeypatch.setattr(module, name, never)
    found = series()
    assert value(found, "library_used_bytes", **TORCH) == MIB
    assert value(found, "last_collect_success") == 1
    assert value(found, "library_sample_failures_total", library="torch") == 0


def test_when_the_observation_ends_its_series_go(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, MIB)
    sp.observe("torch")
    torch.allocate(1)
    _devices.sample()
    assert values(series(), "library_used_bytes") != []
    sp.unobserve("torch")
    _devices.sample()
    assert values(series(), "library_used_bytes") == []


def test_a_line_that_leaks_in_a_library_is_a_suspect_and_stands_first_on_the_page(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(monkeypatch, MIB)
    sp.observe("torch", stacks=True)
    steady = torch.allocate(500 * MIB)
    now = [0.0]
    history = holders.History(lambda: now[0])
    monkeypatch.setattr(_devices, "history", history)
    monkeypatch.setattr("streampool.metrics._reading.history", history)
    for minute in range(61):
        now[0] = 60.0 * minute
        leaking(torch)
        history.observe()
    _devices.sample()
    found = series()
    assert value(found, "library_suspected_leaks", **TORCH) == 1
    assert 40 * MIB < value(found, "library_suspected_leak_bytes", **TORCH) < 61 * MIB
    text = history.text()
    head = "== torch's own pool, observed, device memory of cuda:0: exact\n"
    assert head in text
    first = text.partition(head)[2].partition("\n    ")[2]  # other pools of the process may stand before it
    assert "in leaking\n" in first.partition("\n\n")[0] + "\n"
    assert text.index("in leaking") < text.index("500 MiB in 1 blocks")
    assert "torch" in sp.postmortem.text()
    del steady


def test_a_library_with_very_many_blocks_is_looked_at_for_people_only(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_observe, "_MOST_BLOCKS", 3)
    sp.observe("torch")
    kept = [torch.allocate(512) for _ in range(3)]
    assert _observe.blocks(in_background=True) != {}
    kept.append(torch.allocate(512))
    assert _observe.blocks(in_background=True) == {}
    assert len(_observe.blocks()["cuda:0", "torch", "device"]) == 4
    torch.free(kept.pop())
    assert _observe.blocks(in_background=True) == {}  # else its blocks would seem to come from nothing
    sp.observe("torch")
    assert _observe.blocks(in_background=True) != {}


def test_holders_without_call_stacks_are_named_by_what_they_are(torch: Torch) -> None:
    sp.observe("torch")
    torch.allocate(2 * MIB)
    assert "\n2 MiB in 1 blocks\n    PyTorch's blocks of 2 MiB, no call stack\n" in holders.History().text()
