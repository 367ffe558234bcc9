"""Beam search: the sequences and scores of transformers, however steps are scheduled."""

import gc
import random

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.unit.worker.conftest import VOCAB
from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason

PROMPT = 37
"""Length of a prompt that ends inside a block."""


@pytest.fixture(scope="module")
def reference(model_folder):
    return LlamaForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture
def make(make_engine):
    return lambda **changes: make_engine(**{"max_beam_width": 8, **changes})


def generate(reference, prompt, width, max_tokens, **fields):
    """Outputs of transformers, without their end, and their scores."""
    end = fields.pop("eos_token_id", None)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=end,
            return_dict_in_generate=True,
            output_scores=True,
            **fields,
        )
    outputs = []
    for row, indices in zip(found.sequences, found.beam_indices, strict=True):
        output = row[len(prompt) :][: int((indices >= 0).sum())].tolist()
        ends = end if isinstance(end, list) else [end]
        outputs.append(output[:-1] if output[-1] in ends else output)
    return outputs, found.sequences_scores.tolist()


def beams_of(driver, request):
    """The last message about a request's beams."""
    beams = driver.extras[request, 0][-1]["beams"]
    return [np.frombuffer(ids, dtype=np.int32).tolist() for ids in beams["ids"]], beams


def submit(driver, prompt, width, **fields):
    fields = {"num_return_sequences": width, "max_tokens": 20, **fields}
    return driver.submit(prompt, beam_width=width, **fields)


CASES = {
    "no end": (4, {}, {}),
    "wide": (8, {}, {}),
    "end": (3, {"end_id": 53}, {"eos_token_id": 53}),
    "several ends": (
        3, {"end_id": 53, "end_ids": (18, 86)}, {"eos_token_id": [53, 18, 86]},
    ),
    "long ones": (4, {"end_id": 53, "length_penalty": 2.0}, {"eos_token_id": 53}),
    "short ones": (4, {"end_id": 53, "length_penalty": -1.0}, {"eos_token_id": 53}),
    "until full": (4, {"end_id": 53, "early_stopping": 1}, {"eos_token_id": 53}),
    "as long as any may win": (
        4, {"end_id": 53, "early_stopping": 2, "length_penalty": 0.5}, {"eos_token_id": 53},
    ),
}  # fmt: skip
STOPPING = {0: False, 1: True, 2: "never"}


@pytest.mark.matrix(keep=5)
@pytest.mark.feature("input:beam_width", "input:len_penalty", "input:early_stopping")
@pytest.mark.parametrize(("width", "ours", "theirs"), CASES.values(), ids=CASES.keys())
def test_beams_are_those_of_transformers(make, reference, prompt_of, width, ours, theirs):
    ours = {"early_stopping": 0, **ours}
    driver = make()
    requests = {}
    for seed in range(6):
        requests[seed] = submit(driver, prompt_of(PROMPT, seed), width, **ours)

    driver.run()

    for seed, request in requests.items():
        expected, scores = generate(
            reference,
            prompt_of(PROMPT, seed),
            width,
            20,
            early_stopping=STOPPING[ours["early_stopping"]],
            length_penalty=ours.get("length_penalty", 0.0),
            **theirs,
        )
        outputs, beams = beams_of(driver, request)
        assert outputs == expected
        assert beams["scores"] == pytest.approx(scores, rel=2e-5)
    driver.check_idle()


WAYS = {
    "overlapped": {"depth": 2},
    "in chunks": {"max_num_batched_tokens": 16, "depth": 2},
    "without reuse": {"enable_block_reuse": False},
    "few rows": {"max_num_seqs": 5, "max_num_batched_tokens": 16},
    "reserved": {"policy": "guaranteed_no_evict", "max_tokens": 240, "depth": 2},
    "preempted": {"max_tokens": 240},
    "preempted, overlapped": {"max_tokens": 240, "depth": 2},
    "static": {"policy": "static_batch"},
    "blocks of 5": {"tokens_per_block": 5, "depth": 2},
    "beside the host's cache": {"max_tokens": 240, "host_bytes": 1 << 20, "depth": 2},
}
MIXED = (
    {"beam_width": 3, "end_id": 53, "early_stopping": 0},
    {"beam_width": 4, "length_penalty": 1.0, "repetition_penalty": 1.4, "end_id": 53},
    {"beam_width": 2, "no_repeat_ngram_size": 2, "temperature": 0.7},
    {},
    {"top_p": 0.9, "seed": 3},
)


@pytest.fixture(scope="module")
def alone():
    """Outputs of each kind of request, run alone once."""
    return {}


def mixed(number, prompt_of):
    fields = dict(MIXED[number % len(MIXED)])
    width = fields.get("beam_width", 1)
    return prompt_of(5 + 11 * (number % 7), number), {
        "max_tokens": 24, "num_return_sequences": width, **fields
    }  # fmt: skip


def output_of(driver, request):
    if driver.extras[request, 0]:
        return beams_of(driver, request)[0]
    return driver.output(request)


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize("way", WAYS)
def test_beams_do_not_depend_on_how_steps_are_made(make, prompt_of, alone, way):
    if not alone:
        quiet = make(max_num_batched_tokens=256)
        for number in range(15):
            prompt, fields = mixed(number, prompt_of)
            request = quiet.submit(prompt, **fields)
            quiet.run()
            alone[number] = output_of(quiet, request)
    driver = make(**WAYS[way])
    requests = {}
    most = 0
    for number in range(15):
        prompt, fields = mixed(number, prompt_of)
        requests[number] = driver.submit(prompt, **fields)

    while driver.engine.has_work:
        driver.step()
        most = max(most, driver.engine.scheduler.preemptions.num_waiting)
        check_blocks(driver)

    assert {n: output_of(driver, request) for n, request in requests.items()} == alone
    assert (most > 0) == (way.startswith("preempted") or "host" in way)
    driver.check_idle()


@pytest.mark.parametrize("end_id", [-1, 53])
def test_returned_logits_of_beams_are_those_that_their_ids_were_chosen_from(
    make, reference, prompt_of, end_id
):
    driver = make(max_num_batched_tokens=32, max_num_seqs=8, depth=2)
    prompt = prompt_of(PROMPT)
    flags = {"return_generation_logits": True, "return_context_logits": True, "end_id": end_id}
    whole = submit(driver, prompt, 4, **flags)
    stream = submit(driver, prompt, 4, streaming=True, **flags)
    driver.run()

    outputs, beams = beams_of(driver, whole)
    last = driver.extras[whole, 0][-1]
    logits = [np.frombuffer(raw, np.float32) for raw in last["generation_logits"]]
    assert beams["num_logits"] == [len(output) for output in outputs]
    for output in outputs:
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + output])).logits[0].numpy()
        found = np.stack([logits.pop(0) for _ in output])
        np.testing.assert_allclose(found, expected[PROMPT - 1 : -1], atol=3e-4)
    for request in (whole, stream):
        told = [extras for extras in driver.extras[request, 0] if "context_logits" in extras]
        raw = b"".join(told[0]["context_logits"])
        assert len(told) == 1 and len(raw) == 4 * PROMPT * len(expected[0])
        np.testing.assert_allclose(
            np.frombuffer(raw, np.float32).reshape(PROMPT, -1), expected[:PROMPT], atol=3e-4
        )
    for extras in driver.extras[stream, 0]:
        assert extras["beams"]["num_logits"] == [1] * len(extras["beams"]["ids"])


def test_a_beam_search_without_temperature_or_allowed_ids_ends(make, prompt_of):
    driver = make()
    plain = submit(driver, prompt_of(PROMPT), 3)
    cold = submit(driver, prompt_of(PROMPT), 3, temperature=0.0)
    bias = np.full(150, -np.inf, "<f4")
    bias[5] = 0.0
    fields = {"embedding_bias": bias.tobytes(), "bad_words": [[5]]}
    nothing = submit(driver, prompt_of(PROMPT), 3, **fields)
    driver.run()

    assert beams_of(driver, cold)[0] == beams_of(driver, plain)[0]
    assert driver.reasons[nothing, 0] is FinishReason.END_ID
    driver.check_idle()


def test_a_streamed_beam_search_sends_every_beam_whole_at_each_step(make, prompt_of):
    driver = make()
    request = submit(driver, prompt_of(PROMPT), 3, streaming=True, return_log_probs=True)

    driver.run()

    told = [extras["beams"] for extras in driver.extras[request, 0]]
    assert [len(beams["ids"][0]) // 4 for beams in told] == list(range(1, 21))
    for beams in told:
        for each, total in zip(beams["log_probs"], beams["cum_log_probs"], strict=True):
            assert sum(each) == pytest.approx(total, rel=1e-5)
        assert beams["scores"] == sorted(beams["scores"], reverse=True)
    assert driver.output(request) == []
    assert driver.reasons[request, 0] == FinishReason.LENGTH


@pytest.mark.parametrize(
    "fields",
    [
        {"length_penalty": 3.0},
        {"early_stopping": 1},
        {"beam_search_diversity_rate": 3.0},
        {"temperature": 3.0},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"no_repeat_ngram_size": 2},
        {"bad_words": ((18,),)},
        {"min_tokens": 12},
        {"stop_words": ((18,),)},
        {"num_return_sequences": 2},
    ],
)
def test_each_field_of_a_beam_search_takes_effect(make, prompt_of, fields):
    driver = make()
    usual = {"end_id": 53, "early_stopping": 0, "length_penalty": 1.0}
    plain = [submit(driver, prompt_of(PROMPT, seed), 4, **usual) for seed in range(6)]
    other = [
        submit(driver, prompt_of(PROMPT, seed), 4, **{**usual, **fields}) for seed in range(6)
    ]

    driver.run()

    assert [beams_of(driver, r)[0] for r in plain] != [beams_of(driver, r)[0] for r in other]


@pytest.mark.feature("parameter:max_beam_width")
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"beam_width": 9}, "beam_width is 9 but this engine serves at most 8"),
        ({"beam_width": 0}, "'beam_width' is 0 but must be at least 1"),
        (
            {"beam_width": 2, "num_return_sequences": 3},
            "num_return_sequences is 3 .*beam_width 2",
        ),
        ({"beam_width": 2, "guide_type": "json"}, "beams do not follow a guide"),
        ({"beam_width": 2, "length_penalty": 11.0}, "'length_penalty' is 11.0 .* -10 and 10"),
        ({"beam_width": 8, "max_tokens": 90}, "need 57 KV cache blocks .* has 50"),
    ],
)
def test_invalid_beam_searches_are_refused(make, prompt_of, fields, text):
    driver = make(max_tokens=800)

    with pytest.raises(RequestError, match=text):
        driver.submit(prompt_of(30), **fields)

    driver.check_idle()


def check_blocks(driver):
    scheduler = driver.engine.scheduler
    held = [
        *scheduler.running,
        *scheduler.waiting,
        *scheduler.deferred_frees,
        *scheduler.swap_ins,
    ]
    held += [beam for s in held if s.beams is not None for beam in s.beams.beams[1:]]
    scheduler.cache.check([sequence.blocks for sequence in held])


@pytest.mark.parametrize("width", [1, 4])
def test_a_streamed_beam_search_gets_output_at_every_step_beside_a_long_prompt(
    make, prompt_of, width
):
    # A chunk ends at a block's end if it would leave a single token of the prompt.
    driver = make(max_num_batched_tokens=17, tokens_per_block=4)
    before = driver.submit(prompt_of(110), max_tokens=2)
    driver.step()
    beams = submit(driver, prompt_of(3, 1), width, num_return_sequences=1, streaming=True)
    num_told = []
    while (before, 0) not in driver.reasons:
        driver.step()
        told = driver.extras if width > 1 else driver.tokens
        num_told.append(len(told[beams, 0]))

    assert num_told == list(range(1, len(num_told) + 1))


@pytest.mark.parametrize("way", ["over", "cancelled", "client gone"])
def test_logits_of_a_beam_search_are_freed_without_garbage_collection(make, prompt_of, way):
    driver = make(depth=2)
    gc.collect()
    gc.disable()
    try:
        request = submit(driver, prompt_of(9), 3, max_tokens=20, return_generation_logits=True)
        for _ in range(6):
            driver.step()
        if way == "cancelled":
            driver.engine.cancel("client", [request])
        if way == "client gone":
            driver.engine.drop_source("client")
        driver.run()
        driver.extras.clear()
        alive = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        assert not [each for each in alive if each.shape == (VOCAB,)]
    finally:
        gc.enable()
    driver.check_idle()


@pytest.mark.parametrize("seed", range(3))
def test_cancelled_beam_searches_leave_nothing(make, prompt_of, seed):
    rng = random.Random(seed)
    driver = make(
        depth=rng.choice((1, 2)),
        max_tokens=rng.choice((240, 400)),
        policy=rng.choice(("max_utilization", "guaranteed_no_evict")),
    )
    requests = []
    for number in range(30):
        prompt, fields = mixed(number, prompt_of)
        requests.append(driver.submit(prompt, streaming=True, **fields))
        for _ in range(rng.randrange(5)):
            driver.step()
        if rng.random() < 0.5:
            driver.engine.cancel("client", [rng.choice(requests)])
        check_blocks(driver)

    driver.run()

    assert len(driver.reasons) == 30
    driver.check_idle()
