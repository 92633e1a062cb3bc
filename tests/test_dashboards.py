"""Rules and dashboards: written from their sources, well-formed, and about metrics that exist, with none left out."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from metrics_scene import DASHBOARDS, promtool, tool

from streampool.metrics import CATALOGUE, Type
from streampool.metrics.catalogue import find

README = (DASHBOARDS / "README.md").read_text()
BOARDS = sorted((DASHBOARDS / "grafana").glob("*.json"))
FOREIGN = {"DCGM_FI_DEV_FB_USED": {"UUID", "GPU_I_ID"}, "ALERTS": {"alertname", "alertstate"}}
TARGET = {"job", "instance"}  # Prometheus's own
ANCHORS = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.+)$", README, re.M)}


def library(name: str) -> Any:
    """Import what the tests of dashboards need; in CI it must be there."""
    if os.environ.get("CI") == "true":
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'streampool[test]'")


def source(name: str) -> ModuleType:
    """Load a program of dashboards/src."""
    spec = importlib.util.spec_from_file_location(f"dashboards_{name}", DASHBOARDS / "src" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Use:
    """A selector in a query, and where it stands."""

    where: str
    name: str
    matchers: dict[str, str]
    functions: tuple[str, ...]  # innermost first


def rules() -> list[dict[str, Any]]:
    yaml = library("yaml")
    groups = yaml.safe_load((DASHBOARDS / "rules/streampool.rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Give every query with where it stands."""
    for rule in rules():
        yield f"rule {rule.get('alert') or rule['record']}", rule["expr"]
    for path in BOARDS:
        board = json.loads(path.read_text())
        for panel in panels(board):
            for target in panel["targets"]:
                yield f"{path.name}, panel {panel['title']!r}", target["expr"]
        for annotation in board.get("annotations", {}).get("list", []):
            yield f"{path.name}, annotation {annotation['name']!r}", annotation["expr"]


def uses(where: str, query: str) -> Iterator[Use]:
    """Give the selectors of a query."""
    ql = library("promql_parser")
    text = query.replace("$__rate_interval", "5m")

    def visit(node: Any, functions: tuple[str, ...]) -> Iterator[Use]:
        if isinstance(node, ql.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, ql.VectorSelector):
            matchers = {m.name: m.value for m in node.matchers.matchers}
            yield Use(where, node.name or matchers["__name__"], matchers, functions)
        elif isinstance(node, ql.Call):
            for argument in node.args:
                yield from visit(argument, (node.func.name, *functions))
        elif isinstance(node, ql.BinaryExpr):
            yield from visit(node.lhs, functions)
            yield from visit(node.rhs, functions)
        elif isinstance(node, (ql.ParenExpr, ql.UnaryExpr, ql.AggregateExpr, ql.SubqueryExpr)):
            yield from visit(node.expr, functions)

    yield from visit(ql.parse(text), ())


def all_uses() -> list[Use]:
    return [use for where, query in queries() for use in uses(where, query)]


def test_every_metric_is_in_a_panel_or_a_rule_and_every_name_there_is_a_metric() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = set()
    for use in all_uses():
        if use.name in recorded or use.name in FOREIGN:
            continue
        used.add(find(use.name).name)  # KeyError: no such metric
    assert used == {metric.name for metric in CATALOGUE}
    assert recorded <= {use.name for use in all_uses()}, "a recorded series that nobody looks at"


def test_queries_ask_for_labels_that_the_metrics_have() -> None:
    for use in all_uses():
        if use.name in FOREIGN or ":" in use.name:
            continue
        metric = find(use.name)
        known = TARGET | set(metric.labels) | ({"le"} if metric.type is Type.HISTOGRAM else set())
        assert set(use.matchers) <= known, use
        for label, value in use.matchers.items():
            if label == metric.label and metric.words:
                assert set(value.split("|")) <= set(metric.words), use


def test_counters_stand_under_a_rate_and_gauges_do_not() -> None:
    for use in all_uses():
        if use.name in FOREIGN or ":" in use.name or use.name.endswith("_info"):
            continue
        counts = use.name.endswith(("_total", "_bucket", "_sum", "_count"))
        rated = bool(use.functions) and use.functions[0] in ("rate", "increase", "irate")
        if use.name == "streampool_unnamed_pools_total" and use.where.startswith("streampool-fleet"):
            continue  # how many there are in all is what that table shows
        assert counts == rated, use


def test_every_query_of_a_dashboard_keeps_to_its_variables() -> None:
    for use in all_uses():
        if use.where.startswith("rule") or use.name in FOREIGN:
            continue
        assert use.matchers.get("job") == "$job", use
        assert use.matchers.get("instance") == "$instance", use
        own = set(find(use.name).labels) if ":" not in use.name else {"device"}
        assert "device" not in own or use.matchers.get("device") == "$device", use


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboards_are_complete(path: Any) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    assert board["editable"] is False
    assert board["description"]
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance", "device", "pool"]
    assert variables["datasource"]["type"] == "datasource"
    for name in ("job", "instance", "device", "pool"):
        assert variables[name]["multi"], name
        assert variables[name]["includeAll"], name
        assert variables[name]["allValue"] == ".+"
        assert variables[name]["refresh"] == 2
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert len({panel["title"] for panel in panels(board)}) == len(panels(board))
    for panel in panels(board):
        assert panel["title"], panel
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "$datasource"
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == sorted(set(refs)) != []
        assert all(target["datasource"]["uid"] == "$datasource" for target in panel["targets"])
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_rates_in_panels_use_grafanas_interval() -> None:
    for where, query in queries():
        if "panel" in where:
            assert not re.search(r"rate\([^)]*\[\d", query), where


def test_alerts_say_what_is_wrong_how_bad_and_what_to_do() -> None:
    for rule in rules():
        if "alert" not in rule:
            continue
        assert rule["alert"].startswith("Streampool")
        assert set(rule["labels"]) == {"severity"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook"}
        assert "{{" not in notes["summary"]
        assert "$labels.instance" in notes["description"]
        assert re.search(r"\$value \| humanize", notes["description"]), rule["alert"]
        page, anchor = notes["runbook"].split("#")
        assert page == "dashboards/README.md"
        assert anchor == rule["alert"].lower()
        assert anchor in ANCHORS, f"the README has no section {rule['alert']}"
        assert "topk" not in rule["expr"]
        assert re.search(r"[<>]|==", rule["expr"]), "an alert compares"


def test_every_alert_has_series_that_fire_it_and_clear_and_series_that_do_not() -> None:
    cases = source("rule_tests").CASES
    for rule in rules():
        if "alert" in rule:
            tested = {case.fires for case in cases if f"Streampool{case.alert}" == rule["alert"]}
            assert tested == {True, False}, rule["alert"]
            assert any(case.clears for case in cases if f"Streampool{case.alert}" == rule["alert"]), rule["alert"]
    recorded = (DASHBOARDS / "rules/tests/alerts.yml").read_text()
    assert recorded == source("rule_tests").text(), "run: python dashboards/src/rule_tests.py"


def test_dashboards_are_as_their_source_writes_them() -> None:
    library("grafana_foundation_sdk")
    for path, text in source("dashboards").files():
        assert path.read_text() == text, "run: python dashboards/src/dashboards.py"
    assert {path for path, _ in source("dashboards").files()} == set(BOARDS)


def test_the_mixin_has_all_rules_and_dashboards() -> None:
    jsonnet = library("_jsonnet")
    snippet = "(import 'mixin.libsonnet') + {_config+:: {runbookBase: 'https://example.com/'}, all: {" + (
        "d: $.grafanaDashboards, r: $.prometheusRules, a: $.prometheusAlerts}}"
    )
    made = json.loads(jsonnet.evaluate_snippet("mixin", snippet, jpathdir=str(DASHBOARDS)))["all"]
    assert set(made["d"]) == {path.name for path in BOARDS}
    found = [rule for key in ("r", "a") for group in made[key]["groups"] for rule in group["rules"]]
    assert len(found) == len(rules())
    alerts = [rule for rule in found if "alert" in rule]
    assert all(rule["annotations"]["runbook_url"].startswith("https://example.com/dashboards/") for rule in alerts)


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", DASHBOARDS / "rules/streampool.rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_promtool_finds_that_alerts_fire_and_stay_quiet() -> None:
    done = promtool("test", "rules", DASHBOARDS / "rules/tests/alerts.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_dcgms_used_memory_is_joined_on_whole_gpus_and_on_mig_instances(tmp_path: Path) -> None:
    """As DCGM's exporter names them: a MIG instance by the UUID of its GPU and `GPU_I_ID`."""
    board = json.loads((DASHBOARDS / "grafana/streampool-fleet.json").read_text())
    (panel,) = [panel for panel in panels(board) if "DCGM" in panel["title"]]
    query = re.sub(r"\$(job|instance|device|pool)\b", ".+", panel["targets"][0]["expr"])
    mib = 1 << 20
    series = {
        'DCGM_FI_DEV_FB_USED{UUID="GPU-1", gpu="0", GPU_I_ID="7", GPU_I_PROFILE="1g.18gb"}': 900,
        'DCGM_FI_DEV_FB_USED{UUID="GPU-1", gpu="0", GPU_I_ID="8", GPU_I_PROFILE="1g.18gb"}': 800,
        'DCGM_FI_DEV_FB_USED{UUID="GPU-2", gpu="1"}': 700,
    }
    for instance, device, gpu, part, held in (
        ("i:1", "cuda:0", "GPU-1", "7", 300),
        ("i:2", "cuda:0", "GPU-1", "8", 200),
        ("i:3", "cuda:0", "GPU-2", "", 100),
        ("i:4", "cuda:1", "GPU-2", "", 50),
    ):
        own = f'job="j", instance="{instance}", device="{device}"'
        series[f'streampool_device_info{{{own}, uuid="x", gpu_uuid="{gpu}", gpu_instance="{part}"}}'] = 1
        for pool in "ab":
            series[f'streampool_reserved_bytes{{{own}, pool="{pool}", kind="device"}}'] = held * mib // 2
    left = [('{UUID="GPU-1", GPU_I_ID="7"}', 600), ('{UUID="GPU-1", GPU_I_ID="8"}', 600), ('{UUID="GPU-2"}', 550)]
    expected = [{"labels": labels, "value": value * mib} for labels, value in left]
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": str(value)} for name, value in series.items()],
            "promql_expr_test": [{"expr": query, "eval_time": "0m", "exp_samples": expected}],
        }
    ]
    path = tmp_path / "join.yml"
    path.write_text(json.dumps({"rule_files": [], "evaluation_interval": "1m", "tests": tests}))
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_example_configurations_are_accepted() -> None:
    done = promtool("check", "config", DASHBOARDS / "examples/prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    import subprocess

    command = [tool("amtool"), "check-config", str(DASHBOARDS / "examples/alertmanager.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
