"""Every sampling field of a request takes effect: the answer differs without the field."""

import numpy as np
import pytest

from trimaran.comm.messages.sampling_fields import FIELDS, SERVED_FIELDS
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.sampling.sampler import PROCESSORS

VOCAB = 150
DRAWN = {"top_p": 0.95, "temperature": 1.5}
DECAYING = {**DRAWN, "top_p_decay": 0.6}
BEAMS = {"beam_width": 4, "num_return_sequences": 4, "end_id": 53, "length_penalty": 1.0}
BIAS = np.where(np.arange(VOCAB) % 2, 0.0, 3.0).astype("<f4").tobytes()
LOGITS = {"return_generation_logits": True}

# The request's other fields, and the tested field's value.
EFFECTS = {
    "max_tokens": ({}, 7),
    "end_id": ({}, 86),
    "end_ids": ({}, (86,)),
    "temperature": ({"top_p": 1.0}, 0.3),
    "top_k": ({"temperature": 1.5}, 5),
    "top_p": ({"temperature": 1.5}, 0.9),
    "min_p": (DRAWN, 0.4),
    "seed": (DRAWN, 12),
    "top_p_decay": (DRAWN, 0.5),
    "top_p_min": (DECAYING, 0.9),
    "top_p_reset_ids": (DECAYING, 53),
    "stop_words": ({}, ((18,),)),
    "bad_words": ({}, ((18,), (105, 3))),
    "min_tokens": ({"end_id": 86}, 15),
    "repetition_penalty": ({}, 1.5),
    "presence_penalty": ({}, 2.0),
    "frequency_penalty": ({}, 2.0),
    "no_repeat_ngram_size": ({}, 2),
    "embedding_bias": ({}, BIAS),
    "num_return_sequences": (DRAWN, 3),
    "return_log_probs": ({}, True),
    "return_context_logits": ({}, True),
    "return_generation_logits": ({}, True),
    "logits_dtype": (LOGITS, "float16"),
    "return_perf_metrics": ({}, True),
    "beam_width": ({}, 3),
    "length_penalty": (BEAMS, 3.0),
    "early_stopping": (BEAMS, 0),
    "beam_search_diversity_rate": (BEAMS, 3.0),
}
ELSEWHERE = {
    # Responses are padded with -1 for any pad id.
    "pad_id",
    # See test_guided.py: they need a tokenizer.
    "guide_type",
    "guide",
}


def test_every_served_field_is_covered_here_or_by_a_named_test():
    assert EFFECTS.keys() | ELSEWHERE == SERVED_FIELDS


def test_every_processor_serves_a_field_of_the_table():
    path = "worker/sampling/logits_processors.py: "
    named = {
        row.served_by.removeprefix(path)
        for row in FIELDS.values()
        if row.served_by is not None and row.served_by.startswith(path)
    }

    assert {process.__name__ for _, process in PROCESSORS} == named


@pytest.fixture(scope="module")
def said():
    """The engine's answers by fields, each run once."""
    return {}


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(
            field,
            marks=pytest.mark.feature(*(f"input:{n}" for n in FIELDS[field].inputs)),
        )
        for field in EFFECTS
    ],
)
def test_a_field_changes_the_answer(make_engine, prompt_of, said, field):
    besides, value = EFFECTS[field]
    with_it, without = {**besides, field: value}, {**besides}
    without.pop(field, None)
    assert SamplingParams(**with_it) != SamplingParams(**without)

    assert answer(make_engine, prompt_of, said, with_it) != answer(
        make_engine, prompt_of, said, without
    )


def answer(make_engine, prompt_of, said, fields):
    key = repr(sorted(fields.items()))
    if key not in said:
        driver = make_engine(max_beam_width=4)
        for seed in range(6):
            driver.submit(prompt_of(37, seed), **{"max_tokens": 20, **fields})
        driver.run()
        said[key] = (dict(driver.tokens), dict(driver.reasons), repr(dict(driver.extras)))
        driver.check_idle()
    return said[key]
