"""Reports: what the text says and in which order, the JSON and its schema, suppressions, and what counts."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampool.faults import BlockFacts, BlockState, Fault, FaultKind, Frame, user_frames
from streampool.leaks import Leak, LeakClass, LeakPolicy, Leaks
from streampool.report import Coverage, NotChecked, PoolFacts, Process, Report, UsedRule, schema
from streampool.suppressions import Suppressions, suggest

ADDRESS = 0x7F0000000400
PATTERN = bytes(range(0x71, 0x71 + 64))
STACKS = {
    1: [("/app/train.py", 31, "fill_edges"), ("/app/train.py", 58, "main"), ("/app/train.py", 70, "<module>")],
    2: [("/app/train.py", 44, "drop"), ("/app/train.py", 59, "main")],
    3: [("/app/load.py", 20, "load")],
}
DEBUG_OPTIONS = {"guard_bytes": "256", "fill": "true", "fill_edge_bytes": "0", "track": "true"}
STANDARD = jsonschema.Draft202012Validator(schema())


def resolve(stack: int) -> list[tuple[str, int, str]]:
    return STACKS[stack]


def block(**changes: Any) -> dict[str, Any]:
    facts = {
        "serial": 12,
        "state": "live",
        "address": ADDRESS,
        "size": 1013,
        "begin": ADDRESS - 256,
        "reserved": 1536,
        "stream": 3,
        "allocated_thread": 77,
        "freed_thread": 0,
        "allocated_time": 0.12,
        "freed_time": 0.0,
        "allocated_at": 1,
        "freed_at": 0,
        "raw": False,
        "tag": "",
    }
    return facts | changes


def freed(**changes: Any) -> dict[str, Any]:
    return block(state="quarantined", freed_at=2, freed_thread=78, freed_time=0.5) | changes


def written(
    kind: str, offset: int, data: bytes, *, before: int = 0, of: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A fault of `data` written at `offset` from the block's start, shown from `before` bytes earlier."""
    of = of or block()
    address = of["address"] + offset
    found = PATTERN[:before] + data + PATTERN[before + len(data) :]
    facts = {
        "kind": kind,
        "number": 1,
        "block": of,
        "below": None,
        "above": None,
        "address": address,
        "last": address + len(data) - 1,
        "bad_bytes": len(data),
        "shown_from": address - before,
        "found": found,
        "expected": PATTERN,
        "at": 0,
        "time": 1.31,
        "last_good_check": 3,
        "found_by_check": 4,
        "last_good_time": 1.2,
        "note": "",
    }
    return facts | more


def overrun(**more: Any) -> dict[str, Any]:
    return written("overrun", 1013, b"\xab", **more)


@dataclass
class Found:
    """What the session gathers of one pool."""

    name: str = "default"
    kind: str = "device"
    device: str = "sim:0"
    mode: str = "debug"
    ended: str = "closed"
    faults: list[dict[str, Any]] = field(default_factory=list)
    live_blocks: list[dict[str, Any]] = field(default_factory=list)
    not_checked: list[dict[str, Any]] = field(default_factory=list)
    debug_totals: dict[str, int] = field(default_factory=lambda: {"checks": 4, "blocks_checked": 130})
    stats: dict[str, Any] = field(default_factory=lambda: {"allocations": 123, "frees": 120})
    options: dict[str, str] = field(default_factory=lambda: dict(DEBUG_OPTIONS))
    problems: list[str] = field(default_factory=list)


def report(*found: Found, **options: Any) -> Report:
    process = Process(1, ("train.py", "--fast"), "3.11.2")
    return Report.from_findings(found, resolve=resolve, process=process, **options)


def fault(facts: dict[str, Any]) -> Fault:
    return Fault.from_dict(facts, resolve, pool="default", device="sim:0")


def assert_in_order(text: str, *parts: str) -> None:
    at = 0
    for part in parts:
        found = text.find(part, at)
        assert found >= 0, f"{part!r} is not in the text after {text[:at][-80:]!r}"
        at = found + len(part)


# -- sentences --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (written("overrun", 1013, b"\1"), "write of 1 byte, 0 bytes behind the end of a 1013-byte block"),
        (written("overrun", 1023, b"\1\2\3"), "write of 3 bytes, 10 bytes behind the end of a 1013-byte block"),
        (written("underrun", -1, b"\1"), "write of 1 byte, 0 bytes before the start of a 1013-byte block"),
        (written("underrun", -9, b"\1\2"), "write of 2 bytes, 7 bytes before the start of a 1013-byte block"),
        (
            written("write_after_free", 16, b"\1\2\3\4", of=freed()),
            "write of 4 bytes, 16 bytes into a 1013-byte block that had been freed",
        ),
        (
            written("write_after_free", 1013, b"\1", of=freed()),
            "write of 1 byte, 0 bytes behind the end of a 1013-byte block that had been freed",
        ),
        (
            written("overrun", 1013, b"\1\2\3\4", bad_bytes=3),
            "write of at least 3 bytes in a run of 4, 0 bytes behind the end of a 1013-byte block",
        ),
        (
            {"kind": "interior_free", "block": block(), "address": ADDRESS + 24},
            f"free of {ADDRESS + 24:#x}, which is 24 bytes inside a 1013-byte block and not its start",
        ),
        (
            {"kind": "double_free", "block": freed(), "address": ADDRESS},
            f"second free of a 1013-byte block at {ADDRESS:#x}",
        ),
        ({"kind": "foreign_free", "address": 0x1234}, "free of 0x1234, which no pool owns"),
    ],
)
def test_a_sentence_gives_the_distance_in_words(facts: dict[str, Any], sentence: str) -> None:
    assert fault(facts).sentence == sentence


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_has_its_sentence_its_advice_and_its_page(kind: FaultKind, request: pytest.FixtureRequest) -> None:
    for facts in ({"kind": kind, "block": block(), "address": ADDRESS, "at": 3}, {"kind": kind, "address": ADDRESS}):
        text = report(Found(faults=[facts])).to_text()
        assert_in_order(text, f"FAULT 1 of 1: {kind}", f"docs/faults/{kind}.md", f"SUMMARY: streampool: {kind}")
    assert (request.config.rootpath / "docs" / "faults" / f"{kind}.md").read_text().startswith(f"# {kind}\n")


SECTIONS = ["What the report shows", "Typical causes", "How to find the line", "Is the pool wrong?", "Suppress"]


@pytest.mark.parametrize("word", [*FaultKind, *LeakClass])
def test_every_page_answers_the_same_questions_and_its_links_lead_somewhere(
    word: str, request: pytest.FixtureRequest
) -> None:
    folder = request.config.rootpath / "docs" / "faults"
    page = (folder / f"{word}.md").read_text()
    assert page.startswith(f"# {word}\n\n**")
    assert re.findall("^## (.*)$", page, re.MULTILINE) == SECTIONS
    assert f"]({word}.md)" in (folder / "README.md").read_text()
    for target, _, part in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", page)):
        other = (folder / (target or f"{word}.md")).read_text()
        titles = [
            re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in re.findall("^#+ (.*)$", other, re.MULTILINE)
        ]
        assert not part or part in titles, f"{target}#{part}"


@pytest.mark.parametrize("leak_class", LeakClass)
def test_every_leak_says_what_to_do_and_names_its_page(leak_class: LeakClass) -> None:
    one = Report(leak_policy=LeakPolicy.ALL, leaks=Leaks((Leak(leak_class, bytes=1, blocks=1),)))
    assert f"(docs/faults/{leak_class}.md)" in one.to_text()
    assert f'href="#about-{leak_class}"' in one.to_html()
    assert one.to_dict()["leaks"][0]["page"] == f"docs/faults/{leak_class}.md"


def test_the_kinds_are_those_of_the_native_table(request: pytest.FixtureRequest) -> None:
    source = (request.config.rootpath / "native" / "src" / "debug" / "fault.hpp").read_text()
    for kind in FaultKind:
        assert f'X({kind}, "{kind.meaning}")' in source.replace("\\\n", "")
    assert source.count("  X(") == len(FaultKind)


# -- the text of a fault ----------------------------------------------------------------------------------------------
def test_the_text_of_a_fault_has_its_parts_in_order() -> None:
    below = block(serial=11, address=ADDRESS - 600, size=100, allocated_at=3)
    above = block(serial=13, address=ADDRESS + 2000, size=50, allocated_at=3)
    facts = written("overrun", 1013, b"\xab\xcd", before=5, of=freed(tag="edges"), below=below, above=above)
    assert_in_order(
        report(Found(faults=[facts])).to_text(),
        "FAULT 1 of 1: overrun",
        "write of 2 bytes, 0 bytes behind the end of a 1013-byte block",
        "in pool 'default' on sim:0",
        "bytes",
        "end+0",
        "|ab cd  .  .",
        "#12, 1,013 bytes at 0x7f0000000400, freed, in quarantine, stream 3, tag 'edges'",
        "allocated at",
        "/app/train.py:31 in fill_edges",
        "/app/train.py:58 in main",
        "by thread 77, at 0.120 s",
        "freed at",
        "/app/train.py:44 in drop",
        "below",
        "#11, 100 bytes, live, 500 bytes away, allocated at /app/load.py:20 in load",
        "above",
        "#13, 50 bytes, live, 987 bytes away",
        "window",
        "whole at check 3 (1.200 s); bad at check 4 (1.310 s): written within these 0.110 s",
        "next",
        "suppress with",
        "overrun:fill_edges",
        "SUMMARY: streampool: overrun /app/train.py:31 in fill_edges",
        "DEDUP_TOKEN: overrun-train.fill_edges:31-train.main:58-train.<module>:70",
    )


def test_the_map_shows_written_bytes_in_hex_and_untouched_ones_as_dots() -> None:
    text = report(Found(faults=[written("overrun", 1013 + 4, b"\x01\x02\x03", before=4)])).to_text()
    assert "end+0     | .  .  .  . 01 02 03  .  .  .  .  .  .  .  .  ." in text


def test_the_map_of_an_underrun_ends_at_the_start_of_the_block() -> None:
    text = report(Found(faults=[written("underrun", -2, b"\x01\x02", before=8)])).to_text()
    assert_in_order(text, "start-16", " .  . 01 02")
    assert "start+0" not in text


def test_the_map_says_when_bad_bytes_go_on_beyond_it() -> None:
    facts = written("write_after_free", 8, bytes(range(56)), before=8, of=freed()) | {"last": ADDRESS + 500}
    assert f"… and on, up to {ADDRESS + 500:#x} (start+500)" in report(Found(faults=[facts])).to_text()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bytes(8), "all zero"),
        (b"\xee" * 7, "all 0xee"),
        (struct.pack("<2i", 5, -3), "int32 5, -3"),
        (struct.pack("<2f", 1.5, -0.25), "float32 1.5, -0.25"),
        (b"\x9a\x13\x77", None),
    ],
)
def test_the_map_says_what_the_bytes_read_as(data: bytes, words: str | None) -> None:
    text = report(Found(faults=[written("write_after_free", 16, data, of=freed())])).to_text()
    assert (f"; reads as {words}" in text) if words else ("reads as" not in text)


def test_a_block_that_was_never_checked_before_says_so() -> None:
    text = report(Found(faults=[overrun(last_good_check=0)])).to_text()
    assert "never checked before; allocated (0.120 s); bad at check 4" in text


def test_a_fault_without_stacks_is_reported_all_the_same() -> None:
    facts = overrun(block=block(allocated_at=0, tag="weights"))
    text = report(Found(faults=[facts])).to_text()
    assert_in_order(
        text, "no stack was kept (option stack_depth)", "overrun:weights", "DEDUP_TOKEN: overrun-weights-1013-bytes"
    )


def test_frames_of_the_library_and_of_the_runner_are_left_out() -> None:
    import streampool.faults as module

    ours = module.__file__
    runner = ours.replace("faults.py", "cli/_program.py")
    frames = [
        (ours, 1, "allocate"),
        ("/app/a.py", 2, "f"),
        (ours, 3, "x"),
        ("/app/a.py", 4, "g"),
        (runner, 5, "run"),
        ("/b", 6, "main"),
    ]
    assert [frame.line for frame in user_frames(frames)] == [2, 3, 4]
    assert [frame.line for frame in user_frames([("/app/a.py", 2, "f"), ("<frozen runpy>", 3, "run")])] == [2]
    assert [frame.line for frame in user_frames([(ours, 1, "allocate")])] == [1]


def test_equal_faults_are_one_entry_with_a_count() -> None:
    many = [overrun(number=n, block=block(serial=n)) for n in range(1, 31)]
    other = overrun(block=block(allocated_at=3))
    text = report(Found(faults=[*many, other])).to_text()
    assert_in_order(text, "FAULT 1 of 2", "30 times from the same lines (shown: the first; also #2, #3", "FAULT 2 of 2")
    assert "31 faults (31 overrun)" in text


def test_two_lines_of_one_function_are_two_faults() -> None:
    stacks = {1: [("/app/a.py", 1, "main")], 2: [("/app/a.py", 2, "main")]}
    tokens = {Fault.from_dict(overrun(block=block(allocated_at=n)), stacks.__getitem__).dedup_token for n in (1, 2)}
    assert len(tokens) == 2


def test_the_text_is_the_same_in_a_pipe_and_fits_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    one = report(
        Found(
            faults=[overrun(), written("write_after_free", 8, bytes(40), of=freed())], live_blocks=[block(owner="raw")]
        )
    )
    plain = one.to_text()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert one.to_text() == plain
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 100
    assert len(plain.splitlines()) < 80
    assert "\x1b[" in one.to_text(color=True)


def test_markup_in_names_is_printed_as_it_is() -> None:
    tag = "[bold]x[/] :smile:"
    assert tag in report(Found(faults=[overrun(block=block(tag=tag))])).to_text(color=False)


# -- the end of every report ------------------------------------------------------------------------------------------
def test_a_clean_report_is_short_and_ends_with_what_was_covered_and_what_was_not() -> None:
    clean = report(Found())
    assert not clean.counts
    text = clean.to_text()
    assert_in_order(
        text,
        "train.py --fast",
        "'default' (device memory, sim:0, debug mode)",
        "1 pool; 123 blocks allocated, 120 freed; 130 block verifications in 4 checks",
        "never seen",
        "SUMMARY: streampool: no faults, no leaks that count",
    )
    assert len(text.splitlines()) <= 10


def test_blocks_with_pending_work_are_listed_as_not_checked() -> None:
    text = report(Found(not_checked=[block(), block(serial=13, allocated_at=3)])).to_text(width=400)
    assert "not checked   'default': " not in text
    assert "pool 'default': guards and fills of blocks with pending work (2 blocks, 2,026 bytes)" in text
    assert "allocated at /app/train.py:31, /app/load.py:20" in text


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            Found(options=DEBUG_OPTIONS | {"guard_bytes": "0", "fill": "false"}),
            "overruns, underruns, writes after free: guards",
        ),
        (Found(options=DEBUG_OPTIONS | {"fill": "false"}), "writes after free: fill is off"),
        (Found(options=DEBUG_OPTIONS | {"guard_bytes": "0"}), "most overruns and underruns"),
        (
            Found(options=DEBUG_OPTIONS | {"fill_edge_bytes": "4096"}),
            "the middle of freed blocks: fill_edge_bytes is 4096",
        ),
        (Found(options=DEBUG_OPTIONS | {"track": "false"}), "leaks: blocks are not tracked"),
        (Found(problems=["last check: DriverError: lost"]), "last check: DriverError: lost"),
        (Found(debug_totals={"faults_dropped": 7}), "7 more faults: more than max_faults"),
        (Found(debug_totals={"driver_failures": 2}), "the driver failed 2 times"),
    ],
)
def test_what_was_not_looked_for_is_said(found: Found, words: str) -> None:
    assert words in report(found).to_text(width=300)


def test_leaks_that_were_not_looked_for_are_said() -> None:
    off = report(Found(live_blocks=[block(owner="raw")]), leaks="off")
    assert not off.counts
    assert not len(off.leaks)
    assert "leaks: --leaks=off" in off.to_text()


# -- leaks in a report ------------------------------------------------------------------------------------------------
def test_leaks_come_after_faults_and_the_summary_counts_both() -> None:
    live = [block(owner="raw", serial=n) for n in range(1, 4)] + [block(owner="buffer", allocated_at=3, serial=9)]
    one = report(Found(faults=[overrun()], live_blocks=live))
    assert one.counts == 2
    assert_in_order(
        one.to_text(),
        "FAULT 1 of 1",
        "LEAK: lost: 3,039 bytes in 3 blocks, 1,013 bytes each, allocated raw and never freed",
        "/app/train.py:31 in fill_edges",
        "#1, #2, #3",
        "lost:fill_edges",
        "NOTE: held: 1,013 bytes in 1 block, still held by live objects",
        "/app/load.py:20 in load",
        "SUMMARY: streampool: 1 fault (1 overrun); 3,039 bytes leaked (3 lost); 1,013 bytes still held, not counted",
    )


def test_held_blocks_count_only_when_asked() -> None:
    found = Found(live_blocks=[block(owner="buffer")])
    assert report(found).counts == 0
    assert report(found, leaks="all").counts == 1
    assert "LEAK: held" in report(found, leaks=LeakPolicy.ALL).to_text()


def test_of_many_leaks_the_largest_are_shown_and_the_rest_is_counted() -> None:
    stacks = {n: [("/app/a.py", n, "f")] for n in range(1, 31)}
    live = [block(owner="raw", serial=n, size=n, allocated_at=n) for n in stacks]
    one = Report.from_findings([Found(live_blocks=live)], resolve=stacks.__getitem__)
    text = one.to_text()
    assert "/app/a.py:11 in f" in text
    assert "/app/a.py:10 in f" not in text
    assert "Omitting 10 more (55 bytes)" in text
    assert one.counts == 30


# -- suppressions -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rule",
    [
        "overrun:fill_edges",
        "overrun:main",
        "overrun:train.py",
        "overrun:*/train.py",
        "overrun:train.py:31",
        "overrun:train",
        "overrun:app.train",
        "overrun:my tag",
        "*:fill_*",
    ],
)
def test_a_rule_fits_function_file_line_module_or_tag(rule: str) -> None:
    one = report(Found(faults=[overrun(block=block(tag="my tag"))]), suppressions=[rule])
    assert not one.counts
    assert len(one.suppressed_faults) == 1
    assert_in_order(one.to_text(width=200), f"suppressed    {rule} (1)", "no faults", "1 suppressed")


@pytest.mark.parametrize(
    "rule", ["underrun:fill_edges", "overrun:fill", "overrun:Fill_edges", "leak:fill_edges", "overrun:rain"]
)
def test_a_rule_that_does_not_fit_changes_nothing_and_is_listed_as_unused(rule: str) -> None:
    one = report(Found(faults=[overrun()]), suppressions=["# known", "", f"{rule}  # why"])
    assert one.counts == 1
    assert f"unused rules  {rule}" in one.to_text()


@pytest.mark.parametrize("rule", ["lost:fill_edges", "leak:fill_edges", "*:*"])
def test_leaks_can_be_suppressed(rule: str) -> None:
    one = report(Found(live_blocks=[block(owner="raw")]), suppressions=[rule])
    assert not one.counts
    assert "LEAK" not in one.to_text()
    assert one.leaks[0].suppressed_by == rule


@pytest.mark.parametrize(
    ("line", "words"), [("overrun", "not kind:glob"), ("leek:f", "unknown kind 'leek'"), ("overrun:", "not kind")]
)
def test_a_broken_rule_names_its_line(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"rules\.txt, line 2: .*{words}"):
        Suppressions.parse(["# fine", line], source="rules.txt")


def test_every_word_that_an_unknown_kind_is_told_of_is_one() -> None:
    with pytest.raises(ValueError, match="unknown kind 'leaks': there are ") as caught:
        Suppressions.parse(["leaks:*"])
    words = str(caught.value).partition("there are ")[2].split(", ")
    assert words == [*FaultKind, *LeakClass, "leak", "*"]
    assert [rule.kind for rule in Suppressions.parse([f"{word}:x" for word in words]).rules] == words


@pytest.mark.parametrize("function", ["step", "<module>", "<lambda>", "A.f[0]*"])
def test_the_suggested_rule_fits_its_own_finding(function: str) -> None:
    stack = (Frame("/app/a.py", 3, function),)
    rules = Suppressions.parse([suggest("overrun", stack)])
    assert rules.find("overrun", [stack]) is not None
    assert not rules.unused
    tagged = Suppressions.parse([suggest("held", (), "weights[0]")])
    assert tagged.find("held", [()], ["weights[0]"]) is not None


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
    bytes=U64,
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
