"""How much device memory this process holds: by NVML where it says so, else by the device; and what a device is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from scene import MIB

import streampool as sp
from streampool import _core, _device_facts, _process_memory
from streampool._process_memory import Basis, ProcessMemory

GPU = "GPU-11111111-2222-3333-4444-555555555555"
MIG = "MIG-66666666-7777-8888-9999-000000000000"


class Nvml(ModuleType):
    """What `nvidia-ml-py` has of processes and MIG instances, with one GPU."""

    def __init__(self, processes: list[tuple[int, int | None]]) -> None:
        super().__init__("pynvml")
        self.processes = processes

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (GPU, MIG):
            raise RuntimeError("NVMLError_NotFound")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        assert handle == MIG
        return GPU

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:  # some versions give bytes
        return handle.encode()

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:
        return 7


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    _device_facts._start.cache_clear()
    yield
    _device_facts._start.cache_clear()


def with_nvml(monkeypatch: pytest.MonkeyPatch, *processes: tuple[int, int | None]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(list(processes)))


class Card:
    """A driver that says what its device has."""

    def memory_info(self) -> tuple[int, int]:
        return 30 * MIB, 100 * MIB


def test_on_the_simulated_device_the_figure_is_this_processs_own() -> None:
    before = _process_memory.read("sim:0")
    assert before is not None
    with sp.Pool("sim:0", initial="64MiB"):
        after = _process_memory.read("sim:0")
        assert after is not None
        assert (after.bytes - before.bytes, after.basis, after.is_ceiling) == (64 * MIB, Basis.PROCESS, False)


def test_nvmls_figure_for_this_process_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nvml(monkeypatch, (os.getpid() + 1, 50 * MIB), (os.getpid(), 20 * MIB))
    found = _process_memory.read("cuda:0", _device_facts.DeviceFacts(uuid=GPU))
    assert found == ProcessMemory("cuda:0", 20 * MIB, Basis.PROCESS)


@pytest.mark.parametrize("processes", [[], [(os.getpid() + 1, 50 * MIB)], [(os.getpid(), None)]])
def test_where_nvml_does_not_list_this_process_the_figure_is_a_ceiling_and_says_so(
    monkeypatch: pytest.MonkeyPatch, processes: list[tuple[int, int | None]]
) -> None:
    with_nvml(monkeypatch, *processes)
    monkeypatch.setattr(_core, "open_device", lambda name: Card())
    found = _process_memory.read("cuda:0", _device_facts.DeviceFacts(uuid=GPU))
    assert found == ProcessMemory("cuda:0", 70 * MIB, Basis.DEVICE)
    assert found.is_ceiling


def test_nobody_to_ask_is_no_figure_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise sp.DriverError("told to fail")

    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    monkeypatch.setattr(_core, "open_device", broken)
    assert _process_memory.read("cuda:0", _device_facts.DeviceFacts()) is None


def test_pools_that_grew_after_the_figure_leave_nothing_outside_rather_than_less() -> None:
    assert ProcessMemory("cuda:0", 10, Basis.PROCESS).outside(4) == 6
    assert ProcessMemory("cuda:0", 10, Basis.PROCESS).outside(14) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", _device_facts.DeviceFacts(GPU, "0000:01:00.0", "NVIDIA H200", GPU, "")),
        (
            "NVIDIA H200 MIG 1g.18gb",
            _device_facts.DeviceFacts(MIG, "0000:01:00.0", "NVIDIA H200 MIG 1g.18gb", GPU, "7"),
        ),
    ],
)
def test_a_mig_instance_is_named_by_its_own_uuid_and_by_its_place_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: _device_facts.DeviceFacts
) -> None:
    core = ModuleType("cuda.core")
    uuid = (MIG if "MIG" in name else GPU)[4:]  # cuda.core gives it without the prefix
    core.Device = lambda ordinal: SimpleNamespace(name=name, uuid=uuid, pci_bus_id="0000:01:00.0")  # type: ignore[attr-defined]
    import cuda

    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(cuda, "core", core, raising=False)
    with_nvml(monkeypatch)
    assert _device_facts.ask("cuda:0") == expected
