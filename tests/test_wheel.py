"""The wheel: what is in it, and that it installs and works where there is no compiler.

STREAMPOOL_WHEEL names a wheel that was made before (.ci/run does); otherwise one is made here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("wheel")]  # one wheel, made once

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("STREAMPOOL_WHEEL"):
        return Path(given).resolve()
    out = tmp_path_factory.mktemp("wheel")
    build = f"build-dir={out / 'build'}"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-C", build, "-w", str(out)]
    subprocess.run([*pip, str(ROOT)], check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and what it depends on, nothing else."""
    home = tmp_path_factory.mktemp("clean") / "env"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", str(wheel)], check=True, env=_bare_environment(home))
    return python


def _bare_environment(home: Path) -> dict[str, str]:
    """An environment whose PATH has the new environment's programs only: no compiler."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STREAMPOOL"))}
    return kept | {"PATH": str(home / "bin")}


def test_it_ships_the_extension_the_library_the_headers_and_the_cmake_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "streampool/libstreampool.so",
        "streampool/include/streampool/streampool.h",
        "streampool/include/streampool/pool.hpp",
        "streampool/cmake/streampoolConfig.cmake",
        "streampool/cmake/streampoolConfigVersion.cmake",
        "streampool/_core.pyi",
        "streampool/py.typed",
        "streampool/_bench_worker",
        "streampool/_bench_native/serve.hpp",
        "streampool/_bench_native/peers/rmm.cpp",
        "streampool/bench_schema.json",
        "streampool/report_schema.json",
        "streampool/_faults/overrun.md",
        "streampool/_faults/growing.md",
    ):
        assert wanted in names
    assert any(name.startswith("streampool/_core.") and name.endswith(".so") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_ships_no_tests_and_no_build_output(wheel: Path) -> None:
    for name in zipfile.ZipFile(wheel).namelist():
        top = name.split("/")[0]
        assert top == "streampool" or top.endswith(".dist-info"), name
        assert "_native_tests" not in name
        assert "__pycache__" not in name


def test_auditwheel_finds_no_library_that_a_system_may_lack(wheel: Path) -> None:
    pytest.importorskip("auditwheel")
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=True
    )
    assert "manylinux_" in " ".join(done.stdout.split()), done.stdout


def test_it_installs_and_works_without_a_compiler(clean_python: Path) -> None:
    code = """
import streampool as sp
device = sp.Device("sim:0")
stream = device.create_stream()
pool = sp.Pool(device, mode="debug")
with pool.allocate(4096, stream=stream) as block:
    assert block.size == 4096
pool.close()
print("works", sp.__version__)
"""
    done = subprocess.run(
        [clean_python, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=_bare_environment(clean_python.parents[1]),
        cwd=clean_python.parent,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("works ")


def test_its_command_is_installed(clean_python: Path) -> None:
    command = clean_python.parent / "streampool"
    done = subprocess.run(
        [command, "--help"], capture_output=True, text=True, check=True, env=_bare_environment(clean_python.parents[1])
    )
    assert "replay" in done.stdout


def test_its_demo_runs_without_the_sources(clean_python: Path) -> None:
    done = subprocess.run(
        [clean_python.parent / "streampool", "demo", "--device", "sim"],
        capture_output=True,
        text=True,
        check=False,
        env=_bare_environment(clean_python.parents[1]),
        cwd=clean_python.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_benchmark_runs_without_sources_and_without_a_compiler(clean_python: Path) -> None:
    done = subprocess.run(
        [
            clean_python.parent / "streampool",
            "bench",
            "pairs",
            "--device",
            "sim",
            "--pairs",
            "64",
            "--repetitions",
            "1",
        ],
        capture_output=True,
        text=True,
        check=False,
        env=_bare_environment(clean_python.parents[1]),
        cwd=clean_python.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for peer in ("streampool", "glibc malloc"):
        assert peer in done.stdout


def test_importing_it_loads_no_driver_and_none_of_the_heavy_packages(clean_python: Path) -> None:
    code = (
        "import sys, streampool; "
        "heavy = {'cuda', 'numpy', 'rich', 'click', 'jsonschema', 'structlog', 'prometheus_client'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [clean_python, "-c", code], capture_output=True, text=True, check=True, cwd=clean_python.parent
    )
    assert done.stdout.strip() == "[]"


def test_a_cpp_program_builds_against_it(clean_python: Path, tmp_path: Path) -> None:
    where = subprocess.run(
        [clean_python, "-c", "import streampool; print(streampool.cmake_dir())"],
        capture_output=True,
        text=True,
        check=True,
        cwd=clean_python.parent,
    ).stdout.strip()
    cmake = [sys.executable, "-m", "cmake"]
    subprocess.run([*cmake, "-S", ROOT / "examples" / "cpp", "-B", tmp_path, f"-Dstreampool_DIR={where}"], check=True)
    subprocess.run([*cmake, "--build", tmp_path], check=True)
    done = subprocess.run([tmp_path / "two_streams", "sim:0"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
