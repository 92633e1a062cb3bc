"""``streampool bench``: what it measures, what it says of peers that are missing, and what it refuses.

No test looks at how long anything takes: figures are only held to being there and to agreeing with each other.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import attach_scene
import jsonschema
import pytest
from attach_scene import LOOKALIKES
from click.testing import CliRunner, Result

import streampool
from streampool import _paths, config, sim, traces
from streampool._bench import budgets, builds, engine, kinds, libraries, peers, plot, python_worker, run, tables, worker
from streampool._bench.calls import CALLS, FEATURES
from streampool._bench.kinds import FEATURES_PATTERN
from streampool.cli import cli

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((Path(streampool.__file__).parent / "bench_schema.json").read_text())
SMALL = """Thread,Time,Action,Pointer,Size,Stream
1,0,allocate,0x100,4096,1
1,0,allocate,0x200,2000000,2
1,0,free,0x100,4096,1
1,0,allocate,0x300,100,2
1,0,free,0x200,2000000,2
"""
QUICK = ("--device", "sim", "--pairs", "16", "--repetitions", "1", "--threads", "2")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    path.write_text(SMALL)
    return path


@pytest.fixture(autouse=True)
def few_free_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "PIECES", (100, 200))


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


def measured(*arguments: object) -> dict[str, Any]:
    done = bench(*arguments, *QUICK, "--json")
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(result, SCHEMA)
    return result


def rows_of(result: dict[str, Any], peer: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["peer"] == peer]


# -- kinds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_kind_measures_streampool_on_the_simulated_device(kind: str, small: Path) -> None:
    result = measured(kind, "--trace", small)
    assert result["kinds"] == [kind]
    assert result["failures"] == []
    assert {row["kind"] for row in result["rows"]} == {kind}
    ours = [row for row in result["rows"] if row["peer"].startswith("streampool")]
    assert ours
    for row in result["rows"]:
        assert row["median"] > 0, row
        assert 0 < row["p50"] <= row["p99"], row


@pytest.mark.parametrize("kind", ["pairs", "window"])
def test_a_ratio_is_of_glibc_in_the_same_run(kind: str) -> None:
    result = measured(kind)
    for row in rows_of(result, "streampool"):
        (floor,) = [one for one in rows_of(result, "glibc") if one["pattern"] == row["pattern"]]
        assert row["baseline"] == "glibc malloc"
        assert row["ratio"] == pytest.approx(row["median"] / floor["median"])


def test_threads_are_held_against_one_thread_of_the_same_allocator() -> None:
    result = measured("threads")
    counts = {row["parameters"]["threads"] for row in rows_of(result, "streampool")}
    assert counts == {1, 2}
    for row in result["rows"]:
        assert row["baseline"] == row["label"]
        if row["parameters"]["threads"] == 1:
            assert row["ratio"] == 1


def test_free_extents_are_held_against_the_fewest_in_every_order() -> None:
    result = measured("freelist", "--peers", "glibc")
    seen = {(r["parameters"]["order"], r["parameters"]["pieces"], r["parameters"]["part"]) for r in result["rows"]}
    assert seen == {(o, n, p) for o in kinds.ORDERS for n in (100, 200) for p in ("alloc", "free")}
    assert all(row["ratio"] == 1 for row in result["rows"] if row["parameters"]["pieces"] == 100)


def test_a_replay_tells_time_and_bytes_and_every_source_of_segments(small: Path) -> None:
    result = measured("replay", "--trace", small)
    (row,) = rows_of(result, "streampool")
    assert row["extra"]["peak_live_bytes"] == 2004096
    assert row["extra"]["held_bytes"] >= 2004096
    assert row["extra"]["held_ratio"] == row["extra"]["held_bytes"] / row["extra"]["peak_live_bytes"]
    assert row["extra"]["cold"] > 0
    assert len(row["repetitions"]) == kinds.WARM_PASSES
    assert rows_of(result, "streampool:segments=malloc")
    assert "held_ratio" not in rows_of(result, "glibc")[0]["extra"]


def test_options_reach_the_pools_of_every_worker(small: Path) -> None:
    done = bench("replay", "--trace", small, *QUICK, "--json", "--option", "limit=1MiB")
    assert done.exit_code == 1
    failures = json.loads(done.stdout)["failures"]
    assert {failure["peer"] for failure in failures} >= {"streampool", "streampool, segments=malloc"}
    assert all(failure["peer"].startswith("streampool") for failure in failures)
    assert all("limit" in failure["reason"] for failure in failures)


def test_calls_from_python_are_held_against_a_method_that_does_nothing() -> None:
    result = measured("python")
    by_call = {row["parameters"]["call"]: row for row in result["rows"]}
    assert {"empty", "raw", "buffer"} <= set(by_call)
    assert by_call["raw"]["ratio"] == pytest.approx(by_call["raw"]["median"] / by_call["empty"]["median"])


@pytest.mark.parametrize("process", sorted({call.process for call in CALLS} & set(python_worker._PEERS)))
def test_every_process_of_calls_is_started_by_its_name_though_a_peer_has_it_too(process: str) -> None:
    """CuPy's and PyTorch's calls were asked of the peers of those names, which know none."""
    names = [call.name for call in CALLS if call.process == process]
    command = [sys.executable, "-P", "-m", "streampool._bench.python_worker", f"calls:{process}"]
    with closing(worker.Worker(command, {})) as served:
        for name in names:
            answer = ""
            try:
                served.ask(f"call {name} 256")
            except worker.WorkerError as error:  # its library is not here
                answer = str(error)
            assert not answer.startswith(("KeyError", "ValueError")), answer


def test_the_loops_of_raw_calls_keep_their_stream_alive() -> None:
    """In debug mode a pool fences its registered streams: one that was collected crashed a GPU's driver."""
    for name in ("raw", "debug-raw", "stacks-raw"):
        call = next(call for call in CALLS if call.name == name)
        loop = call.make("sim:0", "")
        gc.collect()
        sim.traps()
        loop(300)
        assert sim.traps() == []


def test_ordering_counts_the_driver_calls_of_a_pair() -> None:
    calls = {row["pattern"]: row["extra"]["calls"] for row in measured("ordering")["rows"]}
    assert calls["id of a stream"] == {"stream_id": 1}
    assert calls["wait edge"] == {"stream_wait_event": 1}
    assert calls["context event"] == {"context_event_record": 1}
    assert calls["4 KiB pair, lasting stream"] == {}
    assert calls["1 MiB pair, lasting stream"] == {}
    assert calls["4 KiB pair, raw handle"]["stream_id"] == pytest.approx(2)
    assert calls["1 MiB pair, raw handle: fenced in the free"]["event_record"] == pytest.approx(1)


def test_debug_measures_each_part_of_debug_mode_against_production(tmp_path: Path) -> None:
    result = measured("debug", "--no-compile")
    rows = [row for row in result["rows"] if row["pattern"] == FEATURES_PATTERN]
    assert [row["parameters"]["call"] for row in rows] == [f"feature-{feature}" for feature in FEATURES]
    assert {row["baseline"] for row in rows} == {FEATURES["none"][0]}
    for label, options in FEATURES.values():
        settings = dict(item.split("=") for item in options.split(":") if item)
        assert label
        for name, value in settings.items():
            config.check_option(name, value)
    features = bench_tables()._PARTS["features"]
    table = features(result)
    assert table.count("**") == 2
    assert all(f"| {label} |" in table for label, _ in FEATURES.values())
    with pytest.raises(SystemExit, match="streampool bench debug"):
        features({**result, "rows": []})


# -- through other libraries -------------------------------------------------------------------------------------------


def bench_tables() -> Any:
    """The generator of the pages."""
    spec = importlib.util.spec_from_file_location("bench_tables", ROOT / "tools" / "bench_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WITHOUT_A_LOOKALIKE = "cuda-core"  # the real one is there, and needs a GPU


@pytest.fixture(scope="module")
def through_lookalikes() -> engine.Engine:
    """The kind libraries, measured with the small libraries of tests/lookalikes on the simulated device."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(LOOKALIKES), *filter(None, [os.environ.get("PYTHONPATH")])]  # an empty one is this folder
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setattr(kinds, "_is_here", lambda call, settings: True)
        found = [peers.Found(one) for one in peers.PEERS if "libraries" in one.kinds if one.name != WITHOUT_A_LOOKALIKE]
        settings = kinds.Settings("sim:0", 64, 1, "mode=debug", 2)
        made = engine.Engine(settings, lambda done, total, text: None)
        made.run({"libraries": (kinds.KINDS["libraries"], kinds.KINDS["libraries"].plan(found, settings))})
    return made


def test_a_pair_through_a_library_is_held_against_the_same_call_on_its_own_pool(
    through_lookalikes: engine.Engine,
) -> None:
    assert through_lookalikes.failures == []
    rows = {(row.parameters.get("how"), row.parameters["memory"]): row for row in through_lookalikes.rows}
    planned = [call for call in libraries.CALLS if call.peer != WITHOUT_A_LOOKALIKE]
    assert {(call.facts["how"], call.facts["memory"]) for call in planned} < set(rows)
    for (how, _), row in rows.items():
        if how is None:  # streampool's own calls
            assert row.ratio is None
            continue
        own = rows[how, "own"]
        assert row.baseline == own.label
        assert row.ratio == pytest.approx(row.median / own.median)


def test_the_table_of_libraries_is_one_with_each_librarys_own_pool_first(through_lookalikes: engine.Engine) -> None:
    rows = [asdict(row) for row in through_lookalikes.rows]
    text = bench_tables()._PARTS.get("libraries") or bench_tables()._kind("libraries")
    table = text({"kinds": ["libraries"], "rows": rows, "budgets": []})
    assert table.count("**") == 2
    labels = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[4:]]
    assert labels == [row["label"] for row in rows]
    own = [label for label in labels if label.endswith((", its own pool", ", cuMemAlloc"))]
    assert own
    for label in own:
        how = label.rpartition(", ")[0]
        assert labels[labels.index(label) + 1] == f"{how}, streampool"


def test_a_served_call_allocates_from_streampool_and_the_others_do_not() -> None:
    ended = attach_scene.python(
        """
        import sys
        import streampool as sp
        from streampool._bench import libraries
        sp.device.override_default("sim")
        for call in libraries.CALLS:
            if call.process == sys.argv[1]:
                loop = call.make("sim:0", "mode=debug")
                loop(10)
                pools = [pool for one in sp.installed() for pool in one.pools]
                print(call.facts["memory"], sum(pool.stats().allocations for pool in pools), *(p.mode for p in pools))
        """,
        *("cupy-streampool",),
    )
    assert ended.out.splitlines() == ["streampool 10 debug", "streampool 20 debug"], ended.err


def test_rmms_own_pool_is_called_back_in_the_form_of_older_and_of_newer_releases() -> None:
    ended = attach_scene.python(
        """
        import rmm
        from streampool._bench import libraries
        said = []
        rmm.mr.PoolMemoryResource.allocate = lambda self, *given: said.append(given) or 4096
        rmm.mr.PoolMemoryResource.deallocate = lambda self, *given: said.append(given)
        (call,) = [call for call in libraries.CALLS if call.facts["memory"] == "callback"]
        call.make("cuda:0", "")(2)
        calls, said[:] = len(said), []
        mr = rmm.mr.get_per_device_resource(0)
        mr.deallocate(mr.allocate(1000, "stream"), 1000, "stream")
        mr.deallocate("stream", mr.allocate("stream", 1000, 256), 1000, 256)
        print(calls, said[:2] == said[2:] == [(1000, "stream"), (4096, 1000, "stream")])
        """
    )
    assert ended.out.splitlines() == ["4 True"], ended.err


def test_a_library_that_cannot_be_measured_is_named_with_the_reason() -> None:
    result = measured("libraries")
    absent = {peer["label"]: peer["absent"] for peer in result["peers"]}
    assert len(absent) == len({call.peer for call in libraries.CALLS})
    assert all(reason.startswith("needs a GPU") for reason in absent.values()), absent
    assert {row["parameters"]["memory"] for row in result["rows"]} == {"streampool"}
    text = bench("libraries", *QUICK).stdout
    for title in ("PyTorch", "CuPy", "Numba", "RMM", "cuda.core"):
        assert f"through {title}" in text.partition("not measured")[2]
    done = bench("libraries", "--peers", "numba", *QUICK)
    assert done.exit_code == 2
    assert "numba cannot be measured here: needs a GPU" in done.stderr


def test_a_library_that_is_not_installed_is_named_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(peers, "_problem", lambda peer, device: None)
    found = peers.find([peer for peer in peers.PEERS if "libraries" in peer.kinds], "cuda:0")
    assert {one.absent for one in found} == {
        f"the package {module} is not installed" for module in ("torch", "cupy", "numba", "rmm", "cuda.core")
    }


# -- turns -------------------------------------------------------------------------------------------------------------


def test_glibc_comes_first_in_every_repetition_and_the_others_take_turns() -> None:
    steps: list[str] = []
    run.run(
        run.Wanted(["window"], "sim", None, 3, 16, compile_missing=False),
        lambda done, total, text: steps.append(text.rpartition(": ")[2]),
    )
    peers_here = len(set(steps))
    rounds = [steps[i : i + peers_here] for i in range(0, len(steps), peers_here)]
    assert len(rounds) == 5  # two untimed
    assert {turn[0] for turn in rounds} == {"glibc malloc"}
    assert all(len(set(turn)) == peers_here for turn in rounds)
    if peers_here > 2:
        assert len({turn[1] for turn in rounds}) > 1


def test_progress_counts_every_measurement(small: Path) -> None:
    seen: list[tuple[int, int]] = []
    run.run(
        run.Wanted(list(kinds.KINDS), "sim", frozenset({"glibc"}), 1, 16, 2, traces=[small], compile_missing=False),
        lambda done, total, text: seen.append((done, total)),
    )
    totals = {total for _, total in seen}
    assert len(totals) == 1
    assert [done for done, _ in seen] == list(range(1, totals.pop() + 1))


@contextmanager
def a_worker(*arguments: str) -> Iterator[worker.Worker]:
    one = worker.Worker([str(_paths.bench_worker_path()), *arguments], {})
    try:
        yield one
    finally:
        one.close()


def test_the_process_that_measures_glibc_has_one_thread() -> None:
    with a_worker("glibc") as one:
        one.ask("pair 4096 100 1 own")
        assert len(os.listdir(f"/proc/{one._process.pid}/task")) == 1


def test_a_worker_replays_what_the_reader_read(tmp_path: Path) -> None:
    trace = traces.read_trace(ROOT / "examples" / "traces" / "multistream_pipeline.csv.gz")
    path = tmp_path / "trace"
    kinds.write_for_workers(trace, path)
    with a_worker("streampool", "--device", "sim:0", "--streams", str(len(trace.stream_names))) as one:
        answer = one.ask(f"replay {path} 1 bytes")
        again = one.ask(f"replay {path} 1 bytes")  # from nothing, as if there had been no first time
    assert answer["peak_live"] == trace.peak_live_bytes
    assert answer["held"] >= trace.peak_live_bytes
    assert again["held"] == answer["held"]
    assert len(answer["ns"]) == 1


def test_a_worker_says_what_it_does_not_understand() -> None:
    with a_worker("glibc") as one:
        for command in ("dance", "pair 4096", "freelist 10 sideways 16", "replay /nowhere 1 times", "ordering 1"):
            with pytest.raises(worker.WorkerError):
                one.ask(command)
        assert one.ask("pair 4096 16 1 own")["ns"]  # and goes on


class Recorder:
    """A peer that remembers what it was asked."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.sizes: list[int] = []
        self.next = 0

    def alloc(self, size: int, stream: int) -> int:
        self.next += 1
        self.live[self.next] = size
        self.sizes.append(size)
        return self.next

    def free(self, block: int, size: int, stream: int) -> None:
        assert self.live.pop(block) == size

    def held(self) -> int:
        return sum(self.live.values())

    def settle(self) -> None:
        pass

    def restart(self) -> None:
        assert not self.live


def test_the_loops_from_python_free_what_they_allocate(tmp_path: Path) -> None:
    peer = Recorder()
    python_worker._window(peer, 7, 2000)
    assert not peer.live
    assert min(peer.sizes) >= 512
    assert max(peer.sizes) < (1 << 20) + 512
    trace = traces.read_trace(ROOT / "examples" / "traces" / "multistream_pipeline.csv.gz")
    kinds.write_for_workers(trace, tmp_path / "trace")
    peer = Recorder()
    answer = python_worker._replay(peer, str(tmp_path / "trace"), 1, True)
    assert not peer.live
    assert answer["peak_live"] == answer["held"] == trace.peak_live_bytes


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_an_allocator_that_is_missing_is_named_with_the_reason() -> None:
    result = measured("pairs")
    absent = {peer["name"]: peer["absent"] for peer in result["peers"]}
    assert absent["glibc"] == absent["streampool"] == ""
    for name in ("async-0", "cub", "rmm-pool", "torch-expandable", "cupy"):
        assert absent[name].startswith("needs a GPU"), name
    text = bench("pairs", *QUICK).stdout
    assert "not measured: " in text
    assert "RMM arena" in text.partition("not measured")[2]


def test_a_missing_allocator_that_was_asked_for_by_name_is_wrong_use() -> None:
    done = bench("pairs", "--peers", "glibc,cub", *QUICK)
    assert done.exit_code == 2
    assert "cub cannot be measured here: needs a GPU" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "rmm-pol"], "did you mean 'rmm-pool'?"),
        (["--peers", "xyzzy"], "there are: glibc, "),
        (["dance"], "'dance'"),
        (["--repetitions", "0"], "--repetitions"),
        (["--threads", "65"], "--threads"),
        (["--pairs", "many"], "--pairs"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--option", "segment=malloc"], "did you mean 'segments'?"),
        (["--trace", "/nowhere.csv"], "does not exist"),
        (["--native", "/nowhere"], "does not exist"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_measured(arguments: list[str], said: str) -> None:
    done = bench("pairs", "--device", "sim", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_a_broken_trace_is_wrong_use(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("no trace\n")
    done = bench("replay", "--trace", path, *QUICK)
    assert done.exit_code == 2
    assert "not the header of a trace" in done.stderr


def test_a_measurement_that_fails_leaves_the_others_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = peers.Peer("mimalloc", "nobody", "worker", ("nobody",), frozenset({"pairs"}), "host")
    monkeypatch.setattr(peers, "PEERS", (*(p for p in peers.PEERS if p.name in ("glibc", "streampool")), nobody))
    monkeypatch.setattr(peers.ctypes.util, "find_library", lambda name: "libc.so.6")
    done = bench("pairs", *QUICK)
    assert done.exit_code == 1
    assert "failed: pairs, 4 KiB pair, nobody: there is no peer 'nobody'" in done.stdout
    assert "glibc malloc" in done.stdout


def a_task(label: str, code: str) -> kinds.Task:
    command = [sys.executable, "-c", code]
    return kinds.Task(command, {}, label, label, "Python", {"size": 1}, lambda n: f"pair {n}")


HELLO = "print('{\"ready\": true}', flush=True)\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('no such card')", "it ended with 1: no such card"),
        (HELLO + "input()\nimport os\nos._exit(3)", "it ended with 3"),
        (HELLO + "input()\nprint('hello', flush=True)\ninput()", "it answered b'hello'"),
        (HELLO + 'input()\nprint(\'{"error": "out of memory"}\', flush=True)\ninput()', "out of memory"),
        (HELLO + "input()\nimport time\ntime.sleep(100)", "it did not answer within 1 s"),
    ],
)
def test_a_worker_that_breaks_is_noted_and_the_others_go_on(
    code: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_ANSWERS_IN", 1.0)
    good = HELLO + 'while True:\n  input()\n  print(\'{"ns": [5.0], "p50": 4, "p99": 6, "left_out": 0}\', flush=True)'
    group = kinds.Group("a pair", "ns", [a_task("good", good), a_task("bad", code), a_task("fine", good + "\n")])
    made = engine.Engine(kinds.Settings("sim:0", 16, 1, "", 2), lambda done, total, text: None)
    made.run({"pairs": (kinds.KINDS["pairs"], [group])})
    assert [row.label for row in made.rows] == ["good", "fine"]
    assert [(f.peer, f.reason) for f in made.failures] == [("bad", reason)]


def test_what_was_measured_before_an_interrupt_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.Engine, "_ordering", interrupt)
    done = bench("pairs", "ordering", *QUICK, "--json")
    result = json.loads(done.stdout)
    jsonschema.validate(result, SCHEMA)
    assert done.exit_code == 1
    assert {row["kind"] for row in result["rows"]} == {"pairs"}
    assert result["failures"][0]["reason"] == "interrupted"


# -- what is compiled --------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="there is no C++ compiler here"
)


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family of peers whose worker needs nothing; gives its source."""
    monkeypatch.setattr(builds, "FAMILIES", {"plain": builds.Recipe})
    source = tmp_path / "native" / "peers" / "plain.cpp"
    source.parent.mkdir(parents=True)
    source.with_name("runtime.hpp").touch()
    source.write_text("int main() { return 7; }\n")
    return source


def build(source: Path, said: list[str]) -> Path | str:
    native = source.parents[1]
    return builds.build_all(["plain"], native, native.parent / "cache", said.append)["plain"]


@needs_compiler
def test_a_worker_is_compiled_once_and_again_when_its_source_changes(family: Path) -> None:
    said: list[str] = []
    first = build(family, said)
    assert isinstance(first, Path), first
    assert subprocess.run([first], check=False).returncode == 7
    assert build(family, said) == first
    assert len(said) == 1
    family.write_text("int main() { return 8; }\n")
    second = build(family, said)
    assert isinstance(second, Path)
    assert subprocess.run([second], check=False).returncode == 8
    assert len(said) == 2


@needs_compiler
def test_a_worker_that_does_not_compile_says_why(family: Path) -> None:
    family.write_text("int main() { return nothing; }\n")
    problem = build(family, [])
    assert isinstance(problem, str)
    assert "plain.cpp does not compile" in problem
    assert "nothing" in problem


def test_without_a_compiler_that_is_the_reason(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build(family, []) == "no C++ compiler was found (CXX, c++, g++, clang++)"


def test_without_sources_that_is_the_reason(tmp_path: Path) -> None:
    assert builds.build_all(["cub"], tmp_path, tmp_path, lambda text: None)["cub"] == (
        f"the workers' sources are missing in {tmp_path}"
    )


def test_a_library_that_is_not_installed_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "_toolkit", builds.Recipe)
    monkeypatch.setattr(builds, "find_spec", lambda name: None)
    for family, module in (("rmm", "librmm"), ("torch", "torch")):
        with pytest.raises(builds.NotBuiltError, match=f"the package {module} is not installed"):
            builds.FAMILIES[family]()


def test_without_a_toolkit_that_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(builds.shutil, "which", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(builds, "_TOOLKITS", ())
    with pytest.raises(builds.NotBuiltError, match="no CUDA toolkit"):
        builds.FAMILIES["cub"]()


@needs_compiler
def test_the_worker_of_cub_compiles_and_speaks(tmp_path: Path) -> None:
    program = builds.build_all(["cub"], ROOT / "benchmarks" / "native", tmp_path, lambda text: None)["cub"]
    if isinstance(program, str) and "CUDA toolkit" in program:
        pytest.skip(program)
    assert isinstance(program, Path), program
    one = worker.Worker([str(program), "cub", "--device", "cuda:0"], {})
    try:
        assert one.hello()["ready"]  # on a machine with a GPU
    except worker.WorkerError as error:
        assert "driver" in str(error) or "device" in str(error)  # noqa: PT017 - either is right
    finally:
        one.close()


def test_what_cannot_be_compiled_is_measured_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_problem", lambda peer, device: None)
    monkeypatch.setattr(peers, "find_spec", lambda name: object() if name == "torch" else None)
    loops = [peer for peer in peers.PEERS if "libraries" not in peer.kinds]
    here = {one.peer.name: one for one in peers.find(loops, "cuda:0", compile_missing=False)}
    assert (here["torch"].interface, here["torch"].absent) == ("Python", "")
    assert here["torch"].command[-1] == "torch"
    assert here["rmm-pool"].absent == "--no-compile was given"
    assert here["cub"].absent == "--no-compile was given"
    assert here["cupy"].absent == "the package cupy is not installed"


# -- how it is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_kind_has_help_of_its_own(kind: str) -> None:
    done = bench(kind, "--help")
    assert done.exit_code == 0
    said = " ".join(done.output.split())
    assert " ".join(kinds.KINDS[kind].text.split()) in said
    assert f"streampool bench {kind} --device" in said


def test_a_result_names_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        sys, "argv", ["x", "bench", "window", "--cache", str(tmp_path), f"--native={tmp_path}", "--json"]
    )
    native = tmp_path / "native"
    native.mkdir()
    result = measured("window", "--cache", tmp_path, "--native", native)
    assert result["command"] == "streampool bench window --json"
    assert str(tmp_path) not in json.dumps(result)


def test_help_lists_the_kinds() -> None:
    done = bench("--help")
    for kind in kinds.KINDS:
        assert f"  {kind} " in done.output


def test_it_is_quiet_in_a_pipe() -> None:
    done = bench("window", *QUICK)
    assert done.stderr == ""
    assert "256 live, random sizes" in done.stdout


def test_ratios_come_first() -> None:
    result = measured("pairs", "window")
    for table in tables.tables(result):
        if "glibc" in table.headings[1]:
            assert table.headings[1].startswith("×")  # noqa: RUF001
            break
    else:
        pytest.fail("no table has ratios")


def test_a_plot_without_matplotlib_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plot, "is_possible", lambda: False)
    done = bench("pairs", *QUICK, "--plot", tmp_path / "out.png")
    assert done.exit_code == 2
    assert "pip install 'streampool[plot]'" in done.stderr


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, said in (("out.abc", "does not end in a format"), ("none/out.png", "does not exist")):
        done = bench("pairs", *QUICK, "--plot", tmp_path / name)
        assert done.exit_code == 2
        assert said in done.stderr
    measured("pairs", "ordering", "--plot", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def row(kind: str, peer: str, median: float, **parameters: Any) -> dict[str, Any]:
    extra = parameters.pop("extra", {})
    return {
        "kind": kind, "peer": peer, "label": peer, "median": median, "parameters": parameters, "extra": extra,
        "ratio": parameters.get("ratio"), "baseline": "the fastest",
    }  # fmt: skip


def test_promises_are_held_against_the_rows() -> None:
    rows = [
        row("pairs", "glibc", 40, size=4096),
        row("pairs", "streampool", 20, size=4096),
        row("pairs", "streampool", 160, size=1 << 20),
        *(row("threads", "streampool", 20 * n, size=4096, threads=n, streams_of="own") for n in (1, 2, 16)),
        row("replay", "streampool", 100, trace="t", ratio=0.3, extra={"held_ratio": 1.02}),
        row("replay", "rmm-pool", 400, trace="t", extra={"held_ratio": 1.2}),
        row("replay", "torch-expandable", 500, trace="t", extra={"held_ratio": 1.01}),
    ]
    made = {check.what: (check.value, check.kept) for check in budgets.check(rows, cores=2)}
    assert made["4 KiB pair, against glibc malloc"] == (0.5, True)
    assert made["1 MiB pair"] == (160, False)
    assert made["4 KiB pair, 2 threads on their own streams, against one"] == (2, False)  # 16 need 16 cores
    assert made["t, time an event, against the fastest"] == (0.3, True)
    assert made["t, bytes held / peak live"] == (1.02, False)


def test_the_tables_of_the_pages_are_what_the_results_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "bench_tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*-bench.json")), ids=lambda p: p.name)
def test_committed_results_fit_the_schema(path: Path) -> None:
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)


def test_instructions_are_read_from_callgrinds_table() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import count_instructions
    finally:
        sys.path.pop(0)
    text = """
1,234 (50.0%)  ???:sp_free [/lib/libstreampool.so]
  100 ( 5.0%)  ./malloc/./malloc/malloc.c:malloc [/lib/libc.so.6]
   20 ( 1.0%)  ???:streampool::pool::Core::plan(unsigned long) const [/lib/libstreampool.so]
   10 ( 0.5%)  ???:streampool::pool::(anonymous namespace)::full_alloc(int) [clone .isra.0] [/lib/x.so]
    2 ( 0.1%)  ???:bench::Times bench::window<int>(unsigned int, long) [/bin/_bench_worker]
    3 ( 0.1%)  ???:_ZN5bench5timedIZNS_4pairI [/bin/_bench_worker]
"""
    assert count_instructions.parse(text) == {
        "sp_free": 1234, "malloc": 100, "pool::Core::plan": 20, "pool::full_alloc": 10, "the benchmark's loop": 5,
    }  # fmt: skip


def test_a_script_of_the_benchmarks_writes_one_form_of_report_and_ends_with_1_for_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from streampool._bench import reports

    given: dict[str, Any] = {
        "what": "w", "command": "c", "facts": {"gpu": "NVIDIA H200"}, "bar": {"b": 1.3}, "rows": [{"x": 1}],
    }  # fmt: skip
    assert reports.write(tmp_path / "new", "traces", **given, problems=[]) == 0
    (file,) = (tmp_path / "new").iterdir()
    assert file.name.endswith("-h200-traces.json")
    written = json.loads(file.read_text())
    assert written["results"] == [{"x": 1}]
    assert written["date"][:10] == file.name[:10]
    assert reports.write(tmp_path, "traces", **given, problems=["too slow"]) == 1
    assert "PROBLEM: too slow" in capsys.readouterr().err
