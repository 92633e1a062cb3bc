"""Settings: which one wins, and what is said of a bad one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import streampool as sp
from streampool import _core, config


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.ENVIRONMENT, raising=False)
    monkeypatch.setattr(config, "_help_shown", False)
    monkeypatch.setattr(config, "_override", None)


def test_modes_are_those_of_the_core() -> None:
    assert {str(mode) for mode in sp.Mode} == set(_core.presets())
    (row,) = [option for option in _core.option_table() if option.name == "mode"]
    assert row.choices == [str(mode) for mode in sp.Mode]


def test_every_option_resolves_to_its_default_and_has_help() -> None:
    resolved = config.resolve(None, {})
    for option in _core.option_table():
        assert resolved[option.name] == _core.resolve_options({option.name: option.default}, None)[option.name]
        assert option.help
    assert resolved["mode"] == "production"


def test_arguments_stand_over_the_environment_over_the_preset_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = _core.presets()["debug"]["guard_bytes"]
    assert config.resolve("production", {})["guard_bytes"] == "0"
    assert config.resolve("debug", {})["guard_bytes"] == preset
    monkeypatch.setenv(config.ENVIRONMENT, "guard_bytes=512:mode=debug")
    assert config.resolve(None, {})["guard_bytes"] == "512"
    assert config.resolve(None, {})["fill"] == "true"
    assert config.resolve(None, {"guard_bytes": "1KiB"})["guard_bytes"] == "1024"
    assert config.resolve("production", {})["fill"] == "false"


def test_the_mode_of_run_stands_over_the_programs_and_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    config.override_mode("debug")
    assert config.resolve("production", {}, pool="mine")["mode"] == "debug"
    assert capsys.readouterr().err == (
        "streampool: pool 'mine': mode=production in the program, overridden by --mode debug\n"
    )
    assert config.resolve("debug", {})["mode"] == "debug"
    assert config.resolve(None, {})["fill"] == "true"
    assert capsys.readouterr().err == ""
    config.override_mode(None)
    assert config.resolve(None, {})["mode"] == "production"


def test_the_environments_mode_does_not_stand_over_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.ENVIRONMENT, "mode=paranoid")
    assert config.resolve("production", {})["mode"] == "production"
    assert config.resolve(None, {})["mode"] == "paranoid"


def test_help_in_the_environment_prints_every_option_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(config.ENVIRONMENT, "guard_bytes=64:help=1")
    assert config.resolve(None, {})["guard_bytes"] == "64"
    config.resolve(None, {})
    printed = capsys.readouterr().err
    for option in _core.option_table():
        assert printed.count(f"  {option.name} (") == 1


@pytest.mark.parametrize(
    ("mode", "options", "says"),
    [
        ("debgu", {}, "did you mean 'debug'"),
        ("nonsense", {}, "off|observe|production|debug|paranoid"),
        (None, {"gaurd_bytes": 1}, "did you mean 'guard_bytes'"),
        (None, {"limit": "-1"}, "negative"),
        (None, {"limit": -1}, "negative"),
        (None, {"limit": 1 << 64}, "64 bits"),
        (None, {"limit": "two"}, "is not a size"),
        (None, {"limit": "2QiB"}, "the unit is unknown"),
        (None, {"track": "perhaps"}, "takes true or false"),
        (None, {"on_fault": "explode"}, "report|raise"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(mode: str | None, options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        sp.Pool("sim:0", mode=mode, **options)
    assert says in str(caught.value)


@pytest.mark.parametrize("options", [{"limit": True}, {"limit": 1.5}, {"limit": [1]}, {"limit": {}}])
def test_a_setting_of_another_type_is_a_type_error(options: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        sp.Pool("sim:0", **options)


def test_a_mode_that_is_no_text_is_refused() -> None:
    with pytest.raises((TypeError, ValueError)):
        sp.Pool("sim:0", mode=3)  # type: ignore[arg-type]


def test_help_in_the_environment_prints_every_option_once_when_a_program_makes_its_first_pool() -> None:
    script = "import streampool as sp; print('imported'); sp.Pool('sim'); sp.Pool('sim', mode='debug')"
    env = {**os.environ, config.ENVIRONMENT: "guard_bytes=64:help=1"}
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "imported\n"
    assert done.stderr == config.options_help() + "\n"
    env[config.ENVIRONMENT] = "help=0"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, env=env)
    assert done.stderr == ""


@pytest.mark.parametrize("text", ["mode", "mode=debgu", "nonsense=1"])
def test_a_bad_environment_is_named_as_such(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(config.ENVIRONMENT, text)
    with pytest.raises(ValueError, match="STREAMPOOL_OPTIONS"):
        config.resolve(None, {})


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("2GiB", 2 << 30), ("512 MB", 512_000_000), ("1.5KiB", 1536), (4096, 4096), ("0", 0)],
)
def test_sizes_are_read_as_people_write_them(text: str | int, size: int) -> None:
    assert sp.parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.50 KiB"), (5 << 30, "5 GiB")]
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert sp.format_size(size) == text
