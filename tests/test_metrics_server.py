"""The metrics server, its apps, and how children and ranks are found: faults, slow clients, forks, ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metrics_scene import certificate, free_port, get, parse, program, value, values, wait_until

import streampool as sp
from streampool import metrics
from streampool.metrics import _discovery, _environment, server
from streampool.metrics import site as sites

START = "import streampool as sp, sys; p = sp.Pool('sim:0', name='own'); b = p.allocate(4096)\n"


@pytest.fixture
def pool() -> Iterator[sp.Pool]:
    with sp.Pool("sim:0", name="served") as pool:
        yield pool


def served(**options: Any) -> metrics.Server:
    return metrics.start_server(0, sample_devices=False, **options)


def ask(address: tuple[str, int], text: bytes) -> bytes:
    with socket.create_connection(address, timeout=10) as s:
        s.sendall(text)
        out = b""
        while part := s.recv(65536):
            out += part
        return out


def test_the_page_is_under_metrics_health_looks_at_no_pool_and_the_rest_is_not_found(
    pool: sp.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as running:
        assert running.address == "127.0.0.1"  # nobody else's business unless asked for
        assert value(parse(get(running.url)), "last_collect_success") == 1
        address = (running.address, running.port)
        head = ask(address, b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert head.endswith(b"\r\n\r\n")
        assert b"text/plain; version=0.0.4; charset=utf-8" in head
        assert ask(address, b"GET /nothing HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404 ")
        assert ask(address, b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 501 ")
        assert b"/metrics" in ask(address, b"GET / HTTP/1.0\r\n\r\n")
        monkeypatch.setattr(sites.Site, "metrics", lambda self: 1 / 0)
        assert ask(address, b"GET /-/healthy HTTP/1.1\r\n\r\n").endswith(b"healthy\n")


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n", b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x" *
    100_000], ids=["tls", "empty", "short", "version", "endless"],
)  # fmt: skip
def test_nonsense_is_answered_or_dropped_and_the_next_scrape_works(garbage: bytes) -> None:
    with served() as running:
        with contextlib.suppress(ConnectionError):
            ask((running.address, running.port), garbage)
        assert get(running.url)


def test_idle_and_slow_clients_are_let_go_of_and_threads_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_DEADLINE", 1.0)
    with served() as running:
        before = threading.active_count()
        idle = [socket.create_connection((running.address, running.port)) for _ in range(60)]
        for s in idle:
            s.settimeout(30)
        for _ in range(5):  # a byte now and then does not make the deadline later
            for s in idle:
                with contextlib.suppress(OSError):
                    s.sendall(b"x")
            assert threading.active_count() <= before + server._MOST_CONNECTIONS
            time.sleep(0.05)
        wait_until(lambda: get(running.url))
        for s in idle:
            with contextlib.suppress(ConnectionError):
                assert s.recv(1) == b""
            s.close()


def test_an_idle_tls_client_holds_up_nobody(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with served(certfile=cert, keyfile=key) as running:
        assert running.url.startswith("https://")
        idle = [socket.create_connection((running.address, running.port)) for _ in range(5)]  # no handshake
        begin = time.monotonic()
        assert get(running.url, cafile=cert)
        assert time.monotonic() - begin < server._DEADLINE  # it did not wait for them
        with pytest.raises(OSError):
            get(running.url)  # whose certificate is nobody's we know
        assert get(running.url, cafile=cert)
        for s in idle:
            s.close()


def test_mutual_tls_wants_a_certificate_of_the_client(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    client, client_key = certificate(tmp_path, "client")
    with served(certfile=cert, keyfile=key, client_cafile=client) as running:
        address = (running.address, running.port)

        def scrape(*own: Path) -> bytes:
            context = ssl.create_default_context(cafile=str(cert))
            if own:
                context.load_cert_chain(*own)
            with context.wrap_socket(socket.create_connection(address, timeout=10), server_hostname="localhost") as s:
                s.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                return s.recv(12)

        assert scrape(client, client_key) == b"HTTP/1.1 200"
        try:
            refused = scrape()
        except OSError:
            refused = b""
        assert refused == b""


def test_what_cannot_be_served_says_so_at_once(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "none.pem"
    cert.write_text("not a certificate")
    with served() as running:
        with pytest.raises(OSError, match=rf"port {running.port} of 127\.0\.0\.1 is in use: .*choose another port"):
            metrics.start_server(running.port)
        assert get(running.url)
    with pytest.raises(OSError, match="none of this machine's"):
        metrics.start_server(0, "192.0.2.1")
    with pytest.raises(OSError, match="'no such host' is no address"):
        metrics.start_server(0, "no such host")
    for port in (-1, 70000, "9466", True):
        with pytest.raises(ValueError, match="a port is a number from 0"):
            metrics.start_server(port)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cert\.pem cannot be used"):
        metrics.start_server(0, certfile=cert)
    with pytest.raises(ValueError, match=r"none\.pem cannot be used: No such file"):
        metrics.start_server(0, certfile=key)
    with pytest.raises(ValueError, match="go with a certfile"):
        metrics.start_server(0, keyfile=key)


def test_a_server_that_was_stopped_gives_its_port_back() -> None:
    running = served()
    running.stop()
    running.stop()
    with pytest.raises(OSError):
        get(running.url)
    metrics.start_server(running.port, sample_devices=False).stop()


def test_a_forked_child_holds_no_port_and_disturbs_no_scrape() -> None:
    code = START + (
        "import os, time\n"
        "s = sp.metrics.start_server(0); pid = os.fork()\n"
        "if pid == 0: time.sleep(60); os._exit(0)\n"
        "print(s.port, pid, flush=True); sys.stdin.readline(); s.stop()\n"
        "t = sp.metrics.start_server(s.port); print('again', flush=True); sys.stdin.readline(); os.kill(pid, 9)\n"
    )
    with program(code) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        port, child = map(int, parent.stdout.readline().split())
        url = f"http://127.0.0.1:{port}/metrics"
        for _ in range(3):
            assert value(parse(get(url)), "live_allocations", pool="own") == 1
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "again\n"  # the port was free, though the child lives
        os.kill(child, 0)
        assert get(url)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.wait(timeout=30) == 0


def test_a_forked_child_that_outlives_its_parent_leaves_no_port_that_nobody_answers() -> None:
    code = START + (
        "import os, time\n"
        "s = sp.metrics.start_server(0); pid = os.fork()\n"
        "if pid == 0: time.sleep(60); os._exit(0)\n"
        "print(s.port, pid, flush=True); sys.stdin.readline()\n"
    )
    with program(code) as parent:
        assert parent.stdout is not None
        port, child = map(int, parent.stdout.readline().split())
        try:
            assert get(f"http://127.0.0.1:{port}/metrics")
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            os.kill(child, 0)  # it lives
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=10)
        finally:
            os.kill(child, signal.SIGKILL)  # which also lets go of the pipes


def test_a_fork_while_another_thread_is_in_the_middle_of_everything_leaves_a_child_that_ends() -> None:
    """Fork: locks of the exporter, of logs and of observing that a thread held are free in the child."""
    code = START + (
        "import logging, os, threading; logging.basicConfig(level='ERROR')\n"
        "from streampool import _device_facts, _observe, logs, metrics, postmortem\n"
        "from streampool.metrics import _devices, holders, page\n"
        "page = page.Page(); page.render()\n"
        "locks = [logs._lock, postmortem._lock, _devices._lock, holders.history._lock, page._lock, _observe._lock,\n"
        "         _device_facts._lock, _observe._model._lock]\n"
        "held = threading.Event()\n"
        "def hold():\n"
        "    for lock in locks: lock.acquire()\n"
        "    held.set(); threading.Event().wait()\n"
        "threading.Thread(target=hold, daemon=True).start(); held.wait()\n"
        "import warnings; warnings.filterwarnings('ignore', 'This process .* is multi-threaded')\n"  # from 3.12 on
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    sp.logs.drain(); sp.observe(); sp.unobserve(); page.render(); _devices.sample()\n"
        "    list(metrics.Collector().collect())\n"
        "    sys.exit(7)\n"  # by the interpreter's own end, which empties the ring once more
        "print(os.waitpid(pid, 0)[1] >> 8, flush=True); os._exit(0)\n"
    )
    with program(code) as parent:
        assert parent.stdout is not None
        out, errors = parent.communicate(timeout=60)
    assert (out, errors) == ("7\n", "")


def test_a_signals_handler_or_a_finalizer_in_the_middle_of_everything_holds_up_nobody(pool: sp.Pool) -> None:
    """What is called from there may need the locks that its own thread has."""
    from streampool import _device_facts, _observe, logs, postmortem
    from streampool.metrics import _devices, holders, page

    fast = page.Page()
    locks = [logs._lock, postmortem._lock, _devices._lock, holders.history._lock, fast._lock, _observe._lock]
    done: list[str] = []

    def work() -> None:
        with contextlib.ExitStack() as stack:
            for lock in [*locks, _device_facts._lock, _observe._model._lock]:
                stack.enter_context(lock)
            logs.drain()
            _devices.sample()
            fast.render()
            done.append(postmortem.text())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert "pool 'served'" in done[0]


def scrape_all(folder: Path) -> dict[str, Any]:
    """Scrape every target that Prometheus would find in the folder."""
    found = {}
    for path in folder.glob("*.json"):
        (target,) = json.loads(path.read_text())[0]["targets"]
        with contextlib.suppress(OSError):
            found[target] = parse(get(f"http://{target}/metrics"))
    return found


WORKER = """
import multiprocessing, os, sys, time

def work():
    import streampool as sp
    pool = sp.Pool("sim:0", name="worker")
    kept = pool.allocate(1 << 20)
    while True:
        pool.allocate(1000).close()
        time.sleep(0.01)

def forked():
    import streampool as sp
    try:
        sp.Pool("sim:0", name="forked")
    except sp.ForkedProcessError:
        time.sleep(60)

if __name__ == "__main__":
    import streampool as sp  # preloaded, with a pool of its own
    kept = sp.Pool("sim:0", name="parent").allocate(4096)
    spawn, fork = (multiprocessing.get_context(word) for word in ("spawn", "fork"))
    workers = [spawn.Process(target=work, daemon=True) for _ in range(4)]
    others = [fork.Process(target=forked, daemon=True) for _ in range(2)]
    for worker in [*workers, *others]:
        worker.start()
    print(*[worker.pid for worker in workers], flush=True)
    for line in sys.stdin:  # recycle one
        workers[0].kill()
        workers[0].join()
        workers[0] = spawn.Process(target=work, daemon=True)
        workers[0].start()
        print(workers[0].pid, flush=True)
    for worker in [*workers, *others]:
        worker.kill()
"""


def test_of_preloaded_workers_only_live_ones_are_seen_and_no_counter_goes_back(tmp_path: Path) -> None:
    """Case 61: gauges of dead workers stay, a preloaded parent's pid is inherited, rates jump from mixed workers."""
    folder = tmp_path / "targets"
    folder.mkdir()
    script = tmp_path / "workers.py"
    script.write_text(WORKER)
    env = {_environment.PORT: "0", _environment.FOLDER: str(folder)}
    with program("", str(script), env=env) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pids = parent.stdout.readline().split()
        assert len(pids) == 4

        def serving(count: int) -> Any:
            pages = scrape_all(folder)
            ready = [p for p in pages.values() if values(p, "live_allocations", pool="worker")]
            return pages if len(ready) == count and len(pages) == count + 1 else None

        before = wait_until(lambda: serving(4), of=parent)  # the parent too, and no forked child
        assert sum(bool(values(page, "reserved_bytes", pool="parent")) for page in before.values()) == 1
        assert not any(values(page, "reserved_bytes", pool="forked") for page in before.values())
        seen = {target: value(page, "frees_total", pool="worker") for target, page in before.items()
                if values(page, "frees_total", pool="worker")}  # fmt: skip
        for step in range(10):
            if step == 5:
                parent.stdin.write("recycle\n")
                parent.stdin.flush()
                new = parent.stdout.readline().strip()
                assert new not in pids
                after = wait_until(lambda: serving(4), of=parent)
                assert len(after.keys() - before.keys()) == 1
                names = {path.name for path in folder.glob("*.json")}
                assert not any(name.endswith(f"-{pids[0]}.json") for name in names)  # the new one took its file away
                assert any(name.endswith(f"-{new}.json") for name in names)
            for target, page in scrape_all(folder).items():
                for frees in values(page, "frees_total", pool="worker"):
                    assert frees >= seen.get(target, 0.0)
                    seen[target] = frees
        assert len(seen) == 5
        parent.communicate(timeout=30)  # the end of its input


def test_a_process_with_a_server_ends_quietly_while_it_is_scraped(tmp_path: Path) -> None:
    code = START + (
        "import threading, urllib.request\n"
        f"s = sp.metrics.start_server(0, sd_folder={str(tmp_path)!r})\n"
        "def scrape():\n"
        "    while True:\n"
        "        try: urllib.request.urlopen(s.url).read()\n"
        "        except OSError: pass\n"
        "for _ in range(3): threading.Thread(target=scrape, daemon=True).start()\n"
        "import time; time.sleep(0.3)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_target_is_written_whole_and_one_that_was_killed_is_swept_by_the_next(tmp_path: Path) -> None:
    code = (
        START
        + f"s = sp.metrics.start_server(0, sd_folder={str(tmp_path)!r}); print(s.target, flush=True); sys.stdin.read()"
    )
    with program(code, env={"RANK": "3"}) as child:
        assert child.stdout is not None
        target = child.stdout.readline().strip()
        (path,) = tmp_path.glob("*.json")
        (group,) = json.loads(path.read_text())
        assert group["targets"] == [target]
        assert group["labels"]["rank"] == "3"
        assert path.stat().st_mode & 0o444 == 0o444
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert path.exists()  # nobody could take it away
    with served(sd_folder=tmp_path) as running:
        assert not path.exists()
        assert [json.loads(p.read_text())[0]["targets"] for p in tmp_path.glob("*.json")] == [[running.target]]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = threading.active_count()
    with pytest.raises(OSError, match=r"file_sd folder .*file/sd cannot be written: Not a directory"):
        served(sd_folder=tmp_path / "file" / "sd")
    assert threading.active_count() == before  # no server without its target


def test_a_full_disk_leaves_the_older_target_as_it_was(tmp_path: Path) -> None:
    _discovery.write(tmp_path, "127.0.0.1:1", tls=False)
    code = (
        "import resource, sys; from pathlib import Path; from streampool.metrics import _discovery\n"
        "import os; os.getpid = lambda: int(sys.argv[2])\n"  # as the process that wrote the older one
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try: _discovery.write(Path(sys.argv[1]), '127.0.0.1:2', tls=False)\n"
        "except OSError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path), str(os.getpid())], capture_output=True, text=True, check=True
    )
    assert "cannot be written" in done.stdout
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())[0]["targets"] == ["127.0.0.1:1"]


def test_a_foreign_registry_is_served_whole_and_its_failures_are_an_answer(pool: sp.Pool) -> None:
    from prometheus_client import CollectorRegistry, Counter

    registry = CollectorRegistry()
    Counter("requests", "Of the app.", registry=registry).inc()
    metrics.register(registry, sample_devices=False)
    with served(registry=registry) as running:
        page = get(running.url)
        assert b"requests_total 1.0" in page
        assert b"streampool_used_bytes" in page

        class Broken:
            def collect(self) -> Any:
                raise RuntimeError("told to fail")

        registry.register(Broken())  # type: ignore[arg-type]
        answer = ask((running.address, running.port), b"GET /metrics HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert b"told to fail" in answer


def test_the_wsgi_app_keeps_the_rules_of_wsgi(pool: sp.Pool) -> None:
    from wsgiref.util import setup_testing_defaults
    from wsgiref.validate import validator

    app = validator(metrics.wsgi_app(sample_devices=False))  # type: ignore[arg-type]
    for method, status in (("GET", "200 OK"), ("HEAD", "200 OK"), ("POST", "405 Method Not Allowed")):
        environ: dict[str, Any] = {"REQUEST_METHOD": method, "QUERY_STRING": ""}
        setup_testing_defaults(environ)
        told: list[Any] = []

        def start(status: str, headers: Any, exc_info: Any = None, told: list[Any] = told) -> Any:
            told.append(status)
            return lambda data: None

        answer = app(environ, start)
        body = b"".join(answer)
        answer.close()  # type: ignore[attr-defined]
        assert told == [status]
        assert (b"streampool_used_bytes" in body) == (method == "GET")


def test_the_asgi_app_answers_requests_and_lifespans(pool: sp.Pool) -> None:
    async def talk(scope: dict[str, Any], *messages: dict[str, Any]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        left = list(messages)

        async def receive() -> dict[str, Any]:
            return left.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await metrics.asgi_app(sample_devices=False)(scope, receive, send)
        return sent

    start, body = asyncio.run(talk({"type": "http", "method": "GET", "path": "/metrics"}))
    assert start["status"] == 200
    assert b"streampool_used_bytes" in body["body"]
    start, _ = asyncio.run(talk({"type": "http", "method": "PUT", "path": "/metrics"}))
    assert start["status"] == 405
    sent = asyncio.run(talk({"type": "lifespan"}, {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}))
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    with pytest.raises(ValueError, match="over HTTP"):
        asyncio.run(talk({"type": "websocket"}))


# -- `streampool run`, children and ranks ------------------------------------------------------------------------------


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "streampool", "run", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=60, env=dict(os.environ) | (env or {}),
    )  # fmt: skip


def test_run_serves_the_program_and_each_child_under_a_port_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    folder = tmp_path / "targets"
    script.write_text(
        START
        + "import json, pathlib, subprocess, urllib.request\n"
        + "child = subprocess.Popen([sys.executable, '-P', '-c', sys.argv[1]], stdin=-1, stdout=-1, text=True)\n"
        + "child.stdout.readline()\n"
        + "for path in sorted(pathlib.Path(sys.argv[2]).glob('*.json')):\n"
        + "    target = json.loads(path.read_text())[0]['targets'][0]\n"
        + "    page = urllib.request.urlopen(f'http://{target}/metrics').read().decode()\n"
        + "    print([l for l in page.splitlines() if l.startswith('streampool_requested_bytes{')])\n"
        + "child.communicate('')\n"
    )
    child = (
        START + "c = sp.Pool('sim:0', name='child'); d = c.allocate(777); print('ready', flush=True); sys.stdin.read()"
    )
    done = run("--metrics-port", free_port(), "--metrics-folder", folder, script, child, folder)
    assert done.returncode == 0, done.stderr
    assert "streampool: metrics at http://127.0.0.1:" in done.stderr
    pages = done.stdout.splitlines()
    assert len(pages) == 2
    assert sum('pool="child"} 777.0' in page for page in pages) == 1
    assert all('pool="own"} 4096.0' in page for page in pages)
    assert list(folder.iterdir()) == []


def test_run_gives_each_rank_the_port_behind_the_one_before(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(START)
    port = free_port() - 3
    done = run("--metrics-port", port, script, env={"LOCAL_RANK": "3"})
    assert f"metrics at http://127.0.0.1:{port + 3}/metrics" in done.stderr


def test_run_refuses_a_port_that_is_taken_before_the_program_starts(tmp_path: Path) -> None:
    script = tmp_path / "started.py"
    script.write_text("print('started')")
    with served() as running:
        done = run("--metrics-port", running.port, script)
    assert done.returncode == 2
    assert "is in use" in done.stderr
    assert "started" not in done.stdout
    assert "--metrics-port" in run("--metrics-folder", tmp_path, script).stderr


def test_a_child_that_cannot_be_served_is_warned_about_and_goes_on() -> None:
    with served() as running:
        env = {_environment.PORT: str(running.port)}
        with program(START + "print('goes on')", env=env) as child:
            out, problem = child.communicate(timeout=60)
        assert out == "goes on\n"
        assert "no metrics of this process are served" in problem
        assert "is in use" in problem
    with program(START + "print('goes on')", env={_environment.PORT: "http"}) as child:
        out, problem = child.communicate(timeout=60)
    assert out == "goes on\n"
    assert "'http', not a port" in problem


def test_nothing_is_served_unless_asked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = {thread.name for thread in threading.enumerate()}
        sp.Pool("sim:0").close()
        assert {thread.name for thread in threading.enumerate()} == names
