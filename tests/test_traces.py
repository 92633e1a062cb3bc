"""Readers of traces: what they keep, what they count, and how they refuse."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampool.traces import Trace, TraceError, read_trace

HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"
EXAMPLES = Path(__file__).parent.parent / "examples" / "traces"


def rows(*lines: str) -> str:
    return HEADER + "".join(f"{line}\n" for line in lines)


def read(folder: Path, text: str, name: str = "log.csv") -> Trace:
    path = folder / name
    path.write_text(text)
    return read_trace(path)


def test_an_rmm_log_becomes_arrays_of_events_in_order(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        rows(
            "7,10:00:00.000001,allocate,0x7f00,1000,0x0",
            "7,10:00:00.000002,allocate,0x8f00,24,0x55d0",
            "7,10:00:00.000003,free,0x7f00,1000,0x0",
        ),
    )
    assert trace.actions.tolist() == [1, 1, 0]
    assert trace.ids.tolist() == [0, 1, 0]
    assert trace.sizes.tolist() == [1000, 24, 1000]
    assert trace.streams.tolist() == [0, 1, 0]
    assert trace.stream_names == ["0x0", "0x55d0"]
    assert [a.dtype for a in (trace.actions, trace.ids, trace.sizes, trace.streams)] == [
        np.uint8,
        np.uint32,
        np.uint64,
        np.uint32,
    ]
    assert (trace.events, trace.blocks, trace.peak_live_bytes, trace.live_at_end_bytes) == (3, 2, 1024, 24)


def test_the_per_thread_handle_is_a_stream_of_each_thread_and_a_stream_numbered_two_is_not(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        rows(
            "1,0,allocate,0x100,1,0x2",
            "2,0,allocate,0x200,1,0x2",
            "1,0,allocate,0x300,1,2",
            "2,0,allocate,0x400,1,2",
            "2,0,allocate,0x500,1,0x1",
            "1,0,allocate,0x600,1,0x1",
        ),
    )
    assert trace.streams.tolist() == [0, 1, 2, 2, 3, 3]
    assert trace.stream_names == ["0x2 of thread 1", "0x2 of thread 2", "2", "0x1"]


def test_a_pointer_that_is_allocated_again_after_its_free_is_another_block(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        rows("1,0,allocate,0x1,8,0", "1,0,free,0x1,8,0", "1,0,allocate,0x1,16,0", "1,0,free,0x1,16,0"),
    )
    assert trace.ids.tolist() == [0, 0, 1, 1]
    assert trace.sizes.tolist() == [8, 8, 16, 16]
    assert trace.live_at_end_bytes == 0
    assert trace.reallocations == 0


def test_failures_and_frees_of_unknown_pointers_are_counted_and_skipped(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        rows(
            "1,0,free,0x99,8,0",
            "1,0,allocate failure,(nil),4096,0",
            "1,0,allocate,0x1,8,0",
            "1,0,allocate,(nil),0,0",
            "1,0,free,0x0,0,0",
            "1,0,free,0x1,8,0",
            "1,0,free,0x1,8,0",
        ),
    )
    assert trace.events == 2
    assert (trace.skipped_failures, trace.skipped_frees, trace.skipped_null) == (1, 2, 2)


def test_a_live_pointer_allocated_again_gets_the_missing_free(tmp_path: Path) -> None:
    trace = read(tmp_path, rows("1,0,allocate,0x1,8,a", "1,0,allocate,0x1,16,b"))
    assert trace.actions.tolist() == [1, 0, 1]
    assert trace.ids.tolist() == [0, 0, 1]
    assert trace.streams.tolist() == [0, 0, 1]
    assert trace.reallocations == 1
    assert (trace.peak_live_bytes, trace.live_at_end_bytes) == (16, 16)


def test_columns_are_found_by_name_and_more_columns_do_no_harm(tmp_path: Path) -> None:
    trace = read(
        tmp_path, "Size,Stream,Pointer,Action,Thread,Time,Tag\n64, 3 ,0x1,allocate,1,0,weights\n", "reordered.csv"
    )
    assert trace.sizes.tolist() == [64]
    assert trace.stream_names == ["3"]


def test_blank_lines_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes((HEADER + "\n1,0,allocate,0x1,8,0\n\n1,0,free,0x1,8,0\n").replace("\n", "\r\n").encode())
    assert read_trace(path).events == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1,0,allocate,0x2,8", "5 fields where the header has 6"),
        ("1,0,allocate,0x2,8,0,extra", "7 fields where the header has 6"),
        ("1,0,allocate,0x2,8,", "the Stream field is empty"),
        ("1,0,reallocate,0x2,8,0", "unknown action 'reallocate'"),
        ("1,0,allocate,0x2,eight,0", "Size is 'eight', not a number"),
        ("1,0,allocate,0x2,-8,0", "Size is -8"),
        ("1,0,allocate,0x2,18446744073709551616,0", "Size is 18446744073709551616"),
        ("1,0,allocate,0xzz,8,0", "Pointer is '0xzz', not a number"),
        ('1,0,allocate,"0x2,8,0', "not a row of text"),
    ],
)
def test_a_broken_row_is_named_with_its_number_and_what_is_wrong(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(TraceError, match="row 3") as caught:
        read(tmp_path, rows("1,0,allocate,0x1,8,0", line))
    assert says in str(caught.value)
    assert "log.csv" in str(caught.value)


def test_a_file_cut_inside_its_last_row_is_an_error(tmp_path: Path) -> None:
    whole = rows("1,0,allocate,0x1,8,0", "1,0,free,0x1,8,0")
    with pytest.raises(TraceError, match="row 3: 5 fields"):
        read(tmp_path, whole[:-3])


def test_a_file_without_the_header_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="row 1: not the header of a trace: Thread, Time"):
        read(tmp_path, "1,0,allocate,0x1,8,0\n")
    with pytest.raises(TraceError, match="the file is empty"):
        read(tmp_path, "")
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(TraceError, match="row 1: not a row of text"):
        read_trace(path)


def test_a_gzip_log_is_known_by_its_bytes_and_not_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(gzip.compress(rows("1,0,allocate,0x1,8,0").encode()))
    assert read_trace(path).events == 1


def test_a_truncated_gzip_log_is_an_error_that_says_after_which_row(tmp_path: Path) -> None:
    packed = (EXAMPLES / "resnet50_train.csv.gz").read_bytes()
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"after row \d{3,}: the gzip data end before their end mark") as caught:
        read_trace(path)
    assert "cut.csv.gz" in str(caught.value)
    path.write_bytes(packed[:4])
    with pytest.raises(TraceError, match="gzip data end before"):
        read_trace(path)


def test_a_damaged_gzip_log_is_an_error(tmp_path: Path) -> None:
    packed = bytearray((EXAMPLES / "resnet50_train.csv.gz").read_bytes())
    packed[len(packed) // 2 : len(packed) // 2 + 64] = bytes(64)
    path = tmp_path / "bad.csv.gz"
    path.write_bytes(packed)
    with pytest.raises(TraceError, match=r"bad\.csv\.gz"):
        read_trace(path)


@pytest.mark.parametrize("name", ["resnet50_train", "gpt2_train_varlen", "multistream_pipeline", "gnn_train"])
def test_the_shipped_traces_read_as_their_notes_say(name: str) -> None:
    import json

    facts = json.loads((EXAMPLES / f"{name}.json").read_text())
    trace = read_trace(EXAMPLES / f"{name}.csv.gz")
    assert trace.name == name
    assert trace.events == facts["events"]
    assert len(trace.stream_names) == facts["streams"]
    assert trace.peak_live_bytes == facts["peak_live"]
    assert trace.live_at_end_bytes == facts["live_at_end"]
    assert (trace.skipped_failures, trace.skipped_frees, trace.skipped_null, trace.reallocations) == (0, 0, 0, 0)
    assert trace.own is not None
    assert trace.own.peak_reserved_bytes == facts["torch_peak_reserved"]
    assert "PyTorch 2.11" in trace.own.name


def test_the_reader_agrees_with_a_plain_reading_of_the_rows() -> None:
    with gzip.open(EXAMPLES / "multistream_pipeline.csv.gz", "rt", newline="") as file:
        expected = list(csv.DictReader(file))
    trace = read_trace(EXAMPLES / "multistream_pipeline.csv.gz")
    assert [("free", "allocate")[a] for a in trace.actions.tolist()] == [row["Action"] for row in expected]
    assert [trace.stream_names[s] for s in trace.streams.tolist()] == [row["Stream"] for row in expected]
    live: dict[str, int] = {}
    for row, number, size in zip(expected, trace.ids.tolist(), trace.sizes.tolist(), strict=True):
        assert size == int(row["Size"])
        if row["Action"] == "allocate":
            live[row["Pointer"]] = number
        else:
            assert live.pop(row["Pointer"]) == number


def test_a_side_note_that_is_broken_is_told_and_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text("{")
    trace = read(tmp_path, rows("1,0,allocate,0x1,8,0"))
    assert trace.own is None
    assert "log.json beside the log was not understood" in trace.notes[0]


# -- PyTorch's snapshot ------------------------------------------------------------------------------------------------


def entry(action: str, addr: int = 0, size: int = 0, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": 1, "frames": []}


def snapshot(*entries: dict[str, Any], segments: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"segments": segments or [], "device_traces": [list(entries)], "external_annotations": []}


def write_pickle(path: Path, value: object, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


def test_a_torch_snapshot_becomes_a_trace_freed_where_the_program_asked(tmp_path: Path) -> None:
    made = snapshot(
        entry("segment_alloc", 0x1000, 2 << 20),
        entry("alloc", 0x1000, 512, 0),
        entry("alloc", 0x1200, 100, 0x7F00),
        entry("free_requested", 0x1000, 512, 0),
        entry("free_completed", 0x1000, 512, 0),
        entry("alloc", 0x1000, 256, 0),
        {"action": "oom", "device_free": 0, "size": 1 << 40, "stream": 0},
        entry("free_requested", 0x9999, 5, 0),
        entry("free_completed", 0x9999, 5, 0),
        entry("snapshot"),
    )
    trace = read_trace(write_pickle(tmp_path / "snap.pickle", made))
    assert trace.actions.tolist() == [1, 1, 0, 1]
    assert trace.ids.tolist() == [0, 1, 0, 2]
    assert trace.sizes.tolist() == [512, 100, 512, 256]
    assert trace.peak_live_bytes == 612
    assert (trace.skipped_failures, trace.skipped_frees) == (1, 1)
    assert trace.name == "snap"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_snapshots_of_every_binary_protocol_are_read_also_packed(tmp_path: Path, protocol: int) -> None:
    made = pickle.dumps(snapshot(entry("alloc", 1, 2)), protocol=protocol)
    path = tmp_path / "snap"
    path.write_bytes(made)
    assert read_trace(path).events == 1
    path.write_bytes(gzip.compress(made))
    assert read_trace(path).events == 1


def test_what_the_logs_own_allocator_held_at_most_is_worked_out_backwards(tmp_path: Path) -> None:
    made = snapshot(
        entry("alloc", 1, 100),
        entry("segment_alloc", 0x1000, 500),
        entry("segment_free", 0x1000, 500),
        entry("segment_map", 0x1000, 50),
        segments=[{"device": 0, "total_size": 150}, {"device": 1, "total_size": 999}],
    )
    own = read_trace(write_pickle(tmp_path / "snap.pickle", made)).own
    assert own is not None
    assert own.peak_reserved_bytes == 600  # 100 before the trace, and 500
    assert own.ratio == 6.0


def test_of_several_devices_the_busiest_is_read_and_the_others_are_told(tmp_path: Path) -> None:
    made = snapshot()
    made["device_traces"] = [[entry("alloc", 1, 2)], [entry("alloc", 1, 2), entry("alloc", 3, 4)]]
    trace = read_trace(write_pickle(tmp_path / "snap.pickle", made))
    assert trace.events == 2
    assert trace.notes == ["device 1 of the snapshot; 1 allocations of other devices are left out"]


class Danger:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import test_traces_danger",))


def test_a_pickle_that_asks_for_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"refers to builtins\.exec, and only plain data"):
        read_trace(write_pickle(tmp_path / "evil.pickle", {"device_traces": [Danger()]}))
    with pytest.raises(TraceError, match=r"refers to pathlib[.\w]*\.\w*Path"):
        read_trace(write_pickle(tmp_path / "evil.pickle", {"device_traces": [tmp_path]}))


def test_sets_in_a_pickle_are_plain_data(tmp_path: Path) -> None:
    made = {**snapshot(entry("alloc", 1, 2)), "more": {1, 2}, "frozen": frozenset({3})}
    assert read_trace(write_pickle(tmp_path / "snap.pickle", made, protocol=2)).events == 1


def test_a_truncated_snapshot_is_an_error_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = pickle.dumps(snapshot(*(entry("alloc", i, i) for i in range(1, 50))), protocol=4)
    path = tmp_path / "cut.pickle"
    for length in range(2, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match=r"cut\.pickle"):
            read_trace(path)


def test_damaged_pickles_are_errors_of_ours_whatever_byte_is_hit(tmp_path: Path) -> None:
    whole = pickle.dumps(snapshot(entry("alloc", 1, 2)), protocol=4)
    path = tmp_path / "bad.pickle"
    for at in range(2, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(TraceError):  # some flips hit a text that nobody reads; every other one is named
            read_trace(path)


@pytest.mark.parametrize("value", [[1, 2], {}, {"device_traces": 3}, {"device_traces": [3]}, {"segments": []}])
def test_a_pickle_of_something_else_is_no_snapshot(tmp_path: Path, value: object) -> None:
    with pytest.raises(TraceError, match="not a PyTorch memory snapshot"):
        read_trace(write_pickle(tmp_path / "other.pickle", value))


def test_a_snapshot_without_recorded_history_says_how_to_record_it(tmp_path: Path) -> None:
    for empty in ({"device_traces": []}, {"device_traces": [[], []]}):
        with pytest.raises(TraceError, match="_record_memory_history"):
            read_trace(write_pickle(tmp_path / "empty.pickle", empty))


def test_an_entry_without_its_fields_is_named_by_its_number(tmp_path: Path) -> None:
    made = snapshot(entry("alloc", 1, 2), {"action": "alloc", "addr": 5})
    with pytest.raises(TraceError, match="entry 2 of the trace: no usable addr, size and stream"):
        read_trace(write_pickle(tmp_path / "snap.pickle", made))
    made = snapshot(entry("alloc", 1, -2))
    with pytest.raises(TraceError, match="entry 1 of the trace: size is -2"):
        read_trace(write_pickle(tmp_path / "snap.pickle", made))


def test_a_zip_archive_of_torch_save_is_told_apart(tmp_path: Path) -> None:
    import zipfile

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("data.pkl", b"")
    path = tmp_path / "saved.pt"
    path.write_bytes(packed.getvalue())
    with pytest.raises(TraceError, match=r"torch\.save"):
        read_trace(path)


def test_a_missing_file_is_the_systems_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.csv")
