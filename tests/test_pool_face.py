"""The Python face of a pool: results as objects, findings at the right moment, settings by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

import streampool as sp
from streampool.faults import FaultKind
from streampool.leaks import LeakClass


@pytest.fixture
def device() -> sp.sim.Device:
    device = sp.Device("sim:0")
    assert isinstance(device, sp.sim.Device)
    return device


def overrun(device: sp.sim.Device, pool: sp.Pool) -> sp.sim.Stream:
    """Allocate a block, write one byte too far, and free it; give its stream."""
    stream = device.create_stream()
    block = pool.allocate(1000, stream=stream)
    stream.launch(lambda out: out.fill(0x41), writes=[(block.handle, 1001)])
    stream.sync()
    block.close(stream)
    return stream


def test_counters_are_read_as_attributes_and_as_items(device: sp.sim.Device) -> None:
    with sp.Pool(device) as pool:
        block = pool.allocate(1000, stream=device.create_stream())
        stats = pool.stats()
        assert stats.in_use == stats["in_use"] == 1000
        assert stats.allocations == 1
        parts = ("in_use", "rounding", "guards", "quarantined", "pending", "cached")
        assert sum(stats[part] for part in parts) == stats.reserved
        with pytest.raises(AttributeError, match="no counter 'in_used'"):
            _ = stats.in_used
        block.close()


def test_a_check_gives_what_it_looked_at_and_faults_are_objects_with_both_stacks(device: sp.sim.Device) -> None:
    with sp.Pool(device, mode="debug") as pool:
        overrun(device, pool)
        result = pool.check()
        assert result.faults == 1
        assert result.checked_blocks >= 1
        assert result.not_checked == []
        (fault,) = pool.faults()
        assert fault.kind is FaultKind.OVERRUN
        assert fault.block is not None
        assert fault.block.allocated_at[0].function == "overrun"
        assert fault.block.freed_at[0].function == "overrun"
        assert (fault.pool, fault.device) == ("default", "sim:0")
        assert pool.faults() == []


def test_on_fault_raise_raises_at_check_with_the_faults(device: sp.sim.Device) -> None:
    pool = sp.Pool(device, mode="debug", on_fault="raise")
    overrun(device, pool)
    with pytest.raises(sp.FaultError, match=r"overrun: write of 1 byte.*test_pool_face\.py:\d+ in overrun") as caught:
        pool.check()
    assert [fault.kind for fault in caught.value.faults] == [FaultKind.OVERRUN]
    pool.check()
    pool.close()


def test_on_fault_raise_raises_at_close_and_the_pool_is_closed_all_the_same(device: sp.sim.Device) -> None:
    pool = sp.Pool(device, mode="debug", on_fault="raise")
    overrun(device, pool)
    with pytest.raises(sp.FaultError):
        pool.close()
    assert pool.is_closed
    pool.close()


def test_on_fault_raise_raises_at_the_next_call_after_the_finding(device: sp.sim.Device) -> None:
    pool = sp.Pool(device, mode="debug", on_fault="raise", check_every=1)
    stream = overrun(device, pool)

    def calls() -> None:
        for _ in range(100):
            pool.free_raw(pool.allocate_raw(64, stream=stream), stream=stream)

    with pytest.raises(sp.FaultError):
        calls()
    calls()
    pool.close()


def test_without_on_fault_raise_nothing_raises(device: sp.sim.Device) -> None:
    pool = sp.Pool(device, mode="debug")
    overrun(device, pool)
    pool.check()
    pool.close()
    assert len(pool.faults()) == 1


def test_leaks_come_by_class_and_by_line(device: sp.sim.Device) -> None:
    with sp.Pool(device, mode="debug", name="mine") as pool:
        stream = device.create_stream()
        pointers = [pool.allocate_raw(100, stream=stream) for _ in range(3)]
        held = pool.allocate(50, stream=stream)
        leaks = pool.leaks()
        assert {(leak.leak_class, leak.blocks, leak.bytes) for leak in leaks} == {
            (LeakClass.LOST, 3, 300),
            (LeakClass.HELD, 1, 50),
        }
        assert all(leak.allocated_at[0].file == __file__ for leak in leaks)
        assert {(leak.pool, leak.device) for leak in leaks} == {("mine", "sim:0")}
        for pointer in pointers:
            pool.free_raw(pointer, stream=stream)
        held.close()
        assert len(pool.leaks()) == 0


def test_a_snapshot_is_plain_data_of_the_whole_pool(device: sp.sim.Device) -> None:
    with sp.Pool(device, mode="debug", name="mine") as pool:
        block = pool.allocate(100, stream=device.create_stream(), tag="weights")
        snapshot = json.loads(json.dumps(pool.snapshot()))
        assert snapshot["pool"] == "mine"
        assert snapshot["device"] == "sim:0"
        assert snapshot["options"]["mode"] == "debug"
        assert snapshot["stats"]["live_blocks"] == 1
        assert [(b["size"], b["tag"], b["owner"]) for b in snapshot["blocks"]] == [(100, "weights", "buffer")]
        block.close()


def test_a_declared_capture_ends_also_when_its_body_raises(
    device: sp.sim.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, Any]] = []
    monkeypatch.setattr(sp.Pool, "begin_capturing", lambda self, s: seen.append(("begin", s)))
    monkeypatch.setattr(sp.Pool, "end_capturing", lambda self, s: seen.append(("end", s)))
    with sp.Pool(device) as pool, pytest.raises(KeyError), pool.capturing(7):
        raise KeyError
    assert seen == [("begin", 7), ("end", 7)]


@pytest.mark.parametrize(("limit", "size"), [("2GiB", 2 << 30), (4096, 4096)])
def test_a_limit_is_a_number_or_text(device: sp.sim.Device, limit: int | str, size: int) -> None:
    with sp.Pool(device, limit=limit) as pool:
        assert pool.options["limit"] == str(size)
        assert pool.stats().limit == size


def test_initial_memory_is_there_at_once(device: sp.sim.Device) -> None:
    with sp.Pool(device, initial="64MiB") as pool:
        assert pool.stats().reserved >= 64 << 20


def test_an_unknown_kind_is_refused(device: sp.sim.Device) -> None:
    with pytest.raises(ValueError, match="'device', 'pinned' or 'managed', not 'unified'"):
        sp.Pool(device, kind="unified")


def test_a_pool_says_what_it_is(device: sp.sim.Device) -> None:
    pool = sp.Pool(device, kind="pinned", mode="debug", name="staging")
    assert repr(pool) == "<streampool.Pool 'staging' pinned on sim:0, mode=debug>"
    pool.close()
    assert repr(pool) == "<streampool.Pool 'staging' pinned on sim:0, closed>"


def test_every_public_name_is_there() -> None:
    for name in sp.__all__:
        assert getattr(sp, name) is not None
    assert set(sp.__all__) <= set(dir(sp))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sp.nonsense


def test_errors_have_one_base_and_out_of_memory_is_a_memory_error() -> None:
    from streampool import errors

    for name in errors.__all__:
        assert issubclass(getattr(errors, name), sp.StreamPoolError)
    assert issubclass(sp.OutOfMemoryError, MemoryError)
    assert issubclass(sp.DoubleFreeError, sp.InvalidFreeError)
    assert issubclass(sp.DriverNotFoundError, sp.DriverError)
    assert issubclass(sp.TraceError, ValueError)


@pytest.mark.gpu
def test_devices_and_streams_on_the_gpu_are_cuda_cores() -> None:
    from cuda import core

    device = sp.Device()
    assert isinstance(device, core.Device)
    stream = device.create_stream()
    with sp.Pool(device) as pool:
        assert pool.driver.name == f"cuda:{device.device_id}"
        pool.register_stream(stream)
        with sp.stream(stream):
            block = pool.allocate(1 << 20)
        block.fill(7)
        host = bytearray(1 << 20)
        block.copy_to(host)
        assert host == b"\x07" * (1 << 20)
        block.close(stream)
        pool.forget_stream(stream)
