"""Public bug reports about events, out of memory, growth and trim, as tests of ours; test_cases.py has the others.

Numbers are those of the project's list of cases; the docstrings name the reports. Cases 14, 20 and 43, which need many
rounds, are native (native/tests/test_cases.cpp); 32 is tests/test_driver_failures.py, 54 tests/test_host_memory.py.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scene import GIB, KIB, MIB, Busy, Scene, becomes, fill_up, scene

import streampool as sp

KINDS = pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
MODES = pytest.mark.parametrize("mode", ["production", "debug"])


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


def touched(blocks: list[sp.Buffer], work: Busy) -> list[sp.Buffer]:
    return [block for block in blocks if work.overlaps(block.handle, block.size)]


# -- C. events --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["device", "pinned"])
@pytest.mark.parametrize("size", [4 * KIB, 200 * KIB])
@pytest.mark.parametrize("lasting", [True, False])
def test_case_17_an_event_that_never_completes_holds_back_its_own_block_and_no_other(
    sc: Scene, kind: str, size: int, lasting: bool
) -> None:
    """pytorch/pytorch#183501: the queue of events was walked up to the first that was not done, for ever."""
    count = 1000
    pool = sc.pool(kind, limit=2 * count * size + 8 * MIB)
    stuck = sc.stream(pool, lasting=lasting)
    lanes = [sc.stream(pool, lasting=lasting) for _ in range(8)]
    first = pool.allocate(size, stream=stuck)
    work = sc.busy(stuck, first)
    first.close(stuck)
    blocks = [pool.allocate(size, stream=lanes[i % 8]) for i in range(count)]
    for i, block in enumerate(blocks):
        sc.use(lanes[i % 8], block)
        block.close(lanes[i % 8])
    blocks.clear()
    del block
    for lane in lanes:
        pool.allocate(0, stream=lane).close(lane)  # what the pool owes a raw stream is done by a call that names it
    sp.sim.settle()
    reserved, asked = pool.stats().reserved, sc.device.calls()["event_query"]

    receiver = sc.stream(pool)
    again = [pool.allocate(size, stream=receiver) for _ in range(count)]
    assert touched(again, work) == []
    assert pool.stats().reserved <= reserved + 2 * MIB, "what is done is used again, instead of as much new memory"
    assert sc.device.calls()["event_query"] - asked <= 2 * count, "what one allocation looks at is bounded"
    for block in again:
        sc.use(receiver, block)

    sc.open()
    pool.allocate(0, stream=stuck).close(stuck)
    sp.sim.settle()
    late, _ = fill_up(pool, size, receiver)
    assert touched(late, work), "control: now it is used again"
    for block in late:
        sc.use(receiver, block)
    sp.sim.settle()
    sc.assert_no_race()


# -- F. out of memory -------------------------------------------------------------------------------------------------


class OpensWhenCollected:
    """Garbage, in a cycle, that opens a gate when it is collected, and waits for the work behind it."""

    def __init__(self, gate: Any, stream: Any) -> None:
        self.gate, self.stream, self.me = gate, stream, self

    def __del__(self) -> None:
        self.gate.open()
        self.stream.sync()


OPENERS = ["another thread", "the collector", "the callback"]
# Ten pieces of the driver's go back within what is left of wait_timeout: nothing, where all of it was waited for.
SHAPES = [("vmm", 1, OPENERS), ("vmm", 10, OPENERS), ("malloc", 1, OPENERS), ("malloc", 10, OPENERS[:1])]


@pytest.mark.parametrize(
    ("segments", "pieces", "opens"), [(where, pieces, opens) for where, pieces, by in SHAPES for opens in by]
)
@pytest.mark.parametrize("full", ["limit", "device"])
def test_case_26_memory_that_comes_back_during_the_retry_serves_the_call_that_waits_for_it(
    opens: str, full: str, segments: str, pieces: int
) -> None:
    """pytorch/pytorch#189504, #19222, cupy/cupy#7679: out of memory, and the same call succeeded right after."""
    waits = 60 if opens == "another thread" else 0.05
    with scene(seed=None, memory=GIB) as sc:
        limit = GIB if full == "limit" else 0
        pool = sc.pool(limit=limit, segments=segments, reuse="opportunistic", wait_timeout=waits)
        s, t = sc.stream(pool), sc.stream(pool)
        gate = sp.sim.Gate()
        blocks = [pool.allocate(700 * MIB // pieces, stream=s) for _ in range(pieces)]
        for block in blocks:
            block.record_stream(t)
        t.launch(writes=[blocks[-1]], gate=gate)
        while blocks:
            blocks.pop().close(s)
        del block
        asked: list[int] = []

        def open_once_it_waits() -> None:
            while pool.stats().host_waits == 0:
                time.sleep(0.001)
            gate.open()

        opener = threading.Thread(target=open_once_it_waits, daemon=True)
        if opens == "another thread":
            opener.start()
        elif opens == "the collector":
            OpensWhenCollected(gate, t)
        else:
            pool.set_oom_callback(lambda size: (asked.append(size), gate.open(), t.sync(), True)[-1])
        again = pool.allocate(600 * MIB, stream=s)
        sc.use(s, again)
        if pieces == 1:  # it serves the call as it is; ten pieces become one by way of the driver
            assert sum(pool.stats().paths[name] for name in ("host_waited", "completed", "called_back")) == 1
        if opens == "another thread":
            opener.join()
            assert pool.stats().host_waits == 1
        assert asked == ([600 * MIB] if opens == "the callback" else [])
        assert pool.stats().out_of_memory == 0
        assert pool.stats().reserved <= GIB
        pool.set_oom_callback(None)
        sc.device.sync()
        sc.assert_no_race()
        assert pool.audit() == ""
        again.close(s)


@KINDS
@pytest.mark.parametrize("segments", ["vmm", "malloc"])
def test_case_28_a_refusal_of_the_driver_that_was_recovered_leaves_no_trace(kind: str, segments: str) -> None:
    """NVIDIA/cub#47: after a recovered refusal the driver's last error was still set."""
    takes = {"pinned": "mem_alloc_host", "managed": "mem_alloc_managed"}.get(
        kind, "mem_create" if segments == "vmm" else "mem_alloc"
    )
    with scene(memory=64 * MIB, host_memory=64 * MIB) as sc:
        pool = sc.pool(kind, segments=segments, on_fault="raise")
        s = sc.stream(pool)
        idle = pool.allocate(20 * MIB, stream=s)
        idle.close(s)
        sp.sim.settle()
        sc.device.fail_call(takes, 1, code="out_of_memory")
        block = pool.allocate(30 * MIB, stream=s)  # refused; what is idle goes back, and then there is enough
        sc.use(s, block)
        sp.sim.settle()
        sc.device.clear_failures()
        assert (pool.stats().out_of_memory, sc.device.fault) == (0, "")
        assert pool.check().faults == 0
        s.sync()  # the program's next call hears of nothing
        pool.allocate(4 * KIB, stream=s).close(s)
        assert pool.audit() == ""


CLASSES = [1, 256, 300, 1000, 4 * KIB, 5000, 16 * KIB, 33_000, 64 * KIB, 64 * KIB + 1, 700 * KIB, MIB, 3 * MIB + 5]


@KINDS
@pytest.mark.parametrize("caches", ["full", "empty"])
@pytest.mark.parametrize("size", CLASSES)
def test_case_28_a_device_that_is_full_is_an_ordinary_error_for_every_size_and_small_requests_work(
    kind: str, caches: str, size: int
) -> None:
    """NVIDIA/cub#705 (fix NVIDIA/cccl#119): on a true refusal the allocator crashed."""
    with scene(memory=16 * MIB, host_memory=16 * MIB) as sc:
        pool = sc.pool(kind)
        s, t = sc.stream(pool), sc.stream(pool)
        # Most of it in a block of another pool: filling it with bytes takes long.
        other = sc.pool(kind, name="of somebody else")
        most = other.allocate(11 * MIB, stream=t)
        if caches == "full":
            for step in (100, 10 * KIB, MIB):
                pool.allocate(step, stream=s).close(s)
        blocks, error = fill_up(pool, size, s)
        assert blocks
        assert isinstance(error, MemoryError)
        for _ in range(2):
            with pytest.raises(sp.OutOfMemoryError) as caught:
                pool.allocate(size, stream=s)
            assert caught.value.fields["request"] == size
        with pytest.raises(sp.OutOfMemoryError):
            pool.allocate(17 * MIB, stream=t)
        blocks.pop().close(s)
        pool.allocate(size, stream=s).close(s)
        for block in blocks:
            block.close(s)
        pool.allocate(200, stream=s).close(s)
        sc.device.sync()
        assert (sc.device.fault, pool.audit(), other.audit()) == ("", "", "")
        blocks.clear()
        most.close(t)
        sp.sim.settle()
        other.trim()
        assert becomes(lambda: other.stats().reserved, 0)
        pool.allocate(10 * MIB, stream=s).close(s)


def test_case_30_the_text_of_an_out_of_memory_error_is_never_cut_off(sc: Scene) -> None:
    """pytorch/pytorch#126766: the message ended in the middle. (Its fields and reasons: test_allocation.py.)"""
    name = "pool-" + "x" * 3000 + "-end"
    pool = sc.pool(limit=32 * MIB, name=name, mode="debug", quarantine_bytes=0)
    s = sc.stream(pool)
    # More call sites than the text lists.
    sites: list[sp.Buffer] = []
    for i in range(30):
        exec(compile("\n" * i + "keep.append(pool.allocate(1000, stream=s))", f"site{i}.py", "exec"),
             {"keep": sites, "pool": pool, "s": s})  # fmt: skip
    with pytest.raises(sp.OutOfMemoryError) as caught:
        pool.allocate(2**40 + 1, stream=s)
    text = str(caught.value)
    assert name in text
    assert str(2**40 + 1) in text
    assert 1 <= len(caught.value.fields["holders"]) <= 10
    assert caught.value.fields["pool"] == name
    for size, blocks, _ in caught.value.fields["holders"]:
        assert (size, blocks) == (1000, 1)
    assert text.rstrip()[-1] not in ",;:(", "it ends with a sentence"
    sites.clear()


# -- G. growth and trim -----------------------------------------------------------------------------------------------

LAG = 50  # rounds by which the second stream is behind
Declare = Callable[[Scene, sp.Buffer, Any], None]


def by_stream(sc: Scene, block: sp.Buffer, user: Any) -> None:
    block.record_stream(user)


def by_event(sc: Scene, block: sp.Buffer, user: Any) -> None:
    block.record_event(user.record())


def run_ahead(sc: Scene, pool: sp.Pool, size: int, rounds: int, user: Any, declare: Declare, *, later: bool) -> int:
    """Allocate, use elsewhere, declare and free, far ahead of that stream; give the most bytes that were reserved.

    The gated work is the use itself, or, with `later`, comes after it and has nothing to do with the block.
    """
    home = sc.stream(pool)
    behind: deque[Busy] = deque()
    scratch = pool.allocate(256, stream=user)
    for _ in range(rounds):
        block = pool.allocate(size, stream=home)
        user.wait(home)
        if later:
            sc.use(user, block)
        else:
            behind.append(sc.busy(user, block))
        declare(sc, block, user)
        if later:
            behind.append(sc.busy(user, scratch))
        block.close(home)
        del block
        if len(behind) > LAG:
            sc.open(behind.popleft())
        else:
            sp.sim.settle()
    peak: int = pool.stats().reserved_peak
    sc.open()
    scratch.close(user)
    sp.sim.settle()
    sc.assert_no_race()
    return peak


@pytest.mark.parametrize("size", [64 * KIB, MIB, 3 * MIB])
@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("later", [False, True])
def test_case_33_memory_used_on_a_stream_that_lags_grows_with_the_lag_and_not_with_the_rounds(
    sc: Scene, size: int, lasting: bool, later: bool
) -> None:
    """pytorch/pytorch#147168, pytorch/torchtitan#735: memory piled up when the host ran far ahead."""
    peaks = []
    for rounds in (2 * LAG, 8 * LAG):
        pool = sc.pool()
        user = sc.stream(pool, lasting=lasting)
        peaks.append(run_ahead(sc, pool, size, rounds, user, by_stream, later=later))
        assert pool.audit() == ""
    assert peaks[0] <= 3 * LAG // 2 * size + 4 * MIB
    assert peaks[1] <= peaks[0] + 2 * size + 2 * MIB


@pytest.mark.parametrize("size", [MIB, 3 * MIB, 9 * MIB])
@pytest.mark.parametrize("lasting", [True, False])
def test_case_33_a_precise_event_holds_a_block_for_its_own_work_and_not_for_what_comes_later(
    sc: Scene, size: int, lasting: bool
) -> None:
    """pytorch/pytorch#147168: the event recorded at the free covered later, unrelated work on that stream."""
    for declare in (by_event, by_stream):
        pool = sc.pool()
        user, home = sc.stream(pool, lasting=lasting), sc.stream(pool)
        scratch = pool.allocate(256, stream=user)
        block = pool.allocate(size, stream=home)
        user.wait(home)
        sc.use(user, block)
        declare(sc, block, user)
        sp.sim.settle()  # that work is done
        later = sc.busy(user, scratch)  # and this, which has nothing to do with the block, is not
        work = Busy(user, block.handle, size, None)
        block.close(home)
        del block
        held = [pool.allocate(size, stream=home) for _ in range(3)]
        if declare is by_event:
            assert touched(held, work), "its own work was done before the free"
        else:
            assert not touched(held, work), "control: by stream it waits for all that was queued before the free"
        sc.open(later)
        pool.allocate(0, stream=user).close(user)
        sp.sim.settle()
        held += [pool.allocate(size, stream=home) for _ in range(3)]
        assert touched(held, work)
        for other in held:
            sc.use(home, other)
        sp.sim.settle()
        sc.assert_no_race()


@pytest.mark.parametrize("full", ["limit", "device"])
@pytest.mark.parametrize("size", [300 * KIB, 3 * MIB])
def test_case_33_at_the_limit_the_host_waits_for_the_lagging_stream_and_nothing_fails(full: str, size: int) -> None:
    """pytorch/pytorch#147168: the way out is to wait, not to fail."""
    room = 20 * size // (2 * MIB) * 2 * MIB + 4 * MIB
    with scene(seed=None, memory=GIB if full == "limit" else room) as sc:
        pool = sc.pool(limit=room if full == "limit" else 0, wait_timeout=60)
        home, user = sc.stream(pool), sc.stream(pool)
        gates: deque[Any] = deque()
        over = threading.Event()

        def lag() -> None:  # opens one gate after the other, as far behind as memory allows
            while not over.is_set() or gates:
                if gates and (len(gates) > LAG or over.is_set() or pool.stats().pending > room // 2):
                    gates.popleft().open()
                else:
                    over.wait(0.0005)

        thread = threading.Thread(target=lag)
        thread.start()
        try:
            for _ in range(4 * LAG):
                block = pool.allocate(size, stream=home)
                user.wait(home)
                gate = sp.sim.Gate()
                user.launch(writes=[block], gate=gate)
                block.record_stream(user)
                block.close(home)
                gates.append(gate)
                del block
        finally:
            over.set()
            thread.join()
        sc.device.sync()
        stats = pool.stats()
        assert (stats.out_of_memory, stats.live_blocks) == (0, 0)
        assert sc.device.used_memory <= room
        sc.assert_no_race()
        assert pool.audit() == ""


@KINDS
@MODES
@pytest.mark.parametrize("size", [4 * KIB, 32 * KIB, MIB])
def test_case_35_one_live_piece_pins_little_and_without_it_the_driver_has_everything_back(
    sc: Scene, kind: str, mode: str, size: int
) -> None:
    """cupy/cupy#4171, microsoft/onnxruntime#22297, rapidsai/rmm#144: one live piece pinned all, and nobody said so."""
    pool = sc.pool(kind, mode, quarantine_bytes=0)
    s = sc.stream(pool)
    blocks = [pool.allocate(size, stream=s) for _ in range(64)]
    works = [sc.busy(s, block) for block in blocks[::16]]
    kept = blocks.pop(37)
    while blocks:
        blocks.pop().close(s)
    before = pool.stats()
    if kind == "device":  # memory in one piece goes back only when the device is idle
        held = pool.trim()
        assert held["pending"] >= 63 * size
        assert held["pinned_by_live"] >= size
        assert held["released"] + held["reserved"] == before.reserved
        assert sc.device.used_memory == held["reserved"]
    sc.open(*works)
    pool.check()
    trimmed = pool.trim()
    assert (trimmed["pending"], pool.stats().live_blocks) == (0, 1)
    assert size <= trimmed["pinned_by_live"] == trimmed["reserved"]
    if kind == "device":
        assert trimmed["reserved"] <= 4 * MIB, "the one or two pieces it lies in, and no more"
    kept.close(s)
    sp.sim.settle()
    pool.check()
    last = pool.trim()
    assert (last["reserved"], last["pinned_by_live"], last["pending"]) == (0, 0, 0)
    assert becomes(lambda: (pool.stats().reserved, sc.device.used_memory), (0, 0))
    assert pool.audit() == ""


# -- N. pinned memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pinned", "managed"])
@pytest.mark.parametrize("held_by", ["its own stream", "record_stream", "record_event"])
def test_case_54_a_source_that_was_dropped_is_held_for_the_copy_until_that_is_done(
    sc: Scene, kind: str, held_by: str
) -> None:
    """cupy/cupy#8789 (fix #8845), LMCache/LMCache#4830: nobody held it for the copy; the pool is full, too."""
    size = 64 * KIB
    pool, device_pool = sc.pool(kind, limit=2 * MIB, wait_timeout=0.01), sc.pool()
    s, home = sc.stream(pool), sc.stream(pool)
    device_pool.register_stream(s)
    target = device_pool.allocate(size, stream=s)
    receiver = s if held_by == "its own stream" else home
    source = pool.allocate(size, stream=receiver)
    source.numpy()[:] = 7
    place = source.handle
    gate = sp.sim.Gate()
    s.launch(gate=gate)
    source.copy_to(target, stream=s)
    if held_by == "record_stream":
        source.record_stream(s)
    elif held_by == "record_event":
        source.record_event(s.record())
    del source
    gc.collect()
    home.sync()  # that the caller waits for something else is no protection, and needs none
    others, error = fill_up(pool, size, receiver)
    assert error.fields["reason"] == "pending"
    assert place not in {other.handle for other in others}
    for other in others:
        other.numpy()[:] = 9
    gate.open()
    s.sync()
    assert (target.numpy() == 7).all()
    others.append(pool.allocate(size, stream=receiver))
    assert others[-1].handle == place, "now it is there"
    sc.assert_no_race()
