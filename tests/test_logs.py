"""Logs: events of a closed list, into whatever the program has set up, and nothing at all where it has nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from scene import GIB, MIB
from structlog.testing import capture_logs

import streampool as sp
from streampool import _core, logs


@pytest.fixture(autouse=True)
def empty_ring() -> Iterator[None]:
    _core.drain_events()
    yield
    structlog.reset_defaults()
    _core.drain_events()


def misadventures() -> None:
    """Make one event of each kind that the core has."""
    with sp.Pool("sim:0", name="logged", mode="debug", limit="64MiB", wait_timeout=0) as pool:
        pool.allocate(MIB).close()
        with pytest.raises(sp.OutOfMemoryError):
            pool.allocate(GIB)
        with pytest.raises(sp.ForeignFreeError):
            pool.free_raw(12345)
        sp.sim.settle()
        pool.trim()


def test_the_list_of_events_is_the_cores_and_ours_and_each_has_its_fields() -> None:
    assert len({event.word for event in logs.EVENTS}) == len(logs.EVENTS)
    for word, number, more in _core.event_words():
        (event,) = [event for event in logs.EVENTS if event.word == word]
        assert {field for field in (number, more) if field} == set(event.fields) - {"reason"}
    record = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
    for event in logs.EVENTS:
        assert not record & {*logs.COMMON, *event.fields}, "a field that collides with one of a LogRecord"


def test_the_documentation_lists_every_event() -> None:
    page = (Path(__file__).parent.parent / "docs/monitoring.md").read_text()
    for event in logs.EVENTS:
        fields = ", ".join(f"`{field}`" for field in event.fields)
        assert f"| `{event.word}` | {event.level} | {fields} | {event.meaning} |\n" in page


def test_events_come_with_typed_fields_to_structlog_where_it_is_configured() -> None:
    structlog.configure(processors=[])
    with capture_logs() as seen:
        misadventures()
    by_word: dict[str, list[dict[str, object]]] = {}
    for entry in seen:
        by_word.setdefault(str(entry["event"]), []).append(dict(entry))
    assert set(by_word) == {word for word, _, _ in _core.event_words()}
    for event in logs.EVENTS:
        for entry in by_word.get(event.word, []):
            assert set(entry) - {"event", "log_level"} == {*logs.COMMON, *event.fields}
            assert entry["log_level"] == event.level
            assert (entry["device"], entry["pool"], entry["memory_kind"]) == ("sim:0", "logged", "device")
    (failed,) = by_word["alloc.failed"]
    assert (failed["requested_bytes"], failed["reason"]) == (GIB, "limit")
    assert by_word["free.invalid"][0]["reason"] == "foreign_free"
    assert by_word["pool.created"][0]["limit_bytes"] == 64 * MIB


def test_events_come_to_the_standard_library_with_fields_as_extras(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="streampool"):
        misadventures()
    (failed,) = [record for record in caplog.records if getattr(record, "event", "") == "alloc.failed"]
    assert failed.name == "streampool"
    assert failed.levelno == logging.WARNING
    assert failed.requested_bytes == GIB  # type: ignore[attr-defined]
    assert failed.getMessage().startswith("alloc.failed device=sim:0 pool=logged ")


def test_a_program_without_logging_stays_silent_and_loads_no_logging() -> None:
    code = (
        "import sys, streampool as sp\n"
        "p = sp.Pool('sim:0', limit='8MiB', wait_timeout=0)\n"
        "try: p.allocate(1 << 30)\nexcept sp.OutOfMemoryError: pass\n"
        "p.close(); sp.logs.drain()\n"
        "print('structlog' in sys.modules, 'logging' in sys.modules)\n"
    )
    for first in ("", "import logging\n", "import structlog\n"):  # imported, and not set up
        done = subprocess.run([sys.executable, "-P", "-c", first + code], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        assert len(done.stdout.splitlines()) == 1, done.stdout
        if not first:
            assert done.stdout == "False False\n"


def test_what_happens_at_the_end_is_logged_too() -> None:
    code = (
        "import logging; logging.basicConfig(level='DEBUG', format='%(levelname)s %(message)s')\n"
        "import streampool as sp; p = sp.Pool('sim:0', name='last'); b = p.allocate(5 << 20)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert "DEBUG pool.created device=sim:0 pool=last" in done.stderr
    assert "pool.grown" in done.stderr


def test_a_flood_is_suppressed_and_what_is_dropped_is_counted() -> None:
    with sp.Pool("sim:0", name="flood") as pool:
        _core.drain_events()
        before = _core.read_pulse()[3]
        for _ in range(1500):
            with pytest.raises(sp.ForeignFreeError):
                pool.free_raw(12345)
        assert _core.read_pulse()[3] - before == 1500 - 1024
        structlog.configure(processors=[])
        with capture_logs() as seen:
            assert logs.drain() == 1024
    words = [entry["event"] for entry in seen]
    assert words.count("free.invalid") == 10
    (more,) = [entry for entry in seen if entry["event"] == "events.suppressed"]
    assert (more["event_word"], more["count"]) == ("free.invalid", 1014)
    (lost,) = [entry for entry in seen if entry["event"] == "events.dropped"]
    assert lost["count"] >= 1500 - 1024


def test_events_of_many_threads_are_all_there_and_whole() -> None:
    with sp.Pool("sim:0", name="many") as pool:
        _core.drain_events()
        seen: list[object] = []

        def work() -> None:
            for _ in range(200):
                with pytest.raises(sp.ForeignFreeError):
                    pool.free_raw(12345)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            seen += _core.drain_events()
        seen += _core.drain_events()
        assert len(seen) == 800
        assert {event[:5] for event in seen} == {  # type: ignore[index]
            ("free.invalid", "device", "sim:0", "many", "foreign_free")
        }


def test_a_handler_that_fails_or_uses_a_pool_hurts_nobody() -> None:
    def meddle(_logger: object, _name: str, event: dict[str, object]) -> dict[str, object]:
        if event["event"] == "pool.created" and event["pool"] == "meddled":
            sp.Pool("sim:0", name="inner").close()
        raise RuntimeError("told to fail")

    structlog.configure(processors=[meddle])
    misadventures()
    sp.Pool("sim:0", name="meddled").close()


def test_the_example_configuration_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    for json in (True, False):
        structlog.configure(**logs.example_config(json=json))
        misadventures()
        assert "alloc.failed" in capsys.readouterr().out
