"""Random requests over HTTP and gRPC, beside a stream and a probe that must not change."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

from campaign import Campaign, Target, case_of, together
from cases import Case, corpus, read, write
from pieces import build, weight
from run import demo_server, target_of

SECONDS = float(os.environ.get("FUZZ_SECONDS", "300"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
FORM_SECONDS = SECONDS / 20
FORMS_TOGETHER = (("tls", "drafts"), ("keys", "front-ends"))
"""Fewer servers than forms, for the sake of time."""
MAX_CORPUS_BYTES = 500_000


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server of the demo model on two ranks."""
    with demo_server(tmp_path_factory.mktemp("fuzz")) as served:
        yield target_of(served)


@pytest.fixture
def campaign(target: Target, tmp_path: Path) -> Campaign:
    """Saves what does harm in the folder of the test."""
    return Campaign(target, tmp_path, SEED)


def check(campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    campaign.check_log()
    report = campaign.report()
    del report["samples"]
    with capsys.disabled():
        print("\n" + json.dumps(report, indent=1))
    assert campaign.violations == [], [path.read_text()[:2000] for path in campaign.saved]
    assert campaign.seen["streams"] + campaign.seen["probes"] > 20


def test_a_fuzz_case_is_reproducible_from_its_number_and_its_file(tmp_path: Path):
    """A harmful case can be sent again."""
    for number in range(300):
        case = case_of(SEED, number)
        told = json.dumps(case.to_dict())
        assert told == json.dumps(case_of(SEED, number).to_dict())
        write(tmp_path / "case.json", [case])
        (again,) = read(tmp_path / "case.json")
        assert [build(part) for part in again.parts] == [build(part) for part in case.parts]
        assert json.dumps(again.to_dict()) == told


def test_parts_of_a_fuzz_case_are_built_from_their_descriptions():
    assert build(["a", {"times": 3, "of": {"hex": "00"}}]) == b"a\0\0\0"
    assert build({"field": 1, "wire": 2, "value": [{"field": 2, "wire": 0, "value": 300}]}) == (
        b"\x0a\x03\x10\xac\x02"
    )
    assert build({"field": 1, "wire": 2, "value": "a", "length": 7}) == b"\x0a\x07a"
    assert build({"chunks": 2, "of": "abc"}) == b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    assert build({"frame": 4, "of": ""}) == b"\0\0\0\x04\0\0\0\0\0"
    assert weight({"gzip": {"times": 1000, "of": "aa"}}) == 2000
    empty = {"times": 1000, "of": {"field": 1, "wire": 2, "value": ""}}
    assert weight(empty) == len(build(empty)) == 2000


def test_the_error_of_a_client_is_raised_behind_the_end_of_all():
    ended = []
    with pytest.raises(MemoryError, match="too many"):
        together([partial(_fail, MemoryError("too many")), partial(ended.append, 1)])
    assert ended == [1]


def _fail(error: Exception) -> None:
    raise error


def test_the_corpus_is_small_and_each_file_has_a_description():
    files = corpus()
    assert sum(path.stat().st_size for path in files) < MAX_CORPUS_BYTES
    for path in files:
        assert read(path) and all(isinstance(case, Case) and case.name for case in read(path))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("forms", FORMS_TOGETHER, ids=" and ".join)
def test_random_requests_disturb_no_stream_of_a_server_with(forms, tmp_path, capsys):
    with demo_server(tmp_path, forms=forms) as served:
        campaign = Campaign(target_of(served), tmp_path, SEED)
        campaign.run(FORM_SECONDS)
        check(campaign, capsys)
    assert any(status.startswith("http 2") for status in campaign.statuses)
    assert campaign.statuses["gRPC OK"]


@pytest.mark.timeout(600)
def test_the_corpus_disturbs_no_stream(campaign, capsys):
    campaign.replay(corpus())
    check(campaign, capsys)


@pytest.mark.timeout(SECONDS + 300)
def test_random_requests_disturb_no_stream(campaign, capsys):
    campaign.run(SECONDS)
    check(campaign, capsys)
    assert campaign.kinds.total() > SECONDS
