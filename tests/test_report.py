"""Reports: what the text says and in which order, and what counts."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest
from report_scene import (
    ADDRESS,
    DEBUG_OPTIONS,
    Found,
    assert_in_order,
    block,
    fault,
    freed,
    overrun,
    report,
    written,
)

from streampool.faults import Fault, FaultKind, user_frames
from streampool.leaks import Leak, LeakClass, LeakPolicy, Leaks
from streampool.report import Report


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
