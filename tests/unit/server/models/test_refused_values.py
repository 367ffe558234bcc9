"""Invalid values of a request are reported before any engine receives it."""

from __future__ import annotations

import numpy as np
import pytest

from trimaran.comm.errors import ErrorKind, RequestError

PROMPT = {"input_ids": [7, 8, 9], "input_lengths": 3, "request_output_len": 5}
LOOKAHEAD = {
    "lookahead_window_size": 4,
    "lookahead_ngram_size": 3,
    "lookahead_verification_set_size": 4,
}
TWO = {
    "input_ids": np.ones((2, 3), np.int32),
    "input_lengths": np.full((2, 1), 3, np.int32),
    "request_output_len": np.full((2, 1), 5, np.int32),
}


def _column(*values, dtype=np.int32):
    return np.array([[value] for value in values], dtype)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"runtime_top_p": np.nan}, "'top_p' is nan but must be between 0 and 1"),
        ({"runtime_top_k": -1}, "or more (also called runtime_top_k)"),
        ({"seed": 7, "random_seed": 8}, "random_seed is 8 but seed, another name for it, is 7"),
        ({"min_length": 2, "min_tokens": 3}, "min_length is 2 but min_tokens, another name"),
        ({"guided_decoding_guide": "a+"}, "is set without guided_decoding_guide_type"),
        (
            {"guided_decoding_guide_type": b"\xff\xfe", "guided_decoding_guide": "a"},
            "input 'guided_decoding_guide_type' is not UTF-8 text",
        ),
        ({"lora_name": ""}, "lora_name is empty; leave it out, or name a folder"),
        (
            {"draft_input_ids": [4] * 6},
            "input 'draft_input_ids' holds 6 ids but this engine verifies at most 5. Send "
            "fewer, or build the engine with --max_draft_len 6",
        ),
        (
            {"draft_input_ids": [4, 600]},
            "input 'draft_input_ids' holds 600, which is no token id: ids are 0 to 599",
        ),
        ({"draft_input_ids": [-1]}, "holds -1, which is no token id: ids are 0 to 599"),
        (
            {"draft_input_ids": [4], "beam_width": 2},
            "beam_width is 2 together with draft_input_ids, but beams are not drafted",
        ),
        (
            {**LOOKAHEAD, "lookahead_ngram_size": 5},
            "lookahead_verification_set_size are [4, 5, 4] but must be at least [1, 2, 1] and "
            "at most the engine's [4, 3, 4]. Send smaller ones",
        ),
        ({**LOOKAHEAD, "lookahead_ngram_size": 1}, "are [4, 1, 4] but must be at least [1, 2"),
        ({**LOOKAHEAD, "beam_width": 2}, "are [4, 3, 4] together with beam_width 2"),
        ({**LOOKAHEAD, "draft_input_ids": [4]}, "are [4, 3, 4] together with draft_input_ids"),
        ({"draft_acceptance_threshold": 0.5}, "is set without draft_input_ids; send both"),
        (
            {"draft_input_ids": [4], "draft_acceptance_threshold": 1.5},
            "'draft_acceptance_threshold' is 1.5 but must be between 0 and 1",
        ),
        (
            {"draft_input_ids": [4], "draft_acceptance_threshold": np.nan},
            "'draft_acceptance_threshold' is nan but must be between 0 and 1",
        ),
        (
            {"draft_logits": np.ones((1, 1, 600), np.float32)},
            "input 'draft_logits' is set without draft_input_ids; send both",
        ),
        (
            {"draft_input_ids": [4, 5], "draft_logits": np.ones((1, 1, 600), np.float32)},
            "input 'draft_logits' has the shape [1, 600] but must be [2, 600]",
        ),
        (
            {"num_return_sequences": 1025},
            "num_return_sequences is 1025 for each of 1 prompt(s) but a request may have at "
            "most 1024 sequences",
        ),
        (
            {**TWO, "num_return_sequences": _column(600, 600)},
            "num_return_sequences is 600 for each of 2 prompt(s)",
        ),
        (
            {**TWO, "num_return_sequences": _column(1, 2)},
            "num_return_sequences is 2 in one sample and 1 in another",
        ),
        (
            {**TWO, "streaming": _column(True, False, dtype=np.bool_)},
            "streaming is False in one sample and True in another",
        ),
    ],
)
async def test_an_impossible_value_is_refused_as_an_error_of_the_client(serve, inputs, text):
    async with serve() as served:
        engine = await served.dial(lambda submit: [0])
        with pytest.raises(RequestError) as got:
            await served.infer("tensorrt_llm", **{**PROMPT, **inputs})
        assert engine.submits == []
    assert text in str(got.value)
    assert got.value.kind is ErrorKind.INVALID_ARG


async def test_an_error_shows_the_beginning_of_a_long_list(serve):
    words = np.full((1, 2, 50_000), 7, np.int32)
    async with serve() as served:
        await served.dial(lambda submit: [0])
        with pytest.raises(RequestError, match=r"7, 7, \.\.\. \(100000 values\)") as got:
            await served.infer("tensorrt_llm", **PROMPT, stop_words_list=words)
    assert len(str(got.value)) < 1000


async def test_equal_values_under_both_names_are_one_value(serve):
    async with serve() as served:
        engine = await served.dial(lambda submit: [0])
        await served.infer("tensorrt_llm", **PROMPT, seed=7, random_seed=7)
        assert engine.submits[0].sampling["seed"] == 7
