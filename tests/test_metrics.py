"""Metrics: what the page says, that it is the client library's own, and that nothing of it can hurt the program."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metrics_scene import ROOT, Series, parse, value, values
from scene import GIB, MIB

import streampool as sp
from streampool import _core, metrics
from streampool.metrics import _devices, _reading, catalogue, collector, page


@pytest.fixture
def machine() -> Iterator[None]:
    sp.sim.reset()
    sp.sim.configure(devices=8)
    yield
    sp.sim.reset()


def pool_on(device: str, name: str = "m", **options: Any) -> sp.Pool:
    return sp.Pool(device, name=name, **options)


def series() -> Series:
    return parse(page.Page().render())


def test_every_number_of_the_core_is_in_the_catalogue_and_no_metric_asks_for_one_that_is_not() -> None:
    columns = {name for name, _ in _core.pulse_columns()}
    asked = {c for metric in metrics.CATALOGUE for words in metric.words.values() for c in words}
    sizes = {name for name in columns if name.startswith("size_")}
    assert asked == columns - sizes - {"allocations"}  # which is the sum of its sources
    counters = {name for name, sort in _core.pulse_columns() if sort == "tally"}
    for metric in metrics.CATALOGUE:
        for words in filter(None, metric.words.values()):
            assert {c in counters for c in words} == {metric.type is metrics.Type.COUNTER}, metric.name


def test_names_follow_the_rules_of_prometheus() -> None:
    families = [metric.family for metric in metrics.CATALOGUE]
    assert len(set(families)) == len(families)
    for metric in metrics.CATALOGUE:
        assert re.fullmatch(r"streampool_[a-z_]+", metric.full_name)
        assert metric.full_name.endswith("_total") == (metric.type is metrics.Type.COUNTER), metric.name
        assert metric.full_name.endswith("_info") == (metric.type is metrics.Type.INFO), metric.name
        assert not metric.unit or metric.name.removesuffix("_total").endswith(metric.unit), metric.name
        assert metric.help.endswith("."), metric.name
        assert not {"stream", "thread", "pid", "address", "instance", "job"} & set(metric.labels)


def test_the_reference_of_metrics_is_written_from_the_catalogue() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import metrics_reference
    finally:
        sys.path.pop(0)
    assert (ROOT / "docs/METRICS.md").read_text() == metrics_reference.text(), "run: python tools/metrics_reference.py"


def everything(devices: range = range(8)) -> list[Any]:
    """Pools of all sorts with live, freed and refused blocks."""
    held: list[Any] = []
    for ordinal in devices:
        for name, kind, options in (
            ("m", "device", {"limit": "64MiB", "sample_bytes": 4096, "wait_timeout": 0}),
            ("debug", "device", {"mode": "debug"}),
            ("off", "pinned", {"mode": "off"}),
        ):
            pool = sp.Pool(f"sim:{ordinal}", name=name, kind=kind, **options)
            blocks = [pool.allocate(size * 1000) for size in range(1, 60)]
            del blocks[::2]
            held += [pool, blocks]
            if "limit" in options:
                with pytest.raises(sp.OutOfMemoryError):
                    pool.allocate(GIB)
            with pytest.raises(sp.InvalidFreeError):
                pool.free_raw(12345)
    return held


def test_the_page_is_byte_for_byte_what_the_client_library_makes_of_the_collector(machine: None) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    class Fixed:
        reading = _reading.Reading()

        def collect(self) -> Any:
            return collector.families(self.reading)

    registry, fixed, fast = CollectorRegistry(), Fixed(), page.Page()
    registry.register(fixed)  # type: ignore[arg-type]
    for step in range(4):
        held = everything(range(step, 2 * step)) if step < 3 else []
        if step == 2:
            _devices.sample()
        fixed.reading = _reading.read()
        assert fast.render_reading(fixed.reading) == generate_latest(registry), f"step {step}"
        del held
    assert len(parse(fast.render())) > 500


def test_the_collector_speaks_strict_openmetrics(machine: None) -> None:
    from prometheus_client import CollectorRegistry
    from prometheus_client.openmetrics import exposition, parser

    held = everything(range(1))
    registry = CollectorRegistry()
    metrics.register(registry, sample_devices=False)
    families = list(parser.text_string_to_metric_families(exposition.generate_latest(registry).decode()))
    assert {family.name for family in families} == {metric.family for metric in metrics.CATALOGUE}
    del held


def test_the_parts_of_each_pool_add_up_to_what_it_holds(machine: None) -> None:
    held = everything(range(2, 4))
    found = series()
    for name in ("m", "debug", "off"):
        own = {"device": "sim:2", "pool": name}
        parts = [
            part
            for word in ("used", "guard", "quarantined", "pending", "cached")
            for part in values(found, f"{word}_bytes", **own)
        ]
        assert sum(parts) == value(found, "reserved_bytes", **own) > 0
        live = value(found, "allocated_bytes_total", **own) - value(found, "freed_bytes_total", **own)
        assert live == value(found, "requested_bytes", **own)
    assert value(found, "limit_bytes", device="sim:2", pool="m") == 64 * MIB
    assert value(found, "limit_bytes", device="sim:2", pool="debug") == float("inf")
    assert value(found, "guard_bytes", device="sim:2", pool="debug") > 0
    del held


def test_what_debug_mode_may_take_and_takes_is_shown(machine: None) -> None:
    own = {"device": "sim:2", "pool": "watched"}
    before = value(series(), "debug_host_bytes")
    pools = [
        pool_on("sim:2", "watched", mode="debug", quarantine_bytes=size, check_every=1, page_guards="all",
                page_guard_min="1MiB", page_guard_max="1MiB")
        for size in ("1MiB", "3MiB")
    ]  # fmt: skip
    plain = pool_on("sim:2", "plain")
    blocks = [pool.allocate(size) for pool in pools for size in (1000, 2000, MIB)]
    found = series()
    assert value(found, "quarantine_limit_bytes", **own) == 4 * MIB
    assert value(found, "page_guarded_bytes", **own) == sum(p.debug_totals()["page_guard_bytes"] for p in pools) > 0
    assert value(found, "debug_host_bytes") == before + 6 * _core.BLOCK_FACTS_BYTES
    for name in ("quarantine_limit_bytes", "page_guarded_bytes"):
        assert value(found, name, device="sim:2", pool="plain") == 0
    blocks[0].close()  # in quarantine it is known as before
    pools[0].check()
    assert value(series(), "debug_host_bytes") == before + 6 * _core.BLOCK_FACTS_BYTES
    del blocks
    for pool in pools:
        pool.close()
    assert values(series(), "quarantine_limit_bytes", **own) == []
    plain.close()


def test_counts_are_exact_and_closed_sets_of_words_are_there_from_the_start(machine: None) -> None:
    pool = pool_on("sim:4", "exact", limit="8MiB", wait_timeout=0)
    before = series()
    own = {"device": "sim:4", "pool": "exact"}
    assert values(before, "allocation_failures_total", **own) == [0.0] * 5
    assert values(before, "invalid_frees_total", **own) == [0.0] * 6
    blocks = [pool.allocate_raw(5000) for _ in range(100)]
    for block in blocks[:40]:
        pool.free_raw(block)
    for _ in range(3):
        with pytest.raises(sp.OutOfMemoryError):
            pool.allocate(16 * MIB)
    with pytest.raises(sp.DoubleFreeError):
        pool.free_raw(blocks[0])
    after = series()
    assert sum(values(after, "allocations_total", **own)) == 100
    assert value(after, "frees_total", **own) == 40
    assert value(after, "live_allocations", **own) == 60
    assert value(after, "requested_bytes", **own) == 60 * 5000
    assert value(after, "allocation_failures_total", **own, reason="limit") == 3
    assert value(after, "invalid_frees_total", **own, reason="double_free") == 1
    assert value(after, "growth_refusals_total", **own, reason="limit") >= 3
    for block in blocks[40:]:
        pool.free_raw(block)


def test_headroom_is_what_can_still_be_allocated(machine: None) -> None:
    own = {"device": "sim:5", "pool": "room"}
    pool = pool_on("sim:5", "room", limit="64MiB", wait_timeout=0)
    kept = pool.allocate(16 * MIB)
    _devices.sample()
    room = int(value(series(), "headroom_bytes", **own))
    assert room == 48 * MIB
    with pytest.raises(sp.OutOfMemoryError):
        pool.allocate(room + 1)
    assert pool.allocate(room).size == room
    free = pool_on("sim:5", "free")  # without a limit: what the device has, finite
    assert 0 < value(series(), "headroom_bytes", device="sim:5", pool="free") < float("inf")
    del kept, free


def test_a_closed_pool_leaves_its_counters_and_no_gauge(machine: None) -> None:
    own = {"device": "sim:6", "pool": "gone"}
    for round in (1, 2):
        with pool_on("sim:6", "gone") as pool:
            pool.allocate(1000).close()
            assert value(series(), "pools", **own) == 1
        del pool
        found = series()
        assert value(found, "frees_total", **own) == round
        for metric in metrics.CATALOGUE:
            if metric.scope == catalogue.POOL and metric.type is metrics.Type.GAUGE:
                assert values(found, metric.name, **own) == []


def test_device_memory_is_there_once_it_was_sampled(machine: None) -> None:
    pool = pool_on("sim:7", initial="1GiB")
    _devices.sample()
    found = series()
    total = value(found, "device_total_bytes", device="sim:7")
    assert value(found, "device_free_bytes", device="sim:7") == total - value(
        found, "reserved_bytes", device="sim:7", pool="m"
    )
    info = next(
        dict(labels) for (name, labels) in found if name == "streampool_device_info" and ("device", "sim:7") in labels
    )
    assert info["uuid"] == "sim:7"
    pool.close()


def test_reading_that_fails_is_a_metric_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("told to fail")

    fast = page.Page()
    before = parse(fast.render())
    assert value(before, "last_collect_success") == 1
    monkeypatch.setattr(_core, "read_pulse", broken)
    found = parse(fast.render())
    assert value(found, "last_collect_success") == 0
    assert value(found, "collect_failures_total") == value(before, "collect_failures_total") + 1
    assert values(found, "build_info") == [1]
    assert [family.name for family in metrics.Collector().collect()] == [m.family for m in metrics.CATALOGUE]
    monkeypatch.undo()
    assert value(parse(fast.render()), "last_collect_success") == 1


def test_one_broken_metric_does_not_take_the_page_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = sp.Pool("sim:0")
    monkeypatch.setitem(_reading._COMPUTED, "limit_bytes", lambda *_: 1 / 0)
    found = series()
    assert values(found, "limit_bytes") == []
    assert value(found, "last_collect_success") == 0
    assert values(found, "reserved_bytes") != []
    assert value(parse(generate()), "last_collect_success") == 0
    pool.close()


def generate() -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    metrics.register(registry, sample_devices=False)
    return generate_latest(registry)


def test_registering_reads_nothing_and_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import CollectorRegistry

    def never(*_: Any) -> Any:
        raise AssertionError("read")

    registry = CollectorRegistry()
    with monkeypatch.context() as patch:
        patch.setattr(_core, "read_pulse", never)
        metrics.register(registry, sample_devices=False)
    with pytest.raises(Exception, match="Duplicated timeseries"):
        metrics.register(registry, sample_devices=False)


def test_multiprocess_mode_is_named_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Case 61: gauges of dead workers, an inherited pid, rates of mixed workers."""
    from prometheus_client import CollectorRegistry

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="multi-process mode takes no collectors.*start_server"):
        metrics.register(CollectorRegistry(), sample_devices=False)


def test_neither_import_nor_pools_load_the_client_library_or_start_a_thread() -> None:
    code = (
        "import sys, threading; import streampool as sp; from streampool import metrics; p = sp.Pool('sim:0'); "
        "p.allocate(1)\nprint('prometheus_client' in sys.modules, 'http.server' in sys.modules and 0, "
        "threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "False"
    assert done.stdout.split()[2] == "1"
    code = "import sys; import streampool; print([m for m in sys.modules if m.startswith('streampool.metrics')])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_short_lived_streams_threads_and_pools_leave_the_series_as_they_are(machine: None) -> None:
    """Case 59: labels that carry addresses or unbounded names make the series count explode."""
    device = sp.Device("sim:3")
    pool = pool_on("sim:3", "stay")
    before = series().keys()

    def work() -> None:
        stream = device.create_stream()
        pool.allocate(1000, stream=stream).close(stream)

    for _ in range(200):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    for _ in range(1000):
        sp.Pool("sim:3", name="stay").close()
        work()
    assert series().keys() == before


@pytest.mark.slow
def test_ten_thousand_streams_threads_and_pools_leave_series_and_page_as_they_are(machine: None) -> None:
    """Case 59, in the numbers of its report: 1e4 of each; scrape; close; scrape."""
    device = sp.Device("sim:3")
    pool = pool_on("sim:3", "stay")
    fast = page.Page()

    def work() -> None:
        stream = device.create_stream()
        pool.allocate(1000, stream=stream).close(stream)
        stream.close()

    def churn(times: int) -> None:
        for i in range(times):
            thread = threading.Thread(target=work)
            thread.start()
            sp.Pool("sim:3", name=f"name {i} at {id(thread):#x}" if i % 2 else "stay").close()
            thread.join()

    churn(100)  # by now the names have had their places
    _devices.sample()
    before, size = series().keys(), len(fast.render())
    churn(10_000)
    found = series()
    assert found.keys() == before
    assert len(fast.render()) < 1.1 * size  # the numbers are longer, the lines are not more
    assert value(found, "frees_total", device="sim:3", pool="stay") == 10_100


@pytest.mark.parametrize(("devices", "most"), [(1, 220), (8, 1600)])
def test_the_number_of_series_is_what_a_prometheus_was_promised(devices: int, most: int) -> None:
    # In a process of its own: other tests' pools have series here.
    code = (
        "import sys, streampool as sp; from streampool import metrics; from streampool.metrics import _devices\n"
        "n = int(sys.argv[1]); sp.sim.configure(devices=n)\n"
        "pools = [sp.Pool(f'sim:{d}', name=name) for d in range(n) for name in 'ab']\n"
        "_devices.sample()\n"
        "print(sum(not line.startswith(b'#') for line in metrics.Page().render().splitlines()))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, str(devices)], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= most


def test_scrapes_from_many_threads_while_pools_come_and_go_are_each_whole(machine: None) -> None:
    stop = threading.Event()
    problems: list[BaseException] = []
    fast = page.Page()

    def scrape() -> None:
        try:
            while not stop.is_set():
                found = parse(fast.render())
                assert value(found, "last_collect_success") == 1
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(60):
        with sp.Pool("sim:1", name=f"come{i % 3}") as pool:
            pool.allocate(1000).close()
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
