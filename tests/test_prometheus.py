"""A real Prometheus scrapes working programs: plain, with TLS, children; and shows every panel's query over history."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metrics_scene import DASHBOARDS, ROOT, Prometheus, certificate, program, promtool, tool, wait_until

from streampool.metrics import CATALOGUE, Type

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prometheus")]

SCRAPE = {"scrape_interval": "250ms", "scrape_timeout": "250ms"}
WORK = """
import sys, threading, time
import streampool as sp
from streampool._observe import _cupy
from streampool.metrics import start_server

sys.path.append(sys.argv.pop(1))
import libraries  # of PyTorch's and CuPy's shape, with memory of its own

theirs = libraries.Torch().install().allocate(3 << 20)
sys.modules["cupy"] = libraries.CuPy((1 << 20, 2 << 20))
_cupy.in_use = lambda ordinal: ordinal == 0
sp.observe()
sp.sim.configure(devices=2)
modes = {"main": "production", "dbg": "debug"}
pools = [sp.Pool(f"sim:{n}", name=name, mode=modes[name]) for n in (0, 1) for name in modes]
server = start_server(0, **dict(zip(("certfile", "keyfile"), sys.argv[1:3])))
kept = [pool.allocate(1 << 20) for pool in pools]
stop = threading.Event()
pairs = 0

def work():  # a hundred pairs, ten times a second
    global pairs
    while not stop.wait(0.1):
        for _ in range(100):
            pools[0].free_raw(pools[0].allocate_raw(5000))
        pairs += 100

thread = threading.Thread(target=work)
thread.start()
print(server.url, flush=True)
sys.stdin.readline()
stop.set()
thread.join()
print(pairs, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One Prometheus for all: a plain program, one with TLS, and targets in a folder."""
    tool("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    cert, key = certificate(folder)
    script = folder / "work.py"
    script.write_text(WORK)
    targets = folder / "targets"
    targets.mkdir()  # Prometheus complains about a folder that comes later, and finds it all the same
    tests = str(ROOT / "tests")
    with program("", str(script), tests) as first, program("", str(script), tests, str(cert), str(key)) as second:
        plain, secure = (_target(child) for child in (first, second))
        config = {
            "global": SCRAPE,
            "rule_files": [str(DASHBOARDS / "rules/streampool.rules.yml")],
            "scrape_configs": [
                {"job_name": "plain", "static_configs": [{"targets": [plain]}]},
                {
                    "job_name": "secure",
                    "scheme": "https",
                    "tls_config": {"ca_file": str(cert), "server_name": "localhost"},
                    "static_configs": [{"targets": [secure]}],
                },
                {"job_name": "folder", "file_sd_configs": [{"files": [f"{targets}/*.json"], "refresh_interval": "1s"}]},
            ],
        }
        server = Prometheus(folder, config)
        try:
            wait_until(lambda: len(server.query('up{job=~"plain|secure"} == 1')) == 2)
            yield {"server": server, "plain": first, "targets": targets}
        finally:
            server.stop()


def _target(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    assert child.stderr is not None
    line = child.stdout.readline()
    assert line.startswith("http"), child.stderr.read()
    return line.partition("//")[2].partition("/")[0]


def test_every_series_of_the_catalogue_arrives_plain_and_with_tls(scraped: dict[str, Any]) -> None:
    for job in ("plain", "secure"):
        found = scraped["server"].query(f'{{job="{job}", __name__=~"streampool_.*"}}')
        names = {labels["__name__"] for labels, _ in found}
        expected: set[str] = set()
        for metric in CATALOGUE:
            ends = ("_bucket", "_count", "_sum") if metric.type is Type.HISTOGRAM else ("",)
            expected |= {metric.full_name + end for end in ends}
        assert names == expected


def test_no_sample_of_a_scrape_is_dropped_as_a_duplicate(scraped: dict[str, Any]) -> None:
    server = scraped["server"]
    left_out = "scrape_samples_scraped - scrape_samples_post_metric_relabeling"
    assert all(value == 0 for _, value in server.query(left_out))
    log = (server.folder / "log").read_text()
    assert "level=error" not in log
    assert "level=warn" not in log  # as for samples that come twice


def test_counts_and_rates_are_those_of_the_program(scraped: dict[str, Any]) -> None:
    server, child = scraped["server"], scraped["plain"]
    own = 'job="plain", device="sim:0", pool="main"'
    # A thousand pairs a second, as long as the machine keeps up; what the counter says must fit its own rate.
    wait_until(lambda: server.query(f"sum(rate(streampool_allocations_total{{{own}}}[5s])) > 100"))
    child.stdin.write("\n")
    child.stdin.flush()
    pairs = int(child.stdout.readline())

    def total(name: str) -> float:
        ((_, value),) = server.query(f"sum(streampool_{name}{{{own}}})")
        return float(value)

    wait_until(lambda: total("frees_total") == pairs)
    assert total("allocations_total") == pairs + 1  # the one that is kept
    assert total("allocated_bytes_total") == pairs * 5000 + (1 << 20)
    assert total("freed_bytes_total") == pairs * 5000
    # What a rate is made of: each sample is a count that the program had reached, and none is ever lower than the last.
    ((_, first),) = server.query(f"sum(min_over_time(streampool_frees_total{{{own}}}[5m]))")
    ((_, resets),) = server.query(f"sum(resets(streampool_frees_total{{{own}}}[5m]))")
    assert 0 <= first < pairs
    assert resets == 0
    ((_, rated),) = server.query(f"sum(increase(streampool_frees_total{{{own}}}[5m]))")
    assert rated >= pairs - first  # extrapolated to the ends of the window, and no less than what was seen
    ((_, parts),) = server.query(
        f"sum(streampool_used_bytes{{{own}}}) + sum(streampool_guard_bytes{{{own}}}) + "
        f"sum(streampool_quarantined_bytes{{{own}}}) + sum(streampool_pending_bytes{{{own}}}) + "
        f"sum(streampool_cached_bytes{{{own}}}) - sum(streampool_reserved_bytes{{{own}}})"
    )
    assert parts == 0


def test_a_child_is_found_by_its_file_and_goes_with_it(scraped: dict[str, Any], tmp_path: Path) -> None:
    server = scraped["server"]
    child = (
        "import streampool as sp, sys; p = sp.Pool('sim:0', name='spawned'); b = p.allocate(777)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys, streampool as sp\np = sp.Pool('sim:0', name='parent'); b = p.allocate(4096)\n"
        f"c = subprocess.Popen([sys.executable, '-P', '-c', {child!r}], stdin=-1)\n"
        "sys.stdin.readline(); c.communicate(b'')\n"
    )
    options = ["--metrics-port", "0", "--metrics-folder", str(scraped["targets"])]
    with program("", "-m", "streampool", "run", *options, str(script)) as parent:
        query = 'streampool_requested_bytes{job="folder", pool="%s"}'
        found = wait_until(lambda: server.query(query % "spawned"))
        assert [value for _, value in found] == [777]
        assert wait_until(lambda: server.query(query % "parent"))[0][1] == 4096
        assert "pid" not in found[0][0]
        parent.communicate("\n", timeout=60)
    wait_until(lambda: not server.query('up{job="folder"}'))


def test_rules_are_loaded_and_evaluate_without_errors(scraped: dict[str, Any]) -> None:
    server = scraped["server"]
    rules = [rule for group in server.api("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == 33
    assert [rule for rule in rules if rule.get("lastError")] == []


def test_every_query_of_every_panel_returns_data_over_history(tmp_path: Path) -> None:
    """Three hours of pages of a leaking server, made in simulated time, are put into a Prometheus as its past."""
    command = [sys.executable, "-P", str(ROOT / "tests/paging_program.py"), "leak", "180", "0"]
    run = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    start = 1_700_000_000 - 1_700_000_000 % 7200
    lines = []
    minutes = len(next(iter(run["values"].values())))
    values = dict(run["values"])
    # What only other programs would show: sizes, and DCGM's own metric of the device.
    for le in ("4096.0", "+Inf"):
        name = f'streampool_allocation_size_bytes_bucket{{device="sim:0",kind="device",pool="inference",le="{le}"}}'
        values[name] = [str(10 * minute) for minute in range(minutes)]
    values['DCGM_FI_DEV_FB_USED{UUID="sim:0"}'] = ["9000"] * minutes
    families: dict[str, list[str]] = {}
    for series, samples in values.items():
        bare, brace, labels = series.partition("{")
        own = f",{labels}" if brace else "}"
        for minute, value in enumerate(samples):
            if value is not None:
                text = f'{bare}{{job="streampool",instance="127.0.0.1:9466"{own} {value} {start + 60 * minute}'
                families.setdefault(bare, []).append(text)
    for bare, texts in families.items():
        lines += [f"# TYPE {bare.removesuffix('_total')} {'counter' if bare.endswith('_total') else 'unknown'}", *texts]
    history = tmp_path / "history.txt"
    history.write_text("\n".join([*lines, "# EOF"]) + "\n")
    data = tmp_path / "data"
    done = promtool("tsdb", "create-blocks-from", "openmetrics", history, data)
    assert done.returncode == 0, done.stdout + done.stderr
    end = start + 60 * minutes
    config = {"global": {"scrape_interval": "1m"}}
    server = Prometheus(tmp_path, config, data=data)
    try:
        rules = DASHBOARDS / "rules/streampool.rules.yml"
        recorded = tmp_path / "recorded"
        # Twice: some recorded series are made of others. What was recorded becomes part of the history.
        for _ in range(2):
            done = promtool(
                "tsdb", "create-blocks-from", "rules", f"--start={start}", f"--end={end}", f"--url={server.url}",
                f"--output-dir={recorded}", "--eval-interval=1m", rules,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            server.stop()
            for block in recorded.iterdir():
                if block.is_dir() and len(block.name) == 26:
                    block.rename(data / block.name)
            server = Prometheus(tmp_path, config, data=data)
        empty = []
        for path in sorted((DASHBOARDS / "grafana").glob("*.json")):
            board = json.loads(path.read_text())
            for panel in board["panels"]:
                for target in panel.get("targets", []):
                    query = target["expr"].replace("$__rate_interval", "5m")
                    query = re.sub(r"\$(job|instance|device|pool)\b", ".+", query)
                    found = server.api("query_range", query=query, start=start + 3600, end=end - 60, step=300)["result"]
                    if not found:
                        empty.append(f"{path.name}: {panel['title']}: {query}")
        # Nothing of the server's is ever under another name.
        assert [text for text in empty if "unnamed_pools" not in text] == []
    finally:
        server.stop()
