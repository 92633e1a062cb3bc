"""What the tests of metrics share: pages as series, programs in their own processes, certificates, Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DASHBOARDS = ROOT / "dashboards"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(page: bytes | str) -> Series:
    """Give the series of a page; a series that stands there twice is an error."""
    from prometheus_client.parser import text_string_to_metric_families

    found: Series = {}
    for family in text_string_to_metric_families(page.decode() if isinstance(page, bytes) else page):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"twice on the page: {sample}"
            found[key] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float:
    """Give the value of the one series with these labels."""
    (found,) = values(series, name, **labels)
    return found


def values(series: Series, name: str, **labels: str) -> list[float]:
    """Give the values of all series of a name (without the prefix) with these labels."""
    wanted = frozenset(labels.items())
    return [value for (full, own), value in series.items() if full == f"streampool_{name}" and own >= wanted]


def get(url: str, *, cafile: Path | None = None, timeout: float = 10) -> bytes:
    import ssl

    context = ssl.create_default_context(cafile=str(cafile)) if cafile is not None else None
    with urllib.request.urlopen(url, timeout=timeout, context=context) as answer:
        return bytes(answer.read())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until(what: Callable[[], Any], *, seconds: float = 60, of: subprocess.Popen[Any] | None = None) -> Any:
    """Ask until the answer is true; gives it."""
    deadline = time.monotonic() + seconds
    problem: object = None
    while time.monotonic() < deadline:
        if of is not None and of.poll() is not None:
            pytest.fail(f"the process ended with {of.returncode} instead: {problem}")
        try:
            if answer := what():
                return answer
        except (OSError, ValueError, KeyError) as error:
            problem = str(error)  # not the error, whose frames hold sockets
        time.sleep(0.05)
    return pytest.fail(f"not within {seconds} seconds: {problem}")


@contextmanager
def program(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run Python code in a process of its own, killed at the end."""
    child = subprocess.Popen(
        [sys.executable, "-P", *((arguments) or ("-c", code))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=dict(os.environ) | dict(env or {}), **more,
    )  # fmt: skip
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
        child.communicate()


def certificate(folder: Path, name: str = "server") -> tuple[Path, Path]:
    """Make a self-signed certificate of this machine and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificate to test TLS with")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert), "-days",
        "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def tool(name: str) -> str:
    """Give the path of one of Prometheus's programs; where it is missing the test is skipped, in CI it fails."""
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed (Debian: apt-get install prometheus prometheus-alertmanager)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def promtool(*arguments: object, input: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool to its end."""
    return subprocess.run(
        [tool("promtool"), *map(str, arguments)], input=input, capture_output=True, text=True, check=False, timeout=110
    )


class Prometheus:
    """A real Prometheus on loopback, over a folder of its own."""

    def __init__(self, folder: Path, config: Mapping[str, Any], *, data: Path | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        path = folder / "prometheus.yml"
        path.write_text(json.dumps(config))  # JSON is YAML
        self._log = (folder / "log").open("a")
        self.process = subprocess.Popen(
            [tool("prometheus"), f"--config.file={path}", f"--storage.tsdb.path={data or folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn", "--storage.tsdb.retention.time=100y"],
            stdout=subprocess.DEVNULL, stderr=self._log,
        )  # fmt: skip
        try:
            wait_until(lambda: get(f"{self.url}/-/ready"), of=self.process)
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def api(self, path: str, **query: object) -> Any:
        answer = json.loads(get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, text: str, **more: object) -> list[tuple[dict[str, str], float]]:
        """Give the samples of an instant query."""
        data = self.api("query", query=text, **more)
        assert data["resultType"] == "vector"
        return [(row["metric"], float(row["value"][1])) for row in data["result"]]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        self._log.close()
