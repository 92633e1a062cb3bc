"""Who holds memory: the page behind an alert, and the profile."""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metrics_scene import get
from scene import MIB

import streampool as sp
from streampool import metrics
from streampool.metrics.holders import History

HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    sp.sim.reset()
    sp.sim.configure(scheduler="seeded")
    yield
    sp.sim.reset()


def leaking(pool: sp.Pool) -> sp.Buffer:
    return pool.allocate(8 * MIB)  # grows


def steady(pool: sp.Pool) -> sp.Buffer:
    return pool.allocate(64 * MIB)  # stays


def test_the_line_that_grows_comes_before_the_line_that_holds_most() -> None:
    pool = sp.Pool("sim:0", name="grows")
    history = History(sp.sim.clock.now)
    kept = [steady(pool) for _ in range(4)]
    kept.append(leaking(pool))
    history.observe()
    for _ in range(10):
        sp.sim.clock.advance(60)
        kept.append(leaking(pool))
        history.observe()
    (pool_now,) = [p for p in history.now() if p.pool == "grows"]
    assert pool_now.sample_bytes == 4 * MIB
    first, second = pool_now.holders[:2]
    assert first.frames[0].function == "leaking"
    # Each block of 8 MiB is sampled with probability 1 - exp(-2): an estimate.
    assert 40 * MIB < first.grown <= 11 * 8 * MIB / 0.86
    assert first.since == pytest.approx(600)
    assert second.frames[0].function == "steady"
    assert second.grown == 0
    assert abs(second.bytes - 256 * MIB) < MIB
    text = history.text()
    assert text.index("in leaking") < text.index("in steady")
    assert " in 10 min" in text
    assert f"{HERE}:{leaking.__code__.co_firstlineno + 1} in leaking" in text


def test_a_look_comes_once_a_minute_and_reaches_back_an_hour() -> None:
    pool = sp.Pool("sim:0", name="looks")
    history = History(sp.sim.clock.now)
    kept = steady(pool)
    for _ in range(3 * 120):
        history.observe()
        sp.sim.clock.advance(30)
    (holder,) = next(p for p in history.now() if p.pool == "looks").holders
    assert 3500 <= holder.since <= 3700
    assert len(history._epochs) == 61
    kept.close()


def test_a_clock_that_goes_back_begins_a_new_history() -> None:
    now = [1000.0]
    history = History(lambda: now[0])
    history.observe()
    now[0] = 5.0
    history.observe()
    assert [at for at, _ in history._epochs] == [5.0]


def test_a_site_that_rises_all_hour_is_suspected_and_one_that_comes_and_goes_is_not() -> None:
    pool = sp.Pool("sim:0", name="suspects", mode="debug", quarantine_bytes=0)
    history = History(sp.sim.clock.now)
    kept: list[sp.Buffer] = [steady(pool)]
    saw: list[sp.Buffer] = []
    for minute in range(61):
        kept.append(leaking(pool))
        saw = [] if minute % 10 == 0 else [*saw, pool.allocate(16 * MIB)]
        history.observe()
        sp.sim.clock.advance(60)
        found = history.suspects()["sim:0", "suspects", "device"]
        assert (found.sites == 1) == (minute == 60), minute  # not before an hour has gone by
    assert found.bytes == 45 * 8 * MIB  # from the first quarter's least to the last one's
    saw.clear()
    for _ in range(30):
        history.observe()
        sp.sim.clock.advance(60)
    assert history.suspects()["sim:0", "suspects", "device"].sites == 0  # it does not grow any more


def test_a_steady_site_is_no_suspect_however_it_is_sampled() -> None:
    pool = sp.Pool("sim:0", name="noise")
    history = History(sp.sim.clock.now)
    live: list[sp.Buffer] = []
    for minute in range(200):
        for _ in range(50):  # other blocks are sampled each time
            live.append(pool.allocate(MIB))
        del live[:-200]
        if minute < 5:
            continue  # it fills
        history.observe()
        sp.sim.clock.advance(60)
        assert history.suspects()["sim:0", "noise", "device"].sites == 0


def serve(pool: sp.Pool) -> sp.Buffer:
    return pool.allocate(8 * MIB)  # mostly freed at once


def test_old_blocks_of_a_line_that_frees_most_of_its_blocks_may_be_left_over(caplog: pytest.LogCaptureFixture) -> None:
    """By age: forgotten requests, which neither grow nor are many. Weights are old too, and were never freed."""
    pool = sp.Pool("sim:0", name="forgets")
    history = History(sp.sim.clock.now)
    weights = [steady(pool) for _ in range(4)]
    forgotten: list[sp.Buffer] = []
    own = "sim:0", "forgets", "device"
    with caplog.at_level(logging.INFO, logger="streampool"):
        for minute in range(90):
            for _ in range(5):
                request = serve(pool)
                if minute < 2:
                    forgotten.append(request)
            del request
            sp.sim.settle()
            history.observe()
            found = history.suspects()[own]
            assert (found.aged_sites == 1) == (minute >= 61), minute  # no block is older than an hour before
            assert found.sites == 0
            sp.sim.clock.advance(60)
    # The ten of them: each is sampled with probability 1 - exp(-2).
    assert 40 * MIB < found.aged_bytes <= 80 * MIB / 0.86
    told = [record for record in caplog.records if getattr(record, "event", "") == "leak.left_over"]
    assert [record.sites for record in told] == [1]  # type: ignore[attr-defined]
    text = history.text()
    first = text.partition("pool 'forgets', device memory of sim:0")[2].split("\n\n")[1]
    assert re.search(r"blocks, .* in 6. min, the oldest 1\.5 h old\n    left over\? .* older than an hour", first)
    assert "in serve\n" in first + "\n"
    forgotten.clear()
    sp.sim.settle()
    sp.sim.clock.advance(60)
    history.observe()
    assert history.suspects()[own].aged_sites == 0
    del weights


def test_memory_that_is_used_again_is_as_young_as_its_new_block() -> None:
    pool = sp.Pool("sim:0", name="reuses", sample_bytes=1)  # each is sampled
    block = pool.allocate(MIB)
    address = block.handle
    assert pool.holders()[0][5] == 0
    sp.sim.clock.advance(4000)
    assert round(pool.holders()[0][5]) == 4000
    block.close()
    again = pool.allocate(MIB)
    assert again.handle == address
    (held,) = [row for row in pool.holders() if row[0]]
    assert (held[5], held[6]) == (0, 0)
    again.close()


def test_holders_are_exact_where_every_call_stack_is_kept() -> None:
    pool = sp.Pool("sim:0", name="exact", mode="debug")
    kept = [pool.allocate(1000) for _ in range(7)]
    sp.sim.clock.advance(5000)
    kept.append(pool.allocate(1000))
    rows = pool.holders()
    assert sum(size for size, *_ in rows) == 8000
    ((size, blocks, _, allocated, made, oldest, aged, _),) = [row for row in rows if row[1] == 7]
    assert (size, blocks) == (7000, 7)
    assert (allocated, made) == (0, 0)  # not counted
    assert (round(oldest), aged) == (5000, 7000)
    assert "exact" in History().text()
    del kept


def test_pools_of_one_name_are_one_entry() -> None:
    pools = [sp.Pool("sim:0", name="same", mode="debug") for _ in range(2)]
    kept = [steady(pool) for pool in pools]
    (holder,) = next(p for p in History().now() if p.pool == "same").holders
    assert (holder.bytes, holder.blocks) == (128 * MIB, 2)
    del kept


def test_memory_without_a_call_stack_is_named_as_such() -> None:
    pool = sp.Pool("sim:0", name="off", mode="off")
    pool.allocate_raw(1000)
    assert "no call stack" in History().text()


def test_the_page_is_served_unless_it_is_switched_off() -> None:
    pool = sp.Pool("sim:0", name="served", mode="debug")
    kept = steady(pool)
    with metrics.start_server(0, sample_devices=False) as server:
        assert b"in steady" in get(server.url.replace("/metrics", "/debug/holders"))
    with (
        metrics.start_server(0, sample_devices=False, debug_pages=False) as server,
        pytest.raises(OSError, match="404"),
    ):
        get(server.url.replace("/metrics", "/debug/holders"))
    kept.close()


# -- profiles ---------------------------------------------------------------------------------------------------------


def read_profile(data: bytes) -> Any:
    """Read a profile by protobuf's own library, with the messages of github.com/google/pprof's proto/profile.proto."""
    protobuf = pytest.importorskip(
        "google.protobuf", reason="protobuf is not installed: pip install 'streampool[test]'"
    )
    del protobuf
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="t", syntax="proto3")
    kinds = {"int": 3, "uint": 4, "string": 9, "bool": 8}
    for name, fields in {
        "ValueType": "type:int=1 unit:int=2",
        "Label": "key:int=1 str:int=2 num:int=3 num_unit:int=4",
        "Sample": "*location_id:uint=1 *value:int=2 *label:Label=3",
        "Line": "function_id:uint=1 line:int=2 column:int=3",
        "Location": "id:uint=1 mapping_id:uint=2 address:uint=3 *line:Line=4 is_folded:bool=5",
        "Function": "id:uint=1 name:int=2 system_name:int=3 filename:int=4 start_line:int=5",
        "Profile": "*sample_type:ValueType=1 *sample:Sample=2 *location:Location=4 *function:Function=5 "
        "*string_table:string=6 drop_frames:int=7 keep_frames:int=8 time_nanos:int=9 duration_nanos:int=10 "
        "period_type:ValueType=11 period:int=12 *comment:int=13 default_sample_type:int=14",
    }.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            field, number = text.split("=")
            label, kind = field.lstrip("*").split(":")
            made = message.field.add(name=label, number=int(number), label=3 if field.startswith("*") else 1)
            if kind in kinds:
                made.type = kinds[kind]
            else:
                made.type, made.type_name = 11, f".t.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    profile = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Profile"))()
    profile.ParseFromString(gzip.decompress(data))
    return profile


def by_function(data: bytes, pool: str, *, tag: str | None = None) -> dict[str, dict[str, int]]:
    """Give what a profile says of a pool's innermost functions, or of one of its tags, by sample type."""
    profile = read_profile(data)
    text = list(profile.string_table)
    assert text[0] == ""
    types = [text[t.type] for t in profile.sample_type]
    functions = {f.id: text[f.name] for f in profile.function}
    locations = {loc.id: functions[loc.line[0].function_id] for loc in profile.location}
    assert text[profile.default_sample_type] == "inuse_space"
    found: dict[str, dict[str, int]] = {}
    for sample in profile.sample:
        labels = {text[label.key]: text[label.str] for label in sample.label}
        assert {"pool", "device", "kind"} <= set(labels) <= {"pool", "device", "kind", "tag"}
        if labels["pool"] != pool:
            continue  # another test's
        if tag is not None and labels.get("tag", "") != tag:
            continue
        sums = found.setdefault(locations[sample.location_id[0]], dict.fromkeys(types, 0))
        for kind, value in zip(types, sample.value, strict=True):
            sums[kind] += value
    return found


def test_a_profile_is_read_by_another_reader_and_is_exact_where_all_stacks_are_kept() -> None:
    pool = sp.Pool("sim:0", name="profiled", mode="debug")
    kept = [steady(pool), leaking(pool), leaking(pool)]
    found = by_function(pool.heap_profile(), "profiled")
    assert found["steady"] == {"alloc_objects": 0, "alloc_space": 0, "inuse_objects": 1, "inuse_space": 64 * MIB}
    assert found["leaking"]["inuse_space"] == 16 * MIB
    del kept


def tagged(pool: sp.Pool, tag: str | None) -> sp.Buffer:
    return pool.allocate(1000, tag=tag)


@pytest.mark.parametrize("mode", ["debug", "production"])
def test_a_profile_tells_the_tags_of_a_line_apart(mode: str) -> None:
    pool = sp.Pool("sim:0", name="tagged", mode=mode, sample_bytes=1)  # each allocation is a sample
    kept = [tagged(pool, tag) for tag in ("weights", "weights", "acts", None)]
    tagged(pool, "acts").close()
    profile = pool.heap_profile()
    for tag, live, allocated in (("weights", 2, 2), ("acts", 1, 2), ("", 1, 1)):
        found = by_function(profile, "tagged", tag=tag)["tagged"]
        assert (found["inuse_objects"], found["inuse_space"]) == (live, 1000 * live), tag
        assert found["alloc_objects"] == (allocated if mode == "production" else 0), tag
    assert by_function(profile, "tagged")["tagged"]["inuse_objects"] == 4
    (held,) = (row for row in pool.holders() if row[1])
    assert (held[0], held[1], held[-1]) == (4000, 4, "")
    assert sum(row[1] for row in pool.holders(by_tag=True)) == 4
    del kept


@pytest.mark.parametrize("mode", ["debug", "production"])
def test_tags_without_end_are_told_apart_up_to_a_number(mode: str) -> None:
    pool = sp.Pool("sim:0", name="endless", mode=mode, sample_bytes=1)
    kept = [tagged(pool, f"request {number}") for number in range(300)]
    tags = {row[-1]: row[1] for row in pool.holders(by_tag=True)}
    assert len(tags) == 257
    assert tags["_other"] == 300 - 256
    for _ in range(100):
        tagged(pool, f"more {len(kept)}").close()
    assert {row[-1] for row in pool.holders(by_tag=True)} == tags.keys()
    assert pool.audit() == ""
    del kept


def test_tags_that_are_gone_take_no_place_of_those_that_are_there() -> None:
    pool = sp.Pool("sim:0", name="by request", mode="debug")
    for first in (0, 200, 400):
        kept = [tagged(pool, f"request {number}") for number in range(first, first + 200)]
        held = {row[-1] for row in pool.holders(by_tag=True) if row[1]}
        assert held == {f"request {number}" for number in range(first, first + 200)}
        del kept


def test_nothing_is_said_of_a_block_that_was_true_of_the_one_before_it_in_its_place() -> None:
    pool = sp.Pool("sim:0", mode="debug", track=False, quarantine_bytes=0)
    places = set()
    for tag in ("old", None):
        block = tagged(pool, tag)
        facts = block.facts()
        places.add(facts["address"])
        assert (facts["tag"], facts["serial"] != 0, facts["freed_time"]) == (tag or "", tag is not None, 0)
        sp.sim.clock.advance(1)
        block.close()
        pool.check()
    assert len(places) == 1


def test_the_profile_is_served_for_all_pools() -> None:
    pool = sp.Pool("sim:0", name="served", mode="debug")
    kept = steady(pool)
    with metrics.start_server(0, sample_devices=False) as server:
        found = by_function(get(server.url.replace("/metrics", "/debug/pprof/heap")), "served")
    assert found["steady"]["inuse_objects"] == 1
    kept.close()


def small(pool: sp.Pool) -> sp.Buffer:
    return pool.allocate(20_000)


def large(pool: sp.Pool) -> sp.Buffer:
    return pool.allocate(3 * MIB)


RUNS, BLOCKS = 100, 60


def hundred_runs() -> None:
    """Print what a hundred profiles say together of each function: live bytes, allocated bytes."""
    sums = {name: [0, 0] for name in ("small", "large")}

    def one() -> None:
        with sp.Pool("sim:0", name="estimated", sample_bytes=256 << 10) as pool:
            kept = []
            for _ in range(BLOCKS):
                kept += [small(pool), large(pool)]
            del kept[BLOCKS:]  # half of each
            found = by_function(pool.heap_profile(), "estimated")
            for name, total in sums.items():
                total[0] += found.get(name, {}).get("inuse_space", 0)
                total[1] += found.get(name, {}).get("alloc_space", 0)
            kept.clear()

    for _ in range(RUNS):
        thread = threading.Thread(target=one)  # each thread has a seed of its own
        thread.start()
        thread.join()
    print(json.dumps(sums))


def test_over_a_hundred_seeds_the_sampled_profile_is_right_on_average() -> None:
    """Live and allocated: the mean of the estimates is within 3 standard errors of the exact bytes, for each stack."""
    read_profile(gzip.compress(b""))  # or skips
    # In a process of its own, so that the sampler's random numbers are the same each time.
    code = "import test_metrics_holders; test_metrics_holders.hundred_runs()"
    # No empty part: that would be the current folder, with the bare sources.
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env=env)
    sums = json.loads(done.stdout)
    mean = 256 << 10
    for name, size in (("small", 20_000), ("large", 3 * MIB)):
        chance = -math.expm1(-size / mean)
        for total, count in zip(sums[name], (BLOCKS // 2, BLOCKS), strict=True):
            # A block stands for size / chance with that chance: variance size^2 (1 / chance - 1), all independent.
            error = math.sqrt(RUNS * count * size**2 * (1 / chance - 1)) + RUNS  # and the rounding of each profile
            assert abs(total - RUNS * count * size) < 3 * error, (name, total)
