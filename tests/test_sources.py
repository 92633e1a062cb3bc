"""Where memory comes from: the three sources of segments, limits as parts of the device, and traces under a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scene import GIB, MIB, scene

import streampool as sp
from streampool import _core
from streampool.replay import replay

TRACES = Path(__file__).parent.parent / "examples" / "traces"
SOURCES = ["vmm", "malloc", "driver"]
# The least that a peer holds on each trace, by its peak live bytes: the pool holds no more, in its default settings.
BEST_PEER = {
    "resnet50_train": 1.017,
    "gpt2_train_varlen": 1.057,
    "multistream_pipeline": 1.137,
    "gnn_train": 1.058,
}
TIGHT = 1.02


def fresh_device() -> Any:
    """Give a device of a machine that no other test has used."""
    sp.sim.reset()
    sp.sim.configure(memory="140GiB")
    return sp.sim.Device(0)


@pytest.mark.parametrize("name", BEST_PEER)
def test_no_peer_holds_less_memory_for_a_trace_in_the_default_settings_however_often_it_comes(name: str) -> None:
    result = replay(TRACES / f"{name}.csv.gz", fresh_device(), "production", passes=10)
    assert result.is_clean, result.verdict
    assert result.ratio <= BEST_PEER[name]


@pytest.mark.parametrize("name", BEST_PEER)
def test_a_trace_completes_in_little_more_than_it_needs_or_the_error_names_what_is_missing(name: str) -> None:
    trace = sp.traces.read_trace(TRACES / f"{name}.csv.gz")
    limit = int(trace.peak_live_bytes * TIGHT)
    result = replay(trace, fresh_device(), "production", passes=1, options={"limit": limit, "wait_timeout": 0.1})
    assert result.peak_reserved_bytes <= limit
    if name in ("resnet50_train", "gnn_train"):
        assert result.is_clean, result.verdict
    elif result.failures:
        assert "\n  missing " in result.first_failure


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", BEST_PEER)
def test_every_trace_replays_verified_from_each_source(name: str, source: str) -> None:
    device = fresh_device()
    result = replay(
        TRACES / f"{name}.csv.gz", device, "production", verify=True, passes=1, options={"segments": source}
    )
    assert result.is_clean, result.verdict
    calls = device.calls()
    used = {
        "vmm": ("mem_create", "mem_release"),
        "malloc": ("mem_alloc", "mem_free"),
        "driver": ("pool_alloc", "pool_free"),
    }
    for other, names in used.items():
        assert all((calls[call] > 0) == (other == source) for call in names)
    assert device.used_memory == 0


@pytest.mark.parametrize("source", SOURCES)
def test_stats_say_where_memory_comes_from(source: str) -> None:
    with scene() as sc:
        pool = sc.pool(segments=source)
        s = sc.stream(pool)
        block = pool.allocate(32 * MIB, stream=s)
        stats = pool.stats()
        assert stats.source == source
        assert stats.segments >= 1
        assert stats.handles >= 1
        block.close(s)
        assert sc.pool(kind="pinned", segments=source).stats().source == "malloc"


def test_without_virtual_memory_segments_are_pieces_and_stats_say_so() -> None:
    with scene(virtual_memory=False, driver_pools=False) as sc:
        for asked in ("auto", "vmm", "malloc"):
            assert sc.pool(segments=asked).stats().source == "malloc"
        with pytest.raises(sp.DriverError, match=r"segments=driver.*no memory pools.*segments=vmm"):
            sc.pool(segments="driver")


@pytest.mark.parametrize(("limit", "part"), [("50%", 0.5), (0.25, 0.25), ("0.125", 0.125), ("100%", 1.0)])
def test_a_limit_may_be_a_part_of_the_devices_memory(limit: Any, part: float) -> None:
    with scene(memory="4GiB") as sc:
        pool = sc.pool(limit=limit)
        assert pool.stats().limit == int(4 * GIB * part)
        s = sc.stream(pool)
        with pytest.raises(sp.OutOfMemoryError) as caught:
            pool.allocate(4 * GIB + MIB, stream=s)
        assert caught.value.fields["missing"] == 4 * GIB + MIB - int(4 * GIB * part)


def test_a_release_threshold_may_be_a_part_of_the_devices_memory() -> None:
    with scene(memory="1GiB") as sc:
        pool = sc.pool(release_threshold="12.5%")
        s = sc.stream(pool)
        pool.allocate(512 * MIB, stream=s).close(s)
        pool.allocate(256 * MIB, stream=s).close(s)
        s.sync()
        pool.check()
        other = sc.stream(pool)
        pool.allocate(600 * MIB, stream=other).close(other)  # the slow path
        assert pool.stats().reserved <= 600 * MIB + 128 * MIB


def test_doctor_says_which_sources_a_device_has() -> None:
    from streampool.cli.doctor import examine

    with scene(devices=2, virtual_memory=False):
        (device,) = examine()["devices"]["sim"]
        assert device["segments"]["sources"] == ["malloc", "driver"]
        assert device["segments"]["default"] == "malloc"
    with scene(devices=3, driver_pools=False):
        (device,) = examine()["devices"]["sim"]
        assert device["segments"]["sources"] == ["vmm", "malloc"]
        assert device["segments"]["peers"] == [1, 2]


@pytest.mark.parametrize("limit", ["0%", "101%", "1.5", 1.5, 0.0, "-5%", "80 % GiB", "%"])
def test_a_limit_that_is_no_part_is_named_with_what_is_allowed(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"option 'limit'.*(80% or 0\.8|is not a size)"):
        sp.Pool("sim:0", limit=limit)


def test_options_show_parts_as_people_write_them() -> None:
    resolved = _core.resolve_options({"limit": 0.07, "release_threshold": "33.3 %"}, None)
    assert (resolved["limit"], resolved["release_threshold"]) == ("7%", "33.3%")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"peers": "1,x"}, "takes device numbers with commas"),
        ({"peers": "1, 2"}, "takes device numbers with commas"),
        ({"export": "file"}, "none|posix_fd|fabric"),
        ({"rdma": "perhaps"}, "takes true or false"),
    ],
)
def test_a_bad_setting_of_memory_is_named_with_what_is_allowed(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        sp.Pool("sim:0", **options)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options", "error", "says"),
    [
        ("device", {"export": "fabric"}, sp.DriverError, "option 'export': device sim:0 cannot make such memory"),
        ("device", {"peers": "0"}, sp.DriverError, "option 'peers': device 0 cannot be given access"),
        ("device", {"peers": "7"}, sp.DriverError, "option 'peers': device 7 cannot be given access"),
        ("device", {"rdma": True, "segments": "malloc"}, ValueError, "segments=malloc takes none"),
        ("pinned", {"export": "posix_fd"}, ValueError, "pinned memory comes in pieces"),
    ],
)
def test_a_setting_that_device_or_source_cannot_serve_is_refused(
    kind: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with scene() as sc:
        with pytest.raises(error) as caught:
            sc.pool(kind=kind, **options)
        assert says in str(caught.value)


def test_settings_of_memory_that_the_device_has_are_served() -> None:
    with scene(devices=2) as sc:
        pool = sc.pool(export="posix_fd", rdma=True, peers="all")
        s = sc.stream(pool)
        pool.allocate(8 * MIB, stream=s).close(s)
        assert pool.options["peers"] == "all"
        assert pool.stats().source == "vmm"
        pool.trim()
        assert pool.stats().reserved == 0
