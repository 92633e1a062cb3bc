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
from scene import MIB
from test_metrics_holders import by_function
from test_report_html import assert_sound

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
