"""Every input of every model has an effect: the engine's or the client's message differs."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from tests.unit.server.models.test_outputs import FIGURES
from trimaran.comm.errors import RequestError
from trimaran.comm.messages.sampling_fields import refuse_unserved
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import unpack_ids

TABLE = np.ones((1, 2, 4), np.float16)
LORA = {
    "lora_task_id": 5,
    "lora_weights": np.ones((1, 1, 8), np.float16),
    "lora_config": np.ones((1, 1, 3), np.int32),
}
LOOKAHEAD = {
    "lookahead_window_size": 4,
    "lookahead_ngram_size": 3,
    "lookahead_verification_set_size": 4,
}
RANGES = {
    "retention_token_range_starts": [0],
    "retention_token_range_ends": [9],
    "retention_token_range_priorities": [50],
    "retention_token_range_durations_ms": [100],
}
BIAS = {"embedding_bias_words": ["zoo"], "embedding_bias_weights": [2.0]}
DRAFTS = {"draft_input_ids": [1, 2]}
LATENTS = {"prompt_embedding_table": TABLE}
BEAMS = {"beam_width": 2}
JSON = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a"}

# The other inputs of the request, and the input's value, for both kinds of models.
COMMON = {
    "num_return_sequences": ({}, 2),
    "exclude_input_in_output": ({}, True),
    "end_id": ({}, 5),
    "temperature": ({}, 0.5),
    "repetition_penalty": ({}, 1.5),
    "presence_penalty": ({}, 0.5),
    "frequency_penalty": ({}, 0.5),
    "min_length": ({}, 3),
    "min_tokens": ({}, 3),
    "random_seed": ({}, 2**64 - 1),
    "seed": ({}, 2**64 - 1),
    "no_repeat_ngram_size": ({}, 3),
    "beam_width": ({}, 2),
    "early_stopping": (BEAMS, False),
    "beam_search_diversity_rate": (BEAMS, 0.5),
    "return_log_probs": ({}, True),
    "return_context_logits": ({}, True),
    "return_generation_logits": ({}, True),
    "return_perf_metrics": ({}, True),
    "return_kv_cache_reuse_stats": ({}, True),
    "return_finish_reason": ({}, True),
    "return_num_input_tokens": ({}, True),
    "return_num_output_tokens": ({}, True),
    "stop": ({}, True),
    "prompt_embedding_table": ({}, TABLE),
    "lora_task_id": ({}, 5),
    "lora_weights": (LORA, LORA["lora_weights"] + 1),
    "lora_config": (LORA, LORA["lora_config"] + 1),
    "lora_name": ({}, "french"),
    "guided_decoding_guide_type": (JSON, "ebnf_grammar"),
    "guided_decoding_guide": (JSON, "b"),
}
TOKEN = {
    **COMMON,
    "input_ids": ({}, [7, 8, 10]),
    "input_lengths": ({}, 2),
    "request_output_len": ({}, 3),
    "streaming": ({}, True),
    "runtime_top_k": ({}, 7),
    "runtime_top_p": ({}, 0.5),
    "runtime_min_p": ({}, 0.5),
    "runtime_top_p_min": ({}, 0.5),
    "runtime_top_p_decay": ({}, 0.5),
    "runtime_top_p_reset_ids": ({}, 7),
    "len_penalty": (BEAMS, 2.0),
    "stop_words_list": ({}, np.array([[[5, 6], [1, 2]]], np.int32)),
    "bad_words_list": ({}, np.array([[[5, 6], [1, 2]]], np.int32)),
    "embedding_bias": ({}, np.ones((1, 2), np.float32)),
    "prompt_table_extra_ids": (LATENTS, [0, 5, 0]),
    "retention_token_range_starts": (RANGES, [1]),
    "retention_token_range_ends": (RANGES, [8]),
    "retention_token_range_priorities": (RANGES, [60]),
    "retention_token_range_durations_ms": (RANGES, [200]),
    "retention_decode_priority": ({}, 60),
    "retention_decode_duration_ms": ({"retention_decode_priority": 60}, 200),
    "draft_input_ids": ({}, [1, 2]),
    "lookahead_window_size": (LOOKAHEAD, 3),
    "lookahead_ngram_size": (LOOKAHEAD, 2),
    "lookahead_verification_set_size": (LOOKAHEAD, 3),
    "draft_acceptance_threshold": (DRAFTS, 0.5),
    "draft_logits": (DRAFTS, np.ones((1, 2, 600), np.float32)),
}
TEXT = {
    **COMMON,
    "text_input": ({}, "A ship"),
    "max_tokens": ({}, 3),
    "bad_words": ({}, ["ugly"]),
    "stop_words": ({}, ["halt"]),
    "stream": ({}, True),
    "top_k": ({}, 7),
    "top_p": ({}, 0.5),
    "min_p": ({}, 0.5),
    "top_p_min": ({}, 0.5),
    "top_p_decay": ({}, 0.5),
    "top_p_reset_ids": ({}, 7),
    "length_penalty": (BEAMS, 2.0),
    "embedding_bias_words": (BIAS, ["zebra"]),
    "embedding_bias_weights": (BIAS, [3.0]),
}
PREPROCESSING = {
    "QUERY": ({}, "A ship"),
    "DECODER_QUERY": ({}, "A ship"),
    "REQUEST_OUTPUT_LEN": ({}, 3),
    "BAD_WORDS_DICT": ({}, ["ugly"]),
    "STOP_WORDS_DICT": ({}, ["halt"]),
    "EMBEDDING_BIAS_WORDS": (
        {"EMBEDDING_BIAS_WORDS": ["zoo"], "EMBEDDING_BIAS_WEIGHTS": [2.0]},
        ["zebra"],
    ),
    "EMBEDDING_BIAS_WEIGHTS": (
        {"EMBEDDING_BIAS_WORDS": ["zoo"], "EMBEDDING_BIAS_WEIGHTS": [2.0]},
        [3.0],
    ),
    "END_ID": ({}, 5),
    "PAD_ID": ({}, 5),
    "PROMPT_TABLE_EXTRA_ID": ({}, 5),
}
POSTPROCESSING = {
    "TOKENS_BATCH": ({}, np.array([[[50, 51, 53]]], np.int32)),
    "SEQUENCE_LENGTH": ({}, [2]),
}
# Inputs without effect: the answer is the same with them.
TOKEN_WITHOUT_EFFECT = {
    "pad_id": ({}, 5),
    "encoder_output_lengths": ({}, 5),
    "decoder_input_ids": ({}, [1, 2]),
    "decoder_input_lengths": ({}, 2),
    "prompt_vocab_size": (LATENTS, 2),
}
TEXT_WITHOUT_EFFECT = {
    "pad_id": ({}, 5),
    "decoder_text_input": ({}, "A ship"),
    "prompt_vocab_size": (LATENTS, 2),
    "prompt_table_extra_id": (LATENTS, 5),
    "use_draft_logits": ({}, True),
}
TOKEN_REFUSED = {
    "encoder_input_features": ({}, np.ones((1, 2, 4), np.float16)),
    "cross_attention_mask": ({}, np.ones((1, 2, 4), np.bool_)),
    "skip_cross_attn_blocks": ({}, True),
    "mrope_rotary_cos_sin": ({}, [1.0]),
    "mrope_position_deltas": ({}, 1),
    "context_phase_params": ({}, np.ones((1, 4), np.uint8)),
}
PIXELS = np.ones((1, 1, 2, 2, 3), np.uint8)
TEXT_REFUSED = {
    "image_input": ({}, np.ones((1, 1, 3, 2, 2), np.float16)),
    "image_bytes_input": ({}, PIXELS),
    "image_url_input": ({}, "http://host/picture.png"),
    "video_bytes_input": ({}, PIXELS),
    "num_draft_tokens": ({}, 3),
}
PREPROCESSING_REFUSED = {
    "IMAGE_BYTES": ({}, PIXELS),
    "IMAGE_URL": ({}, "http://host/picture.png"),
    "VIDEO_BYTES": ({}, PIXELS),
}
REQUESTS = {
    "token": {"input_ids": [7, 8, 9], "input_lengths": 3, "request_output_len": 5},
    "text": {"text_input": "A house", "max_tokens": 5},
    "preprocessing": {"QUERY": "A house", "REQUEST_OUTPUT_LEN": 5},
    "postprocessing": {
        "TOKENS_BATCH": np.array([[[50, 51, 52]]], np.int32),
        "SEQUENCE_LENGTH": [3],
    },
}
MODELS = {"token": ("tensorrt_llm",), "text": ("ensemble", "tensorrt_llm_bls")}
OF_THE_CONNECTION = ("request_id", "arrival_ns")


def kinds(**tables):
    """A case for every kind of model, marked for its inputs: one server for all of them."""
    return pytest.mark.parametrize(
        ("kind", "table"),
        [
            pytest.param(
                kind, table,
                id=kind,
                marks=pytest.mark.feature(*(f"input:{name}" for name in table), of=kind),
            )
            for kind, table in tables.items()
        ],
    )  # fmt: skip


@kinds(token=TOKEN, text=TEXT, preprocessing=PREPROCESSING, postprocessing=POSTPROCESSING)
async def test_every_input_changes_the_submitted_request(serve, kind, table):
    async with serve() as served:
        engine = await _engine(served)
        dropped = []
        for model in MODELS.get(kind, (kind,)):
            for name, (besides, value) in table.items():
                request = {**REQUESTS[kind], **besides}
                without = await _outcome(served, engine, model, request)
                if without == await _outcome(served, engine, model, {**request, name: value}):
                    dropped.append((model, name))
            # The difference must not be only the time.
            assert without == await _outcome(served, engine, model, request)
        assert dropped == []


@kinds(token=TOKEN_WITHOUT_EFFECT, text=TEXT_WITHOUT_EFFECT)
async def test_inputs_without_effect_do_not_change_the_answer(serve, kind, table):
    async with serve() as served:
        engine = await _engine(served)
        for model in MODELS[kind]:
            declared = {tensor.name for tensor in served.models[model].config.input}
            for name, (besides, value) in table.items():
                request = {**REQUESTS[kind], **besides}
                _, without = await _outcome(served, engine, model, request)
                if name in declared:
                    _, answer = await _outcome(served, engine, model, {**request, name: value})
                    assert answer == without, name


@kinds(token=TOKEN_REFUSED, text=TEXT_REFUSED, preprocessing=PREPROCESSING_REFUSED)
async def test_inputs_that_are_not_served_are_refused(serve, kind, table):
    async with serve() as served:
        engine = await _engine(served)
        model = {"token": "tensorrt_llm", "text": "tensorrt_llm_bls"}.get(kind, kind)
        for name, (besides, value) in table.items():
            engine.submits.clear()
            with pytest.raises(RequestError, match=r"not served|without draft model"):
                await served.infer(model, **{**REQUESTS[kind], **besides, name: value})
                # The engine refuses some, with equal texts for all models.
                sampling = SamplingParams.from_wire(engine.submits[0].sampling)
                refuse_unserved(sampling)


async def test_every_declared_input_is_covered(serve):
    tables = {
        "tensorrt_llm": (TOKEN, TOKEN_WITHOUT_EFFECT, TOKEN_REFUSED),
        "tensorrt_llm_bls": (TEXT, TEXT_WITHOUT_EFFECT, TEXT_REFUSED),
        "preprocessing": (PREPROCESSING, PREPROCESSING_REFUSED),
        "postprocessing": (POSTPROCESSING,),
    }
    async with serve() as served:
        for model, known in tables.items():
            declared = {tensor.name for tensor in served.models[model].config.input}
            assert {name for table in known for name in table} == declared
            assert sum(map(len, known)) == len(declared)


async def _engine(served):
    """An engine that sends every output to every request."""

    def script(submit):
        start = 30 + 10 * submit.sequence_index + len(unpack_ids(submit.prompt_ids))
        return list(range(start, start + 50))

    engine = await served.dial(script)
    engine.extras = lambda ids: {"log_probs": [-0.5] * len(ids), "figures": FIGURES}
    return engine


async def _outcome(served, engine, model, request):
    """The engine's request, and the client's answer."""
    engine.submits.clear()
    responses = await served.infer(model, id="a", **request)
    asked = [asdict(submit) for submit in engine.submits]
    for submit in asked:
        for name in OF_THE_CONNECTION:
            del submit[name]
    answered = [
        [(tensor.name, tensor.data.tolist()) for tensor in response.outputs]
        for response in responses
    ]
    return asked, answered
