"""Blocks with pages of their own: an access beyond them, or after their free, stops the device, and is somebody's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from scene import KIB, MIB, Scene, scene
from test_report_html import assert_sound
from test_report_json import ANYTHING, damaged, places

import streampool as sp
from streampool._report_check import problem_of
from streampool.cli import cli
from streampool.faults import BlockState, Fault, FaultKind
from streampool.page_guards import read_records
from streampool.report import Report, schema

SIZES = [1, 255, 256, 257, 1013, 4 * KIB, 4 * KIB + 1, 2 * MIB, 3 * MIB]


@pytest.fixture
def sc() -> Iterator[Scene]:
    with scene() as made:
        yield made


def guarded_pool(sc: Scene, **options: Any) -> sp.Pool:
    settings = {"page_guards": "all", "check_every": 1, "page_guard_side": "right", **options}
    return sc.pool(mode=settings.pop("mode", "debug"), **settings)


def use(stream: Any, address: int, size: int = 1, *, write: bool = False) -> None:
    """Queue work that touches some bytes, and wait for the device to run or to stop."""
    ranges = [(address, size)]
    stream.launch(writes=ranges) if write else stream.launch(reads=ranges)
    sp.sim.settle()


def is_lost(sc: Scene) -> bool:
    try:
        sc.device.create_stream().close()
    except sp.DriverError:
        return True
    return False


def the_fault(pool: sp.Pool) -> Fault:
    """Notice the lost device, and give the one fault that says whose access it was."""
    with pytest.raises(sp.DriverError, match="is lost"):
        pool.check()
    (fault,) = (fault for fault in pool.faults() if fault.kind is FaultKind.ILLEGAL_ACCESS)
    with pytest.raises(sp.DriverError):
        pool.check()
    assert pool.faults() == []  # said once
    return fault


# -- where an access faults -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("size", SIZES)
def test_an_access_behind_the_end_or_before_the_start_faults_on_the_guarded_side(
    sc: Scene, size: int, write: bool
) -> None:
    for side in ("right", "left"):
        with scene() as one:
            pool = guarded_pool(one, page_guard_side=side)
            stream = one.stream(pool)
            others = [pool.allocate(size, stream=stream) for _ in range(2)]
            block = pool.allocate(size, stream=stream)
            facts = block.facts()
            assert facts["pages"] == side
            use(stream, block.handle, size, write=write)
            assert not is_lost(one)
            slack = facts["begin"] + facts["reserved"] - block.handle - size if side == "right" else 0
            assert slack < 256
            use(stream, block.handle + size + slack if side == "right" else block.handle - 1, write=write)
            assert is_lost(one)
            fault = the_fault(pool)
            assert facts["serial"] in [candidate.block.serial for candidate in fault.candidates]
            assert len(fault.candidates) == 3
            del others


@pytest.mark.parametrize("distance", [1, 64 * KIB, 1 * MIB])
def test_far_accesses_fault_too(sc: Scene, distance: int) -> None:
    pool = guarded_pool(sc)
    stream = sc.stream(pool)
    block = pool.allocate(256, stream=stream)
    use(stream, block.handle + 255 + distance)
    assert is_lost(sc)


def test_an_access_after_the_free_faults_once_the_marks_are_complete(sc: Scene) -> None:
    pool = guarded_pool(sc)
    stream = sc.stream(pool)
    block = pool.allocate(1000, stream=stream)
    address = block.handle
    block.close(stream)
    pool.check()
    use(stream, address)
    assert is_lost(sc)
    fault = the_fault(pool)
    (candidate,) = fault.candidates
    assert candidate.block.address == address
    assert candidate.block.state is BlockState.FREED
    assert "pages revoked" in candidate.why
    assert (
        candidate.block.freed_at[0].function
        == candidate.block.allocated_at[0].function
        == ("test_an_access_after_the_free_faults_once_the_marks_are_complete")
    )


def test_a_use_that_a_second_stream_still_makes_of_a_freed_block_is_not_disturbed(sc: Scene) -> None:
    """R2 in debug mode: nothing is revoked, filled or verified before every mark is complete."""
    pool = guarded_pool(sc)
    home, second = sc.stream(pool), sc.stream(pool)
    block = pool.allocate(1000, stream=home)
    block.record_stream(second)
    work = sc.busy(second, block)
    block.close(home)
    pool.check(0)
    for _ in range(3):
        pool.allocate(1000, stream=home).close(home)
    assert pool.debug_totals()["page_guarded_live"] >= 1
    sc.open(work)
    assert not is_lost(sc)
    pool.check()
    assert pool.debug_totals()["page_guarded_live"] == 0
    sc.assert_no_race()
    assert pool.faults() == []


def test_the_slack_is_watched_like_a_guard(sc: Scene) -> None:
    pool = guarded_pool(sc)
    stream = sc.stream(pool)
    block = pool.allocate(1013, stream=stream)
    for at, kind in ((1013, FaultKind.OVERRUN), (-1, FaultKind.UNDERRUN), (-4096, FaultKind.UNDERRUN)):
        stream.launch(lambda out: out.fill(0), writes=[(block.handle + at, 1)])
        pool.check()
        (fault,) = pool.faults()
        assert (fault.kind, fault.address) == (kind, block.handle + at)
    assert not is_lost(sc)


# -- which blocks -----------------------------------------------------------------------------------------------------
def sides(pool: sp.Pool, *sizes: int, stream: Any, tag: str | None = None) -> list[str]:
    return [pool.allocate(size, stream=stream, tag=tag).facts()["pages"] for size in sizes]


def test_blocks_are_chosen_by_size(sc: Scene) -> None:
    pool = guarded_pool(sc, page_guard_min=1000, page_guard_max=2000)
    stream = sc.stream(pool)
    assert sides(pool, 0, 999, 1000, 2000, 2001, stream=stream) == ["none", "none", "right", "right", "none"]


def there(pool: sp.Pool, stream: Any) -> str:
    return str(pool.allocate(100, stream=stream).facts()["pages"])


@pytest.mark.parametrize(
    ("glob", "fits"),
    [
        ("there", True),
        ("the?e", True),
        ("test_page_guards.py", True),
        ("*/tests/*.py", True),
        ("test_page_guards.py:*", True),
        ("elsewhere", False),
        ("her", False),
    ],
)
def test_blocks_are_chosen_by_call_site(sc: Scene, glob: str, fits: bool) -> None:
    pool = guarded_pool(sc, page_guard_sites=glob)
    stream = sc.stream(pool)
    assert [there(pool, stream) for _ in range(3)] == (["right"] * 3 if fits else ["none"] * 3)


def test_blocks_are_chosen_by_tag(sc: Scene) -> None:
    pool = guarded_pool(sc, page_guard_sites="edge*")
    stream = sc.stream(pool)
    assert sides(pool, 10, stream=stream, tag="edges") == ["right"]
    assert sides(pool, 10, stream=stream, tag="nodes") == ["none"]


def test_samples_come_by_bytes_and_the_same_seed_draws_the_same(sc: Scene) -> None:
    def drawn(seed: int) -> list[str]:
        with scene() as one:
            pool = guarded_pool(
                one, page_guards="sampled", page_guard_sample="1MiB", page_guard_seed=seed, page_guard_side="random"
            )
            stream = one.stream(pool)
            return sides(pool, *[64 * KIB] * 200, stream=stream) + sides(pool, *[64 * MIB] * 3, stream=stream)

    first = drawn(7)
    small, large = first[:200], first[200:]
    assert 4 <= sum(side != "none" for side in small) <= 25  # 12.5 on average
    assert "none" not in large
    assert {"left", "right"} <= set(first)
    assert sum(side == "none" for side in drawn(8)) != 0
    assert drawn(8) != first


def test_beyond_the_cap_blocks_get_guard_bytes_and_are_counted(sc: Scene) -> None:
    pool = guarded_pool(sc, page_guard_cap="4MiB")
    stream = sc.stream(pool)
    blocks = [pool.allocate(100, stream=stream) for _ in range(4)]
    assert [block.facts()["pages"] for block in blocks] == ["right", "right", "none", "none"]
    totals = pool.debug_totals()
    assert (totals["page_guarded"], totals["page_guard_bytes"], totals["page_guards_over_cap"]) == (2, 4 * MIB, 2)
    stream.launch(lambda out: out.fill(0), writes=[(blocks[3].handle + 100, 1)])
    pool.check()
    (fault,) = pool.faults()
    assert fault.kind is FaultKind.OVERRUN
    blocks.clear()
    pool.check()
    assert pool.debug_totals()["page_guard_bytes"] == 0
    assert sides(pool, 100, stream=stream) == ["right"]


def test_where_little_room_is_left_samples_of_sites_that_have_one_are_left_out(sc: Scene) -> None:
    pool = guarded_pool(sc, page_guards="sampled", page_guard_sample=1, page_guard_cap="8MiB")
    stream = sc.stream(pool)
    same = [pool.allocate(100, stream=stream) for _ in range(5)]
    assert [block.facts()["pages"] for block in same].count("right") == 3
    assert there(pool, stream) == "right"  # another site has the last one
    assert pool.debug_totals()["page_guards_covered"] == 2


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_memory_without_gaps_gets_guard_bytes(sc: Scene, kind: str) -> None:
    pool = sc.pool(kind, mode="paranoid")
    stream = sc.stream(pool)
    assert sides(pool, 100, stream=stream) == ["none"]


def test_a_device_without_virtual_memory_gets_guard_bytes() -> None:
    with scene(virtual_memory=False) as sc:
        pool = sc.pool(mode="paranoid")
        assert sides(pool, 100, stream=sc.stream(pool)) == ["none"]


# -- bookkeeping ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("segments", ["vmm", "malloc", "driver"])
def test_counters_add_up_and_the_driver_has_everything_back(sc: Scene, segments: str) -> None:
    before = sc.device.driver.memory_info()
    pool = guarded_pool(sc, segments=segments, page_guard_side="random", page_guard_max=1 * MIB)
    stream = sc.stream(pool)
    blocks = []
    for n in range(60):
        blocks.append(pool.allocate(SIZES[n % len(SIZES)], stream=stream, alignment=256 << n % 14))
        assert blocks[-1].handle % (256 << n % 14) == 0
        if n % 3 == 2:
            blocks.pop(n % len(blocks)).close(stream)
        assert pool.audit() == ""
    for block in blocks:
        block.close(stream)
    pool.check()
    assert pool.audit() == ""
    assert pool.faults() == []
    pool.close()
    assert pool.stats().reserved == 0
    assert sc.device.driver.memory_info() == before


def test_revoked_addresses_are_kept_for_so_many_blocks(sc: Scene) -> None:
    pool = guarded_pool(sc, page_guard_kept=2)
    stream = sc.stream(pool)
    addresses = [pool.allocate_raw(100, stream=stream) for _ in range(4)]
    for address in addresses:
        pool.free_raw(address, stream=stream)
    pool.check()
    for address in addresses[:2]:
        with pytest.raises(sp.ForeignFreeError):
            pool.free_raw(address, stream=stream)
    for address in addresses[2:]:
        with pytest.raises(sp.DoubleFreeError):
            pool.free_raw(address, stream=stream)
        with pytest.raises(sp.ForeignFreeError, match="free memory of a pool"):
            pool.free_raw(address + 70 * KIB, stream=stream)


def test_misuse_at_the_call_is_found_as_with_other_blocks(sc: Scene) -> None:
    pool, other = guarded_pool(sc), sc.pool(mode="debug")
    stream = sc.stream(pool)
    other.register_stream(stream)
    block = pool.allocate_raw(3 * MIB, stream=stream)
    for inside in (1, 300 * KIB, 3 * MIB - 1):
        with pytest.raises(sp.InteriorFreeError, match=f"{inside} bytes into"):
            pool.free_raw(block + inside, stream=stream)
        pool.record_stream_raw(block + inside, stream)
    with pytest.raises(sp.WrongPoolError):
        other.free_raw(block, stream=stream)
    pool.free_raw(block, stream=stream)
    with pytest.raises(sp.DoubleFreeError):
        pool.free_raw(block, stream=stream)
    assert pool.audit() == ""


@pytest.mark.parametrize("call", ["address_reserve", "mem_create", "mem_map", "mem_set_access"])
def test_pages_that_the_driver_refuses_are_done_without(sc: Scene, call: str) -> None:
    pool = guarded_pool(sc)
    stream = sc.stream(pool)
    pool.reserve("8MiB")
    used = sc.device.driver.memory_info()
    sc.device.fail_call(call, n=1)
    assert sides(pool, 100, stream=stream) == ["none"]
    assert pool.debug_totals()["page_guards_refused"] == 1
    assert sc.device.driver.memory_info() == used
    assert pool.audit() == ""
    assert sides(pool, 100, stream=stream) == ["right"]


@pytest.mark.parametrize("call", ["mem_unmap", "mem_release"])
def test_pages_that_the_driver_will_not_take_back_stay_charged_and_are_tried_again(sc: Scene, call: str) -> None:
    pool = guarded_pool(sc)
    stream = sc.stream(pool)
    block = pool.allocate(100, stream=stream)
    sc.device.fail_call(call, n=1)
    block.close(stream)
    pool.check()
    assert pool.stats().reserved == 2 * MIB
    assert pool.audit() == ""
    pool.trim()
    assert pool.stats().reserved == 0
    assert pool.audit() == ""


def test_page_guards_take_at_most_half_of_the_limit_which_counts_their_pages(sc: Scene) -> None:
    pool = guarded_pool(sc, limit="12MiB", wait_timeout=0)
    stream = sc.stream(pool)
    held = [pool.allocate(100, stream=stream) for _ in range(4)]
    assert [block.facts()["pages"] for block in held] == ["right"] * 3 + ["none"]
    assert pool.stats().reserved == 8 * MIB
    assert pool.debug_totals()["page_guards_over_cap"] == 1
    held.clear()
    pool.check()
    assert sides(pool, 100, stream=stream) == ["right"]
    whole = pool.allocate(9 * MIB, stream=stream)
    assert whole.facts()["pages"] == "none"
    assert pool.audit() == ""


def test_pages_that_the_limit_refuses_are_done_without(sc: Scene) -> None:
    pool = guarded_pool(sc, limit="12MiB", wait_timeout=0)
    stream = sc.stream(pool)
    pool.reserve("12MiB")
    assert sides(pool, 100, stream=stream) == ["none"]
    assert pool.debug_totals()["page_guards_refused"] == 1


# -- whose access it was ----------------------------------------------------------------------------------------------
def test_of_1000_blocks_on_8_streams_none_is_named_that_only_idle_streams_used(sc: Scene) -> None:
    pool = guarded_pool(sc, mode="debug", page_guard_side="random", stack_depth=2)
    streams = [sc.stream(pool) for _ in range(8)]
    blocks = [(n % 8, pool.allocate(1000 + n, stream=streams[n % 8])) for n in range(1000)]
    for n, block in blocks:
        streams[n].launch(writes=[(block.handle, block.size)])
    for stream in streams[:7]:
        stream.sync()
    gate = sp.sim.Gate()
    planted = next(block for n, block in reversed(blocks) if n == 7)
    facts = planted.facts()
    outside = facts["begin"] + facts["reserved"] if facts["pages"] == "right" else facts["begin"] - 1
    streams[7].launch(reads=[(outside, 1)], gate=gate)
    result = pool.check(0)
    assert len(result.not_checked) == 125
    gate.open()
    sp.sim.settle()
    fault = the_fault(pool)
    used = {candidate.block.serial for candidate in fault.candidates}
    assert planted.facts()["serial"] in used
    assert used == {block.facts()["serial"] for n, block in blocks if n == 7}
    assert "875 more are left out" in fault.note
    text = Report(faults=(fault,)).to_text()
    assert "candidates" in text
    assert "and 115 more" in text
    assert Report.from_json(Report(faults=(fault,)).to_json()).faults == (fault,)


def test_a_stream_named_after_it_was_found_idle_is_idle_no_more(sc: Scene) -> None:
    pool = guarded_pool(sc)
    first, second = sc.stream(pool), sc.stream(pool)
    old = pool.allocate(100, stream=first)
    shared = pool.allocate(100, stream=second)
    pool.check()
    shared.record_stream(first)
    use(first, old.handle + 300)
    fault = the_fault(pool)
    assert {candidate.block.address for candidate in fault.candidates} == {old.handle, shared.handle}
    assert "left out" not in fault.note


def test_where_all_streams_were_idle_every_block_may_be_meant(sc: Scene) -> None:
    pool = guarded_pool(sc)
    stream = sc.stream(pool)
    block = pool.allocate(100, stream=stream)
    pool.check()
    use(stream, block.handle + 300)
    fault = the_fault(pool)
    assert len(fault.candidates) == 1
    assert "work came after it" in fault.note
    assert "page_guard_seed=" in fault.note


def test_a_free_on_a_lost_device_is_harmless_and_the_fault_is_kept(sc: Scene) -> None:
    pool = guarded_pool(sc)
    stream = sc.stream()
    block = pool.allocate(100, stream=stream)
    use(stream, block.handle + 300)
    block.close(stream)
    (fault,) = pool.faults()
    assert fault.kind is FaultKind.ILLEGAL_ACCESS


def test_without_page_guards_a_lost_device_is_no_fault(sc: Scene) -> None:
    pool = sc.pool(mode="debug")
    sc.device.set_lost()
    with pytest.raises(sp.DriverError):
        pool.check()
    assert pool.faults() == []


# -- records that outlive the process ---------------------------------------------------------------------------------
def test_the_records_say_the_same_as_the_living_pool(sc: Scene, tmp_path: Path) -> None:
    path = tmp_path / "guards.jsonl"
    pool = guarded_pool(sc, page_guard_records=str(path), page_guard_kept=2)
    first, second = sc.stream(pool), sc.stream(pool)
    for _ in range(4):
        pool.allocate(100, stream=first).close(first)
    pool.allocate(10, stream=second, tag='a "quoted" tag')
    pool.check()
    block = pool.allocate(200, stream=first)
    block.record_stream(second)
    use(first, block.handle + 300)
    fault = the_fault(pool)
    records = read_records(path)
    assert (records.pid, records.pool, records.device) == (os.getpid(), "default", "sim:0")
    assert "illegal" in records.error.lower() or "700" in records.error
    living = {(c.block.serial, c.block.address, c.block.size, c.block.pages, c.why) for c in fault.candidates}
    assert {(c.block.serial, c.block.address, c.block.size, c.block.pages, c.why) for c in records.candidates} == living
    assert [c.block.allocated_at for c in records.candidates] == [c.block.allocated_at for c in fault.candidates]
    assert [c.block.freed_at for c in records.candidates] == [c.block.freed_at for c in fault.candidates]
    assert f"{len(living)} blocks between unmapped pages may be meant" in records.to_text()
    assert "docs/faults/illegal_access.md" in records.to_text()


def test_records_are_there_after_a_process_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "guards.jsonl"
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(f"""\
            import os, signal
            import streampool as sp
            device = sp.Device("sim:0")
            pool = sp.Pool(device, mode="debug", page_guards="all", page_guard_records={str(path)!r})
            stream = device.create_stream()
            def weights():
                return pool.allocate(1000, stream=stream, tag="weights")
            block = weights()
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    records = read_records(path)
    (candidate,) = records.candidates
    assert candidate.block.tag == "weights"
    assert candidate.block.allocated_at[0].function == "weights"
    assert "the pool noted no lost device" in records.to_text()
    shown = subprocess.run(
        [sys.executable, "-m", "streampool", "report", str(path)], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "tag 'weights'" in shown.stdout


def report_on(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "streampool", "report", str(path), *options],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def records_of(sc: Scene, tmp_path: Path) -> Path:
    """Records of one live and one revoked block, whose device was lost."""
    path = tmp_path / "guards.jsonl"
    pool = guarded_pool(sc, page_guard_records=str(path), page_guard_seed=7)
    stream = sc.stream(pool)
    pool.allocate(100, stream=stream, tag="</script><b>weights</b>").close(stream)
    pool.check()
    block = pool.allocate(200, stream=stream)
    use(stream, block.handle + 300)
    the_fault(pool)
    return path


def test_records_are_plain_data_by_the_schema(records_of: Path) -> None:
    records = read_records(records_of)
    data = json.loads(report_on(records_of, "--json").stdout)
    assert data == records.to_dict()
    rules = schema()
    jsonschema.validate(data, {"$ref": "#/$defs/post_mortem", "$defs": rules["$defs"]})
    assert (data["seed"], data["pool"], data["left_out"]) == (7, "default", 0)
    assert "ILLEGAL_ADDRESS" in data["error"]
    live, revoked = data["candidates"]
    assert (live["block"]["size"], live["block"]["state"], revoked["block"]["state"]) == (200, "live", "freed")
    assert int(live["block"]["address"], 16) == records.candidates[0].block.address
    assert revoked["block"]["freed_at"][0]["function"] == "records_of"
    assert "any access faults" in revoked["why"]


def test_records_are_a_page_that_reads_by_itself(records_of: Path, tmp_path: Path) -> None:
    out = tmp_path / "guards.html"
    done = report_on(records_of, "--format", "html", "--output", str(out))
    assert done.returncode == 0, done.stderr
    page = assert_sound(out.read_text())
    for words in ("2 blocks between unmapped pages may be meant", "ILLEGAL_ADDRESS", "Block 1 of 2", "Block 2 of 2"):
        assert words in page.text
    assert "tag '</script><b>weights</b>'" in page.text
    assert "About illegal_access" in page.text
    assert "cannot be suppressed" in report_on(records_of, "--format", "suppressions").stderr


def test_records_of_a_block_that_a_graph_owns_name_its_capture(sc: Scene, tmp_path: Path) -> None:
    path = tmp_path / "guards.jsonl"
    pool = guarded_pool(sc, page_guard_records=str(path))
    stream = sc.stream(pool)
    with pool.capturing(stream):
        stream.begin_capture()
        block = pool.allocate(100, stream=stream)
        graph = stream.end_capture()
    assert graph is not None
    assert str(2**63)[:6] not in path.read_text()
    (candidate,) = read_records(path).candidates
    assert (candidate.block.stream, candidate.block.capture) == (0, 1)
    assert candidate.why.endswith("used on capture 1")
    assert block.facts()["capture"] == 1


def test_pools_and_processes_have_a_file_each(sc: Scene, tmp_path: Path) -> None:
    path = str(tmp_path / "guards.%p.jsonl")
    pools = [guarded_pool(sc, page_guard_records=path, name=name) for name in ("one", "two")]
    for pool in pools:
        pool.allocate(100, stream=sc.stream(pool))
    names = [f"guards.{os.getpid()}.jsonl", f"guards-2.{os.getpid()}.jsonl"]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)
    assert [read_records(tmp_path / name).pool for name in names] == ["one", "two"]


def test_a_cut_last_line_is_left_out_and_other_files_are_refused(tmp_path: Path, sc: Scene) -> None:
    path = tmp_path / "guards.jsonl"
    pool = guarded_pool(sc, page_guard_records=str(path))
    pool.allocate(100, stream=sc.stream(pool))
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert read_records(path).candidates == ()
    path.write_text('{"schema": "other"}\n')
    with pytest.raises(ValueError, match="no records of page guards"):
        read_records(path)


_ALLOCATED = [
    *("serial", "address", "size", "begin", "reserved", "pages"),
    *("stream", "thread", "time", "stack", "raw", "tag"),
]
LINES: list[dict[str, Any]] = [
    {"schema": "urn:streampool:page-guards:1", "pid": 7, "pool": "p", "device": "sim:0", "seed": 5},
    {"event": "stack", "stack": 3, "frames": [{"file": "a.py", "line": 2, "function": "f"}]},
    *(
        dict(zip(_ALLOCATED, (serial, 8192, 10, 4096, 8192, "right", stream, 1, 0.5, 3, False, "t"), strict=True))
        | {"event": "allocated"}
        for serial, stream in ((1, 11), (2, "capture 3"), (3, 11))
    ),
    {"event": "used_on", "serial": 1, "stream": 12},
    {"event": "freed", "serial": 1, "stream": 11, "thread": 1, "time": 0.75, "stack": 3},
    {"event": "revoked", "serial": 1},
    {"event": "dropped", "serial": 3},
    {"event": "idle", "stream": 12},
    {"event": "named", "stream": 12},
    {"event": "lost", "error": "it is lost"},
]
"""A line of each kind, as the core writes them."""


def test_the_core_writes_lines_as_the_reader_knows_them(records_of: Path) -> None:
    read = [json.loads(line) for line in records_of.read_text().splitlines()]
    known = {line.get("event"): line.keys() for line in LINES}
    assert {line.get("event"): line.keys() for line in read}.items() <= known.items()
    assert read_records(records_of).bad_lines == 0


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (1, "frames", [{"file": "a.py", "line": 10**30, "function": "f"}]),
        (1, "frames", [{"file": "a.py", "line": 1}]),
        (2, "stream", [1]),
        (2, "stream", "capture x"),
        (2, "size", "x"),
        (2, "size", float("nan")),
        (2, "time", float("inf")),
        (2, "tag", None),
        (2, "event", {}),
        (2, "event", "unheard of"),
        (5, "serial", 1.5),
        (9, "stream", {}),
    ],
)
def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, line: int, name: str, value: Any) -> None:
    path = tmp_path / "guards.jsonl"
    texts = [json.dumps(damaged(one, (name,), value) if at == line else one) for at, one in enumerate(LINES)]
    texts.insert(4, '{"event":"idle","str')
    path.write_text("\n".join([*texts, '{"event":"los']))
    records = read_records(path)
    assert records.bad_lines == 2  # the last one was only cut
    assert [one.block.serial for one in records.candidates] == ([2] if line == 2 else [1, 2])
    assert "the file is damaged: 2 lines are left out" in records.to_text()
    assert "2 lines are left out" in assert_sound(records.to_html()).text


def test_records_are_read_whose_last_line_was_cut_inside_a_letter(tmp_path: Path) -> None:
    path = tmp_path / "guards.jsonl"
    path.write_bytes("\n".join(map(json.dumps, LINES)).encode() + b'\n{"event":"lost","error":"\xc3')
    done = report_on(path)
    assert done.returncode == 0, done.stderr
    assert "2 blocks between unmapped pages" in done.stdout
    assert "damaged" not in done.stdout


def test_records_whose_first_line_is_damaged_are_refused_with_the_name_of_what_is(tmp_path: Path) -> None:
    path = tmp_path / "guards.jsonl"
    path.write_text("\n".join(json.dumps({**line, "seed": "x"}) for line in LINES))
    done = report_on(path)
    assert done.returncode == 2
    assert f"{path} holds no whole records of page guards: 'seed' in its first line is missing" in done.stderr


@given(
    at=st.sampled_from([(number, *place) for number, line in enumerate(LINES) for place in [(), *places(line)]]),
    value=ANYTHING,
    form=st.sampled_from(["text", "html", "json"]),
)
def test_anything_in_any_place_of_records_is_left_out_or_shown_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: tuple[Any, ...], value: Any, form: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("\n".join(map(json.dumps, damaged(LINES, at, value))) + "\n")
    expected = 0
    try:
        data = read_records(path).to_dict()
    except ValueError:
        assert at[0] == 0
        expected = 2
    else:
        assert problem_of(data, {"$ref": "#/$defs/post_mortem", "$defs": schema()["$defs"]}) is None
    done = CliRunner().invoke(cli, ["report", str(path), "--format", form])
    assert done.exit_code == expected, (done.output, done.exception)


def test_records_that_cannot_be_written_are_refused_before_anything_else(sc: Scene, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"page_guard_records.*cannot be written: No such file"):
        guarded_pool(sc, page_guard_records=str(tmp_path / "no" / "file"))


# -- what is said before ----------------------------------------------------------------------------------------------
def test_run_says_what_page_guards_take_before_the_program_starts(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("print('the program')\n")
    done = subprocess.run(
        [sys.executable, "-m", "streampool", "run", "--mode", "paranoid", str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    first = done.stderr.splitlines()[0]
    assert "each block of device memory takes whole pages of its own (2 MiB or more)" in first
    assert "up to 4 GiB" in first
    assert "page_guard_seed=" in first
