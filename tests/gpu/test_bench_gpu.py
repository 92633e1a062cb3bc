"""``streampool bench`` beside the allocators of a machine with a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from streampool.cli import cli

QUICK = ("--device", "cuda", "--pairs", "64", "--repetitions", "1", "--threads", "2", "--json")


def measured(record_property: Callable[[str, object], None], *arguments: str) -> dict[str, Any]:
    record_property("device", "cuda:0")  # the work is done in workers
    done = CliRunner().invoke(cli, ["bench", *arguments, *QUICK])
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_drivers_own_pool_is_measured_beside_ours(record_property: Callable[[str, object], None]) -> None:
    result = measured(record_property, "pairs", "window", "threads", "--peers", "glibc,async-0,async-max")
    peers = {row["peer"] for row in result["rows"]}
    assert {"glibc", "async-0", "async-max", "streampool", "streampool-raw"} == peers
    assert all(row["median"] > 0 for row in result["rows"])


def test_a_replay_counts_bytes_as_the_driver_does(record_property: Callable[[str, object], None]) -> None:
    result = measured(record_property, "replay", "--peers", "async-max")
    for row in result["rows"]:
        held = row["extra"]["held_ratio"]
        assert held >= 1 if row["peer"].startswith("streampool") else held > 0.9, row


def test_ordering_makes_the_calls_that_it_says(record_property: Callable[[str, object], None]) -> None:
    calls = {row["pattern"]: row["extra"]["calls"] for row in measured(record_property, "ordering")["rows"]}
    assert calls["4 KiB pair, lasting stream"] == {}
    assert calls["4 KiB pair, raw handle"]["stream_lookups"] == pytest.approx(2, rel=0.01)


@pytest.mark.timeout(240)  # frameworks are imported in a dozen processes
def test_a_pair_through_each_library_that_is_here_is_measured_on_both_pools(
    record_property: Callable[[str, object], None],
) -> None:
    result = measured(record_property, "libraries")
    assert result["failures"] == []
    here = {peer["name"] for peer in result["peers"] if not peer["absent"]}
    assert here >= {"cuda-core"}, "streampool depends on it"
    rows = {(row["parameters"].get("how"), row["parameters"]["memory"]): row for row in result["rows"]}
    assert {row["peer"] for row in rows.values()} == here | {"streampool"}
    for (how, memory), row in rows.items():
        if how is not None:
            assert row["baseline"] == rows[how, "own"]["label"], memory
            assert row["ratio"] == pytest.approx(row["median"] / rows[how, "own"]["median"])
