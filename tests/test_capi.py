"""The C ABI, called as a C program would, and a C++ program built with CMake against the installed package."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from streampool import cmake_dir, include_dir, library_path

HEADER = include_dir() / "streampool" / "streampool.h"
EXAMPLE = Path(__file__).parents[1] / "examples" / "cpp"


class Stats(ctypes.Structure):
    """`sp_stats_t`, with its fields read from the header, so that the two cannot differ."""

    _fields_ = [
        (name, ctypes.c_size_t if kind == "size_t" else ctypes.c_uint64)
        for kind, name in re.findall(
            r"^\s+(size_t|uint64_t)\s+(\w+);",
            HEADER.read_text().split("typedef struct sp_stats_t {")[1].split("}")[0],
            re.MULTILINE,
        )
    ]


STATUS = {name: int(value) for name, value in re.findall(r"^\s+(SP_\w+) = (\d+)", HEADER.read_text(), re.MULTILINE)}


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    for name in ("sp_last_error", "sp_version", "sp_status_name", "sp_device_name"):
        getattr(library, name).restype = ctypes.c_char_p
    library.sp_device_name.argtypes = [ctypes.c_void_p]
    return library


class Scene:
    """A device with two streams, and a pool on it."""

    def __init__(self, lib: ctypes.CDLL, options: bytes = b"") -> None:
        self.lib = lib
        self.device, self.pool = ctypes.c_void_p(), ctypes.c_void_p()
        self.stream, self.other = ctypes.c_void_p(), ctypes.c_void_p()
        self.ok(lib.sp_device_open(b"sim:0", ctypes.byref(self.device)))
        self.ok(lib.sp_stream_create(self.device, ctypes.byref(self.stream)))
        self.ok(lib.sp_stream_create(self.device, ctypes.byref(self.other)))
        self.ok(lib.sp_pool_create(self.device, b"device", b"capi", options, ctypes.byref(self.pool)))

    def ok(self, status: int) -> None:
        assert status == 0, (self.lib.sp_status_name(status), self.lib.sp_last_error())

    def alloc(self, size: int, alignment: int = 0, stream: ctypes.c_void_p | None = None) -> tuple[int, int]:
        out = ctypes.c_void_p()
        status = self.lib.sp_alloc(
            self.pool, ctypes.c_size_t(size), ctypes.c_size_t(alignment), stream or self.stream, ctypes.byref(out)
        )
        return status, out.value or 0

    def free(self, ptr: int, stream: ctypes.c_void_p | None = None) -> int:
        return int(self.lib.sp_free(self.pool, ctypes.c_void_p(ptr), stream or self.stream))

    def stats(self) -> Stats:
        stats = Stats(struct_size=ctypes.sizeof(Stats))
        self.ok(self.lib.sp_stats(self.pool, ctypes.byref(stats)))
        return stats

    def end(self) -> None:
        self.ok(self.lib.sp_pool_destroy(self.pool))
        self.ok(self.lib.sp_stream_destroy(self.device, self.other))
        self.ok(self.lib.sp_stream_destroy(self.device, self.stream))
        self.ok(self.lib.sp_device_close(self.device))


@pytest.fixture
def make_scene(lib: ctypes.CDLL) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(options: bytes = b"") -> Scene:
        scenes.append(Scene(lib, options))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.end()


def test_library_header_and_package_have_one_version(lib: ctypes.CDLL) -> None:
    defines = dict(re.findall(r"^#define SP_VERSION_(\w+) \"?([\w.]+)", HEADER.read_text(), re.MULTILINE))
    assert lib.sp_version().decode() == version("streampool") == defines["STRING"]
    assert ".".join(defines[part] for part in ("MAJOR", "MINOR", "PATCH")) == defines["STRING"]


def test_every_status_has_its_name(lib: ctypes.CDLL) -> None:
    assert {name: lib.sp_status_name(value).decode() for name, value in STATUS.items()} == {n: n for n in STATUS}
    assert lib.sp_status_name(-1) == b"unknown sp_status"


def test_a_block_comes_and_goes_and_is_counted(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    status, ptr = scene.alloc(1000)
    scene.ok(status)
    assert ptr % 256 == 0
    stats = scene.stats()
    assert (stats.in_use, stats.live_blocks, stats.allocations) == (1000, 1, 1)
    scene.ok(scene.free(ptr))
    stats = scene.stats()
    assert (stats.in_use, stats.live_blocks, stats.frees) == (0, 0, 1)
    parts = (stats.in_use, stats.rounding, stats.guards, stats.quarantined, stats.pending, stats.cached)
    assert sum(parts) == stats.reserved


def test_alignment_is_kept_and_nonsense_refused(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    for alignment in (1, 256, 4096, 2 << 20):
        status, ptr = scene.alloc(100, alignment)
        scene.ok(status)
        assert ptr % max(alignment, 256) == 0
        scene.ok(scene.free(ptr))
    for alignment in (3, 4 << 20):
        assert scene.alloc(100, alignment)[0] == STATUS["SP_ERROR_INVALID_ARGUMENT"]
        assert b"align" in scene.lib.sp_last_error()


def test_bad_frees_have_each_their_status_and_change_nothing(make_scene: Callable[..., Scene]) -> None:
    scene, elsewhere = make_scene(), make_scene()
    _, ptr = scene.alloc(4096)
    _, foreign = elsewhere.alloc(4096)
    local = ctypes.create_string_buffer(8)
    assert scene.free(ptr + 16) == STATUS["SP_ERROR_INTERIOR_FREE"]
    assert scene.free(ctypes.addressof(local)) == STATUS["SP_ERROR_FOREIGN_FREE"]
    assert scene.free(foreign) == STATUS["SP_ERROR_WRONG_POOL"]
    assert scene.stats().live_blocks == elsewhere.stats().live_blocks == 1
    scene.ok(scene.free(ptr))
    assert scene.free(ptr) == STATUS["SP_ERROR_DOUBLE_FREE"]
    assert scene.lib.sp_last_error()
    scene.ok(scene.lib.sp_free(scene.pool, None, scene.stream))
    _, sized = scene.alloc(1000)
    at = ctypes.c_void_p(sized)
    assert (
        scene.lib.sp_free_sized(scene.pool, at, ctypes.c_size_t(1024), scene.stream) == STATUS["SP_ERROR_SIZE_MISMATCH"]
    )
    scene.ok(scene.lib.sp_free_sized(scene.pool, at, ctypes.c_size_t(1000), scene.stream))
    elsewhere.ok(elsewhere.free(foreign))


def test_a_release_names_no_stream(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    _, ptr = scene.alloc(4096)
    scene.ok(scene.lib.sp_release(scene.pool, ctypes.c_void_p(ptr)))
    assert scene.stats().live_blocks == 0
    assert scene.lib.sp_release(scene.pool, ctypes.c_void_p(ptr)) == STATUS["SP_ERROR_DOUBLE_FREE"]


def test_the_limit_ends_in_out_of_memory_with_an_account(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(b"limit=64MiB")
    assert scene.stats().limit == 64 << 20
    status, ptr = scene.alloc(128 << 20)
    assert (status, ptr) == (STATUS["SP_ERROR_OUT_OF_MEMORY"], 0)
    assert b"limit" in scene.lib.sp_last_error()
    assert scene.alloc(2**64 - 1)[0] in (STATUS["SP_ERROR_OUT_OF_MEMORY"], STATUS["SP_ERROR_INVALID_ARGUMENT"])


def test_streams_are_registered_recorded_and_forgotten(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    scene.ok(scene.lib.sp_register_stream(scene.pool, scene.stream))
    _, ptr = scene.alloc(4096)
    scene.ok(scene.lib.sp_record_stream(scene.pool, ctypes.c_void_p(ptr + 100), scene.other))
    scene.ok(scene.free(ptr))
    scene.ok(scene.lib.sp_forget_stream(scene.pool, scene.stream))
    assert scene.lib.sp_record_stream(scene.pool, ctypes.c_void_p(8), scene.other) == STATUS["SP_ERROR_FOREIGN_FREE"]


def test_reserve_and_trim_move_memory_to_and_from_the_driver(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    scene.ok(scene.lib.sp_reserve(scene.pool, ctypes.c_size_t(16 << 20)))
    reserved = scene.stats().reserved
    assert reserved >= 16 << 20
    released = ctypes.c_size_t()
    scene.ok(scene.lib.sp_trim(scene.pool, ctypes.c_size_t(0), ctypes.byref(released)))
    assert released.value == reserved
    assert scene.stats().reserved == 0


def test_debug_mode_finds_an_overrun_on_check(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(b"mode=debug")
    _, ptr = scene.alloc(1000)
    ctypes.memset(ptr + 1000, 0, 1)  # simulated device memory is the host's
    faults = ctypes.c_uint64()
    scene.ok(scene.lib.sp_check(scene.pool, ctypes.c_double(5.0), ctypes.byref(faults)))
    assert faults.value == 1
    assert scene.stats().faults == 1
    scene.ok(scene.free(ptr))


def test_a_pool_that_raises_tells_a_fault_once(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(b"mode=debug:on_fault=raise")
    _, ptr = scene.alloc(1000)
    ctypes.memset(ptr - 1, 0, 1)
    assert scene.lib.sp_check(scene.pool, ctypes.c_double(5.0), None) == STATUS["SP_ERROR_FAULT"]
    assert b"underrun" in scene.lib.sp_last_error()
    status, other = scene.alloc(16)
    scene.ok(status)
    for one in (ptr, other):
        scene.ok(scene.free(one))


def test_each_thread_has_its_own_last_error(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    assert scene.alloc(1, 3)[0] != 0
    here = scene.lib.sp_last_error()
    elsewhere: list[bytes] = []
    thread = threading.Thread(target=lambda: elsewhere.append(scene.lib.sp_last_error()))
    thread.start()
    thread.join()
    assert here
    assert elsewhere == [b""]


def test_a_closed_pool_takes_frees_and_gives_nothing(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    _, ptr = scene.alloc(4096)
    scene.ok(scene.lib.sp_pool_close(scene.pool))
    assert scene.alloc(4096)[0] == STATUS["SP_ERROR_POOL_CLOSED"]
    scene.ok(scene.free(ptr))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (b"texture", b"", b"texture"),
        (b"device", b"mode=fast", b"mode"),
        (b"device", b"colour=red", b"colour"),
        (b"device", b"limit=-1", b"limit"),
    ],
)
def test_bad_settings_are_refused_by_name(
    make_scene: Callable[..., Scene], kind: bytes, options: bytes, words: bytes
) -> None:
    scene = make_scene()
    out = ctypes.c_void_p()
    status = scene.lib.sp_pool_create(scene.device, kind, None, options, ctypes.byref(out))
    assert status == STATUS["SP_ERROR_INVALID_ARGUMENT"]
    assert words in scene.lib.sp_last_error()
    assert not out.value


def test_a_device_that_is_not_there_is_refused(lib: ctypes.CDLL) -> None:
    out = ctypes.c_void_p()
    assert lib.sp_device_open(b"tpu:0", ctypes.byref(out)) == STATUS["SP_ERROR_INVALID_ARGUMENT"]
    assert lib.sp_device_open(None, ctypes.byref(out)) == STATUS["SP_ERROR_INVALID_ARGUMENT"]
    assert b"name" in lib.sp_last_error()


def test_null_handles_are_refused(lib: ctypes.CDLL, make_scene: Callable[..., Scene]) -> None:
    invalid = STATUS["SP_ERROR_INVALID_ARGUMENT"]
    assert lib.sp_alloc(None, ctypes.c_size_t(1), ctypes.c_size_t(0), None, ctypes.byref(ctypes.c_void_p())) == invalid
    assert lib.sp_pool_close(None) == invalid
    assert lib.sp_stats(None, None) == invalid
    assert lib.sp_stats(make_scene().pool, None) == invalid
    assert lib.sp_pool_destroy(None) == lib.sp_device_close(None) == 0
    assert lib.sp_device_name(None) is None


def test_an_older_program_gets_the_statistics_it_knows(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    size = Stats.rounding.offset
    stats = Stats(struct_size=size, rounding=77)
    scene.ok(scene.lib.sp_stats(scene.pool, ctypes.byref(stats)))
    assert (stats.struct_size, stats.rounding) == (size, 77)


@pytest.mark.parametrize("compiler", [name for name in ("cc", "gcc", "clang", "clang-14") if shutil.which(name)])
@pytest.mark.parametrize("standard", ["c99", "c11"])
def test_the_header_is_plain_c(compiler: str, standard: str) -> None:
    flags = ["-x", "c", f"-std={standard}", "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"]
    subprocess.run([compiler, *flags, str(HEADER)], check=True)


@pytest.fixture(scope="module")
def consumer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build examples/cpp against the package under test, as its README says."""
    build = tmp_path_factory.mktemp("cpp")
    cmake: list[Any] = [sys.executable, "-m", "cmake"]
    subprocess.run([*cmake, "-S", EXAMPLE, "-B", build, f"-Dstreampool_DIR={cmake_dir()}"], check=True)
    subprocess.run([*cmake, "--build", build], check=True)
    return build / "two_streams"


def test_a_cpp_program_allocates_on_the_simulated_device(consumer: Path) -> None:
    done = subprocess.run([consumer, "sim:0"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sim:0: 1048576 bytes" in done.stdout
    assert "SP_ERROR_DOUBLE_FREE" in done.stdout


@pytest.mark.gpu
def test_a_cpp_program_allocates_on_the_gpu(consumer: Path, record_property: Callable[[str, object], None]) -> None:
    done = subprocess.run([consumer, "cuda:0"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cuda:0: 1048576 bytes" in done.stdout
    record_property("device", "cuda:0")
