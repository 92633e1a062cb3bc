"""Replays of real traces: every event is served, nothing is overwritten, and memory stays near what is live."""

from __future__ import annotations

from pathlib import Path

import pytest

import streampool as sp
from streampool.replay import ReplayResult, replay

TRACES = Path(__file__).parent.parent / "examples" / "traces"
NAMES = ["resnet50_train", "gpt2_train_varlen", "multistream_pipeline", "gnn_train"]


@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_trace_replays_verified_and_without_failure(name: str, mode: str) -> None:
    result = replay(TRACES / f"{name}.csv.gz", "sim:0", mode, verify=True, passes=1)
    assert result.is_clean, result.verdict
    assert result.verified
    trace = sp.traces.read_trace(TRACES / f"{name}.csv.gz")
    assert result.events == trace.events
    assert result.peak_live_bytes == trace.peak_live_bytes
    assert result.live_at_end_bytes == trace.live_at_end_bytes
    if mode == "production":
        assert result.ratio <= 1.3


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["production", "debug"])
@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_trace_replays_verified_on_the_gpu(name: str, mode: str) -> None:
    result = replay(TRACES / f"{name}.csv.gz", "cuda:0", mode, verify=True, passes=1)
    assert result.device == "cuda:0"
    assert result.is_clean, result.verdict
    if mode == "production":
        assert result.ratio <= 1.3


def test_each_stream_of_the_trace_is_a_stream_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    header = "Thread,Time,Action,Pointer,Size,Stream\n"
    # The same bytes over and over on one stream; on two streams the second must wait for the first, or take its own.
    path.write_text(header + "".join(f"1,0,allocate,0x1,4000000,{i}\n1,0,free,0x1,4000000,{i}\n" for i in (1, 2, 1, 2)))
    result = replay(path, "sim:0", options={"reuse": "deterministic"}, passes=1)
    assert result.streams == 2
    assert result.peak_live_bytes == 4000000
    assert result.peak_reserved_bytes >= 8000000


def test_the_progress_callback_hears_of_the_end() -> None:
    heard: list[tuple[int, int]] = []
    replay(
        TRACES / "resnet50_train.csv.gz", "sim:0", passes=1, progress=lambda done, total: heard.append((done, total))
    )
    assert heard
    assert heard[-1][0] == heard[-1][1]
    assert heard == sorted(heard)


def test_a_progress_callback_that_raises_ends_the_replay_with_its_error() -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(TRACES / "resnet50_train.csv.gz", "sim:0", passes=1, progress=stop)


def result_with(**fields: object) -> ReplayResult:
    plain: dict[str, object] = {
        "trace": "t",
        "device": "sim:0",
        "mode": "production",
        "verified": False,
        "events": 2,
        "streams": 1,
        "passes": 1,
        "ns_per_event_cold": 1.0,
        "ns_per_event": 1.0,
        "peak_live_bytes": 100,
        "peak_reserved_bytes": 106,
        "live_at_end_bytes": 0,
        "failures": 0,
        "verify_errors": 0,
        "faults": 0,
    }
    return ReplayResult(**{**plain, **fields})  # type: ignore[arg-type]


def test_the_verdict_is_one_sentence_of_the_ratio_or_of_what_went_wrong() -> None:
    assert result_with().verdict == "reserved is 1.06 × live"  # noqa: RUF001
    assert result_with(own_allocator="PyTorch", own_ratio=1.5).verdict == (
        "reserved is 1.06 × live; this log's own allocator (PyTorch) reserved 1.50 × its live bytes"  # noqa: RUF001
    )
    assert result_with(failures=2, faults=1, first_failure="event 7").verdict == (
        "2 failed allocations and 1 fault; the first: event 7"
    )
    assert result_with(peak_live_bytes=0).verdict == "the log allocates nothing"
