"""Reports as JSON: the schema, damage of any kind, reports that come back as they were, and several as one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_scene import ADDRESS, STANDARD, Found, block, freed, overrun, report

from streampool.faults import BlockFacts, BlockState, Fault, FaultKind, Frame
from streampool.leaks import Leak, LeakClass, LeakPolicy, Leaks
from streampool.report import Coverage, NotChecked, PoolFacts, Process, Report, UsedRule, schema


# -- JSON -------------------------------------------------------------------------------------------------------------
def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_json_names_kind_lines_and_counts() -> None:
    data = json.loads(
        report(Found(faults=[overrun(block=freed())], live_blocks=[block(owner="raw", allocated_at=3)])).to_json()
    )
    STANDARD.validate(data)
    assert data["summary"] == {"counts": 2, "faults": 1, "counted_leaks": 1, "leaked_bytes": 1013, "suppressed": 0}
    first = data["faults"][0]
    assert (first["kind"], first["address"], first["bad_bytes"]) == ("overrun", hex(ADDRESS + 1013), 1)
    assert first["block"]["allocated_at"][0] == {"file": "/app/train.py", "line": 31, "function": "fill_edges"}
    assert first["block"]["freed_at"][0]["line"] == 44
    assert (data["leaks"][0]["class"], data["leaks"][0]["allocated_at"][0]["line"]) == ("lost", 20)


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": "urn:streampool:report:99"}', "3"])
def test_what_is_not_a_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected schema"):
        Report.from_json(text)


def test_a_report_with_missing_parts_is_refused() -> None:
    data = report(Found()).to_dict()
    del data["coverage"]
    with pytest.raises(ValueError, match="'coverage' is missing"):
        Report.from_json(json.dumps(data))


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Give the path of every part of plain data."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def damaged(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Give a copy of plain data with another value at one place."""
    if not path:
        return value
    copy = data.copy()
    copy[path[0]] = damaged(data[path[0]], path[1:], value)
    return copy


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=20)
    | st.sampled_from(["capture 3", "capture x", "0x10", "none", 1 << 63, 1 << 64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
"""What JSON can hold."""


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_reader_finds_every_damage_that_the_schema_does_not_allow(step: int) -> None:
    """A report with a wrong type inside gave a traceback."""
    whole = report(
        Found(faults=[overrun(block=freed(), below=block())], live_blocks=[block(owner="raw")]), suppressions=["held:x"]
    ).to_dict()
    values = (None, True, "x", "0x10", -1, 1.5, [], [1], {}, {"a": 1})
    refused = 0
    # Every third: at each place another three or four of the ten values.
    for path, value in list(product(places(whole), values))[::step]:
        data = damaged(whole, path, value)
        try:
            Report.from_json(json.dumps(data)).to_text()
        except ValueError:
            refused += 1
        else:
            assert STANDARD.is_valid(data), (path, value)
    assert refused > 1000 // step


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**30, -(10**30)])
def test_numbers_that_nothing_could_have_measured_are_refused(number: float) -> None:
    whole = report(Found(faults=[overrun()])).to_dict()
    data = damaged(whole, ("faults", 0, "time"), number)
    with pytest.raises(ValueError, match=r"faults\[0\].time: .*(finite|64)"):
        Report.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("block",), 5, r"block: expected object or null, found 5"),
        (("block",), {}, r"block: 'serial' is missing"),
        (("block", "state"), "gone", r"block\.state: expected one of live, released, quarantined, freed, found 'gone'"),
        (("block", "address"), "10", r"block\.address: '10' is not of the form \^0x"),
        (("block", "allocated_at", 1, "line"), "x", r"block\.allocated_at\[1\]\.line: expected integer, found 'x'"),
    ],
)
def test_a_damaged_block_is_named_to_the_last_step(path: tuple[Any, ...], value: Any, words: str) -> None:
    data = damaged(report(Found(faults=[overrun(block=freed())])).to_dict(), ("faults", 0, *path), value)
    with pytest.raises(ValueError, match=rf"^faults\[0\]\.{words}"):
        Report.from_json(json.dumps(data))


def test_a_report_of_any_depth_is_refused_with_words() -> None:
    """What the parser just accepts was too deep for the message about it."""
    text = json.dumps({**report(Found()).to_dict(), "created": "HERE"})
    for depth in range(100, 1200):
        with pytest.raises(ValueError, match=r"nested too deeply|created: expected string, found an array"):
            Report.from_json(text.replace('"HERE"', "[" * depth + "]" * depth))


def test_a_fault_whose_bytes_do_not_match_is_refused() -> None:
    data = damaged(report(Found(faults=[overrun()])).to_dict(), ("faults", 0, "expected"), "00")
    with pytest.raises(ValueError, match="'found' and 'expected' are not of the same bytes"):
        Report.from_json(json.dumps(data))


U64 = st.integers(0, 2**64 - 1)
TIMES = st.floats(0, 1e9, allow_nan=False)
TEXT = st.text(max_size=8)
FRAMES = st.lists(st.builds(Frame, TEXT, st.integers(0, 9999), TEXT), max_size=3).map(tuple)
BLOCKS = st.builds(
    BlockFacts,
    serial=U64,
    state=st.sampled_from(BlockState),
    address=U64,
    size=U64,
    begin=U64,
    reserved=U64,
    stream=U64,
    capture=U64,
    allocated_time=TIMES,
    freed_time=TIMES,
    allocated_at=FRAMES,
    freed_at=FRAMES,
    raw=st.booleans(),
    tag=TEXT,
)
MAYBE_BLOCKS = st.none() | BLOCKS


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Any fault, sensible or not: a report must come out of each."""
    size = draw(st.integers(0, 64))
    first = draw(U64)
    return Fault(
        kind=draw(st.sampled_from(FaultKind)),
        number=draw(U64),
        block=draw(MAYBE_BLOCKS),
        below=draw(MAYBE_BLOCKS),
        above=draw(MAYBE_BLOCKS),
        address=first,
        last=first + draw(st.integers(0, 10000)),
        bad_bytes=draw(st.integers(1, 100)),
        shown_from=max(first - draw(st.integers(0, 8)), 0),
        found=draw(st.binary(min_size=size, max_size=size)),
        expected=draw(st.binary(min_size=size, max_size=size)),
        at=draw(FRAMES),
        time=draw(TIMES),
        last_good_check=draw(U64),
        found_by_check=draw(U64),
        note=draw(TEXT),
        pool=draw(TEXT),
        device=draw(TEXT),
    )


LEAKS = st.builds(
    Leak,
    leak_class=st.sampled_from(LeakClass),
    bytes=st.integers(0, 2**60),  # a report has their sum
    blocks=st.integers(1, 2**40),
    allocated_at=FRAMES,
    smallest=U64,
    largest=U64,
    first_time=TIMES,
    tags=st.lists(TEXT, max_size=2).map(tuple),
    serials=st.lists(U64, max_size=3).map(tuple),
    pool=TEXT,
    growth=st.lists(U64, max_size=5).map(tuple),
    suppressed_by=st.just("") | TEXT,
)
REPORTS = st.builds(
    Report,
    version=TEXT,
    created=TEXT,
    leak_policy=st.sampled_from(LeakPolicy),
    processes=st.lists(st.builds(Process, U64, st.lists(TEXT, max_size=2).map(tuple), TEXT), max_size=2).map(tuple),
    pools=st.lists(
        st.builds(
            PoolFacts,
            TEXT,
            TEXT,
            TEXT,
            TEXT,
            TEXT,
            st.dictionaries(TEXT, TEXT, max_size=2),
            st.dictionaries(TEXT, U64, max_size=2),
        ),
        max_size=2,
    ).map(tuple),
    faults=st.lists(faults(), max_size=3).map(tuple),
    suppressed_faults=st.lists(faults(), max_size=1).map(tuple),
    leaks=st.builds(Leaks, st.lists(LEAKS, max_size=3).map(tuple)),
    coverage=st.builds(
        Coverage,
        pools=U64,
        checks=U64,
        not_checked=st.lists(
            st.builds(NotChecked, TEXT, TEXT, TEXT, U64, U64, st.lists(TEXT, max_size=2).map(tuple)), max_size=2
        ).map(tuple),
    ),
    suppressions=st.lists(st.builds(UsedRule, TEXT, U64), max_size=2).map(tuple),
    exit_code=st.none() | st.integers(0, 255),
)


@given(REPORTS)
def test_a_report_comes_back_from_json_as_it_was_and_fits_the_schema(one: Report) -> None:
    text = one.to_json()
    STANDARD.validate(json.loads(text))
    assert Report.from_json(text) == one


@given(REPORTS)
def test_any_report_can_be_printed(one: Report) -> None:
    text = one.to_text()
    assert text.splitlines()[-1].startswith("SUMMARY: streampool: ")


# -- several processes ------------------------------------------------------------------------------------------------
def test_reports_of_several_processes_add_up() -> None:
    parent = report(Found(faults=[overrun()]), suppressions=["held:x"])
    child = replace(report(Found(live_blocks=[block(owner="raw")]), suppressions=["held:x"]), exit_code=1)
    both = Report.merge([parent, child])
    assert both.counts == 2
    assert both.coverage.pools == 2
    assert both.coverage.blocks_allocated == 246
    assert len(both.processes) == 2
    assert both.exit_code == 1
    assert len(both.suppressions) == 1
    STANDARD.validate(both.to_dict())
    assert Report.merge([]) == Report()
