"""Every native test is one test here: a row of the table in native/tests/test.hpp.

Those of files named `*_gpu.cpp` need a GPU, and run in a child process each: some break their context on purpose.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest

from streampool import _native_tests

TABLE = [(PurePath(file).stem, name) for file, name in _native_tests.list()]
FOLDER = Path(_native_tests.__file__).parent
CHILD = "import sys; from streampool import _native_tests as t; f = t.run(sys.argv[1]); f and sys.exit(f)"


def rows(*, gpu: bool) -> list[object]:
    return [pytest.param(name, id=f"{stem}: {name}") for stem, name in TABLE if stem.endswith("_gpu") == gpu]


@pytest.mark.parametrize("name", rows(gpu=False))
def test_native(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMPOOL_TEST_STUB_LIBCUDA", str(next(FOLDER.glob("libcuda_stub*"))))
    failure = _native_tests.run(name)
    if failure is not None:
        pytest.fail(failure, pytrace=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", rows(gpu=True))
def test_native_on_a_gpu(name: str, record_property: Callable[[str, object], None]) -> None:
    required = os.environ | {"STREAMPOOL_REQUIRE_GPU": "1"}  # without a GPU it fails, and does not pass unseen
    done = subprocess.run(
        [sys.executable, "-c", CHILD, name], env=required, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
    record_property("device", "cuda:0")


def test_names_of_native_tests_are_unique() -> None:
    names = [name for _, name in TABLE]
    assert len(set(names)) == len(names)
    assert names
