"""R23: no call of the pool makes a capture invalid. What a capture is given: tests/test_graphs.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scene import KIB, MIB, Scene, scene

import streampool as sp

MODES = pytest.mark.parametrize("mode", ["production", "debug"])
KINDS = pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
SIZES = pytest.mark.parametrize("size", [0, 4 * KIB, 3 * MIB])


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


def calls_on(pool: sp.Pool, stream: Any, block: sp.Buffer, pointer: int, size: int) -> list[Callable[[], object]]:
    """Every call that names a stream."""
    return [
        lambda: pool.allocate(size, stream=stream),
        lambda: pool.allocate_raw(size, stream=stream, alignment=4096),
        lambda: block.record_stream(stream),
        lambda: pool.record_stream_raw(pointer, stream),
        lambda: block.close(stream),
        lambda: pool.free_raw(pointer, stream=stream),
    ]


@KINDS
@MODES
@SIZES
@pytest.mark.parametrize("found", ["by the check", "declared"])
def test_a_capturing_stream_is_served_by_every_call_and_its_capture_stays_valid(
    sc: Scene, kind: str, mode: str, size: int, found: str
) -> None:
    """pytorch/pytorch#159594, NVIDIA/cuopt#1748: growth or recovery during capture invalidated it."""
    pool = sc.pool(kind, mode)
    s = sc.stream(pool, lasting=found == "declared")
    other = sc.stream(pool)
    block, pointer = pool.allocate(size, stream=other), pool.allocate_raw(size, stream=other)
    if found == "declared":
        pool.begin_capturing(s)
    s.begin_capture()
    sc.use(s, other_memory(sc, pool, other))
    with pytest.raises(sp.CaptureError, match=r"captur.*still valid"):
        pool.register_stream(s)
    kept = []
    for call in calls_on(pool, s, block, pointer, size):
        kept.append(call())
        assert s.is_capturing
    with pytest.raises(ValueError, match="closed"):
        block.record_stream(s)
    assert block.is_closed
    graph = s.end_capture()
    assert graph is not None, "nothing made it invalid"
    if found == "declared":
        pool.end_capturing(s)
    # The control, pytorch/pytorch#175015: when the capture is over all goes on as usual.
    block, pointer = pool.allocate(size, stream=s), pool.allocate_raw(size, stream=s)
    for call in calls_on(pool, s, block, pointer, size):
        call()
    pool.register_stream(s)
    assert pool.audit() == ""
    sc.assert_no_race()


def other_memory(sc: Scene, pool: sp.Pool, stream: Any) -> sp.Buffer:
    """Give a block for captured work, which is never run."""
    return pool.allocate(256, stream=stream)


@MODES
@pytest.mark.parametrize("how", ["declared", "seen", "undeclared, without context events"])
@pytest.mark.parametrize("blocking", [True, False])
def test_work_of_the_pool_beside_a_capture_leaves_it_valid(mode: str, how: str, blocking: bool) -> None:
    """pytorch/pytorch#159594: another thread's or stream's growth, trim, waits and errors while somebody captures."""
    declared = how == "declared"
    with scene(memory="96MiB") as sc:
        recover = how != "undeclared, without context events"
        pool = sc.pool(mode=mode, limit=64 * MIB, wait_timeout=0.01, quarantine_bytes=MIB, recover_stranded=recover)
        captured = sc.device.create_stream(nonblocking=not blocking)
        if declared:
            pool.register_stream(captured)
            old = pool.allocate(5 * MIB, stream=captured)
            old.close(captured)  # a mark on the stream that captures
        lasting, raw, gone = sc.stream(pool), sc.stream(), sc.stream()
        legacy, per_thread = sc.device.default_stream, sc.device.per_thread_default_stream
        before = [pool.allocate(2 * MIB, stream=stream) for stream in (lasting, raw, gone, legacy)]
        if declared:
            pool.begin_capturing(captured)
        captured.begin_capture()
        captured.launch(label="captured")
        if how == "seen":
            pool.allocate(1, stream=captured).close(captured)

        gone_block = before[2]
        gone_block.close(gone)
        gone.close()
        for stream in (lasting, raw, per_thread):
            for size in (1, 4 * KIB, 700 * KIB, 9 * MIB):
                block = pool.allocate(size, stream=stream)
                block.record_stream(lasting)
                sc.use(stream, block)
                with contextlib.suppress(sp.CaptureError):  # events are refused while a capture is known
                    block.record_event(stream.record())
                block.close(stream)
        work = sc.busy(lasting, before[0])
        before[0].close(lasting)
        with pytest.raises(sp.OutOfMemoryError):
            pool.allocate(63 * MIB, stream=raw)
        sc.open(work)
        pool.trim()
        pool.check(timeout=0.01)
        pool.stats()
        pool.reserve(20 * MIB)
        pool.leaks()
        before.pop()  # implicitly, on the legacy stream
        pool.trim()
        if not blocking:
            pool.allocate(4 * KIB, stream=legacy).close(legacy)

        assert captured.is_capturing
        assert captured.end_capture(), "no call of the pool invalidates a capture"
        if declared:
            pool.end_capturing(captured)
        assert pool.audit() == ""
        sp.sim.settle()
        pool.allocate(5 * MIB, stream=captured).close(captured)
        sc.assert_no_race()


@MODES
@pytest.mark.parametrize("known", [True, False])
def test_the_legacy_stream_beside_a_blocking_capture_is_refused_or_served_but_never_breaks_it(
    sc: Scene, mode: str, known: bool
) -> None:
    """Beside a blocking stream's capture the legacy stream answers 906, and work on it would lose the capture."""
    pool = sc.pool(mode=mode)
    legacy = sc.device.default_stream
    if known:  # the pool knows the legacy stream before
        pool.allocate(4 * KIB, stream=legacy).close(legacy)
    blocking = sc.device.create_stream(nonblocking=False)
    blocking.begin_capture()
    for size in (4 * KIB, 3 * MIB):
        with contextlib.suppress(sp.CaptureError):
            pool.allocate(size, stream=legacy).close(legacy)
    pool.trim()
    pool.check(timeout=0)
    assert blocking.end_capture()
    pool.allocate(4 * KIB, stream=legacy).close(legacy)
    assert pool.audit() == ""


def test_an_event_that_a_capture_recorded_is_refused_and_the_capture_stays_valid(sc: Scene) -> None:
    pool = sc.pool()
    s, t = sc.stream(), sc.stream(pool)
    block = pool.allocate(4 * KIB, stream=t)
    with pool.capturing(s):
        s.begin_capture()
        event = s.record()
        with pytest.raises(sp.CaptureError, match="captur"):
            block.record_event(event)
        still_valid = s.end_capture()
    block.close(t)
    assert pool.audit() == ""
    assert still_valid


@pytest.mark.parametrize("found", ["by the check", "declared"])
@pytest.mark.parametrize("call", ["copy_to", "copy_from", "__dlpack__"])
def test_what_has_the_host_wait_for_a_capturing_stream_is_refused_and_the_capture_stays_valid(
    sc: Scene, found: str, call: str
) -> None:
    """An event that a capture recorded, asked whether it is done, would end the capture (907)."""
    pool = sc.pool()
    s = sc.stream(pool, lasting=found == "declared")
    block = pool.allocate(4 * KIB, stream=s)
    given = () if call == "__dlpack__" else (bytearray(4 * KIB),)
    with pool.capturing(s) if found == "declared" else contextlib.nullcontext():
        s.begin_capture()
        with pytest.raises(sp.CaptureError, match=rf"{call}: .*capturing.*still valid"):
            getattr(block, call)(*given)
        assert s.is_capturing
        assert s.end_capture()
    getattr(block, call)(*given)
    block.close(s)
    assert pool.audit() == ""


def test_the_host_does_not_wait_for_the_legacy_stream_beside_a_blocking_capture(sc: Scene) -> None:
    pool = sc.pool()
    legacy = sc.device.default_stream
    block = pool.allocate(4 * KIB, stream=legacy)
    blocking = sc.device.create_stream(nonblocking=False)
    blocking.begin_capture()
    with pytest.raises(sp.CaptureError, match=r"legacy.*still valid"):
        block.copy_to(bytearray(4 * KIB))
    assert blocking.end_capture()
    block.copy_to(bytearray(4 * KIB))
    block.close(legacy)


@MODES
def test_memory_marked_before_a_capture_waits_for_its_end_and_is_then_reused(mode: str) -> None:
    with scene() as sc:
        pool = sc.pool(mode=mode, limit=8 * MIB, wait_timeout=0.01, quarantine_bytes=0)
        s, t = sc.stream(pool), sc.stream(pool)
        block = pool.allocate(5 * MIB, stream=s)
        work = sc.busy(s, block)
        block.close(s)
        with pool.capturing(s):
            s.begin_capture()
            with pytest.raises(sp.OutOfMemoryError) as caught:
                pool.allocate(4 * MIB, stream=t)  # needs it, and may neither fence nor wait for a stream that captures
            assert caught.value.fields["reason"] in ("pending", "capture")
            assert s.end_capture()
        sc.open(work)
        again = pool.allocate(4 * MIB, stream=t)
        sc.use(t, again)
        sp.sim.settle()
        sc.assert_no_race()


def test_an_undeclared_capture_that_ended_is_forgotten(sc: Scene) -> None:
    """pytorch/pytorch#175015: a pool wrongly stayed in its mode for captures."""
    pool = sc.pool()
    raw, lasting = sc.stream(), sc.stream(pool)
    raw.begin_capture()
    pool.allocate(1, stream=raw).close(raw)
    graph = raw.end_capture()
    assert graph is not None
    pool.allocate(1, stream=raw).close(raw)
    pool.free_raw(pool.allocate_raw(1, stream=lasting), stream=lasting)
    calls = sc.device.calls()
    for _ in range(100):
        pool.free_raw(pool.allocate_raw(1, stream=lasting), stream=lasting)
    assert sc.device.calls() == calls, "lasting streams are fast again: no driver call at all"
    assert pool.stats().context_events == 0


def test_a_capture_that_was_not_declared_cannot_be_ended() -> None:
    """Without this the count of open captures went below none, and every later call took the stream for capturing."""
    with scene() as sc:
        pool, s = sc.pool(), sc.stream()
        with pytest.raises(sp.CaptureError, match="begin_capturing comes before"):
            pool.end_capturing(s)
        with pool.capturing(s):
            pass
        pool.allocate(4096, stream=s).close(s)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupt_while_a_capture_is_ended_reaches_the_caller_and_the_capture_is_ended(
    sc: Scene, raised: type[BaseException]
) -> None:
    pool, s = sc.pool(), sc.stream()

    class Stream:
        error: BaseException | None = None

        def __cuda_stream__(self) -> tuple[int, int]:
            if self.error is not None:
                raise self.error
            version, handle = s.__cuda_stream__()
            return version, handle

    stream = Stream()
    pool.begin_capturing(stream)
    stream.error = raised()
    # A stream's own error, as that of a closed one, is none of the caller's.
    with contextlib.nullcontext() if raised is RuntimeError else pytest.raises(raised):
        pool.end_capturing(stream)
    with pytest.raises(sp.CaptureError, match="begin_capturing comes before"):
        pool.end_capturing(s)


# -- between a question and what follows ------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["event_create", "event_record"])
@pytest.mark.parametrize(
    "call",
    [
        lambda block: block.copy_to(bytearray(block.size)),
        lambda block: block.copy_from(bytes(block.size)),
        lambda block: block.__dlpack__(),
    ],
    ids=["copy_to", "copy_from", "dlpack"],
)
def test_a_capture_that_begins_just_after_its_stream_was_asked_is_refused_and_stays_valid(
    sc: Scene, call: Callable[[sp.Buffer], object], asked: str
) -> None:
    """A record that falls into a capture is part of it: a question about its event would end the capture."""
    pool = sc.pool()
    s = sc.stream(pool)
    block = pool.allocate(64, stream=s)
    sc.use(s, block)
    events = sc.device.live_events
    sc.device.before_call(asked, s.begin_capture)
    with pytest.raises(sp.CaptureError, match=r"is capturing a graph.*still valid"):
        call(block)
    assert s.is_capturing
    assert sc.device.live_events == events
    assert s.end_capture() is not None
    call(block)
    sc.assert_no_race()


def test_what_runs_inside_a_driver_call_runs_once_and_its_error_is_nobodys(
    sc: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", raised.append)
    ran: list[int] = []
    s = sc.stream()
    sc.device.before_call("event_record", lambda: ran.append(1))
    sc.device.before_call("event_record", lambda: ran.append(1 // 0))
    for _ in range(3):
        s.record()
    assert ran == [1]
    assert [type(one.exc_value) for one in raised] == [ZeroDivisionError]
    with pytest.raises(TypeError, match="something to call"):
        sc.device.before_call("event_record", None)
    with pytest.raises(ValueError, match=r"no driver call is named 'record'; dev\.calls\(\) lists them"):
        sc.device.before_call("record", int)


# -- what is declared -------------------------------------------------------------------------------------------------


def test_a_capture_is_declared_of_a_stream_that_can_capture(sc: Scene) -> None:
    pool = sc.pool()
    s, gone = sc.stream(), sc.stream()
    handle = gone.handle
    gone.close()
    lookups = pool.stats().stream_lookups
    with pytest.raises(sp.StreamError, match=r"cannot be used: stream_is_capturing: SIM_DEAD_HANDLE"):
        pool.begin_capturing(handle)
    for legacy in (0, 1, sc.device.default_stream):
        with pytest.raises(sp.StreamError, match="the legacy default stream captures no graph"):
            pool.begin_capturing(legacy)
    for call in (pool.begin_capturing, pool.end_capturing):
        with pytest.raises(TypeError, match=r"stream must be an int handle or an object with __cuda_stream__"):
            call(None)
    with pytest.raises(sp.CaptureError, match="no capture was declared"):
        pool.end_capturing(s)  # nothing of it counted
    assert pool.stats().stream_lookups == lookups
    assert len(sp.sim.traps()) == 1
    with pool.capturing(sc.device.per_thread_default_stream):
        pass


def test_the_simulated_device_names_the_call_that_a_capture_failed_in(sc: Scene) -> None:
    s, t = sc.stream(), sc.stream()
    s.begin_capture()
    with pytest.raises(sp.CaptureError, match=r"^stream_begin_capture: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        s.begin_capture()
    with pytest.raises(sp.DriverError, match=r"^stream_end_capture: CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"):
        t.end_capture()
    assert s.end_capture() is not None
    sc.device.fail_call("stream_begin_capture", code="failed")
    with pytest.raises(sp.DriverError, match=r"^stream_begin_capture: "):
        t.begin_capture()
    t.begin_capture()
    graph = t.end_capture()
    assert graph is not None
    s.begin_capture()
    with pytest.raises(sp.CaptureError, match=r"^graph_launch: "):
        graph.launch(s)


def test_a_block_of_a_graph_is_known_by_its_captures_number(sc: Scene) -> None:
    pool = sc.pool(mode="debug", limit=8 * MIB, wait_timeout=0)
    s = sc.stream(pool)
    with pool.capturing(s):
        s.begin_capture()
        block = pool.allocate(100, stream=s)
        facts = block.facts()
        with pytest.raises(sp.OutOfMemoryError, match="capture 1") as caught:
            pool.allocate(16 * MIB, stream=s)
        graph = s.end_capture()
    assert graph is not None
    assert (facts["stream"], facts["capture"]) == (0, 1)
    assert (caught.value.fields["stream"], caught.value.fields["capture"]) == (0, 1)
    other = pool.allocate(100, stream=s).facts()
    assert (other["stream"], other["capture"]) == (s.id, 0)
