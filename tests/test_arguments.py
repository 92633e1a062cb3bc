"""What makes no sense is refused in one form of words, by every function of the core, before anything happens.

"size must be a whole number of bytes from 0 to 2^64 - 1, not 1.5 of type float": the parameter, what it takes, what was
given. `TAKES` has a row for every parameter of every native function, and a test that none is missing.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import re
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scene import KIB, Scene, scene

import streampool as sp
from streampool import _core, streams
from streampool._core import sim as native_sim

INFINITY, NAN = float("inf"), float("nan")
BEYOND = [2**64, 10**30, 10**5000, -(2**63), -(10**30)]


class Nothing:
    """Stands for nothing at all, and says so badly."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class BadIndex:
    """Claims to be a whole number."""

    def __index__(self) -> int:
        return "4096"


def function() -> None: ...


OBJECTS = [b"x", object(), Nothing(), int, [1], (1, 2, 3), {5: 1}, {"a"}, 3j]
NO_NUMBERS = [*OBJECTS, function, None, True, False, BadIndex()]
NO_WHOLE_NUMBERS = [*NO_NUMBERS, np.True_, 1.5, 4096.0, NAN, INFINITY, np.float64(1)]
NO_TEXT = [*NO_WHOLE_NUMBERS, 5, -1]
NO_BOOL = [*OBJECTS, function, "x", "", 0, 1, 1.5, BadIndex(), np.True_]
NOT_CALLABLE = ["x", b"x", 5, 1.5, True, object(), Nothing(), [1], {}]
SURROGATE = "\ud800"  # text that UTF-8 cannot hold, as from a file's name


def whole(least: int, most: int) -> tuple[list[object], list[object]]:
    return [*NO_WHOLE_NUMBERS, "x", "7"], [least - 1, most + 1, *BEYOND]


# What a parameter takes: what is of a wrong type, and what is of the right one and makes no sense.
DOMAINS: dict[str, tuple[list[object], list[object]]] = {
    "whole": whole(0, 2**64 - 1),
    "count": whole(1, 2**64 - 1),
    "byte": whole(0, 255),
    "32 bits": whole(0, 2**32 - 1),
    "int": whole(0, 2**31 - 1),
    "signed int": whole(-(2**31), 2**31 - 1),
    "error": whole(1, 2**31 - 1),
    "passes": whole(0, 10**9),
    "pieces": whole(0, 1000),
    "alignment": ([*NO_WHOLE_NUMBERS, "256"], [0, -256, 2**22, *BEYOND]),
    "size": (NO_WHOLE_NUMBERS, [-1, *BEYOND, SURROGATE]),
    "seconds": ([*NO_NUMBERS, "1"], [-1, -0.5, NAN, INFINITY, -INFINITY, 10**400]),
    "text": (NO_TEXT, [SURROGATE]),
    "text?": ([value for value in NO_TEXT if value is not None], [SURROGATE]),
    "bool": ([*NO_BOOL, None], []),
    "bool?": (NO_BOOL, []),
    "torch device": whole(0, 63),
    "kind": (NO_TEXT, ["", "unified", "Device", SURROGATE]),
    "scheduler": (NO_TEXT, ["", "fifo", SURROGATE]),
    "callable?": (NOT_CALLABLE, []),
    "stream?": ([*OBJECTS, function, True, 1.5, "x", np.int64(7)], [-1, *BEYOND]),
    "stream": ([*OBJECTS, function, None, True, 1.5, "x", np.int64(7)], [-1, *BEYOND]),
    "event": ([*OBJECTS, function, None, True, 1.5, "x"], [0, -1, *BEYOND]),
    "host": ([object(), Nothing(), None, 5, 1.5, True, "x", [1], {5: 1}, function], []),
    "host, writable": ([object(), Nothing(), None, 5, 1.5, True, "x", b"x" * 16, [1], {5: 1}], []),
    "dict": ([None, "x", 5, [("a", "b")], object(), Nothing()], []),
    "bytes": ([None, "x", 5, [1], bytearray(1), object(), Nothing()], []),
    "ranges": ([None, "xy", 5, b"xy", {}, [5], ["xy"], [(1,)], [(1, 2, 3)], [None], object()], []),
    "handles": ([None, "x", 5, b"x", {}, object(), Nothing()], []),
    "object": ([*OBJECTS, function, None, "x", 5, True], []),
    "object?": ([*OBJECTS, function, "x", 5, True], []),
}

# Function -> parameter -> domain; the objects that functions belong to are made by `World`.
TAKES: dict[str, dict[str, str]] = {
    "UnorderedMemory.__init__": {"pool": "object"},
    "UnorderedMemory.allocate": {"size": "whole"},
    "UnorderedMemory.free": {"ptr": "whole"},
    "torch_configure": {"family": "text", "name": "text", "options": "dict"},
    "torch_give_pool": {"device": "torch device", "pool": "object"},
    "torch_add_stream": {"device": "torch device", "stream": "whole"},
    "watch_c_pools": {"mode": "text?"},
    "Pool.__init__": {"driver": "object", "kind": "kind", "name": "text", "options": "dict"},
    "Pool.allocate_owned": {"size": "whole", "stream": "stream?", "alignment": "alignment"},
    "Pool.allocate": {
        "size": "whole",
        "stream": "stream?",
        "alignment": "alignment",
        "stream_ordered": "bool?",
        "tag": "text?",
    },
    "Pool.allocate_raw": {"size": "whole", "stream": "stream?", "alignment": "alignment"},
    "Pool.free_raw": {"ptr": "whole", "stream": "stream?"},
    "Pool.free_raw_sized": {"ptr": "whole", "size": "whole", "stream": "stream?"},
    "Pool.record_stream_raw": {"ptr": "whole", "stream": "stream"},
    "Pool.record_event_raw": {"ptr": "whole", "event": "event"},
    "Pool.register_stream": {"stream": "stream"},
    "Pool.forget_stream": {"stream": "stream"},
    "Pool.begin_capturing": {"stream": "stream"},
    "Pool.end_capturing": {"stream": "stream"},
    "Pool.reserve": {"size": "size"},
    "Pool.trim": {"keep_bytes": "size"},
    "Pool.free_pieces": {"most": "pieces"},
    "Pool.holders": {"by_tag": "bool"},
    "read_holders": {"by_tag": "bool"},
    "Pool.check": {"timeout": "seconds"},
    "Pool.set_oom_callback": {"callback": "callable?"},
    "Buffer.record_stream": {"stream": "stream"},
    "Buffer.record_event": {"event": "event"},
    "Buffer.close": {"stream": "stream?"},
    "Buffer.fill": {"value": "byte", "stream": "stream?"},
    "Buffer.copy_to": {"dst": "host, writable", "stream": "stream?"},
    "Buffer.copy_from": {"src": "host", "stream": "stream?"},
    "open_device": {"name": "text"},
    "read_pulse": {"each_pool": "bool"},
    "resolve_options": {"arguments": "dict", "environment": "text?"},
    "capture_stack": {"depth": "int", "native_depth": "int"},
    "resolve_stack": {"stack": "32 bits"},
    "enter_scope": {"name": "text"},
    "leave_scope": {"scope": "whole"},
    "set_current_stream_hook": {"hook": "callable?"},
    "replay": {
        "pool": "object",
        "actions": "bytes",
        "ids": "bytes",
        "sizes": "bytes",
        "streams": "bytes",
        "handles": "handles",
        "passes": "passes",
        "verify": "bool",
        "progress": "callable?",
    },
    "sim.configure": {
        "devices": "int",
        "memory": "whole",
        "host_memory": "whole",
        "scheduler": "scheduler",
        "seed": "whole",
        "virtual_memory": "bool",
        "managed_memory": "bool",
        "context_events": "bool",
        "driver_pools": "bool",
        "check_races": "bool",
        "abort_on_trap": "bool",
    },
    "sim.device": {"ordinal": "signed int"},
    "sim.clock_advance": {"seconds": "seconds"},
    "sim.Device.create_stream": {"blocking": "bool", "name": "text"},
    **{
        f"sim.Device.{name}": {"stream": "whole"}
        for name in (
            "destroy_stream",
            "drop_stream",
            "stream_id",
            "capture_state",
            "begin_capture",
            "end_capture",
            "stream_done",
            "sync_stream",
        )
    },
    **{
        f"sim.Device.{name}": {"event": "whole"}
        for name in ("destroy_event", "drop_event", "record_context_event", "event_done", "sync_event")
    },
    "sim.Device.wait_event": {"stream": "whole", "event": "whole"},
    "sim.Device.record_event": {"event": "whole", "stream": "whole"},
    "sim.Graph.launch": {"stream": "whole"},
    "sim.Device.launch": {
        "stream": "whole",
        "body": "callable?",
        "reads": "ranges",
        "writes": "ranges",
        "gate": "object?",
        "label": "text",
        "stack": "32 bits",
    },
    "sim.Device.fail_call": {"name": "text", "n": "count", "times": "count", "code": "text"},
    "sim.Device.before_call": {"name": "text", "body": "callable?"},
    "sim.Device.set_lost": {"number": "error"},
    "sim.Device.set_gone": {"gone": "bool"},
    "sim.Device.set_occupied": {"size": "whole"},
    "sim.Device.host_access": {
        "address": "whole",
        "size": "whole",
        "write": "bool",
        "label": "text",
        "stack": "32 bits",
    },
}
# Functions that take more than one form of words; they have tests of their own below.
ELSEWHERE = {"parse_size": {"size"}, "Buffer.numpy": {"dtype"}}


@dataclass
class World:
    """A scene with one of everything that a function can be called on, or with."""

    scene: Scene
    pool: sp.Pool
    stream: sp.sim.Stream
    buffer: sp.Buffer
    pointer: int
    event: sp.sim.Event
    graph: sp.sim.Graph
    unordered: _core.UnorderedMemory

    def function(self, name: str) -> Callable[..., object]:
        """Give the native function of a row of `TAKES`, bound to an object of this world."""
        owners = {
            "Pool": self.pool,
            "Buffer": self.buffer,
            "sim.Device": self.scene.device._core,
            "sim.Graph": self.graph._graph,
            "UnorderedMemory": self.unordered,
            "sim": native_sim,
            "": _core,
        }
        owner, _, short = name.rpartition(".")
        if name.endswith(".__init__"):
            return getattr(_core, owner)  # type: ignore[no-any-return]
        return getattr(super(sp.Pool, self.pool) if owner == "Pool" else owners[owner], short)

    def sensible(self, name: str, parameter: str, domain: str) -> object:
        """Give a value that a parameter takes."""
        own: dict[str, object] = {
            "driver": self.scene.device.driver,
            "pool": self.pool,
            "name": "mem_create" if name.endswith(("fail_call", "before_call")) else "sim:0",
            "code": "failed",
            "ptr": self.pointer,
            "options": sp.config.resolve(None, {}),
            "alignment": 256,
            "dst": bytearray(16),
            "src": bytes(16),
            "event": self.event.handle,
            "reads": [(self.pointer, 64)],
            "writes": [(self.pointer, 64)],
            "size": 64,
            "seconds": 0.5,
            "timeout": 0,
        }
        by_domain: dict[str, object] = {
            "text": "x",
            "bool": False,
            "kind": "device",
            "scheduler": "seeded",
            "whole": 1,
            "count": 1,
            "error": 700,
            "byte": 255,
            "int": 0,
            "signed int": 0,
            "32 bits": 0,
            "passes": 0,
            "pieces": 3,
            "torch device": 0,
            "size": 0,
            "bytes": b"",
            "handles": [],
            "stream": self.stream,
            "dict": {},
        }
        return own.get(parameter, by_domain.get(domain))

    def state(self) -> tuple[object, ...]:
        """Give what a refused call must leave as it was."""
        counted = {**self.pool.stats(), "polls": 0, "fences": 0}
        device = self.scene.device
        live = (device.live_streams, device.live_events, device.pending_work, device.fault)
        return counted, device.calls()["mem_create"], live, self.buffer.is_closed, self.pool.audit()


@pytest.fixture
def world() -> Iterator[World]:
    with scene() as here:
        pool = here.pool(mode="debug")
        stream = here.stream(pool)
        buffer = pool.allocate(16, stream=stream)
        pointer = pool.allocate_raw(4 * KIB, stream=stream)
        captured = here.stream()
        captured.begin_capture()
        graph = captured.end_capture()
        assert graph is not None
        yield World(here, pool, stream, buffer, pointer, stream.record(), graph, _core.UnorderedMemory(pool))
        # The pool may outlive the test, and tests of holders look at all there are.
        with contextlib.suppress(sp.InvalidFreeError):  # a test freed it
            pool.free_raw(pointer, stream=stream)
        with contextlib.suppress(sp.InvalidFreeError, BufferError):
            buffer.close(stream)
        _core.set_current_stream_hook(streams._chosen)


PARAMETERS = [(name, parameter) for name, row in TAKES.items() for parameter in row]


def refused(call: Callable[[], object], error: type[Exception], value: object) -> str:
    """Make a call that must be refused with just this error; give its text, which is ours and shows what was given."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert type(caught.value) is error, text
    assert "incompatible function arguments" not in text
    assert "std::" not in text
    if error is TypeError and value is not None:
        assert text.endswith(f" of type {type(value).__name__}") or isinstance(value, (list, tuple, dict)), text
    if not isinstance(value, (Nothing, list, tuple, dict)) and (not isinstance(value, int) or abs(value) < 10**100):
        assert repr(value)[:60] in text
    return text


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS, ids=lambda part: part)
def test_nonsense_is_refused_by_the_name_of_its_parameter_and_changes_nothing(
    world: World, name: str, parameter: str
) -> None:
    row = TAKES[name]
    sensible = {other: world.sensible(name, other, domain) for other, domain in row.items()}
    call = world.function(name)
    before = world.state()
    wrong_types, wrong_values = DOMAINS[row[parameter]]
    for error, values in ((TypeError, wrong_types), (ValueError, wrong_values)):
        for value in values:
            text = refused(lambda value=value: call(**{**sensible, parameter: value}), error, value)
            assert text.startswith((f"{parameter} must be ", "address must be ", "size must be ")), text
            assert text.startswith(parameter) or row[parameter] == "ranges", text
    assert world.state() == before


def native_functions() -> Iterator[tuple[str, set[str]]]:
    """Give every function of the core with the names of its parameters, as nanobind describes them."""
    owners = [("", _core), ("sim.", native_sim)]
    for prefix, module in tuple(owners):
        owners += [(f"{prefix}{name}.", cls) for name, cls in vars(module).items() if inspect.isclass(cls)]
    for prefix, owner in owners:
        for name, function in vars(owner).items():
            for signature, *_ in getattr(function, "__nb_signature__", ()):
                inside = signature.partition("(")[2].rpartition(") ->")[0]
                names = set(re.findall(r"(?:^|, )(\w+)(?=: )", re.sub(r"\[[^\]]*\]", "", inside)))
                if names and not (name.startswith("__") and name != "__init__"):
                    yield prefix + name, names


def test_every_parameter_of_every_native_function_has_a_row() -> None:
    found = dict(native_functions())
    found.pop("break_r1", None)  # in test builds only
    for name in [name for name in found if name.startswith("_EmptyPair.")]:
        del found[name]  # takes whatever Pool's raw pair takes, for the benchmark
    assert len(found) > 40
    assert found == {**{name: set(row) for name, row in TAKES.items()}, **ELSEWHERE}


def stub_functions(file: str, prefix: str) -> Iterator[tuple[str, set[str]]]:
    """Give every function of a stub file with the names of its parameters."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, set[str]]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                names = {one.arg for one in every} - {"self"}
                if names and not (node.name.startswith("__") and node.name != "__init__"):
                    yield prefix + node.name, names

    yield from walk(ast.parse((Path(sp.__file__).parent / file).read_text()).body, prefix)


def test_the_stubs_name_the_parameters_that_there_are() -> None:
    stubs = {**dict(stub_functions("_core.pyi", "")), **dict(stub_functions("_core_sim.pyi", "sim."))}
    found = dict(native_functions())
    found.pop("break_r1", None)
    assert stubs == found


# -- what is taken, though it looks odd -------------------------------------------------------------------------------


@pytest.mark.parametrize("integer", [np.int64, np.uint64, np.int8, np.uint16])
def test_numpys_integers_are_whole_numbers(world: World, integer: Callable[[int], Any]) -> None:
    """A size is often a product of a shape, which NumPy gives as its own integer."""
    pool, s = world.pool, world.stream
    block = pool.allocate(integer(100), stream=s, alignment=integer(64))
    assert block.size == 100
    pointer = pool.allocate_raw(integer(100), stream=s)
    pool.free_raw(np.uint64(pointer), stream=s)
    block.fill(integer(7))
    s.sync()
    assert bytes(block) == b"\x07" * 100
    assert pool.reserve(integer(100)) >= 100
    pool.trim(integer(100))
    pool.check(np.float32(0.5))
    with sp.Pool(world.scene.device, limit=integer(64)) as other:
        assert other.stats().limit == 64


def test_what_stands_for_a_whole_number_is_asked_and_its_own_error_comes_through(world: World) -> None:
    class Broken:
        def __index__(self) -> int:
            raise LookupError("nobody home")

    class Four:
        def __index__(self) -> int:
            return 4

    with pytest.raises(LookupError, match="nobody home"):
        world.pool.allocate(Broken())
    assert world.pool.allocate(Four(), stream=world.stream).size == 4


def test_the_largest_numbers_are_numbers(world: World) -> None:
    with pytest.raises(sp.OutOfMemoryError):
        world.pool.allocate(2**64 - 1, stream=world.stream)
    with pytest.raises(sp.ForeignFreeError):
        world.pool.free_raw(2**64 - 1, stream=world.stream)
    assert world.pool.trim(2**64 - 1)["released"] == 0


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda pool: pool.allocate(1.5),
            "size must be a whole number of bytes from 0 to 2^64 - 1, not 1.5 of type float",
        ),
        (
            lambda pool: pool.allocate(True),
            "size must be a whole number of bytes from 0 to 2^64 - 1, not True of type bool",
        ),
        (lambda pool: pool.allocate(None), "size must be a whole number of bytes from 0 to 2^64 - 1, not None"),
        (lambda pool: pool.allocate(-1), "size must be a whole number of bytes from 0 to 2^64 - 1, not -1"),
        (
            lambda pool: pool.allocate(1, alignment=0),
            "alignment must be a power of two from 1 to 2097152, not 0",
        ),
        (lambda pool: pool.free_raw("a"), "ptr must be an address from 0 to 2^64 - 1, not 'a' of type str"),
        (
            lambda pool: pool.reserve([]),
            "size must be a whole number of bytes from 0 to 2^64 - 1 or text such as '2GiB', not [] of type list",
        ),
        (lambda pool: pool.check(-1), "timeout must be a finite number of seconds, 0 or more, not -1"),
        (
            lambda pool: pool.register_stream(None),
            "stream must be an int handle or an object with __cuda_stream__(), not None",
        ),
        (
            lambda pool: pool.allocate(1, stream="s"),
            "stream must be None, an int handle or an object with __cuda_stream__(), not 's' of type str",
        ),
        (
            lambda pool: pool.allocate([1] * 1000),
            "size must be a whole number of bytes from 0 to 2^64 - 1, "
            "not [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,... of type list",
        ),
        (
            lambda pool: pool.allocate(10**5000),
            "size must be a whole number of bytes from 0 to 2^64 - 1, not an object of type int",
        ),
    ],
)
def test_a_refusal_says_which_argument_what_it_takes_and_what_was_given(
    world: World, call: Callable[[sp.Pool], object], text: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(world.pool)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("size", "error"), [("two", ValueError), ("2QiB", ValueError), ("-1", ValueError), ("", ValueError)]
)
def test_text_that_is_no_size_is_named_with_its_parameter(world: World, size: str, error: type[Exception]) -> None:
    for call, parameter in ((world.pool.reserve, "size"), (world.pool.trim, "keep_bytes"), (sp.parse_size, "size")):
        with pytest.raises(error, match=f"^{parameter}: .* is not a size") as caught:
            call(size)
        assert repr(size) in str(caught.value)


def test_parse_size_refuses_what_other_sizes_refuse() -> None:
    for value in NO_NUMBERS:
        refused(lambda value=value: sp.parse_size(value), TypeError, value)
    for value in (*BEYOND, -1, 1.5, -1.0, NAN, INFINITY, 2.0**64, SURROGATE):
        refused(lambda value=value: sp.parse_size(value), ValueError, value)


def test_parse_size_takes_floats_that_are_whole() -> None:
    assert sp.parse_size(4096.0) == 4096


def test_no_data_type_is_no_answer_to_which(world: World) -> None:
    with pytest.raises(TypeError, match=r"dtype must be a NumPy data type such as 'float32', not None"):
        world.buffer.numpy(None)
    with pytest.raises(TypeError):
        world.buffer.numpy("nonsense")
    assert world.buffer.numpy(np.float32).shape == (4,)


@pytest.mark.parametrize("gives", [None, 7, (7,), (0, 7, 7), [0, 7], (0, "7"), (0, True), (0, 1.5), (0, None)])
def test_a_stream_object_that_gives_nonsense_is_a_type_error(world: World, gives: object) -> None:
    class Odd:
        def __cuda_stream__(self) -> object:
            return gives

    stats = world.pool.stats()
    with pytest.raises(TypeError, match=r"^(what __cuda_stream__\(\) gives|stream) must be "):
        world.pool.allocate(64, stream=Odd())
    assert world.pool.stats() == stats


@pytest.mark.parametrize("handle", ["x", None, 1.5j, b"x", []])
def test_an_event_object_whose_handle_is_nonsense_is_a_type_error(world: World, handle: object) -> None:
    class Odd:
        pass

    odd = Odd()
    odd.handle = handle
    with pytest.raises((TypeError, ValueError), match=r"^event must be an int handle or an object"):
        world.buffer.record_event(odd)


def test_options_of_the_native_pool_are_text(world: World) -> None:
    driver = world.scene.device.driver
    for options, text in (
        ({5: "1"}, "an option's name must be text"),
        ({"limit": 5}, "an option's value must be text"),
    ):
        with pytest.raises(TypeError, match=text):
            _core.Pool(driver, kind="device", name="x", options=options)


@pytest.mark.parametrize("value", [object(), b"1", [1], {}, 3j, function])
def test_an_option_of_a_wrong_type_is_named(value: object) -> None:
    with pytest.raises(TypeError, match=r"^option 'limit' must be text, a number or a bool, not "):
        sp.Pool("sim:0", limit=value)


@pytest.mark.parametrize("option", ["limit", "initial", "guard_bytes", "quarantine_bytes"])
@pytest.mark.parametrize("value", [True, False, 1.5, -1, NAN, 2**64])
def test_a_size_among_the_options_is_a_whole_number_too(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"option '{option}'"):
        sp.Pool("sim:0", **{option: value})


# -- objects that are not what they seem ------------------------------------------------------------------------------


def test_a_buffer_that_was_never_allocated_is_refused_and_collected(world: World) -> None:
    empty = _core.Buffer.__new__(_core.Buffer)
    cycle: list[object] = [empty]
    cycle.append(cycle)
    with pytest.raises(BufferError, match="never allocated"):
        memoryview(empty)
    with pytest.warns(RuntimeWarning, match="uninitialized"), pytest.raises(TypeError, match="dst must be a Buffer"):
        world.buffer.copy_to(empty)
    del empty, cycle
    gc.collect()


def test_methods_called_on_something_else_say_so() -> None:
    for call in (lambda: _core.Pool.allocate(5, 1), lambda: _core.Buffer.numpy(5)):
        with pytest.raises(TypeError, match=r"^self must be a .*, not 5 of type int"):
            call()


def test_a_buffer_whose_block_was_freed_by_its_address_has_no_view(world: World) -> None:
    world.pool.free_raw(world.buffer.handle, stream=world.stream)
    with pytest.raises(BufferError, match="freed by its address"):
        memoryview(world.buffer)


# -- captures ---------------------------------------------------------------------------------------------------------


def test_a_closed_stream_begins_no_capture_but_ends_the_one_it_began(world: World) -> None:
    pool, s = world.pool, world.scene.device.create_stream()
    pool.begin_capturing(s)
    s.close()
    pool.end_capturing(s)
    with pytest.raises(sp.StreamError, match="closed"):
        pool.begin_capturing(s)
    # No capture is seen open: lasting streams are looked up no more.
    lookups = pool.stats().stream_lookups
    pool.free_raw(pool.allocate_raw(64, stream=world.stream), stream=world.stream)
    assert pool.stats().stream_lookups == lookups


# -- the out-of-memory callback ---------------------------------------------------------------------------------------


def test_the_callback_is_replaced_and_let_go_of(world: World) -> None:
    pool = world.scene.pool(limit="4MiB", wait_timeout=0)
    asked: list[str] = []

    class Called:
        def __call__(self, size: int) -> bool:
            asked.append("first")
            pool.set_oom_callback(None)  # while it runs
            return False

    first = Called()
    gone = weakref.ref(first)
    pool.set_oom_callback(first)
    del first
    for _ in range(2):
        with pytest.raises(sp.OutOfMemoryError):
            pool.allocate(64 << 20, stream=world.stream)
    assert asked == ["first"]
    assert gone() is None


def test_ctrl_c_inside_the_callback_ends_the_allocation(world: World) -> None:
    pool = world.scene.pool(limit="4MiB", wait_timeout=0)

    def interrupted(size: int) -> bool:
        signal.raise_signal(signal.SIGINT)
        return True

    pool.set_oom_callback(interrupted)
    before = pool.stats()
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(64 << 20, stream=world.stream)
    after = pool.stats()
    assert (after.live_blocks, after.in_use) == (before.live_blocks, before.in_use)
    assert pool.audit() == ""
    pool.set_oom_callback(None)
    pool.allocate(64, stream=world.stream).close(world.stream)
