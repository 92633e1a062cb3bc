"""R1 on a real GPU: bytes that a stuck kernel may still touch go to nobody else; once it is done they do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import streampool as sp
from gpu import driver
from gpu.gpu_scene import KIB, MIB, GpuScene, overlap
from gpu.kernels import pattern

pytestmark = pytest.mark.gpu

LASTING, RAW, LEGACY, PER_THREAD = "lasting", "raw", "legacy", "per-thread"
Give = Callable[[GpuScene, sp.Buffer, Any, Any], None]  # scene, block, its home stream, the stream that uses it


@dataclass(frozen=True)
class Way:
    """How a block is given away while a kernel still reads it."""

    name: str
    home: str  # the stream it was allocated on
    user: str | None  # the stream whose kernel is stuck; None: home
    give: Give


def close_on_home(gpu: GpuScene, block: sp.Buffer, home: Any, user: Any) -> None:
    block.close(home)


def close_on_user(gpu: GpuScene, block: sp.Buffer, home: Any, user: Any) -> None:
    block.close(user)


def release(gpu: GpuScene, block: sp.Buffer, home: Any, user: Any) -> None:
    block.close()


def release_on_another_thread(gpu: GpuScene, block: sp.Buffer, home: Any, user: Any) -> None:
    thread = threading.Thread(target=block.close)
    thread.start()
    thread.join()


def record_stream(gpu: GpuScene, block: sp.Buffer, home: Any, user: Any) -> None:
    block.record_stream(user)
    block.close(home)


def record_stream_by_inner_address(gpu: GpuScene, block: sp.Buffer, home: Any, user: Any) -> None:
    block.pool.record_stream_raw(block.handle + block.size // 2, user)
    block.close(home)


def record_stream_and_release(gpu: GpuScene, block: sp.Buffer, home: Any, user: Any) -> None:
    block.record_stream(user)
    block.close()


def record_event(gpu: GpuScene, block: sp.Buffer, home: Any, user: Any) -> None:
    block.record_event(gpu.event(user))
    block.close(home)


WAYS = [
    Way("freed on a lasting stream", LASTING, None, close_on_home),
    Way("freed on a raw handle", RAW, None, close_on_home),
    Way("freed on the legacy stream", LEGACY, None, close_on_home),
    Way("freed on the per-thread stream", PER_THREAD, None, close_on_home),
    Way("released, lasting", LASTING, None, release),
    Way("released, raw", RAW, None, release),
    Way("released by another thread", LASTING, None, release_on_another_thread),
    Way("freed on the lasting stream that uses it", LASTING, LASTING, close_on_user),
    Way("freed on the raw stream that uses it", LASTING, RAW, close_on_user),
    Way("recorded for a lasting stream", LASTING, LASTING, record_stream),
    Way("recorded for a raw stream", LASTING, RAW, record_stream),
    Way("recorded by an address inside", LASTING, LASTING, record_stream_by_inner_address),
    Way("recorded for the legacy stream", LASTING, LEGACY, record_stream),
    Way("recorded for the per-thread stream", LASTING, PER_THREAD, record_stream),
    Way("recorded on a raw home", RAW, LASTING, record_stream),
    Way("recorded and released", LASTING, RAW, record_stream_and_release),
    Way("event of a lasting stream", LASTING, LASTING, record_event),
    Way("event of a raw stream", RAW, RAW, record_event),
]


def make_stream(gpu: GpuScene, pool: sp.Pool, kind: str) -> Any:
    if kind == LASTING:
        return gpu.stream(pool)
    return {RAW: gpu.raw_stream, LEGACY: lambda: driver.LEGACY, PER_THREAD: lambda: driver.PER_THREAD}[kind]()


@pytest.mark.parametrize("size", [4 * KIB, 4 * MIB], ids=["4KiB", "4MiB"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_bytes_in_use_by_a_stuck_kernel_go_to_nobody_and_later_to_another_stream(
    gpu: GpuScene, way: Way, size: int
) -> None:
    pool = gpu.pool(fence_age=0)
    home = make_stream(gpu, pool, way.home)
    user = home if way.user is None else make_stream(gpu, pool, way.user)
    strangers = [gpu.stream(pool), gpu.raw_stream()]
    result = pool.allocate(size, stream=user)
    block = pool.allocate(size, stream=home)
    address = block.handle
    gpu.write_pattern(home, block, 1)
    gpu.order(user, home)
    gpu.gate(user)
    gpu.copy(user, result, block)
    way.give(gpu, block, home, user)
    del block

    others = []
    for stream in [*strangers, *([] if user is home else [home])]:
        for _ in range(6):
            other = pool.allocate(size, stream=stream)
            assert not overlap(other.handle, size, address, size), "handed out while a kernel still reads it"
            gpu.write_pattern(stream, other, 0xEE)
            others.append(other)
        driver.sync_stream(stream)
    gpu.assert_held()
    gpu.open()
    assert gpu.read(result) == pattern(size, 1)

    if size < MIB or LEGACY in (way.home, way.user):
        return  # small blocks stay in their stream's slab; the legacy stream is fenced by others under a limit only
    for stream in (home, user):
        others[0].record_stream(stream)  # a call that names the stream, so that it may be fenced
    gpu.device.sync()
    reserved = pool.stats().reserved
    late = pool.allocate(size, stream=strangers[0])
    assert overlap(late.handle, size, address, size), "its bytes are not used again"
    assert pool.stats().reserved == reserved


@pytest.mark.parametrize("size", [4 * KIB, 4 * MIB], ids=["4KiB", "4MiB"])
@pytest.mark.parametrize("kind", [LASTING, RAW, LEGACY, PER_THREAD])
def test_the_stream_itself_gets_its_bytes_back_at_once(gpu: GpuScene, kind: str, size: int) -> None:
    pool = gpu.pool(limit=2 * MIB if size < MIB else size)
    stream = make_stream(gpu, pool, kind)
    block = pool.allocate(size, stream=stream)
    address = block.handle
    gpu.gate(stream)
    gpu.write_pattern(stream, block, 1)
    block.close(stream)
    again = pool.allocate(size, stream=stream)
    gpu.write_pattern(stream, again, 2)
    gpu.assert_held()
    assert again.handle == address
    gpu.open()
    assert gpu.read(again) == pattern(size, 2)


def test_a_limit_is_met_by_waiting_for_pending_frees_and_the_error_says_so(gpu: GpuScene) -> None:
    size = 8 * MIB
    pool = gpu.pool(limit=size, reuse="opportunistic", wait_timeout=0.2)
    a, b = gpu.stream(pool), gpu.stream(pool)
    block = pool.allocate(size, stream=a)
    address = block.handle
    gpu.gate(a)
    gpu.write_pattern(a, block, 1)
    block.close(a)
    with pytest.raises(sp.OutOfMemoryError) as caught:
        pool.allocate(size, stream=b)
    gpu.assert_held()
    assert caught.value.fields["reason"] == "pending"
    assert caught.value.fields["pending"] == size
    gpu.open()
    assert pool.allocate(size, stream=b).handle == address
    assert pool.stats().reserved == size


def test_a_wait_for_pending_frees_ends_when_the_work_does(gpu: GpuScene) -> None:
    size = 8 * MIB
    pool = gpu.pool(limit=size, reuse="opportunistic")
    a, b = gpu.stream(pool), gpu.stream(pool)
    block = pool.allocate(size, stream=a)
    address = block.handle
    gate = gpu.gate(a)
    gpu.write_pattern(a, block, 1)
    block.close(a)
    timer = threading.Timer(0.2, gate.open)
    timer.start()
    later = pool.allocate(size, stream=b)
    timer.join()
    assert later.handle == address
    assert pool.stats().paths["host_waited"] == 1


def test_a_stream_is_made_to_wait_where_nothing_else_helps(gpu: GpuScene) -> None:
    size = 8 * MIB
    pool = gpu.pool(limit=size)
    a, b = gpu.raw_stream(), gpu.stream(pool)  # a large free on a raw handle is fenced in the call
    block = pool.allocate(size, stream=a)
    address = block.handle
    gpu.gate(a)
    gpu.write_pattern(a, block, 1)
    block.close(a)
    taken = pool.allocate(size, stream=b)
    gpu.assert_held()
    assert taken.handle == address
    stats = pool.stats()
    assert (stats.paths["waited"], stats.wait_edges) == (1, 1)
    gpu.write_pattern(b, taken, 2)
    done = b.record()
    assert not done.is_done
    gpu.open()
    assert done.is_done
    assert gpu.read(taken) == pattern(size, 2)


@pytest.mark.parametrize("reuse", ["opportunistic", "deterministic"])
def test_no_stream_is_made_to_wait_where_that_is_off(gpu: GpuScene, reuse: str) -> None:
    size = 8 * MIB
    pool = gpu.pool(limit=size, reuse=reuse, wait_timeout=0.1)
    a, b = gpu.raw_stream(), gpu.stream(pool)
    block = pool.allocate(size, stream=a)
    gpu.gate(a)
    gpu.write_pattern(a, block, 1)
    block.close(a)
    before = pool.driver.calls()["stream_wait_event"]
    with pytest.raises(sp.OutOfMemoryError):
        pool.allocate(size, stream=b)
    gpu.assert_held()
    assert pool.driver.calls()["stream_wait_event"] == before


def test_pending_work_of_a_destroyed_stream_is_waited_for_even_where_its_handle_lives_again(gpu: GpuScene) -> None:
    pool = gpu.pool()
    size = 256 * KIB  # too small to be fenced in its free
    result = pool.allocate(size, stream=driver.LEGACY)
    stream = gpu.raw_stream()
    identity = driver.stream_id(stream)
    block = pool.allocate(size, stream=stream)
    address = block.handle
    gpu.write_pattern(stream, block, 1)
    gpu.gate(stream)
    gpu.copy(stream, result, block)
    block.close(stream)
    gpu.destroy(stream)
    for _ in range(16):
        new = gpu.raw_stream()  # may run in the hardware queue of the destroyed one: nobody waits for it here
        assert driver.stream_id(new) != identity
        other = pool.allocate(size, stream=new)
        assert not overlap(other.handle, size, address, size)
        gpu.write_pattern(new, other, 2)
        other.close(new)
    gpu.assert_held()
    gpu.open()
    assert gpu.read(result) == pattern(size, 1)


def test_what_a_vanished_stream_left_comes_back_by_a_context_event_under_a_limit(gpu: GpuScene) -> None:
    pool = gpu.pool(limit=2 * MIB, wait_timeout=0.2)
    if not pool.driver.capabilities()["context_events"]:
        pytest.fail("this driver has no context events")
    gone, stays = gpu.raw_stream(), gpu.stream(pool)
    blocks = [pool.allocate(512 * KIB, stream=gone) for _ in range(3)]
    gpu.gate(gone)
    for block in blocks:
        gpu.write_pattern(gone, block, 1)
    blocks.pop().close(gone)  # 512 KiB, and nobody names the stream again
    gpu.destroy(gone)
    with pytest.raises(sp.OutOfMemoryError) as caught:
        pool.allocate(MIB, stream=stays)
    gpu.assert_held()
    assert caught.value.fields["pending"] >= 512 * KIB
    gpu.open()
    taken = pool.allocate(MIB, stream=stays)
    assert pool.stats().context_events >= 1
    assert pool.stats().reserved == 2 * MIB
    taken.close(stays)
    del blocks
