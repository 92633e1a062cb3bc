"""Snapshots: a pool at one moment, read again where neither the pool nor the process is there any more."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from scene import MIB
from test_metrics_holders import by_function
from test_report_html import assert_sound
from test_report_json import ANYTHING, damaged, places

import streampool as sp
from streampool import snapshots
from streampool.cli import cli
from streampool.report import schema

PROGRAM = """
import json, sys
import streampool as sp
sp.sim.configure(memory="1GiB")
device = sp.Device("sim:0")
pool = sp.Pool(device, mode=sys.argv[2], name="served <b>", sample_bytes=1)
stream = device.create_stream()
def weights():
    return pool.allocate(3 << 20, stream=stream, tag="weights")
def acts():
    return pool.allocate(1000, stream=stream)
kept = [weights(), weights(), acts()]
acts().close(stream)
with open(sys.argv[1], "w") as to:
    json.dump(pool.snapshot(), to)
"""


@pytest.fixture(params=["debug", "production"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A snapshot that a program left behind."""
    script, path = tmp_path / "program.py", tmp_path / "pool.json"
    script.write_text(textwrap.dedent(PROGRAM))
    subprocess.run([sys.executable, "-P", str(script), str(path), request.param], check=True)
    return path


def report(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["report", *map(str, arguments)])


def test_a_snapshot_says_in_another_process_what_the_pool_held_and_who_held_it(saved: Path) -> None:
    done = report(saved)
    assert done.exit_code == 0, done.output
    text = done.stdout
    assert text.startswith("pool 'served <b>' (device memory, sim:0, ")
    mode = json.loads(saved.read_text())["options"]["mode"]
    assert ("held by (exact)" in text) == (mode == "debug")
    assert ("held by (estimated: one call stack in 1 B is kept)" in text) == (mode == "production")
    held = text.partition("held by")[2]
    first, second = held.index("6,291,456 bytes in 2 blocks, tag 'weights'"), held.index("1,000 bytes in 1 block\n")
    assert first < second
    assert "program.py:9 in weights" in held[first:second]
    assert "program.py:11 in acts" in held[second:]
    lines = [line.split() for line in text.partition("held by")[0].splitlines() if line.strip()][1:8]
    numbers = [int(next(word for word in line if word[0].isdigit()).replace(",", "")) for line in lines]
    assert sum(numbers[:6]) == numbers[6] > 6 * MIB
    assert [line[-1] for line in lines] == [*snapshots._PARTS, "reserved"]


def test_a_snapshot_becomes_a_page_and_json_and_a_profile(saved: Path, tmp_path: Path) -> None:
    assert report(saved, "--format", "html", "-o", tmp_path / "pool.html").exit_code == 0
    page = assert_sound((tmp_path / "pool.html").read_text())
    for words in ("pool 'served <b>'", "tag 'weights'", "in weights", "Settings", "sample_bytes"):
        assert words in page.text
    data = json.loads(report(saved, "--json").stdout)
    assert data == json.loads(saved.read_text())
    jsonschema.validate(data, {"$ref": "#/$defs/snapshot", "$defs": schema()["$defs"]})
    assert report(saved, "--format", "pprof", "-o", tmp_path / "pool.pb.gz").exit_code == 0
    found = by_function((tmp_path / "pool.pb.gz").read_bytes(), "served <b>", tag="weights")["weights"]
    assert (found["inuse_objects"], found["inuse_space"]) == (2, 6 * MIB)
    done = report(saved, "--format", "suppressions")
    assert (done.exit_code, "no findings to suppress" in done.stderr) == (2, True)


def test_a_snapshot_of_a_pool_that_holds_nothing_says_so() -> None:
    with sp.Pool("sim:0", mode="off", name="empty") as pool:
        one = snapshots.Snapshot.from_json(json.dumps(pool.snapshot()))
    assert "nothing that was seen" in one.to_text()
    assert one.account[-1] == ("reserved", 0)
    assert_sound(one.to_html())


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("stats",), {}, "stats: 'in_use' is missing"),
        (("holders", 0, "bytes"), -1, r"holders\[0\].bytes: expected 0 or more, found -1"),
        (("kind",), "unified", "kind: expected one of device, pinned, managed"),
        (("stacks",), [], "stacks: expected object, found an array"),
        (("stats", "in_use"), "abc", "stats.in_use: expected integer, found 'abc'"),
        (("stats", "limit"), {}, "stats.limit: expected integer, found an object"),
        (("blocks", 0, "size"), float("nan"), "nan is no finite number"),
    ],
)
def test_a_damaged_snapshot_is_refused_and_names_the_part(
    tmp_path: Path, path: tuple[Any, ...], value: Any, words: str
) -> None:
    with sp.Pool("sim:0", mode="debug") as pool:
        block = pool.allocate(10)
        data = pool.snapshot()
        block.close()
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=words):
        snapshots.Snapshot.from_json(json.dumps(data))
    file = tmp_path / "pool.json"
    file.write_text(json.dumps(data))
    done = report(file)
    assert done.exit_code == 2
    assert "is JSON, but no whole streampool snapshot" in done.stderr
    file.write_text(file.read_text()[:-20])
    assert "it is cut" in report(file).stderr


def test_the_profile_of_a_report_is_of_what_was_still_live(tmp_path: Path) -> None:
    from streampool._findings import PoolFindings
    from streampool.report import Report

    with sp.Pool("sim:0", mode="debug", name="reported") as pool:
        block = pool.allocate(4096, tag="kept")
        found = PoolFindings("reported", "device", "sim:0", "debug", live_blocks=pool.live_blocks())
        one = Report.from_findings([found])
        block.close()
    file, out = tmp_path / "report.json", tmp_path / "report.pb.gz"
    file.write_text(one.to_json())
    assert report(file, "--format", "pprof", "--output", out).exit_code == 0
    profile = by_function(out.read_bytes(), "reported", tag="kept")
    assert [sums["inuse_space"] for sums in profile.values()] == [4096]
    assert report(file, "--format", "pprof").stdout_bytes[:2] == b"\x1f\x8b"  # gzip, into a pipe


def test_a_snapshot_is_known_by_its_schema_wherever_that_stands(saved: Path) -> None:
    text = report(saved).stdout
    for form in ({"sort_keys": True}, {"sort_keys": True, "indent": 1}):
        saved.write_text(json.dumps(json.loads(saved.read_text()), **form))  # type: ignore[arg-type]
        assert report(saved).stdout == text
    # What only names it is none.
    saved.write_text(json.dumps({"schema": "other", "about": snapshots.SCHEMA_ID}))
    assert "expected schema urn:streampool:report:1, found 'other'" in report(saved).stderr


@pytest.mark.parametrize("depth", [150, 5000, 100_000])
def test_a_snapshot_that_is_nested_too_deeply_is_refused_with_words(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "pool.json"
    path.write_text(json.dumps(WHOLE).replace('"HERE"', "[" * depth + "]" * depth))
    with pytest.raises(ValueError, match="nested too deeply"):
        snapshots.read_snapshot(path)
    done = report(path)
    assert (done.exit_code, "nested too deeply" in done.stderr) == (2, True)


def whole() -> dict[str, Any]:
    with sp.Pool("sim:0", mode="debug") as pool:
        block = pool.allocate(10, tag="t")
        data = json.loads(json.dumps(pool.snapshot()))
        block.close()
    return {**data, "tool": {**data["tool"], "more": "HERE"}}


WHOLE = whole()


@given(
    place=st.sampled_from(list(places(WHOLE))), value=ANYTHING, form=st.sampled_from(["text", "html", "json", "pprof"])
)
def test_anything_in_any_place_of_a_snapshot_is_shown_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[Any, ...], value: Any, form: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(damaged(WHOLE, place, value)))
    try:
        one = snapshots.read_snapshot(path)
    except ValueError:
        expected = 2
    else:
        expected = 0
        assert json.loads(one.to_json()) == json.loads(path.read_text())
    done = report(path, "--format", form)
    assert done.exit_code == expected, (done.output, done.exception)
    if expected:
        wanted = "report: expected schema" if place == ("schema",) else "is JSON, but no whole streampool snapshot"
        assert wanted in done.stderr
