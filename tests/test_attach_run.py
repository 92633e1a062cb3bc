"""``streampool run`` takes over what the program imports, watches the Python it starts, and says what it saw of all."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from attach_scene import NATIVE_POOL, lines_of, python, watched

from streampool.attach import _children
from streampool.report import Report

CUPY = "import cupy\na = cupy.empty(100_000)\n"


def test_what_the_program_imports_is_watched_and_the_report_opens_with_it(tmp_path: Path) -> None:
    ended = watched(tmp_path, "import cupy, torch, rmm\nimport numba.cuda\na = cupy.empty(1000); t = torch.empty(10)\n")
    assert ended.code == 0, ended.err
    first = ended.err.split("\n\n")[0].replace("\n", " ")
    assert first.startswith("COVERAGE: torch 100 % of its bytes; cupy 100 % of its bytes; numba took no device memory")
    assert "outside on sim:0" in first
    assert ended.library("cupy")["watched_bytes"] == 1000
    assert {pool["name"] for pool in ended.report["pools"]} == {"torch", "cupy"}


@pytest.mark.parametrize("source", ["import cupy.cuda\nimport cupy\n", "from cupy import cuda\nimport cupy\n"])
def test_any_form_of_import_is_seen(tmp_path: Path, source: str) -> None:
    ended = watched(tmp_path, source + "a = cupy.empty(1000)\n")
    assert ended.code == 0, ended.err
    assert ended.library("cupy")["served"]


def test_the_loader_of_a_watched_module_is_its_own(tmp_path: Path) -> None:
    ended = watched(
        tmp_path,
        CUPY + "import importlib.machinery as m\n"
        "print(type(cupy.__loader__) is m.SourceFileLoader, 'exec_module' in vars(cupy.__loader__))\n",
    )
    assert ended.out == "True False\n"


def test_a_fault_in_a_librarys_memory_is_found_at_its_line(tmp_path: Path) -> None:
    ended = watched(
        tmp_path,
        """
        import cupy
        s = cupy.cuda.Stream().use()
        a = cupy.empty(1000)  # the block
        s.launch(lambda view: view.fill(0x41), writes=[(a.data.ptr, 1001)])
        s.synchronize()
        del a
        """,
        "--mode",
        "debug",
    )
    assert ended.code == 1, ended.err
    (fault,) = ended.report["faults"]
    assert fault["kind"] == "overrun"
    assert any(f["line"] == 4 and f["file"].endswith("program.py") for f in fault["block"]["allocated_at"])


def test_memory_that_a_librarys_objects_hold_at_the_end_is_no_leak_and_what_grows_is(tmp_path: Path) -> None:
    held = watched(tmp_path, "import torch\nkept = torch.empty(1000)\n", "--mode", "debug")
    assert held.code == 0, held.err
    assert [leak["class"] for leak in held.report["leaks"]] == ["held"]
    growing = watched(
        tmp_path,
        """
        import torch, streampool as sp
        losses = []
        for step in range(8):
            losses.append(torch.empty(500_000))
            sp.installed()[0].pools[0].check()
        """,
        "--mode",
        "debug",
    )
    assert growing.code == 1, growing.err
    assert [leak["class"] for leak in growing.report["leaks"]] == ["growing"]
    assert "program.py:5" in growing.err
    assert growing.report["leaks"][0]["held_by"] == ["module __main__: losses", "[0] of a list of 8"]


@pytest.mark.parametrize("libraries", ["none", "torch,rmm"])
def test_a_library_that_is_not_named_is_not_watched_and_the_report_says_so_loudly(
    tmp_path: Path, libraries: str
) -> None:
    ended = watched(tmp_path, CUPY, "--libraries", libraries)
    assert ended.code == 3, ended.err
    assert "cupy NOT WATCHED (it was not installed" in ended.err.replace("\n", " ")
    assert "NO ALLOCATION WAS OBSERVED" in ended.err


@pytest.mark.parametrize("first", ["", "import cupy, torch\n"], ids=["not yet imported", "imported"])
def test_a_program_that_installs_by_itself_has_its_pools_and_its_options(tmp_path: Path, first: str) -> None:
    ended = watched(
        tmp_path,
        first
        + """
import streampool as sp
mine = sp.Pool("sim:0", name="mine")
sp.install("cupy", pool=mine)
sp.install("torch", limit="64MiB")
import cupy, torch
a, t = cupy.empty(1000), torch.empty(10)
pools = {i.library: i.pools for i in sp.installed()}
print(len(pools), pools["cupy"] == (mine,), mine.stats().live_blocks)
print([(pool.name, pool.stats().limit >> 20) for pool in pools["torch"]])
del a
sp.uninstall("cupy")
print(cupy.empty(10).data.ptr == 0xDEAD0000)
""",
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["2 True 1", "[('torch', 64)]", "True"]


def test_a_program_that_installs_without_options_what_run_serves_keeps_its_memory(tmp_path: Path) -> None:
    ended = watched(
        tmp_path,
        CUPY + "import streampool as sp\nprint(sp.install('cupy').pools[0].stats().live_blocks)\n"
        "try:\n    sp.install('cupy')\nexcept sp.AttachError as error:\n    print(error)\n",
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["1", "CuPy is served already; uninstall('cupy') first"]


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_program_that_installs_with_options_too_late_is_told_so(tmp_path: Path, library: str) -> None:
    ended = watched(
        tmp_path,
        f"import {library}, streampool as sp\na = {library}.empty(1000)\nsp.install('{library}', limit='1MiB')\n",
    )
    assert ended.code == 1
    assert "has memory from `streampool run` already" in ended.err
    assert ended.library(library)["served"]


def test_wrong_names_of_libraries_are_wrong_use(tmp_path: Path) -> None:
    for libraries, says in {
        "cupi": "did you mean 'cupy'",
        "auto,torch": "stand alone",
        ",": "no library is named",
    }.items():
        ended = watched(tmp_path, CUPY, "--libraries", libraries)
        assert ended.code == 2
        assert says in ended.err


def test_a_library_that_cannot_be_taken_over_is_named_at_once_and_in_the_report(tmp_path: Path) -> None:
    ended = watched(
        tmp_path,
        "import cupy\na = cupy.empty(10)\nimport torch\n",
        PYTHONPATH=str(_broken_torch(tmp_path)),
    )
    assert "PYTORCH IS NOT WATCHED: PyTorch has used CUDA already" in ended.err
    assert not ended.library("torch")["served"]
    assert ended.library("cupy")["served"]


def _broken_torch(folder: Path) -> str:
    """The lookalikes' path behind a torch that uses CUDA while it is imported."""
    import os

    from attach_scene import LOOKALIKES, environment

    package = folder / "torch"
    package.mkdir()
    source = (LOOKALIKES / "torch" / "__init__.py").read_text()
    (package / "__init__.py").write_text(
        f"__path__.append({str(LOOKALIKES / 'torch')!r})\n{source}\n_C._initialized = True\n".replace(
            "from __future__ import annotations", ""
        )
    )
    return os.pathsep.join([str(folder), environment(lookalikes=True)["PYTHONPATH"]])


def test_memory_that_a_library_took_elsewhere_lowers_its_part(tmp_path: Path) -> None:
    ended = watched(
        tmp_path,
        "import cupy\na = cupy.empty(750)\nold = cupy.get_default_memory_pool().malloc(250)\n",
    )
    assert "cupy 75 % of its bytes (CuPy's own pool holds memory" in ended.err.replace("\n", " ")


# -- children ---------------------------------------------------------------------------------------------------------


def test_python_children_are_watched_and_their_reports_are_in_the_parents(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CUPY + "b = cupy.empty(77)\n")
    ended = watched(
        tmp_path,
        f"import subprocess\nsubprocess.run([{sys.executable!r}, 'child.py'], check=True)\n" + CUPY,
    )
    assert ended.code == 0, ended.err
    assert len(ended.report["processes"]) == 2
    assert ended.report["processes"][1]["command"] == ["child.py"]
    assert ended.library("cupy")["watched_bytes"] == 200_077
    assert ended.report["coverage"]["blocks_allocated"] == 3


def test_a_fault_in_a_child_counts_and_so_do_spawned_workers(tmp_path: Path) -> None:
    ended = watched(
        tmp_path,
        """
        import multiprocessing

        def work(_):
            import cupy
            s = cupy.cuda.Stream().use()
            a = cupy.empty(1000)
            s.launch(lambda view: view.fill(0x41), writes=[(a.data.ptr, 1001)])
            s.synchronize()

        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=work, args=(0,))
            process.start()
            process.join()
        """,
        "--mode",
        "debug",
    )
    assert ended.code == 1, ended.err
    assert [fault["kind"] for fault in ended.report["faults"]] == ["overrun"]
    assert "resource_tracker" not in ended.err + ended.out
    assert "Exception ignored" not in ended.err


def test_a_child_that_leaves_no_report_is_named_as_not_checked(tmp_path: Path) -> None:
    ended = watched(
        tmp_path,
        f"import subprocess\nsubprocess.run([{sys.executable!r}, '-c', 'import os; os._exit(0)'], check=True)\n" + CUPY,
    )
    (gap,) = [gap for gap in ended.report["coverage"]["not_checked"] if gap["what"].startswith("process ")]
    assert "os._exit" in gap["what"]
    assert "left no report" in gap["why"]


def test_a_child_that_outlives_its_parent_ends_quietly_and_tells_the_core(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(
        """
import json, os, time
from pathlib import Path
from streampool import session
session.exiting = lambda exiting=session.exiting: (exiting(), print("told"))
Path("begun").touch()
while Path(json.loads(os.environ["STREAMPOOL_WATCHED_BY"])["folder"]).exists():
    time.sleep(0.01)
"""
    )
    # It inherits the output: what reads that waits for it.
    ended = watched(
        tmp_path,
        CUPY
        + f"""
import subprocess, time
from pathlib import Path
subprocess.Popen([{sys.executable!r}, "child.py"])
while not Path("begun").exists():
    time.sleep(0.01)
""",
    )
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    assert set(ended.out.splitlines()) == {"told"}


def test_a_childs_own_sitecustomize_still_runs_and_its_path_is_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom" / "sitecustomize.py").write_text("print('custom')\n")
    child = "import sys; print(any(entry.endswith('_site') for entry in sys.path))"
    ended = watched(
        tmp_path,
        f"""
        import os, subprocess
        os.environ["PYTHONPATH"] += os.pathsep + {str(tmp_path / "custom")!r}
        subprocess.run([{sys.executable!r}, "-c", {child!r}], check=True)
        """,
    )
    assert ended.out == "custom\nFalse\n"


def test_a_forked_child_writes_no_report_of_its_parents(tmp_path: Path) -> None:
    ended = watched(
        tmp_path,
        CUPY + "import os, sys\npid = os.fork()\nif pid == 0:\n    sys.exit(0)\nos.waitpid(pid, 0)\n",
    )
    assert ended.code == 0, ended.err
    assert len(ended.report["processes"]) == 1
    assert ended.err.count("SUMMARY") == 1


def test_a_program_that_is_not_there_leaves_no_folder_behind(tmp_path: Path) -> None:
    import subprocess

    from attach_scene import environment

    done = subprocess.run(
        [sys.executable, "-P", "-m", "streampool", "run", "-m", "no_such_module_at_all"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(lookalikes=False, TMPDIR=str(tmp_path)),
    )
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_others_with_a_name_like_ours_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = [tmp_path / f"streampool-run-{word}" for word in ("9" * 30 + "-x", "x-1", "-1-x")]
    for folder in folders:
        folder.mkdir()
        os.utime(folder, (0, 0))
    _children._remove_orphans()
    assert sorted(tmp_path.iterdir()) == sorted(folders)


def test_a_number_that_the_program_closed_and_took_for_a_file_of_its_own_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for taken in (True, False):
        made = _children.Children(mode=None, device=None, libraries=[], leaks="definite", suppressions=[])
        with (tmp_path / "own").open("w") as own:
            if taken:
                os.dup2(own.fileno(), made._lock)
            made.close()
            if taken:
                assert os.path.samestat(os.fstat(made._lock), os.fstat(own.fileno()))
                os.close(made._lock)
            else:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.fstat(made._lock)


def test_what_numba_freed_during_a_capture_or_allocated_in_one_and_freed_is_no_leak(tmp_path: Path) -> None:
    """A graph may use it, so it was kept, and a program without faults ended with 1."""
    ended = watched(
        tmp_path,
        """
        import numba.cuda as cuda
        import streampool as sp
        before = cuda.device_array(100)
        (pool,) = sp.installed()[0].pools
        stream = sp.sim.Device(0).create_stream()
        with pool.capturing(stream):
            stream.begin_capture()
            inside = cuda.device_array(5000)
            del before, inside
            graph = stream.end_capture()
        print(pool.stats().in_use)
        """,
        "--mode",
        "debug",
    )
    assert ended.code == 0, ended.err
    assert ended.out == "5100\n"
    assert ended.report["leaks"] == []


@pytest.mark.parametrize("end", ["", "assert lib.sp_pool_destroy(pool) == 0"], ids=["alive", "destroyed"])
def test_a_double_free_and_a_leak_in_a_pool_of_native_code_are_found_with_their_lines(tmp_path: Path, end: str) -> None:
    """Such a pool was not watched, and the program was said to have taken no memory."""
    source = NATIVE_POOL.format(device="sim:0", mode="production", end=end)
    ended = watched(tmp_path, source, "--mode", "debug", lookalikes=False)
    assert ended.code == 1, ended.err
    assert ended.out == "0\n4\n"
    (fault,) = ended.report["faults"]
    assert fault["kind"] == "double_free"
    assert "allocate(1000, p)  # the block" in lines_of(fault["block"]["allocated_at"], source)
    assert "print(lib.sp_free(pool, p, stream))  # the free" in lines_of(fault["block"]["freed_at"], source)
    assert "print(lib.sp_free(pool, p, stream))  # the second" in lines_of(fault["at"], source)
    (leak,) = ended.report["leaks"]
    assert (leak["class"], leak["bytes"]) == ("lost", 2000)
    assert "allocate(2000, q)  # the leak" in lines_of(leak["allocated_at"], source)


def test_a_pool_of_native_code_has_the_mode_that_it_asks_for_where_run_names_none(tmp_path: Path) -> None:
    source = NATIVE_POOL.format(device="sim:0", mode="off", end="lib.sp_free(pool, q, stream)")
    ended = watched(tmp_path, source, lookalikes=False)
    assert ended.code == 0, ended.err  # a wrong free is an error in every mode, and a fault in debug mode
    assert [(pool["name"], pool["mode"]) for pool in ended.report["pools"]] == [("native", "off")]
    assert ended.report["coverage"]["blocks_allocated"] == 2


def test_pools_of_native_code_are_kept_for_a_report_only_while_somebody_watches() -> None:
    ended = python(
        NATIVE_POOL.format(device="sim:0", mode="debug", end="lib.sp_free(pool, q, stream)")
        + """
from streampool import _core, session
known = lambda: _core.c_pools() + _core.take_ended_c_pools()
print(known())
watching = session.begin()
assert lib.sp_pool_create(device, b"device", b"watched", b"", ctypes.byref(pool)) == 0
assert lib.sp_pool_destroy(pool) == 0
print([(found.name, found.ended) for found in watching.finish()])
session.end()
assert lib.sp_pool_create(device, b"device", b"after", b"", ctypes.byref(pool)) == 0
print(known())
""",
        lookalikes=False,
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[2:] == ["[]", "[('watched', 'closed')]", "[]"]


# A native library that makes and destroys one pool after the other.
MANY_POOLS = """
import ctypes
import streampool as sp
lib = ctypes.CDLL(str(sp.library_path()))
lib.sp_last_error.restype = ctypes.c_char_p
device, pool, stream, p = (ctypes.c_void_p() for _ in range(4))
assert lib.sp_device_open(b"sim:0", ctypes.byref(device)) == 0
assert lib.sp_stream_create(device, ctypes.byref(stream)) == 0
def come_and_go(wrong=False, while_alive=lambda: None):
    assert lib.sp_pool_create(device, b"device", b"many", b"", ctypes.byref(pool)) == 0, lib.sp_last_error()
    size = ctypes.c_size_t(100)
    assert lib.sp_alloc(pool, size, ctypes.c_size_t(0), stream, ctypes.byref(p)) == 0, lib.sp_last_error()
    while_alive()
    assert lib.sp_free(pool, p, stream) == 0
    if wrong:
        assert lib.sp_free(pool, p, stream) != 0
    assert lib.sp_pool_destroy(pool) == 0
"""
MORE_THAN_HAVE_ADDRESSES = 1100  # pools, on the simulated device


def test_many_pools_of_native_code_come_and_go_in_a_watched_process_and_are_counted(tmp_path: Path) -> None:
    """Each was kept to the end with its range of addresses, and the 1,024th found none."""
    many = MORE_THAN_HAVE_ADDRESSES
    ended = watched(tmp_path, MANY_POOLS + f"for _ in range({many}):\n    come_and_go()\n", lookalikes=False)
    assert ended.code == 0, ended.err
    coverage = ended.report["coverage"]
    assert (coverage["pools"], coverage["blocks_allocated"], coverage["blocks_freed"]) == (many, many, many)
    (pool,) = ended.report["pools"]
    assert (pool["name"], pool["pools"], pool["mode"]) == ("many", many, "production")
    assert "'many' (device memory, sim:0, production mode)" in ended.err
    assert "1,100 such pools" in " ".join(ended.err.split())
    assert "closed, 1,100 such pools" in Report.from_json(json.dumps(ended.report)).to_html()


def test_pools_of_native_code_go_also_where_a_session_saw_them_alive() -> None:
    ended = python(
        MANY_POOLS
        + f"""
from streampool import session
watching = session.begin()
for _ in range({MORE_THAN_HAVE_ADDRESSES}):
    come_and_go(while_alive=watching.observe)
watching.observe()
print(len(watching._native), [(f.name, f.pools, f.stats["allocations"]) for f in watching.finish()])
""",
        lookalikes=False,
    )
    assert ended.code == 0, ended.err
    assert ended.out == f"0 [('many', {MORE_THAN_HAVE_ADDRESSES}, {MORE_THAN_HAVE_ADDRESSES})]\n"


def test_of_destroyed_pools_of_native_code_that_have_something_to_tell_only_records_stay_and_not_more_than_256(
    tmp_path: Path,
) -> None:
    many = MORE_THAN_HAVE_ADDRESSES
    source = MANY_POOLS + f"for _ in range({many}):\n    come_and_go(wrong=True)\n"
    ended = watched(tmp_path, source, "--mode", "debug", lookalikes=False)
    assert ended.code == 1, ended.err
    assert [fault["kind"] for fault in ended.report["faults"]] == ["double_free"] * 256
    coverage = ended.report["coverage"]
    assert (coverage["pools"], coverage["blocks_allocated"]) == (many, many)
    assert coverage["faults_dropped"] == many - 256
    assert f"faults and live blocks of {many - 256} destroyed pools" in [gap["what"] for gap in coverage["not_checked"]]


TOLD = {
    "raise": "",
    "callback": """
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: print("called"))
assert lib.sp_set_fault_function(pool, function, None) == 0
""",
}


@pytest.mark.parametrize("end", ["", "print(lib.sp_pool_destroy(pool))"], ids=["alive", "destroyed"])
@pytest.mark.parametrize("on_fault", TOLD)
def test_faults_that_native_code_is_told_of_are_in_the_report_too(tmp_path: Path, on_fault: str, end: str) -> None:
    """Its pool gave them to the program alone: the report said that there were none, and the exit code was 0."""
    source = f"""
import ctypes
import streampool as sp
lib = ctypes.CDLL(str(sp.library_path()))
device, pool, p = (ctypes.c_void_p() for _ in range(3))
legacy = ctypes.c_void_p(1)
assert lib.sp_device_open(b"sim:0", ctypes.byref(device)) == 0
assert lib.sp_pool_create(device, b"pinned", b"native", b"on_fault={on_fault}", ctypes.byref(pool)) == 0
{TOLD[on_fault]}
assert lib.sp_alloc(pool, ctypes.c_size_t(100), ctypes.c_size_t(0), legacy, ctypes.byref(p)) == 0
ctypes.memset(p.value, 1, 104)
lib.sp_free(pool, p, legacy)
print(lib.sp_pool_close(pool))
{end}
"""
    ended = watched(tmp_path, source, "--mode", "debug", lookalikes=False)
    assert ended.code == 1, ended.err
    assert ended.out.splitlines()[:1] == (["16"] if on_fault == "raise" else ["called"])
    (fault,) = ended.report["faults"]
    assert (fault["kind"], fault["pool"]) == ("overrun", "native")
    assert [(pool["name"], pool["ended"]) for pool in ended.report["pools"]] == [("native", "closed")]


@pytest.mark.parametrize(
    ("asked", "said"), [("mode=production", True), ("mode=debug", False), ("guard_bytes=64", False)]
)
def test_run_says_where_the_mode_of_a_pool_of_native_code_is_overridden(tmp_path: Path, asked: str, said: bool) -> None:
    """As of Python's pools (R17); it was done without a word."""
    source = MANY_POOLS.replace('b"many", b""', f'b"many", b"{asked}"') + "come_and_go()\n"
    ended = watched(tmp_path, source, "--mode", "debug", lookalikes=False)
    assert ended.code == 0, ended.err
    assert [pool["mode"] for pool in ended.report["pools"]] == ["debug"]
    line = "streampool: pool 'many': mode=production in the program, overridden by --mode debug"
    assert ended.err.splitlines().count(line) == int(said)


def test_a_double_free_by_native_code_of_pytorchs_memory_is_found_with_its_lines(tmp_path: Path) -> None:
    source = """
        import ctypes
        import torch
        import streampool as sp
        free = ctypes.CDLL(str(sp.library_path())).sp_torch_free
        free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        t = torch.empty(1000)  # the block
        free(t.data_ptr(), 1000, 0, None)  # native code's
        del t  # PyTorch's
    """
    ended = watched(tmp_path, source, "--mode", "debug")
    assert ended.code == 1, ended.err
    (fault,) = ended.report["faults"]
    assert fault["kind"] == "double_free"
    assert lines_of(fault["block"]["allocated_at"], source) == {"t = torch.empty(1000)  # the block"}
    assert lines_of(fault["block"]["freed_at"], source) == {"free(t.data_ptr(), 1000, 0, None)  # native code's"}
    assert lines_of(fault["at"], source) == {"del t  # PyTorch's"}


KEPT = {
    "torch": "import torch\nkept = torch.empty(1000)",
    "rmm": "import rmm\nkept = rmm.DeviceBuffer(1000)",
    "numba": "import numba.cuda\nkept = numba.cuda.device_array(1000)",
    "cupy": "import cupy\nkept = cupy.empty(1000)",
}


@pytest.mark.parametrize("library", KEPT)
def test_what_a_library_holds_of_the_programs_own_pool_is_held_and_only_raw_blocks_are_lost(
    tmp_path: Path, library: str
) -> None:
    """A tensor that lived to the end of a program was said to be allocated raw and never freed."""
    program = f"import streampool as sp\npool = sp.Pool('sim', mode='debug')\nsp.install({library!r}, pool=pool)\n"
    ended = watched(tmp_path, program + KEPT[library])
    assert ended.code == 0, ended.err
    assert [(leak["class"], leak["bytes"]) for leak in ended.report["leaks"]] == [("held", 1000)]
    ended = watched(tmp_path, program + KEPT[library] + "\npool.allocate_raw(64)\n")
    assert ended.code == 1, ended.err
    assert sorted((leak["class"], leak["bytes"]) for leak in ended.report["leaks"]) == [("held", 1000), ("lost", 64)]
