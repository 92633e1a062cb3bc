"""The simulated device: a real asynchronous machine in host memory, under the names of ``cuda.core``.

Work is queued on streams and runs on worker threads (``scheduler="threads"``), or in an order that a seed decides
(``"seeded"``). Work declares what it reads and writes, and `Device.races` gives every pair of conflicting accesses that
nothing orders: it checks programs as well as the pool.

>>> import streampool as sp
>>> device = sp.Device("sim:0")
>>> s, gate = device.create_stream(), sp.sim.Gate()
>>> s.launch(lambda out: out.fill(1), writes=[buf], gate=gate)    # pending ...
>>> gate.open(); s.sync()                                         # ... and done

One machine serves the process. `configure` comes before its first use; `reset` ends it, for tests that need another.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from streampool import _core
from streampool._core import StreamError
from streampool._core import sim as _sim
from streampool._sim_graphs import Graph
from streampool._sim_races import Access, Frame, Race, RaceKind, take_races
from streampool._sizes import parse_size

__all__ = [
    "Access",
    "Device",
    "Event",
    "Frame",
    "Gate",
    "Graph",
    "MachineOptions",
    "Race",
    "RaceKind",
    "Scheduler",
    "Stream",
    "StreamOptions",
    "clock",
    "configure",
    "current_device",
    "default_stream",
    "device_count",
    "is_in_use",
    "options",
    "per_thread_default_stream",
    "races",
    "reset",
    "settle",
    "traps",
]

_LEGACY = 1
_PER_THREAD = 2
_STACK_DEPTH = 16

_current = threading.local()
_raised: list[tuple[str, BaseException]] = []  # by queued bodies; list operations are atomic


class Scheduler(StrEnum):
    """Who runs the queued work."""

    THREADS = "threads"
    SEEDED = "seeded"


class _HasRange(Protocol):
    @property
    def handle(self) -> int: ...
    @property
    def size(self) -> int: ...


Memory: TypeAlias = "_HasRange | tuple[int, int]"  # a buffer, or (address, bytes)


class _HasStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...


# -- the machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineOptions:
    """What the simulated machine is. Set with `configure`.

    Attributes
    ----------
    devices
        How many devices it has.
    memory, host_memory
        Bytes of memory of each device, and of pinned and managed memory together. Only what is touched is committed.
    scheduler
        ``"threads"``: worker threads run the streams concurrently. ``"seeded"``: work runs only when somebody polls,
        waits or settles, one piece at a time, in an order that `seed` decides; time is virtual, and a wait that can
        never end is an error.
    virtual_memory, managed_memory, context_events, driver_pools
        What the devices can do.
    check_races
        Whether accesses are checked for races.
    abort_on_trap
        The use of a destroyed handle ends the process, as on hardware. Otherwise the call fails and `traps` lists it.
    """

    devices: int = 1
    memory: int = 80 << 30
    host_memory: int = 1 << 40
    scheduler: Scheduler = Scheduler.THREADS
    seed: int = 0
    virtual_memory: bool = True
    managed_memory: bool = True
    context_events: bool = True
    driver_pools: bool = True
    check_races: bool = True
    abort_on_trap: bool = False


def configure(
    *,
    devices: int = 1,
    memory: int | str = "80GiB",
    host_memory: int | str = "1TiB",
    scheduler: str = "threads",
    seed: int = 0,
    virtual_memory: bool = True,
    managed_memory: bool = True,
    context_events: bool = True,
    driver_pools: bool = True,
    check_races: bool = True,
    abort_on_trap: bool = False,
) -> None:
    """Say what the simulated machine is, before its first use. See `MachineOptions`; sizes may be text as ``"2GiB"``.

    Raises
    ------
    RuntimeError
        The machine is in use already; `reset` ends it.
    ValueError, TypeError
        A value makes no sense.
    """
    _sim.configure(
        devices=devices,
        memory=parse_size(memory),
        host_memory=parse_size(host_memory),
        scheduler=str(scheduler),
        seed=seed,
        virtual_memory=virtual_memory,
        managed_memory=managed_memory,
        context_events=context_events,
        driver_pools=driver_pools,
        check_races=check_races,
        abort_on_trap=abort_on_trap,
    )


def options() -> MachineOptions:
    """Give what the machine is, or will be on first use."""
    values = _sim.config()
    return MachineOptions(**{**values, "scheduler": Scheduler(values["scheduler"])})


def reset() -> None:
    """End the machine and forget its configuration, so that `configure` may be called again. For tests.

    Pending work is dropped. Devices, streams and pools of the ended machine find it lost at their next call; memory
    that they hold stays readable.
    """
    _raised.clear()
    _sim.reset()


def is_in_use() -> bool:
    """Whether the machine has started, so that `configure` would raise."""
    return _sim.in_use()


def device_count() -> int:
    """Give how many devices the machine has."""
    return _sim.device_count()


def settle() -> None:
    """Run everything that can run: what is left waits for a shut gate. It orders nothing.

    Raises
    ------
    BaseException
        What a queued function raised, if one did since the last wait.
    """
    _sim.settle()
    _raise_from_bodies()


def traps() -> list[str]:
    """Give the uses of destroyed handles, and driver calls made inside queued functions, since the last call."""
    return _sim.traps()


class _Clock:
    """The clock of the simulated machine, from which ages, epochs and time-outs are read. In seconds."""

    def now(self) -> float:
        """Give seconds since the machine started."""
        return _sim.clock_now()

    def advance(self, seconds: float) -> None:
        """Let time pass without waiting: a finite number of seconds, 0 or more."""
        _sim.clock_advance(seconds)


clock = _Clock()


# -- gates ------------------------------------------------------------------------------------------------------------


class Gate:
    """Holds work back until it is opened. Opening is final. As a context manager it opens on exit."""

    def __init__(self) -> None:
        self._gate = _sim.Gate()

    def open(self) -> None:
        """Let the work go. May be called from anywhere, also from inside queued functions."""
        self._gate.open()

    @property
    def is_open(self) -> bool:
        """Whether it was opened."""
        return self._gate.is_open

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()

    def __repr__(self) -> str:
        return f"<Gate {'open' if self.is_open else 'shut'}>"


# -- events -----------------------------------------------------------------------------------------------------------


class Event:
    """A point in a stream's work. Made by `Stream.record` and `Device.create_event`."""

    def __init__(self, device: Device) -> None:
        self._handle = 0
        self._device = device
        self._handle = device._core.create_event()

    @property
    def handle(self) -> int:
        """The driver's handle; 0 when closed."""
        return self._handle

    @property
    def device(self) -> Device:
        """The device that it belongs to."""
        return self._device

    @property
    def is_closed(self) -> bool:
        """Whether it was destroyed."""
        return self._handle == 0

    @property
    def is_done(self) -> bool:
        """Whether the work it covers is done. An event that was never recorded is."""
        done = self._device._core.event_done(self._open())
        _raise_from_bodies()
        return done

    def sync(self) -> None:
        """Wait until the work it covers is done."""
        self._device._core.sync_event(self._open())
        _raise_from_bodies()

    def close(self) -> None:
        """Destroy it. Once closed, harmless."""
        handle, self._handle = self._handle, 0
        if handle:
            self._device._core.destroy_event(handle)

    def __del__(self) -> None:
        handle, self._handle = self._handle, 0
        if handle:
            self._device._core.drop_event(handle)

    def __repr__(self) -> str:
        return f"<Event {'closed' if self.is_closed else hex(self._handle)} of {self._device.name}>"

    def _open(self) -> int:
        if not self._handle:
            raise ValueError("the event is closed")
        return self._handle


# -- streams ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamOptions:
    """How to make a stream.

    Attributes
    ----------
    nonblocking
        The stream and the legacy default stream do not wait for each other.
    priority
        Accepted for `cuda.core`'s sake; the simulated device has none.
    """

    nonblocking: bool = True
    priority: int | None = None


class Stream:
    """A queue of work. Made by `Device.create_stream`; destroyed by `close`, or with its last reference."""

    def __init__(self, device: Device, handle: int, *, owns: bool) -> None:
        self._device = device
        self._handle = handle
        self._owns = owns
        self._closed = False
        self._hash = hash((device, handle))

    @staticmethod
    def from_handle(handle: int, *, device: Device | None = None) -> Stream:
        """Wrap a handle that somebody else owns, on `device` (the current one)."""
        if device is not None:
            _must_be(Device, "device", device)
        if isinstance(handle, bool) or not hasattr(handle, "__index__"):
            raise TypeError(f"handle must be an int, not {handle!r} of type {type(handle).__name__}")
        return Stream(device or current_device(), operator.index(handle), owns=False)

    @property
    def handle(self) -> int:
        """The driver's handle; 0 when closed, as with `cuda.core` (0 also names the legacy stream)."""
        return self._handle

    @property
    def id(self) -> int:
        """The driver's id, unique for the life of the machine. Asking a capturing stream loses its capture."""
        return self._device._core.stream_id(self._open())

    @property
    def device(self) -> Device:
        """The device that it belongs to."""
        return self._device

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def is_owner(self) -> bool:
        """Whether closing it destroys the driver's stream."""
        return self._owns

    @property
    def is_done(self) -> bool:
        """Whether all work queued so far is done."""
        done = self._device._core.stream_done(self._open())
        _raise_from_bodies()
        return done

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._open()

    def record(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, after all work queued so far."""
        handle = self._open()
        if event is None:
            event = Event(self._device)
        self._device._core.record_event(_must_be(Event, "event", event)._open(), handle)
        return event

    def wait(self, event_or_stream: Event | _HasStream) -> None:
        """Let all work queued from here on wait for an event, or for the work so far of another stream."""
        handle = self._open()
        if isinstance(event_or_stream, Event):
            self._device._core.wait_event(handle, event_or_stream._open())
            return
        if isinstance(event_or_stream, Stream):
            other = event_or_stream
        elif hasattr(event_or_stream, "__cuda_stream__"):
            other = Stream.from_handle(event_or_stream.__cuda_stream__()[1], device=self._device)
        else:
            raise TypeError(f"a stream waits for an Event or a stream, not {type(event_or_stream).__name__}")
        event = other.record()
        self._device._core.wait_event(handle, event._open())
        event.close()

    def sync(self) -> None:
        """Wait until all work queued so far is done."""
        self._device._core.sync_stream(self._open())
        _raise_from_bodies()

    def close(self) -> None:
        """Destroy the stream, if this object owns it; its pending work still completes. Once closed, harmless."""
        if self._closed:
            return
        handle, self._handle = self._handle, 0
        self._closed = True
        if self._owns:
            self._device._core.destroy_stream(handle)

    def launch(
        self,
        fn: Callable[..., object] | None = None,
        *,
        reads: Iterable[Memory] = (),
        writes: Iterable[Memory] = (),
        gate: Gate | None = None,
        label: str = "",
    ) -> None:
        """Queue work: what a kernel is, seen from outside.

        Parameters
        ----------
        fn
            Runs when the work runs, with a NumPy view (uint8) for each of `reads` (read-only) and then of `writes`,
            valid during the call. Driver calls inside it are trapped. What it raises comes out of the next wait or
            `settle`.
        reads, writes
            What the work touches: buffers, or (address, bytes). An address that is not mapped when the work runs makes
            the device lost, as on hardware.
        gate
            The work cannot run before this gate opens.
        label
            Names the work in reports.
        """
        read_ranges, write_ranges = _ranges("reads", reads), _ranges("writes", writes)
        if fn is not None and not callable(fn):
            raise TypeError(f"fn must be something to call, or None, not {fn!r} of type {type(fn).__name__}")
        if gate is not None:
            _must_be(Gate, "gate", gate)
        if label == "":
            label = getattr(fn, "__name__", "")
        self._device._core.launch(
            self._open(),
            None if fn is None else _Body(fn, label),
            read_ranges,
            write_ranges,
            None if gate is None else gate._gate,
            label,
            _core.capture_stack(_STACK_DEPTH),
        )

    @property
    def is_capturing(self) -> bool:
        """Whether the stream captures into a graph. Asking harms nothing."""
        return self._device._core.capture_state(self._open())[0]

    def begin_capture(self) -> None:
        """Capture the work queued from here on into a graph instead of running it."""
        self._device._core.begin_capture(self._open())

    def end_capture(self) -> Graph | None:
        """End the capture that began here and give its graph. None: something invalidated it on the way."""
        graph = self._device._core.end_capture(self._open())
        return None if graph is None else Graph(graph)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Stream) or self._closed or other._closed:
            return NotImplemented
        return self._device == other._device and self._handle == other._handle

    def __hash__(self) -> int:
        return self._hash

    def __del__(self) -> None:
        if self._owns and not self._closed:
            self._closed = True
            self._device._core.drop_stream(self._handle)

    def __repr__(self) -> str:
        return f"<Stream {'closed' if self._closed else hex(self._handle)} of {self._device.name}>"

    def _open(self) -> int:
        if self._closed:
            raise StreamError("the stream is closed")
        return self._handle


def default_stream(device: Device | None = None) -> Stream:
    """Give the legacy default stream of `device` (the current one): blocking streams and it wait for each other."""
    return Stream(device or current_device(), _LEGACY, owns=False)


def per_thread_default_stream(device: Device | None = None) -> Stream:
    """Give the per-thread default stream: one handle, and in each thread another stream."""
    return Stream(device or current_device(), _PER_THREAD, owns=False)


# -- devices ----------------------------------------------------------------------------------------------------------


class Device:
    """One simulated device.

    Parameters
    ----------
    ordinal
        Which one; None: the calling thread's current one.

    Raises
    ------
    DriverNotFoundError
        There is no such device.
    """

    def __init__(self, ordinal: int | None = None) -> None:
        if ordinal is None:
            ordinal = getattr(_current, "ordinal", 0)
        if isinstance(ordinal, int) and ordinal.bit_length() > 31:  # the core's ordinals are C's int
            raise _core.DriverNotFoundError(
                f"there is no device sim:{ordinal}: the simulated machine has {device_count()}"
            )
        self._core = _sim.device(ordinal)

    @property
    def driver(self) -> _core.Driver:
        """The native driver, as pools use it."""
        return self._core.driver

    @property
    def device_id(self) -> int:
        """The ordinal."""
        return self._core.ordinal

    @property
    def name(self) -> str:
        """``"sim:0"``."""
        return self._core.name

    def set_current(self) -> None:
        """Make it the calling thread's current device."""
        _current.ordinal = self.device_id

    def create_stream(self, obj: _HasStream | None = None, options: Any = None, *, nonblocking: bool = True) -> Stream:
        """Make a stream; with `obj`, wrap the stream of that object.

        Parameters
        ----------
        obj
            Anything with ``__cuda_stream__``, whose stream stays its own.
        options
            `StreamOptions`, or ``cuda.core.StreamOptions``.
        nonblocking
            Short for ``options=StreamOptions(nonblocking=...)``.
        """
        if obj is not None:
            if not hasattr(obj, "__cuda_stream__"):
                raise TypeError(f"obj must be an object with __cuda_stream__, not {obj!r} of type {type(obj).__name__}")
            return Stream(self, obj.__cuda_stream__()[1], owns=False)
        if options is not None:
            if not hasattr(options, "nonblocking"):
                raise TypeError(f"options must be StreamOptions, not {options!r} of type {type(options).__name__}")
            nonblocking = options.nonblocking is not False
        if not isinstance(nonblocking, bool):
            raise TypeError(
                f"nonblocking must be True or False, not {nonblocking!r} of type {type(nonblocking).__name__}"
            )
        return Stream(self, self._core.create_stream(not nonblocking, ""), owns=True)

    def create_event(self, options: object = None) -> Event:
        """Make an event; `options` is accepted for `cuda.core`'s sake."""
        return Event(self)

    @property
    def default_stream(self) -> Stream:
        """The legacy default stream."""
        return default_stream(self)

    @property
    def per_thread_default_stream(self) -> Stream:
        """The per-thread default stream."""
        return per_thread_default_stream(self)

    def record_context_event(self, event: Event | None = None) -> Event:
        """Record an event after all work of all streams, destroyed ones too. Loses captures that are under way."""
        if event is None:
            event = Event(self)
        self._core.record_context_event(_must_be(Event, "event", event)._open())
        return event

    def sync(self) -> None:
        """Wait until all work of the device is done."""
        self._core.sync()
        _raise_from_bodies()

    def settle(self) -> None:
        """Run everything that can run, as `streampool.sim.settle`."""
        settle()

    def races(self) -> list[Race]:
        """Give the races on this device since the last call."""
        return races(self)

    def host_read(self, memory: Memory, *, label: str = "") -> None:
        """Declare, for the race check, that the host reads memory now."""
        self._host_access(memory, False, label)

    def host_write(self, memory: Memory, *, label: str = "") -> None:
        """Declare, for the race check, that the host writes memory now."""
        self._host_access(memory, True, label)

    def memory_info(self) -> tuple[int, int]:
        """Give (free, total) bytes of device memory."""
        return self._core.memory_info()

    # Levers and readings for tests.

    def calls(self) -> dict[str, int]:
        """Give how often each driver call was made on this device, from whatever side."""
        return self._core.calls()

    def fail_call(self, name: str, n: int = 1, *, times: int = 1, code: str = "out_of_memory") -> None:
        """Let the `n`-th next use of a driver call fail (1: the next), and `times` - 1 uses after it, without effect.

        Parameters
        ----------
        name
            A key of `calls`.
        code
            How: ``"out_of_memory"``, ``"failed"``, ``"not_ready"``, ``"capturing"``, ``"not_supported"``,
            ``"invalid"``, ``"gone"``, or ``"lost"``, which lasts.
        """
        self._core.fail_call(name, n, times, code)

    def before_call(self, name: str, body: Callable[[], object]) -> None:
        """Call `body` once, inside the next use of a driver call and before it has any effect.

        It runs on the thread that makes the call: what another thread may do at just that moment, as to begin a capture
        between a question and what follows from the answer. What it raises goes to ``sys.unraisablehook``.

        Parameters
        ----------
        name
            A key of `calls`.
        body
            The function. Calls of its own are made as any, but it may not wait for the caller.
        """
        if not callable(body):
            raise TypeError(f"body must be something to call, not {body!r}")
        self._core.before_call(name, body)

    def clear_failures(self) -> None:
        """Forget what `fail_call` asked for."""
        self._core.clear_failures()

    def set_lost(self, number: int = 700) -> None:
        """Give the device a sticky error (a CUresult): pending work is dropped, and every later call fails."""
        self._core.set_lost(number)

    def set_gone(self, gone: bool = True) -> None:
        """Let the driver answer as if the process were exiting."""
        self._core.set_gone(gone)

    def set_occupied(self, size: int | str) -> None:
        """Take this much device memory away, as other processes do."""
        self._core.set_occupied(parse_size(size))

    @property
    def fault(self) -> str:
        """What made the device lost; empty while it is not."""
        return self._core.fault

    @property
    def used_memory(self) -> int:
        """Bytes of device memory that the driver has given out."""
        return self._core.used_memory

    @property
    def live_streams(self) -> int:
        """Streams that were created and not destroyed."""
        return self._core.live_streams

    @property
    def live_events(self) -> int:
        """Events that were created and not destroyed."""
        return self._core.live_events

    @property
    def pending_work(self) -> int:
        """Pieces of work, records and waits that are queued and not done."""
        return self._core.pending_work

    def __int__(self) -> int:
        return self.device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self._core == other._core

    def __hash__(self) -> int:
        return hash(self._core)

    def __repr__(self) -> str:
        return f"<Device {self.name}>"

    def _host_access(self, memory: Memory, write: bool, label: str) -> None:
        ((address, size),) = _ranges("memory", (memory,))
        self._core.host_access(address, size, write, label, _core.capture_stack(_STACK_DEPTH))


def current_device() -> Device:
    """Give the calling thread's current device: the one made so with `Device.set_current`, or the first."""
    return Device()


# -- races ------------------------------------------------------------------------------------------------------------


def races(device: Device | None = None) -> list[Race]:
    """Give the races since the last call, on `device` or on all of them."""
    return take_races(None if device is None else _must_be(Device, "device", device).name)


# -- bodies -----------------------------------------------------------------------------------------------------------


class _Body:
    """Calls a queued function with NumPy views, and keeps what it raises for the next wait."""

    def __init__(self, fn: Callable[..., object], label: str) -> None:
        self._fn = fn
        self._label = label

    def __call__(self, *views: memoryview) -> None:
        try:
            if views:
                import numpy as np

                self._fn(*(np.frombuffer(view, np.uint8) for view in views))
            else:
                self._fn()
        except BaseException as error:
            _raised.append((self._label, error))


def _raise_from_bodies() -> None:
    if not _raised:
        return
    label, error = _raised[0]
    _raised.clear()
    error.add_note(f"raised by queued work{f' {label!r}' if label else ''} on the simulated device")
    raise error


_T = TypeVar("_T")


def _must_be(kind: type[_T], name: str, value: object) -> _T:
    """Give `value`, which a caller gave for a parameter, if it is of our class."""
    if isinstance(value, kind):
        return value
    raise TypeError(f"{name} must be a streampool.sim.{kind.__name__}, not {value!r} of type {type(value).__name__}")


def _ranges(name: str, memory: Iterable[Memory]) -> list[tuple[int, int]]:
    ranges = []
    try:
        for one in memory:
            address, size = one if isinstance(one, tuple) else (one.handle, one.size)
            ranges.append((operator.index(address), operator.index(size)))
    except (AttributeError, TypeError, ValueError):
        wanted = "buffers or (address, bytes)"
        raise TypeError(f"{name} must be {wanted}, not {memory!r} of type {type(memory).__name__}") from None
    return ranges
