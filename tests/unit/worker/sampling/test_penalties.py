"""Penalties and masks of greedy requests: the tokens of transformers with the same settings."""

import itertools

import pytest
import torch
from transformers import LlamaForCausalLM

PROMPTS = [(length, length) for length in (3, 16, 37, 60)]

CASES = {
    "repetition": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "encouraged repetition": ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    "n-grams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "bad words": (
        {"bad_words": ((18,), (63, 63), (86, 30, 1))},
        {"bad_words_ids": [[18], [63, 63], [86, 30, 1]]},
    ),
    "min tokens": (
        {"end_id": 86, "min_tokens": 9}, {"eos_token_id": 86, "min_new_tokens": 9},
    ),
    "min tokens before any of several ends": (
        {"end_id": 86, "end_ids": (63, 18), "min_tokens": 9},
        {"eos_token_id": [86, 63, 18], "min_new_tokens": 9},
    ),
    "bias": (
        {"embedding_bias": torch.eye(150)[7].mul(30).numpy().tobytes()},
        {"sequence_bias": [[[7], 30.0]]},
    ),
    "all": (
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words": ((18,),)},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[18]]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(model_folder):
    return LlamaForCausalLM.from_pretrained(model_folder).eval()


@pytest.mark.matrix(keep=5)
@pytest.mark.feature(
    "input:repetition_penalty",
    "input:no_repeat_ngram_size",
    "input:bad_words_list",
    "input:embedding_bias",
    "input:min_tokens",
)
@pytest.mark.parametrize(("ours", "theirs"), CASES.values(), ids=CASES.keys())
def test_tokens_under_penalties_are_those_of_transformers(
    make_engine, reference, prompt_of, ours, theirs
):
    driver = make_engine()
    requests = [driver.submit(prompt_of(*each), max_tokens=24, **ours) for each in PROMPTS]

    driver.run()

    for each, request in zip(PROMPTS, requests, strict=True):
        assert driver.output(request) == expected(reference, prompt_of(*each), **theirs)


def expected(reference, prompt, eos_token_id=None, **fields):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=eos_token_id,
            **fields,
        )
    output = found[0, len(prompt) :].tolist()
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return list(itertools.takewhile(lambda token: token not in ends, output))
