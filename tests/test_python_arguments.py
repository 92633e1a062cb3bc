"""What makes no sense is refused by the functions of Python's layers too, in words that say what they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scene import Scene, scene

import streampool as sp
from streampool import metrics
from streampool.suppressions import Suppressions

NOT_TEXT: list[Any] = [None, 5, 1.5, b"x", ["x"], {}, object()]


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as here:
        yield here


def refused(call: Callable[[], object], words: str, *, by: type[Exception] = TypeError) -> None:
    with pytest.raises(by, match=words) as caught:
        call()
    assert type(caught.value) is by


@pytest.mark.parametrize("value", NOT_TEXT)
def test_what_is_named_by_text_says_so(value: Any) -> None:
    refused(lambda: sp.observe(value), "a library to observe is named by text")
    refused(lambda: sp.unobserve(value), "a library to observe is named by text")
    refused(lambda: sp.install(value), "a library is named by text")
    refused(lambda: sp.uninstall(value), "a library is named by text")
    refused(lambda: sp.scope(value), "a scope's name is a str")
    refused(lambda: metrics.start_server(0, value), "an address is text such as '127.0.0.1'")
    refused(lambda: Suppressions.parse([value]), "suppressions, line 1: a rule is text")


def test_a_file_of_rules_is_named_by_text_or_path_and_its_text_is_no_list_of_lines(tmp_path: Any) -> None:
    path = tmp_path / "known.txt"
    path.write_text("overrun:f\nlost:g\n")
    assert Suppressions.read(str(path)) == Suppressions.read(path)
    refused(lambda: Suppressions.parse(path.read_text()), r"use text\.splitlines\(\)")
    assert len(Suppressions.parse(path.read_text().splitlines()).rules) == 2


@pytest.mark.parametrize("value", [5, "x", [], object()])
def test_what_is_no_registry_is_not_asked_to_register(value: Any) -> None:
    refused(lambda: metrics.register(value), "registry must be a prometheus_client.CollectorRegistry or None")


@pytest.mark.parametrize("value", [5, "sim:0", object()])
def test_races_are_a_devices(sc: Scene, value: Any) -> None:
    refused(lambda: sp.sim.races(value), "device must be a streampool.sim.Device")


@pytest.mark.parametrize("value", [None, "x", [1]])
def test_levers_of_the_simulated_device_take_numbers(sc: Scene, value: Any) -> None:
    refused(lambda: sc.device.fail_call("mem_create", value), "^n must be a count")
    refused(lambda: sc.device.fail_call("mem_create", times=value), "^times must be a count")
    refused(lambda: sp.sim.clock.advance(value), "^seconds must be a finite number of seconds, 0 or more")


def test_levers_of_the_simulated_device_take_sensible_numbers(sc: Scene) -> None:
    for value in (0, -1):
        refused(lambda value=value: sc.device.fail_call("mem_create", value), "^n must be a count", by=ValueError)
    for value in (-1, float("inf"), float("nan")):
        refused(lambda value=value: sp.sim.clock.advance(value), "^seconds must be a finite", by=ValueError)
