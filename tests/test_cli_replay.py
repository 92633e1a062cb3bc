"""``streampool replay``: the table, the JSON object, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from streampool.cli import cli

TRACES = Path(__file__).parent.parent / "examples" / "traces"
SMALL = """Thread,Time,Action,Pointer,Size,Stream
1,0,allocate,0x100,4096,1
1,0,allocate,0x200,2000000,2
1,0,allocate failure,(nil),1,1
1,0,free,0x100,4096,1
1,0,free,0x999,1,1
1,0,allocate,0x300,100,2
1,0,free,0x200,2000000,2
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    path.write_text(SMALL)
    return path


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["replay", "--device", "sim", *map(str, arguments)])


def replay_json(*arguments: object) -> dict[str, Any]:
    done = replay("--json", *arguments)
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_json_object_holds_what_was_measured(small: Path) -> None:
    result = replay_json(small, "--verify")
    assert result["events"] == 5
    assert result["streams"] == 2
    assert result["peak_live_bytes"] == 2004096
    assert result["live_at_end_bytes"] == 100
    assert result["peak_reserved_bytes"] >= 2004096
    assert result["ns_per_event"] > 0
    assert result["ns_per_event_cold"] > 0
    assert (result["failures"], result["verify_errors"], result["faults"]) == (0, 0, 0)
    assert (result["skipped_failures"], result["skipped_frees"]) == (1, 1)
    assert result["ratio"] == result["peak_reserved_bytes"] / result["peak_live_bytes"]
    assert result["verdict"].startswith("reserved is ")
    assert result["device"] == "sim:0"
    assert result["mode"] == "production"


def test_the_table_tells_a_person_the_same(small: Path) -> None:
    done = replay(small)
    assert done.exit_code == 0, done.output
    for words in ("5 on 2 streams", "peak live", "1.91 MiB", "peak reserved", "failed allocations in the log, skipped"):
        assert words in done.stdout
    assert "reserved is" in done.stdout.splitlines()[-1]


def test_the_counts_of_where_memory_came_from_say_that_they_sum_all_passes(small: Path) -> None:
    """They stood in the table beside the events of one pass, unlabelled."""
    done = replay(small, "--passes", 2, "--verify")
    assert done.exit_code == 0, done.output
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if "│" in line]
    table = dict(rows)
    assert table["allocations in 4 passes (1 cold, 2 warm, 1 verifying)"] == "12"  # 3 in the log
    paths = [int(value) for name, value in rows if name.startswith("of these from: ")]
    assert paths
    assert sum(paths) == 12
    assert "failures, all passes" in table
    assert sum(replay_json(small, "--passes", 2)["reuse"].values()) == 9


def test_the_mode_may_be_given_as_an_option_too(small: Path) -> None:
    assert replay_json(small, "--option", "mode=debug")["mode"] == "debug"
    assert replay_json(small, "--option", "mode=debug", "--mode", "observe")["mode"] == "observe"


def test_memory_that_is_not_to_be_had_at_the_start_is_a_failure_and_ends_with_1(small: Path) -> None:
    done = replay(small, "--option", "initial=2GiB", "--limit", "1GiB")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: out of memory")


def test_a_log_that_knows_its_own_allocator_is_compared_with_it() -> None:
    result = replay_json(TRACES / "resnet50_train.csv.gz", "--passes", 1)
    assert "this log's own allocator (PyTorch 2.11.0+cu130 on NVIDIA H200) reserved 1.26 ×" in result["verdict"]  # noqa: RUF001
    assert result["own_peak_reserved_bytes"] == 4116709376


def test_debug_mode_on_the_simulated_device_bounds_fills_and_says_so(small: Path) -> None:
    (note,) = replay_json(small, "--mode", "debug", "--verify")["notes"]
    assert "first and last 4 KiB" in note
    assert replay_json(small, "--mode", "debug", "--option", "fill_edge_bytes=0")["notes"] == []
    assert replay_json(small)["notes"] == []


def test_a_limit_below_the_need_shows_as_failures_and_exit_code_1(small: Path) -> None:
    done = replay(small, "--limit", "1MiB", "--json")
    result = json.loads(done.stdout)
    assert done.exit_code == 1
    assert result["failures"] > 0
    assert result["first_failure"]
    assert "failed allocation" in result["verdict"]


def test_a_torch_snapshot_replays_as_well(tmp_path: Path) -> None:
    import pickle

    entries = [
        {"action": "alloc", "addr": 16, "size": 512, "stream": 0},
        {"action": "free_requested", "addr": 16, "size": 512, "stream": 0},
    ]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [entries], "segments": []}))
    assert replay_json(path)["events"] == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"a,b\n", "row 1: not the header"),
        (SMALL.encode()[:-8], "row 8"),
        (gzip.compress(SMALL.encode())[:-12], "truncated"),
        (b"\x80\x04K\x01.", "not a PyTorch memory snapshot"),
    ],
)
def test_a_trace_that_cannot_be_read_ends_with_2_and_says_where(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    done = replay(path)
    assert done.exit_code == 2
    assert says in done.stderr
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("none.csv",), "does not exist"),
        (("SMALL", "--mode", "debugg"), "did you mean 'debug'"),
        (("SMALL", "--option", "gard_bytes=1"), "did you mean 'guard_bytes'"),
        (("SMALL", "--option", "guard_bytes"), "is not name=value"),
        (("SMALL", "--option", "track=perhaps"), "takes true or false"),
        (("SMALL", "--limit", "-1"), "negative"),
        (("SMALL", "--limit", "1e3"), "is not a size"),
        (("SMALL", "--passes", "0"), "1"),
        (("SMALL", "--devise", "sim"), "--device"),
    ],
)
def test_wrong_use_ends_with_2(small: Path, arguments: tuple[str, ...], says: str) -> None:
    done = replay(*(str(small) if a == "SMALL" else a for a in arguments))
    assert done.exit_code == 2, done.output
    assert says in done.stderr
