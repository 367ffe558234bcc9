"""Sampled outputs follow their guides, alone or in a batch, at any depth."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from array import array

import numpy as np
import pytest

from tests.unit.worker.guided_engine import (
    END,
    GUIDES,
    MODEL,
    TOKENIZER,
    follows,
    ids,
    make_engine,
    submit,
    text_of,
)
from trimaran.comm.errors import ConfigError, RefusedError, RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import GuidedConfig
from trimaran.worker.engine.input_processor import GuidedRequests
from trimaran.worker.guided.compiler import GuideCompiler
from trimaran.worker.requests.request import Request


@pytest.fixture(scope="module")
def driver():
    made = make_engine()
    yield made
    made.engine.shutdown()


@pytest.fixture
def serve():
    """A function that makes a driver for one test, with these changes."""
    drivers = []

    def make(**changes):
        drivers.append(make_engine(**changes))
        return drivers[-1]

    yield make
    for made in drivers:
        made.engine.shutdown()


@pytest.mark.feature("input:guided_decoding_guide_type", "input:guided_decoding_guide")
@pytest.mark.parametrize("kind", GUIDES)
def test_every_draw_follows_its_guide(driver, kind):
    requests = [submit(driver, kind, seed=seed, temperature=3.0) for seed in range(8)]

    driver.run()

    texts = [text_of(driver, request) for request in requests]
    assert all(follows(kind, text) for text in texts), texts
    assert len(set(texts)) > 1, "draws of different seeds are all the same"


def test_the_guide_json_needs_no_text(driver):
    request = submit(driver, "json", temperature=1.0, top_k=1, max_tokens=60)

    driver.run()

    text = TOKENIZER.decode(driver.output(request))
    assert text.lstrip()[:1] in '{["-0123456789tfn'


def test_a_choice_may_have_characters_of_any_unicode_plane(driver):
    request = submit(driver, "choice", json.dumps(["\U0001f600 \u00e9\u4e2d"]), max_tokens=40)

    driver.run()

    assert text_of(driver, request) == "\U0001f600 \u00e9\u4e2d"


def test_greedy_output_is_the_likeliest_output_within_the_guide(driver):
    free = driver.submit(ids("The colour is"), max_tokens=1, top_k=1)
    held = submit(driver, "choice", json.dumps([" not", " red"]), top_k=1)

    driver.run()

    assert driver.output(free)
    assert text_of(driver, held).strip() in ("not", "red")


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("changes", [{"max_tokens": 176, "depth": 2}, {"depth": 2}])
def test_guided_and_free_tokens_depend_neither_on_each_other_nor_on_batching(
    driver, serve, changes
):
    def submit_mixed(to):
        guided = [submit(to, kind, seed=7) for kind in GUIDES]
        return guided + [
            to.submit(ids("It was a dark night"), max_tokens=40, top_k=0, top_p=1.0, seed=n)
            for n in range(4)
        ]

    alone = []
    for place in range(len(GUIDES) + 4):
        requests = submit_mixed(driver)
        driver.engine.cancel("client", [r for r in requests if r != requests[place]])
        driver.run()
        alone.append(driver.output(requests[place]))
    mixed = serve(**changes)
    requests = submit_mixed(mixed)
    mixed.run()

    assert [mixed.output(request) for request in requests] == alone
    mixed.check_idle()


def test_a_replayed_request_continues_within_its_guide(driver):
    request = submit(driver, "json_schema", seed=3)
    driver.run()
    whole = driver.output(request)

    replayed = submit(driver, "json_schema", seed=3, output=whole[:5])
    wrong = submit(driver, "json_schema", seed=3, output=ids("Hello"))
    driver.run()

    assert driver.output(replayed) == whole[5:]
    assert "does not follow the guide" in driver.failed[wrong]


def test_an_output_without_an_end_id_ends_when_its_guide_is_complete(driver):
    request = submit(driver, "regex", "[0-9]{3}", end_id=-1)

    driver.run()

    assert re.fullmatch("[0-9]{3}", text_of(driver, request))


def test_a_replayed_request_whose_output_completes_its_guide_ends(driver):
    request = submit(driver, "regex", "7", end_id=-1, output=ids("7"))

    driver.run()

    assert request not in driver.failed
    assert driver.reasons[request, 0] is FinishReason.END_ID
    assert driver.output(request) == []


@pytest.mark.parametrize(
    ("kind", "guide", "expected"),
    [
        ("regex", "(ab)?", "ab"),
        ("choice", '["to", "to be"]', "to be"),
        ("regex", "a{3,5}", "aaaaa"),
    ],
)
def test_an_output_without_an_end_id_continues_while_its_guide_allows_a_token(
    driver, kind, guide, expected
):
    # Even the tokenizer's end id is masked, for any probability.
    bias = np.zeros(TOKENIZER.get_vocab_size(), dtype="<f4")
    bias[END] = 100.0

    request = submit(driver, kind, guide, end_id=-1, embedding_bias=bias.tobytes())
    driver.run()

    assert text_of(driver, request) == expected


def test_sequences_of_one_request_follow_the_guide_independently(driver):
    request = submit(driver, "regex", num_return_sequences=3)

    driver.run()

    texts = [TOKENIZER.decode(driver.output(request, index)) for index in range(3)]
    assert all(follows("regex", text) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("kind", "guide", "reason"),
    [
        ("json_schema", '{"type": "objec', "Failed to parse JSON"),
        ("regex", "(abc", "parenthesis is not closed"),
        ("ebnf_grammar", "root ::= missing", "not defined"),
        ("choice", '["a", 1]', "must be a JSON list of strings"),
    ],
)
def test_a_wrong_guide_fails_alone(driver, kind, guide, reason):
    good = submit(driver, "regex")
    bad = submit(driver, kind, guide)

    driver.run()

    assert reason in driver.failed[bad]
    assert follows("regex", text_of(driver, good))
    driver.check_idle()


def test_a_failed_request_fails_no_other_request_with_the_same_id(driver):
    other = driver.submit([2, 3], max_tokens=100)
    driver._last_id -= 1
    failed = driver.submit([2, 3], guide_type="regex", guide="(", end_id=END)
    assert failed == other
    while failed not in driver.failed:
        driver.step()

    driver.engine.cancel("client", [other])
    driver.run()

    assert driver.reasons[other, 0] is FinishReason.CANCELLED
    driver.check_idle()


def test_a_request_whose_parameters_forbid_every_token_of_its_guide_fails_alone(driver):
    good = submit(driver, "regex")
    bad = submit(driver, "regex", "7", min_tokens=5)

    driver.run()

    assert "min_length" in driver.failed[bad]
    assert follows("regex", text_of(driver, good))
    driver.check_idle()


def test_values_that_are_no_guides_are_refused_at_once(driver):
    with pytest.raises(RequestError, match="'xml' but must be one of json, json_schema"):
        submit(driver, "xml")
    with pytest.raises(RequestError, match="guided_decoding_guide is empty"):
        submit(driver, "regex", "")


def test_a_cancelled_request_whose_guide_is_compiling_ends(driver):
    request = submit(driver, "json_schema")
    driver.engine.cancel("client", [request])

    driver.run()

    assert driver.reasons[request, 0] is FinishReason.CANCELLED
    driver.check_idle()


@pytest.mark.feature("parameter:guided_decoding_backend")
def test_guides_are_refused_by_engines_without_guided_decoding(serve):
    plain = serve(guided=GuidedConfig())

    with pytest.raises(RequestError, match="Set guided_decoding_backend to xgrammar"):
        submit(plain, "regex")


def test_requests_with_guides_in_compilation_count_in_the_queue_and_the_gauges(serve):
    driver = serve(max_queue_size=3)
    requests = [submit(driver, "regex", seed=seed) for seed in range(18)]
    # This is no grammar either, but that is known only after compiling.
    wrong = submit(driver, "regex", "(")

    assert driver.engine.stats()["active_requests"] == 19
    assert driver.engine.stats()["waiting_requests"] == 19
    with pytest.raises(RefusedError, match="Maximum queue size of 3"):
        submit(driver, "regex")
    driver.engine.cancel("client", [requests[0]])
    driver.run()

    assert driver.failed.keys() == {wrong}
    assert all(follows("regex", text_of(driver, request)) for request in requests[1:])
    assert driver.engine.stats()["active_requests"] == 0
    driver.check_idle()


class ComparedRequest(Request):
    """Counts its comparisons with other requests."""

    num_comparisons = 0
    __hash__ = Request.__hash__

    def __eq__(self, other: object) -> bool:
        ComparedRequest.num_comparisons += 1
        return self is other


def test_taking_or_dropping_a_held_request_compares_no_other_requests(driver):
    guided = GuidedRequests(driver.engine._guided._compiler)
    fields = {
        "source": "client",
        "prompt_ids": array("i", [5]),
        "sampling": SamplingParams(guide_type="regex", guide="a+", end_id=END),
    }
    requests = [ComparedRequest(request_id=n, number=n, **fields) for n in range(200)]
    for request in requests:
        guided.hold(request)
    for request in requests[::2]:
        guided.drop(request)
    taken = []
    while guided:
        guided.sleep(1.0)
        taken += guided.take_compiled()

    assert sorted(request.number for request, _ in taken) == list(range(1, 200, 2))
    assert not any(error for _, error in taken)
    for request, _ in taken:
        request.guide.close()
    assert ComparedRequest.num_comparisons <= 4 * len(requests)


def test_the_arrival_of_a_request_is_before_the_compilation_of_its_guide(driver):
    request = submit(driver, "json_schema", return_perf_metrics=True)
    came = time.monotonic_ns()
    driver.run()

    figures = driver.extras[request, 0][-1]["figures"]
    assert figures["arrival_time_ns"] < came < figures["first_scheduled_time_ns"]


@pytest.mark.feature("parameter:xgrammar_tokenizer_info_path", "parameter:tokenizer_dir")
def test_the_tokenizer_of_guides_is_read_from_the_tokenizer_info_file(tmp_path, serve):
    vocabulary = sorted(TOKENIZER.get_vocab().items(), key=lambda item: item[1])
    path = tmp_path / "info.json"
    path.write_text(
        json.dumps(
            {
                "encoded_vocab": [token for token, _ in vocabulary],
                "tokenizer_str": TOKENIZER.to_str(),
                "stop_token_ids": [END],
            }
        )
    )
    guided = GuidedConfig(backend="xgrammar", tokenizer_info_path=str(path))
    driver = serve(guided=guided)

    request = submit(driver, "regex")
    driver.run()

    assert follows("regex", text_of(driver, request))
    with pytest.raises(ConfigError, match="nowhere"):
        make_engine(guided=dataclasses.replace(guided, tokenizer_info_path="nowhere"))
    with pytest.raises(ConfigError, match=r"Please provide 'tokenizer_dir'\. In /nowhere"):
        make_engine(guided=GuidedConfig(backend="xgrammar", tokenizer_dir="/nowhere"))


def test_the_gpu_masks_as_the_cpu_does():
    """The kernel runs in Triton's interpreter."""
    import torch

    from trimaran.kernels.triton.logits import apply_masks

    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((3, 4100)).astype(np.float32))
    words = rng.integers(-(1 << 31), 1 << 31, (2, 129), dtype=np.int64).astype(np.int32)
    entries = torch.tensor([2, 0])
    expected = logits.clone()
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :4100]
    expected[entries] = torch.where(
        torch.from_numpy(allowed.astype(bool)), expected[entries], float("-inf")
    )

    apply_masks(logits, entries, torch.from_numpy(words))

    assert torch.equal(logits, expected)


def test_a_guided_backend_with_a_missing_package_is_refused_with_the_cause(monkeypatch):
    # Python treats None in sys.modules as a missing module.
    monkeypatch.setitem(sys.modules, "pydantic", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        ConfigError, match=r"cannot be imported \(.*pydantic.*Install the extra"
    ):
        GuideCompiler(GuidedConfig(backend="xgrammar"), str(MODEL), 100)
