"""Alert rules by promtool; every dashboard query by a real Prometheus on a real server."""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from served import Served, free_ports
from tools import program

from tests.processes import runs

pytestmark = pytest.mark.timeout(600)

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RUNBOOK = DEPLOY.parent / "docs" / "runbook.md"
LONG_BODY = {"text_input": "It was", "max_tokens": 800, "bad_words": "", "stop_words": ""}
BODY = {"text_input": "It was", "max_tokens": 40, "bad_words": "", "stop_words": ""}
SCRAPE_S = 1
HOST_METRICS = DEPLOY.parent / "server" / "metrics" / "host_metrics.py"


def of_gpus(text: str) -> bool:
    """Whether the query needs a machine with a GPU."""
    return "nv_gpu_" in text


def rank_of(server: Served) -> psutil.Process:
    """The process of a server's only rank."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    (rank,) = [child for child in children if runs(child, "trimaran-rank")]
    return rank


def promtool(*words: str) -> str:
    done = subprocess.run(
        [program("promtool", "prometheus"), *words],
        cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alerts() -> list[dict[str, Any]]:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    return [rule for group in rules["groups"] for rule in group["rules"]]


def queries() -> list[tuple[str, str]]:
    """Title and expression of every dashboard query, its variables filled in."""
    dashboard = json.loads((DEPLOY / "grafana" / "trimaran.json").read_text())
    found = [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    found += [(note["name"], note["expr"]) for note in dashboard["annotations"]["list"]]
    return [(title, re.sub(r"\$(instance|model)\b", ".*", expr)) for title, expr in found]


def test_promtool_accepts_configuration_and_rules():
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")


def test_each_alert_fires_on_its_fault_and_at_no_other_time():
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml")
    tested = (DEPLOY / "prometheus" / "rules_test.yml").read_text()
    assert all(f"alertname: {rule['alert']}" in tested for rule in alerts())


def test_every_alert_has_a_section_in_the_runbook():
    sections = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"


class Prometheus:
    """A real Prometheus that scrapes one server, with our rules."""

    def __init__(self, folder: Path, target: int) -> None:
        (self.port,) = free_ports(1)
        config = {
            "global": {
                "scrape_interval": f"{SCRAPE_S}s",
                "evaluation_interval": f"{SCRAPE_S}s",
            },
            "rule_files": [str(DEPLOY / "prometheus" / "rules.yml")],
            "scrape_configs": [
                {
                    "job_name": "trimaran",
                    "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
                }
            ],
        }
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        self._process = subprocess.Popen(
            [program("prometheus", "prometheus"), f"--config.file={path}",
             f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{self.port}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def get(self, path: str, **values: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(values)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success"
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        return list(self.get("query", query=expression)["result"])

    def numbers(self, expression: str) -> list[float]:
        """Every number that a panel of the last ten minutes would draw."""
        now = time.time()
        answer = self.get(
            "query_range", query=expression, start=str(now - 600), end=str(now), step="1"
        )
        values = [float(value) for series in answer["result"] for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]

    def wait_for(self, expression: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if self.query(expression):
                    return
            except OSError:
                pass
            time.sleep(0.3)
        raise AssertionError(f"no samples of {expression}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def alert(name: str) -> str:
    """The expression of an alert."""
    return next(rule["expr"] for rule in alerts() if rule["alert"] == name)


@pytest.fixture(scope="module")
def scraped(
    demo_engine: Callable[[int], Path],
    make_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Served, Prometheus]]:
    """A server that has lost and replaced its worker under load, seen by a Prometheus."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Served(make_repository(demo_engine(1)), world_size=1, log_path=log) as server:
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), server.metrics_port)
        try:
            prometheus.wait_for('up{job="trimaran"} == 1')
            for _ in range(6):
                server.post("/v2/models/ensemble/generate", BODY)
                time.sleep(SCRAPE_S)
            prometheus.wait_for("rate(nv_inference_request_success[1m]) > 0")
            with ThreadPoolExecutor() as pool:
                rank = rank_of(server)
                post = functools.partial(server.post, "/v2/models/ensemble/generate")
                answers = [pool.submit(post, LONG_BODY) for _ in range(8)]
                while not any(value for _, value in server.samples("trimaran_group_requests")):
                    assert not answers[0].done(), answers[0].result()
                rank.kill()
                prometheus.wait_for("trimaran_group_up == 0")
                assert [answer.result()[0] for answer in answers] == [200] * 8
            prometheus.wait_for("trimaran_group_up == 1")
            yield server, prometheus
        finally:
            prometheus.stop()


@pytest.mark.parametrize(("title", "expression"), [q for q in queries() if not of_gpus(q[1])])
def test_every_dashboard_query_returns_data(scraped, title, expression):
    _, prometheus = scraped
    assert prometheus.numbers(expression), f"{title}: {expression}"


def test_dashboard_variables_need_no_metric_that_a_flag_disables(scraped):
    _, prometheus = scraped
    dashboard = json.loads((DEPLOY / "grafana" / "trimaran.json").read_text())
    asked = re.findall(r"label_values\((\w+)", json.dumps(dashboard["templating"]))
    assert asked
    for name in asked:
        assert not name.startswith(("nv_cpu_", "nv_gpu_")), "--allow-cpu-metrics false"
        assert prometheus.query(name), name


def test_every_metric_in_rules_and_dashboard_exists_on_the_server(scraped):
    _, prometheus = scraped
    known = set(prometheus.get("label/__name__/values"))
    text = (DEPLOY / "grafana" / "trimaran.json").read_text()
    text += " ".join(rule["expr"] for rule in alerts())
    used = set(re.findall(r"\b(?:nv|trimaran)_\w+", text))
    assert {name for name in used - known if not of_gpus(name)} == set()
    host_metrics = HOST_METRICS.read_text()
    assert all(f'"{name}"' in host_metrics for name in used if of_gpus(name))


def test_prometheus_accepts_queries_about_gpus(scraped):
    _, prometheus = scraped
    about_gpus = [expression for _, expression in queries() if of_gpus(expression)]
    assert about_gpus
    for expression in about_gpus:
        prometheus.query(expression)  # which fails on what is no query


def test_a_death_and_its_replay_are_on_the_dashboard(scraped):
    _, prometheus = scraped
    by_title: dict[str, list[str]] = {}
    for title, expression in queries():
        by_title.setdefault(title, []).append(expression)
    assert {0.0, 1.0} <= set(prometheus.numbers(by_title["Groups up"][0]))
    assert max(prometheus.numbers(by_title["Restarts"][0])) == 1
    replayed, lost = by_title["Requests replayed and lost"]
    assert max(prometheus.numbers(replayed)) > 0
    assert max(prometheus.numbers(lost)) == 0


def test_a_death_hidden_from_clients_fires_no_alert(scraped):
    _, prometheus = scraped
    # One may be pending: replayed requests have waited for their first tokens.
    alerts_now = prometheus.get("alerts")["alerts"]
    assert [alert for alert in alerts_now if alert["state"] == "firing"] == []
    rules = prometheus.get("rules")["groups"][0]["rules"]
    assert len(rules) == len(alerts())
    assert all(rule["health"] == "ok" for rule in rules), rules


def test_an_engine_hanging_before_its_first_report_fires_the_stall_alert(scraped):
    server, prometheus = scraped
    # A minute of the rule is a second for a test.
    stalled = re.sub(r"\[1m\]", "[3s]", alert("TrimaranStalled"))
    rank = rank_of(server)
    time.sleep(4)
    assert prometheus.query(stalled) == []
    with ThreadPoolExecutor() as pool:
        rank.suspend()
        answer = pool.submit(server.post, "/v2/models/ensemble/generate", BODY)
        try:
            prometheus.wait_for(stalled, timeout_s=8)
        finally:
            rank.resume()
        assert answer.result()[0] == 200
