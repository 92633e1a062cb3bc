"""The simulated device's Python face: configuration, streams, events, gated work, queued functions, failures."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from streampool import _core, sim

Configure = Callable[..., sim.Device]


@pytest.fixture
def machine() -> Iterator[Configure]:
    """Give a function that makes a fresh machine and gives its first device."""

    def make(**options: object) -> sim.Device:
        sim.reset()
        sim.configure(**options)  # type: ignore[arg-type]
        return sim.Device()

    yield make
    sim.reset()


@pytest.fixture(params=["threads", "seeded"])
def device(machine: Configure, request: pytest.FixtureRequest) -> sim.Device:
    return machine(scheduler=request.param)


# -- configuration ----------------------------------------------------------------------------------------------


def test_the_machine_has_one_untouched_device_of_80_gib_by_default(machine: Configure) -> None:
    device = machine()
    assert sim.device_count() == 1
    assert device.name == "sim:0"
    assert device.memory_info() == (80 << 30, 80 << 30)


def test_configuring_after_the_first_use_raises_and_a_reset_allows_it(machine: Configure) -> None:
    device = machine(devices=2, memory="1GiB", seed=3)
    assert sim.options() == sim.MachineOptions(devices=2, memory=1 << 30, seed=3)
    assert sim.is_in_use()
    with pytest.raises(RuntimeError, match="in use already"):
        sim.configure(devices=1)
    sim.reset()
    with pytest.raises(_core.DriverError, match="CONTEXT_IS_DESTROYED"):
        device.memory_info()
    sim.configure(devices=1)
    with pytest.raises(_core.DriverNotFoundError, match="sim:1"):
        sim.Device(1)


@pytest.mark.parametrize(
    "options",
    [
        {"devices": -1},
        {"devices": 65},
        {"memory": 1},
        {"memory": "2TiB"},
        {"scheduler": "fair"},
        {"memory": "lots"},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(machine: Configure, options: dict[str, object]) -> None:
    sim.reset()
    with pytest.raises(ValueError, match=r".+"):
        sim.configure(**options)  # type: ignore[arg-type]


def test_devices_compare_by_what_they_are(machine: Configure) -> None:
    device = machine(devices=2)
    assert device == sim.Device(0)
    assert device != sim.Device(1)
    assert len({device, sim.Device(0), sim.Device(1)}) == 2
    assert int(sim.Device(1)) == 1


def test_the_current_device_is_a_threads_own(machine: Configure) -> None:
    machine(devices=2)
    sim.Device(1).set_current()
    try:
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(sim.Device().device_id))
        thread.start()
        thread.join()
        assert seen == [0]
        assert sim.Device().device_id == 1
        assert sim.default_stream().device.device_id == 1
    finally:
        sim.Device(0).set_current()


def test_the_clock_can_be_moved_and_is_virtual_when_seeded(machine: Configure) -> None:
    machine(scheduler="seeded")
    assert sim.clock.now() == 0
    sim.clock.advance(3600)
    assert sim.clock.now() == 3600
    with pytest.raises(ValueError, match="0 or more"):
        sim.clock.advance(-1)


# -- streams and events -----------------------------------------------------------------------------------------


def test_work_waits_for_its_gate_and_the_event_for_the_work(device: sim.Device) -> None:
    s = device.create_stream()
    ran: list[int] = []
    with sim.Gate() as gate:
        s.launch(lambda: ran.append(1), gate=gate)
        event = s.record()
        device.settle()
        assert not event.is_done
        assert not s.is_done
        assert device.pending_work == 2
        assert not ran
    s.sync()
    assert ran == [1]
    assert event.is_done
    assert s.is_done


def test_a_stream_waits_for_an_event_or_for_another_stream(device: sim.Device) -> None:
    s, t, u = (device.create_stream() for _ in range(3))
    order: list[str] = []
    gate = sim.Gate()
    s.launch(lambda: order.append("s"), gate=gate)
    t.wait(s.record())
    t.launch(lambda: order.append("t"))
    u.wait(t)
    u.launch(lambda: order.append("u"))
    device.settle()
    assert not order
    gate.open()
    device.sync()
    assert order == ["s", "t", "u"]
    assert device.live_events == 0
    with pytest.raises(TypeError, match="waits for"):
        s.wait(3)  # type: ignore[arg-type]


def test_a_closed_stream_has_handle_0_and_refuses_everything(device: sim.Device) -> None:
    s = device.create_stream()
    handle = s.handle
    assert s.__cuda_stream__() == (0, handle)
    s.close()
    s.close()
    assert s.handle == 0
    assert s.is_closed
    assert "closed" in repr(s)
    for use in (s.__cuda_stream__, s.record, s.sync, s.launch, lambda: s.id, lambda: device.default_stream.wait(s)):
        with pytest.raises(_core.StreamError, match="closed"):
            use()
    assert device.create_stream().handle == handle


def test_dropping_the_last_reference_destroys_streams_and_events(device: sim.Device) -> None:
    s, event = device.create_stream(), device.create_event()
    assert (device.live_streams, device.live_events) == (1, 1)
    cycle = [s, event]
    cycle.append(cycle)  # type: ignore[arg-type]
    del s, event, cycle
    gc.collect()
    assert (device.live_streams, device.live_events) == (0, 0)
    assert not sim.traps()


def test_closing_a_wrapped_stream_leaves_the_owners_open(device: sim.Device) -> None:
    s = device.create_stream()
    wrapped, from_object = sim.Stream.from_handle(s.handle), device.create_stream(s)
    assert wrapped == from_object == s
    assert hash(wrapped) == hash(s)
    wrapped.close()
    assert wrapped != s
    assert s.id
    legacy = sim.Stream.from_handle(0)
    legacy.launch()
    assert legacy.id == device.default_stream.id
    assert legacy.id != device.per_thread_default_stream.id


def test_a_handle_that_is_used_after_its_stream_is_trapped(device: sim.Device) -> None:
    s = device.create_stream()
    stale = sim.Stream.from_handle(s.handle)
    s.close()
    with pytest.raises(_core.DriverError, match=r"stream_id: SIM_DEAD_HANDLE"):
        _ = stale.id
    (trap,) = sim.traps()
    assert trap.startswith("stream_id: stream handle 0x")
    assert not sim.traps()


def test_a_trap_can_end_the_process() -> None:
    script = (
        "from streampool import sim; sim.configure(abort_on_trap=True); d = sim.Device(); "
        "s = d.create_stream(); t = sim.Stream.from_handle(s.handle); s.close(); t.id"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT
    assert "stream handle 0x" in done.stderr


def test_blocking_streams_and_the_legacy_stream_wait_for_each_other(device: sim.Device) -> None:
    blocking, free = device.create_stream(nonblocking=False), device.create_stream(options=sim.StreamOptions())
    gate = sim.Gate()
    blocking.launch(gate=gate)
    events = [stream.record() for stream in (device.default_stream, device.per_thread_default_stream, free)]
    device.settle()
    assert [event.is_done for event in events] == [False, False, True]
    gate.open()
    device.settle()
    assert all(event.is_done for event in events)


def test_a_context_event_covers_destroyed_streams(device: sim.Device) -> None:
    s = device.create_stream()
    gate = sim.Gate()
    s.launch(gate=gate)
    s.close()
    event = device.record_context_event()
    device.settle()
    assert not event.is_done
    gate.open()
    event.sync()
    assert event.is_done


def test_a_capture_is_lost_to_a_call_that_it_does_not_allow(device: sim.Device) -> None:
    s = device.create_stream()
    s.begin_capture()
    s.launch()
    assert s.is_capturing
    assert s.end_capture()
    s.begin_capture()
    with pytest.raises(_core.CaptureError, match="900"):
        _ = s.id
    assert not s.end_capture()


# -- queued functions ----------------------------------------------------------------------------------------------


class Block:
    """Something with a handle and a size: host memory that the device can reach."""

    def __init__(self, size: int) -> None:
        self.array = np.zeros(size, np.uint8)
        self.handle, self.size = self.array.ctypes.data, size


def test_a_function_that_raises_is_heard_at_the_next_wait(device: sim.Device) -> None:
    s = device.create_stream()

    def broken() -> None:
        raise KeyError("lost")

    s.launch(broken)
    with pytest.raises(KeyError, match="lost") as caught:
        s.sync()
    assert caught.value.__notes__ == ["raised by queued work 'broken' on the simulated device"]
    s.sync()


def test_a_driver_call_inside_a_queued_function_is_trapped(device: sim.Device) -> None:
    s = device.create_stream()
    s.launch(lambda: s.record())
    with pytest.raises(_core.DriverError, match="NOT_PERMITTED"):
        s.sync()
    assert sim.traps() == ["event_create: called from inside a queued body"]


def test_a_stream_may_be_collected_inside_a_queued_function(device: sim.Device) -> None:
    s = device.create_stream()
    box = [device.create_stream()]
    s.launch(box.clear)
    s.sync()
    assert device.live_streams == 1
    assert not sim.traps()


def test_queued_functions_may_open_gates(device: sim.Device) -> None:
    s, t = device.create_stream(), device.create_stream()
    gate = sim.Gate()
    ran: list[str] = []
    t.launch(lambda: ran.append("t"), gate=gate)
    s.launch(gate.open)
    device.sync()
    assert ran == ["t"]


def test_functions_that_wait_for_each_other_run_concurrently(machine: Configure) -> None:
    device = machine()
    barrier = threading.Barrier(8, timeout=60)
    for _ in range(8):
        device.create_stream().launch(barrier.wait)
    device.sync()


def test_queued_functions_are_released_even_when_they_never_run(machine: Configure) -> None:
    import weakref

    class Token:
        pass

    device = machine()
    token = Token()
    watch = weakref.ref(token)
    device.create_stream().launch(lambda held=token: None, gate=sim.Gate())
    del token
    assert watch() is not None
    sim.reset()
    assert watch() is None


def test_work_on_memory_that_is_not_the_devices_makes_it_lost(device: sim.Device) -> None:
    s, block = device.create_stream(), Block(64)
    s.launch(lambda view: view.fill(1), writes=[block], label="stray")
    with pytest.raises(_core.DriverError, match="700"):
        s.sync()
    assert not block.array.any()
    assert "'stray'" in device.fault
    with pytest.raises(_core.DriverError, match="ILLEGAL_ADDRESS"):
        device.create_stream()


# -- waiting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["stream", "event", "device"])
def test_ctrl_c_ends_a_wait(machine: Configure, wait: str) -> None:
    device = machine()
    s = device.create_stream()
    gate = sim.Gate()
    s.launch(gate=gate)
    event = s.record()
    waits = {"stream": s.sync, "event": event.sync, "device": device.sync}

    def wait_and_be_interrupted() -> None:
        threading.Timer(0.1, _thread.interrupt_main).start()
        waits[wait]()

    with pytest.raises(KeyboardInterrupt):
        wait_and_be_interrupted()
    gate.open()
    s.sync()


def test_other_threads_run_while_one_waits(machine: Configure) -> None:
    device = machine()
    s, gate = device.create_stream(), sim.Gate()
    s.launch(gate=gate)
    threading.Timer(0.05, gate.open).start()
    s.sync()


def test_a_wait_that_can_never_end_is_an_error_when_seeded(machine: Configure) -> None:
    device = machine(scheduler="seeded")
    s = device.create_stream()
    s.launch(gate=sim.Gate())
    with pytest.raises(_core.DriverError, match="a gate is shut"):
        s.sync()


def test_a_seed_gives_one_interleaving(machine: Configure) -> None:
    def order_of(seed: int) -> str:
        device = machine(scheduler="seeded", seed=seed)
        order: list[str] = []
        streams = [device.create_stream() for _ in range(4)]
        for name, stream in zip("abcd", streams, strict=True):
            for _ in range(3):
                stream.launch(lambda name=name: order.append(name))
        while not all(stream.is_done for stream in streams):
            pass
        return "".join(order)

    orders = {seed: order_of(seed) for seed in range(6)}
    assert len(set(orders.values())) > 3
    assert orders == {seed: order_of(seed) for seed in orders}


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_call_fails_on_its_nth_use(device: sim.Device) -> None:
    device.fail_call("stream_create", n=2, times=2)
    device.create_stream()
    for _ in range(2):
        with pytest.raises(_core.DriverError, match=r"stream_create: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
            device.create_stream()
    device.create_stream()
    assert device.calls()["stream_create"] == 4
    device.fail_call("stream_create", code="failed")
    device.clear_failures()
    device.create_stream()


@pytest.mark.parametrize("bad", [{"name": "cudaMalloc"}, {"code": "tired"}, {"n": 0}, {"times": 0}])
def test_a_failure_that_makes_no_sense_is_refused(device: sim.Device, bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        device.fail_call(**({"name": "mem_create"} | bad))  # type: ignore[arg-type]


def test_a_device_can_be_lost_or_gone(device: sim.Device) -> None:
    s = device.create_stream()
    s.launch(gate=sim.Gate())
    device.set_gone()
    with pytest.raises(_core.DriverError, match="DEINITIALIZED"):
        s.sync()
    device.set_gone(False)
    device.set_lost(719)
    with pytest.raises(_core.DriverError, match="LAUNCH_FAILED"):
        s.sync()
    assert device.pending_work == 0


def test_a_device_may_lack_what_some_devices_lack(machine: Configure) -> None:
    device = machine(virtual_memory=False, managed_memory=False, context_events=False)
    with pytest.raises(_core.DriverError, match="NOT_SUPPORTED"):
        device.record_context_event()
    assert device.live_events == 0


def test_other_processes_memory_is_taken_away(device: sim.Device) -> None:
    device.set_occupied("79GiB")
    assert device.memory_info() == (1 << 30, 80 << 30)
    assert device.used_memory == 0


# -- the end of the process ------------------------------------------------------------------------------------------

ENDINGS = {
    "return": "",
    "exit": "sys.exit(5)",
    "exception": "raise RuntimeError('planted')",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_quietly_with_work_pending_and_running(ending: str) -> None:
    script = f"""
import sys, time
from streampool import sim
device = sim.Device()
streams = [device.create_stream() for _ in range(4)]
gate, event = sim.Gate(), streams[0].record()
def busy():
    for _ in range(10**9):
        sum(range(100))
for stream in streams[:3]:
    stream.launch(busy)
streams[3].launch(busy, gate=gate)
time.sleep(0.05)
{ENDINGS[ending]}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == {"return": 0, "exit": 5, "exception": 1}[ending]
    assert done.stderr.strip().splitlines()[-1:] == (["RuntimeError: planted"] if ending == "exception" else [])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_and_ends_quietly(machine: Configure) -> None:
    device = machine()
    s, gate = device.create_stream(), sim.Gate()
    s.launch(gate=gate)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            gate.open()
            s.close()
        except _core.DriverError as error:
            code = 0 if "DEINITIALIZED" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    gate.open()
    s.sync()


@pytest.mark.parametrize(
    ("use", "parameter"),
    [
        (lambda dev, s: s.launch(reads=5), "reads"),
        (lambda dev, s: s.launch(writes=[("a", 1)]), "writes"),
        (lambda dev, s: s.launch(gate=5), "gate"),
        (lambda dev, s: s.launch(fn="x"), "fn"),
        (lambda dev, s: s.record("x"), "event"),
        (lambda dev, s: dev.create_stream(obj="x"), "obj"),
        (lambda dev, s: dev.create_stream(nonblocking=1), "nonblocking"),
        (lambda dev, s: sim.Stream.from_handle("x"), "handle"),
        (lambda dev, s: sim.Stream.from_handle(True), "handle"),
        (lambda dev, s: sim.Stream.from_handle(5, device="sim:0"), "device"),
    ],
)
def test_arguments_that_make_no_sense_are_named(
    machine: Configure, use: Callable[[sim.Device, sim.Stream], object], parameter: str
) -> None:
    """A review of the arguments: AttributeErrors from inside, or nonsense taken for good."""
    device = machine()
    with pytest.raises(TypeError, match=rf"^{parameter} must be "):
        use(device, device.create_stream())
