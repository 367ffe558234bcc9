"""The operator's page, as HTML and as JSON."""

import copy
import html.parser
import json
import urllib.request

import pytest

from trimaran.server.http.status_page import render_page

ENGINE = {
    "active_requests": 3.0, "max_requests": 64.0, "scheduled_requests": 3.0,
    "waiting_requests": 7.0, "paused_requests": 0.0, "kv_used_blocks": 12.0,
    "kv_max_blocks": 48.0, "kv_reused_blocks": 5.0, "kv_used_fraction": 0.25,
    "iteration_counter": 1234.0,
}  # fmt: skip
RATES = {
    "tokens_per_s": 1234.5, "first_token_p50_s": 0.0213, "first_token_p99_s": 0.5,
    "inter_token_p50_s": 0.004, "inter_token_p99_s": None,
}  # fmt: skip
HISTORY = {
    "tokens_per_s": [None, 0.0, 1234.5], "waiting_requests": [None, 0.0, 7.0],
    "kv_used_fraction": [None, 0.0, 0.25], "first_token_p99_s": [None, None, 0.5],
}  # fmt: skip
STATUS = {
    "server": {
        "id": "triton", "release": "0.1.0", "version": "2.73.0", "state": "ready",
        "running_requests": 10,
        "uptime_s": 93784.2, "time": 1_700_000_000.0,
    },
    "models": [
        {
            "name": "tensorrt_llm", "version": "1", "state": "READY", "reason": "",
            "num_succeeded": 41, "num_failed": 2, "rates": RATES, "engine": ENGINE,
            "history": HISTORY,
        },
        {
            "name": "old", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded",
            "num_succeeded": 0, "num_failed": 0, "rates": None, "engine": None,
            "history": None,
        },
    ],
    "groups": [
        {
            "group": "tensorrt_llm", "model": "tensorrt_llm", "generation": 2, "state": "down",
            "text": "rank 1 <script>alert(1)</script>", "fault_time": 1_700_000_000.0,
            "num_restarts": 1, "restart_in_s": 0.5, "world_size": 2, "start_method": "spawn",
            "ranks": [
                {"rank": 0, "pid": 4711, "host": "node1", "device": "cuda:0"},
                {"rank": 1, "pid": 4712, "host": "node1", "device": "cuda:1"},
            ],
        }
    ],
    "faults": [{"time": 1_700_000_000.0, "group": "tensorrt_llm", "text": "rank 1 died"}],
    "gpus": [
        {
            "uuid": "GPU-1", "utilization": 0.5, "memory_total_bytes": 8 << 30,
            "memory_used_bytes": 2 << 30, "power_w": 300.0, "power_limit_w": 700.0,
            "energy_j": None,
        }
    ],
    "host": {
        "cpu_utilization": 0.42, "memory_total_bytes": 16 << 30, "memory_used_bytes": 4 << 30,
    },
}  # fmt: skip


class Page(html.parser.HTMLParser):
    """The text of a page, and its external resources."""

    def __init__(self, text):
        super().__init__()
        self.words, self.fetched, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "src" or (name == "href" and tag == "link"):
                self.fetched.append(value)

    def handle_data(self, data):
        self.words += data.split()

    @property
    def text(self):
        return " ".join(self.words)


def test_the_page_shows_models_engines_groups_gpus_and_faults():
    text = Page(render_page(STATUS)).text
    for words in (
        "10 requests running", "up 1 d 02:03:04", "tensorrt_llm v1 ready 41 2 1234 21.3 ms",
        "unavailable unloaded", "3 of 64 7 0 25 % 12 / 48",
        "down restart in 0.5 s spawn 1",
        "0: pid 4711 on node1, cuda:0", "GPU-1 50 % 2.0 GiB / 8.0 GiB 300 W", "rank 1 died",
        "42 % of its cores busy",
    ):  # fmt: skip
        assert words in text


def test_the_page_draws_the_last_ten_minutes_of_each_engine():
    page = Page(render_page(STATUS))
    assert (page.tags.count("svg"), page.tags.count("path")) == (4, 4)
    assert (
        "tensorrt_llm at most 1234 at most 7 at most 25 % of 100 % at most 500.0 ms"
    ) in page.text
    assert 'aria-label="tokens/s of tensorrt_llm"' in render_page(STATUS)
    # Nothing at the first moment, zero at the second, the highest value at the third.
    assert 'd="M98 30.0h0L99 0.0"' in render_page(STATUS)


def test_a_name_of_a_model_cannot_become_markup():
    status = copy.deepcopy(STATUS)
    status["models"][0]["name"] = '"><script>'
    assert Page(render_page(status)).tags.count("script") == 1


def test_the_page_fetches_nothing_from_elsewhere():
    page = Page(render_page(STATUS))
    assert page.fetched == []
    assert "http-equiv" in render_page(STATUS)


def test_a_browser_without_scripts_shows_no_offline_warning():
    assert "no answer" not in render_page(STATUS).partition("<script>")[0]


def test_text_of_a_fault_cannot_become_markup():
    assert Page(render_page(STATUS)).tags.count("script") == 1


@pytest.mark.parametrize("missing", ["models", "groups", "gpus", "faults"])
def test_an_empty_list_is_shown_as_a_sentence_or_omitted(missing):
    status = copy.deepcopy(STATUS)
    status[missing] = []
    assert "triton" in Page(render_page(status)).text


def read(server, path):
    with urllib.request.urlopen(f"{server.metrics_url}{path}") as response:
        return response.headers["Content-Type"], response.read().decode()


def test_the_metrics_port_serves_the_page_and_its_document(fresh_server):
    kind, text = read(fresh_server, "/")
    assert kind == "text/html; charset=utf-8"
    assert "double v1 ready" in Page(text).text
    kind, text = read(fresh_server, "/status.json")
    assert kind == "application/json"
    document = json.loads(text)
    assert set(document) == set(STATUS)
    assert document["server"]["state"] == "ready"
    assert {model["name"] for model in document["models"]} >= {"double", "repeat"}
    assert document["host"]["memory_total_bytes"] > 0


def test_requests_are_counted_by_outcome(fresh_server):
    tensor = {"name": "X", "shape": [1, 2], "datatype": "INT32", "data": [0, 0]}
    fresh_server.post("/v2/models/double/infer", {"inputs": [tensor]})
    bad = {"name": "KIND", "shape": [1], "datatype": "BYTES", "data": ["INTERNAL"]}
    fresh_server.post("/v2/models/fail/infer", {"inputs": [bad]})
    models = {m["name"]: m for m in json.loads(read(fresh_server, "/status.json")[1])["models"]}
    assert models["double"]["num_succeeded"] == 1
    assert models["fail"]["num_failed"] == 1
