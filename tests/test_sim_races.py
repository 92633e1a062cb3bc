"""The race report of the simulated device, as a program sees it. The check itself is tested in native/tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import streampool as sp
from streampool import sim

SIZE = 4096


@pytest.fixture
def device() -> Iterator[sim.Device]:
    sim.reset()
    sim.configure(devices=2)
    yield sim.Device()
    sim.reset()


@pytest.fixture
def block(device: sim.Device) -> Iterator[sp.Buffer]:
    with sp.Pool(device) as pool, pool.allocate(SIZE) as block:
        device.races()
        yield block


def produce(stream: sim.Stream, block: sp.Buffer) -> None:
    stream.launch(lambda out: out.fill(1), writes=[block], label="produce")


def consume(stream: sim.Stream, block: sp.Buffer) -> None:
    stream.launch(lambda data: data.sum(), reads=[(block.handle + 64, 64)], label="consume")


def test_a_race_names_both_places_and_streams(device: sim.Device, block: sp.Buffer) -> None:
    s, t = device.create_stream(), device.create_stream()
    produce(s, block)
    consume(t, block)
    (race,) = device.races()
    assert race.kind is sim.RaceKind.READ_WRITE
    assert (race.device, race.address, race.size, race.count) == ("sim:0", block.handle + 64, 64, 1)
    assert (race.first.write, race.first.label, race.first.stream) == (True, "produce", s.id)
    assert (race.second.write, race.second.label, race.second.stream) == (False, "consume", t.id)
    assert race.first.stack[0].function == "produce"
    assert race.second.stack[0].function == "consume"
    assert race.first.stack[1].function == race.second.stack[1].function
    text = str(race)
    assert f"race (read-write) on 64 bytes at {block.handle + 64:#x} of sim:0" in text
    assert "write by produce on stream" in text
    assert __file__ in text
    assert not device.races()


def test_an_ordered_program_has_no_races(device: sim.Device, block: sp.Buffer) -> None:
    s, t = device.create_stream(), device.create_stream()
    produce(s, block)
    t.wait(s)
    consume(t, block)
    t.sync()
    produce(s, block)
    event = s.record()
    device.settle()
    assert event.is_done
    consume(device.create_stream(), block)
    assert not device.races()


def test_a_loop_that_races_is_reported_once_with_a_count(device: sim.Device, block: sp.Buffer) -> None:
    s, t = device.create_stream(), device.create_stream()
    for _ in range(5):
        produce(s, block)
        consume(t, block)
    races = device.races()
    assert len(races) == 2  # each before the other
    assert sum(race.count for race in races) == 9
    assert "seen 5 times" in str(races[0])


def test_what_the_host_touches_can_be_declared(device: sim.Device, block: sp.Buffer) -> None:
    s = device.create_stream()
    produce(s, block)
    device.host_read(block, label="print")
    (race,) = device.races()
    assert (race.second.label, race.second.stream, race.second.stream_name) == ("print", 0, "host")
    s.sync()
    device.host_write((block.handle, 1))
    produce(s, block)
    assert not device.races()


def test_a_devices_races_are_its_own(device: sim.Device, block: sp.Buffer) -> None:
    other = sim.Device(1)
    s, t = other.create_stream(), other.create_stream()
    consume(s, block)
    produce(t, block)
    assert not device.races()
    assert len(other.races()) == 1
    assert not sim.races()


def test_the_check_can_be_switched_off() -> None:
    sim.reset()
    sim.configure(check_races=False)
    device = sim.Device()
    with sp.Pool(device) as pool, pool.allocate(SIZE) as block:
        produce(device.create_stream(), block)
        consume(device.create_stream(), block)
        device.sync()
        assert not device.races()
    sim.reset()
