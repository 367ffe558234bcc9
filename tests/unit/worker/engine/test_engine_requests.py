"""Requests at the engine: refusals, ends, several sequences, fairness and gauges."""

import dataclasses
import math
import re
import time

import numpy as np
import pytest

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.messages import STATS_KEYS, FinishReason
from trimaran.comm.messages.sampling_params import SamplingParams

VOCAB = 150


def _bias(value):
    return np.full(VOCAB, value, "<f4").tobytes()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"beam_width": 2}, "beam_width is 2 but this engine serves at most 1"),
        (
            {"beam_width": 1 << 30, "num_return_sequences": 1 << 30},
            "beam_width is 1073741824 but this engine serves at most 1",
        ),
        ({"logits_dtype": "int8"}, "'logits_dtype' is 'int8' but must be float32 or float16"),
        ({"temperature": -1.0}, r"'temperature' is -1.0 but must be a finite number >= 0"),
        ({"repetition_penalty": 0.0}, r"'repetition_penalty' is 0.0 but must be above 0"),
        ({"repetition_penalty": math.inf}, "'repetition_penalty' is inf but must be above 0"),
        ({"presence_penalty": math.nan}, "'presence_penalty' is nan but must be a finite"),
        ({"frequency_penalty": -math.inf}, "'frequency_penalty' is -inf but must be a finite"),
        ({"embedding_bias": _bias(math.nan)}, "embedding_bias holds nan but must hold finite"),
        ({"embedding_bias": _bias(math.inf)}, "embedding_bias holds inf but must hold finite"),
        ({"embedding_bias": _bias(-math.inf)}, "embedding_bias is -inf for every id"),
        ({"end_id": VOCAB}, r"'end_id' is 150 but must be below the vocabulary size 150"),
        ({"end_ids": (VOCAB,)}, r"'end_ids' is .*150.* but must be at most 16 ids below the"),
        ({"end_ids": (1,) * 17}, r"'end_ids' is .* but must be at most 16 ids below the"),
        ({"bad_words": ((3, 999),)}, r"bad_words holds 999.* ids are 0 to 149"),
        ({"embedding_bias": b"1234"}, r"embedding_bias holds 1 values .* 150"),
        ({"prompt": [4, VOCAB]}, r"input_ids holds 150.* ids are 0 to 149"),
        ({"prompt": [4, -1]}, r"input_ids holds -1"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1] * 128}, r"Prompt length \(128\) exceeds maximum input length \(127\)"),
        ({"adapter_id": 3}, "LoRA task 3"),
        (
            {"embeddings": {"dtype": "FP32", "shape": [2, 31], "data": b""}},
            r"vectors of 31 values, but the model's have 32; send a table \[entries, 32\]",
        ),
        (
            {"embeddings": {"dtype": "FP16", "shape": [2, 32], "data": b"1234"}},
            r"has 4 bytes, but 128 belong to its shape \[2, 32\] of FP16",
        ),
        (
            {"embeddings": {"dtype": "INT8", "shape": [2, 32], "data": b"1234"}},
            "prompt_embedding_table is INT8 but must be FP16, BF16, FP32",
        ),
        (
            {"embeddings": {"dtype": "FP16", "shape": [0, 32], "data": b""}},
            r"prompt_embedding_table has the shape \[0, 32\]: leave it out",
        ),
        (
            {"embeddings": {"dtype": "BF16", "shape": [1, 32], "data": b"\xc0\x7f" * 32}},
            "prompt_embedding_table holds nan at value 0 of entry 0, which is no finite number",
        ),
        ({"num_return_sequences": 17}, r"num_return_sequences is 17 .* at most 16"),
        ({"top_k": 1 << 63}, "'top_k' is 9223372036854775808 but must be below"),
        ({"min_tokens": 1 << 63}, "'min_tokens' is 9223372036854775808 but must be below"),
        ({"no_repeat_ngram_size": 1 << 64}, "'no_repeat_ngram_size' is 18446744073709551616"),
        ({"stop_words": ((1, 1 << 31),)}, r"stop_words holds 2147483648.* to 2147483647$"),
        ({"sequence_index": 65536}, "sequence_index is 65536 but must be 0 to 65535"),
        ({"sequence_index": -1}, "sequence_index is -1 but must be 0 to 65535"),
        (
            {"sequence_index": 65534, "num_return_sequences": 3},
            "sequence_index is 65534 but must be 0 to 65533, with num_return_sequences 3",
        ),
    ],
)
def test_a_bad_request_is_refused_by_name_and_the_others_go_on(make_engine, fields, text):
    driver = make_engine()
    good = driver.submit([1, 2, 3], max_tokens=4)
    fields = {"prompt": [5, 6], **fields}

    with pytest.raises(RequestError, match=text):
        driver.submit(**fields)
    driver.run()

    assert len(driver.output(good)) == 4
    driver.check_idle()


_WHOLES = [f.name for f in dataclasses.fields(SamplingParams) if f.type == "int"]
_NO_WHOLES = (0.5, 2.0, math.nan, math.inf, True, None, "2", b"2", [2])


def _refusal(driver, **fields):
    with pytest.raises(RequestError) as caught:
        driver.submit([5, 6], **fields)
    assert caught.value.kind is ErrorKind.INVALID_ARG
    return str(caught.value)


@pytest.mark.parametrize("name", [*_WHOLES, "priority", "sequence_index"])
def test_values_that_are_no_integers_are_refused_in_integer_fields(make_engine, name):
    driver = make_engine(max_beam_width=4)
    good = driver.submit([1, 2, 3], max_tokens=4)

    # Values that equal the default are not sent: True for 1.
    values = [v for v in _NO_WHOLES if v != getattr(SamplingParams(), name, None)]

    refused = [(_refusal(driver, **{name: value}), value) for value in values]
    driver.run()

    for text, value in refused:
        assert re.match(rf"'?{name}'? is {re.escape(repr(value))} but must be a whole", text)
    assert len(driver.output(good)) == 4
    driver.check_idle()


@pytest.mark.parametrize("name", ["bad_words", "stop_words"])
def test_a_word_that_holds_anything_but_ids_is_refused(make_engine, name):
    driver = make_engine()
    good = driver.submit([1, 2, 3], max_tokens=4)
    values = (*_NO_WHOLES, 1 << 63, 1 << 64, -(1 << 63) - 1)

    refused = [(_refusal(driver, **{name: ((4,), (1, v, 2))}), v) for v in values]
    refused += [(_refusal(driver, **{name: ((v,), (4,))}), v) for v in values]
    driver.run()

    for text, value in refused:
        assert text.startswith(f"{name} holds {value!r}, which is no token id: ids are ")
    assert len(driver.output(good)) == 4
    driver.check_idle()


def test_stop_words_may_be_empty_or_hold_ids_outside_the_vocabulary(make_engine):
    driver = make_engine()
    words = ((), (-(1 << 31), (1 << 31) - 1), (VOCAB,))

    request = driver.submit([1, 2, 3], max_tokens=4, stop_words=words, bad_words=((),))
    driver.run()

    assert len(driver.output(request)) == 4


def test_an_internal_error_at_one_request_fails_that_request_alone(make_engine, caplog):
    driver = make_engine()
    good = driver.submit([1, 2, 3], max_tokens=4)

    # No front end sends a text here; the test needs a TypeError in the checks.
    with pytest.raises(RequestError, match=r"failed on this request \(TypeError") as caught:
        driver.submit([5, 6], temperature="hot")
    driver.run()

    assert caught.value.kind is ErrorKind.INTERNAL
    assert "Traceback" in caplog.text
    assert len(driver.output(good)) == 4
    driver.check_idle()


_NEVER = tuple((token_id,) for token_id in range(VOCAB))


def _only(token_id):
    bias = np.full(VOCAB, -math.inf, "<f4")
    bias[token_id] = 0
    return bias.tobytes()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": _NEVER},
        {"bad_words": _NEVER, "top_k": 5, "temperature": 1.0, "return_log_probs": True},
        {"bad_words": _NEVER, "top_p": 0.9, "num_return_sequences": 2},
        {"bad_words": ((7, 7),), "embedding_bias": _only(7)},
        {"embedding_bias": _only(9), "no_repeat_ngram_size": 1},
        {"embedding_bias": _only(8), "min_tokens": 4, "end_id": 8},
    ],
)
def test_a_request_that_forbids_every_id_fails_alone(make_engine, fields, depth):
    driver = make_engine(depth=depth)
    driver.failed = {}
    good = driver.submit([1, 2, 3], max_tokens=6, bad_words=_NEVER[:-3])
    bad = driver.submit([1, 2, 3], max_tokens=6, **fields)

    driver.run()

    assert "together forbid every id of the vocabulary" in driver.failed[bad]
    assert set(driver.output(good)) <= {147, 148, 149}
    assert len(driver.output(good)) == 6
    driver.check_idle()


def test_max_tokens_is_lowered_to_the_rest_of_the_sequence_length(make_engine):
    driver = make_engine()
    request = driver.submit([1] * 120, max_tokens=50)

    driver.run()

    assert len(driver.output(request)) == 8
    assert driver.reasons[request, 0] == FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cancelled_request_frees_everything_within_a_step(make_engine, depth):
    driver = make_engine(depth=depth)
    request = driver.submit([1, 2, 3], max_tokens=100)
    for _ in range(5):
        driver.step()

    driver.engine.cancel("client", [request, 999])
    driver.run(max_steps=driver.num_steps + 2)

    assert driver.reasons == {(request, 0): FinishReason.CANCELLED}
    driver.check_idle()


def test_a_client_id_stops_the_requests_with_this_id_from_all_front_ends(make_engine):
    driver = make_engine()
    ids = [
        driver.submit([1, 2, 3], source=source, max_tokens=20, client_request_id=name)
        for source, name in (("one", "a"), ("two", "a"), ("two", "b"), ("two", ""))
    ]
    driver.step()

    driver.engine.stop("a")
    driver.run()

    reasons = [driver.reasons[request, 0] for request in ids]
    assert reasons == [FinishReason.CANCELLED] * 2 + [FinishReason.LENGTH] * 2
    driver.check_idle()


def test_a_queued_request_is_cancelled_without_a_token(make_engine):
    driver = make_engine(max_num_seqs=1)
    driver.submit([1, 2, 3], max_tokens=3)
    driver.step()
    queued = driver.submit([1, 2, 3], max_tokens=3)

    driver.engine.cancel("client", [queued])
    driver.run()

    assert driver.output(queued) == []
    assert driver.reasons[queued, 0] == FinishReason.CANCELLED
    driver.check_idle()


def test_only_the_front_end_that_submitted_a_request_can_cancel_the_request(make_engine):
    driver = make_engine()
    request = driver.submit([1, 2, 3], source="one", max_tokens=3)
    driver.step()

    driver.engine.cancel("other", [request])
    driver.run()

    assert driver.reasons[request, 0] == FinishReason.LENGTH


def test_a_lost_connection_ends_its_requests_silently(make_engine):
    driver = make_engine(depth=2)
    lost = driver.submit([1, 2, 3], source="lost", max_tokens=100)
    kept = driver.submit([4, 5, 6], source="kept", max_tokens=10)
    for _ in range(3):
        driver.step()

    driver.engine.drop_source("lost")
    driver.run()

    assert (lost, 0) not in driver.reasons
    assert driver.reasons == {(kept, 0): FinishReason.LENGTH}
    driver.check_idle()


@pytest.mark.parametrize("changes", [{}, {"depth": 2}, {"enable_block_reuse": False}])
def test_sequences_of_one_request_equal_those_of_single_requests(
    make_engine, prompt_of, changes
):
    driver = make_engine(**changes)
    sampling = {"max_tokens": 12, "top_p": 0.95, "seed": 4}
    prompt = prompt_of(21)
    several = driver.submit(prompt, num_return_sequences=3, **sampling)
    driver.run()
    single = [driver.submit(prompt, sequence_index=index, **sampling) for index in range(3)]
    driver.run()

    outputs = [driver.output(several, index) for index in range(3)]
    assert outputs == [driver.output(r, index) for index, r in enumerate(single)]
    assert len({tuple(output) for output in outputs}) == 3
    driver.check_idle()


def test_a_late_request_has_its_first_token_while_another_runs(make_engine):
    driver = make_engine(depth=2)
    early = driver.submit([1, 2, 3], max_tokens=100)
    while len(driver.output(early)) < 10:
        driver.step()
    late = driver.submit([4] * 100, max_tokens=5)
    while not driver.output(late):
        driver.step()

    assert len(driver.output(early)) < 20


def test_the_end_id_is_not_part_of_the_output(make_engine):
    driver = make_engine()
    request = driver.submit([1, 2, 3], max_tokens=8)
    driver.run()
    tokens = driver.output(request)
    place = next(n for n in range(1, 8) if tokens[n] not in tokens[:n])

    again = driver.submit([1, 2, 3], max_tokens=8, end_id=tokens[place])
    driver.run()

    assert driver.output(again) == tokens[:place]
    assert driver.reasons[again, 0] == FinishReason.END_ID
    driver.check_idle()


def test_each_of_several_end_ids_ends_the_output(make_engine):
    driver = make_engine()
    request = driver.submit([1, 2, 3], max_tokens=8)
    driver.run()
    tokens = driver.output(request)
    place = next(n for n in range(1, 8) if tokens[n] not in tokens[:n])
    absent = next(n for n in range(VOCAB) if n not in tokens)

    for ends in (
        {"end_ids": (absent, tokens[place])},
        {"end_id": absent, "end_ids": (tokens[place],)},
    ):
        again = driver.submit([1, 2, 3], max_tokens=8, **ends)
        driver.run()
        assert driver.output(again) == tokens[:place]
        assert driver.reasons[again, 0] == FinishReason.END_ID
    driver.check_idle()


def test_log_probs_come_with_each_token_and_add_up(make_engine):
    driver = make_engine(depth=2)
    asked = driver.submit([1, 2, 3], max_tokens=6, return_log_probs=True)
    silent = driver.submit([1, 2, 3], max_tokens=6)
    driver.run()

    values = [value for extra in driver.extras[asked, 0] for value in extra["log_probs"]]
    assert len(values) == 6 and all(value <= 0 for value in values)
    assert driver.extras[asked, 0][-1]["cum_log_prob"] == pytest.approx(sum(values))
    assert (silent, 0) not in driver.extras


def test_gauges_equal_the_state_of_the_engine(make_engine):
    driver = make_engine(max_num_seqs=2, max_tokens=2048)
    idle = driver.engine.stats()
    assert idle.keys() == set(STATS_KEYS)
    assert idle["active_requests"] == idle["kv_used_blocks"] == 0
    assert (idle["kv_max_blocks"], idle["kv_tokens_per_block"]) == (16, 16)
    assert idle["max_requests"] == 2
    for length in (20, 50, 30):
        driver.submit([length] * length, max_tokens=10)

    driver.step()
    first = driver.engine.stats()
    assert (first["active_requests"], first["scheduled_requests"]) == (3, 2)
    assert (first["context_requests"], first["generation_requests"]) == (2, 0)
    assert (first["waiting_requests"], first["paused_requests"]) == (1, 0)
    # 20 tokens, then 28 of the remaining budget of 44: a chunk ends at the end of a block.
    assert first["total_context_tokens"] == 20 + 32
    assert first["kv_used_blocks"] == 2 + 2
    assert first["kv_free_blocks"] == 16 - 4
    assert first["iteration_counter"] == 1

    driver.step()
    second = driver.engine.stats()
    assert (second["context_requests"], second["generation_requests"]) == (1, 1)
    assert second["total_context_tokens"] == 18
    assert second["timestamp_us"] >= first["timestamp_us"] > time.time_ns() // 1000 - 60_000_000
    assert second["cpu_memory_bytes"] > 1 << 20

    driver.run()
    last = driver.engine.stats()
    assert last["active_requests"] == last["kv_used_blocks"] == 0
    assert last["kv_reused_blocks"] == 0
    driver.submit([50] * 50, max_tokens=1)
    driver.run()
    assert driver.engine.stats()["kv_reused_blocks"] == 4


def test_gauges_count_a_beam_search_once(make_engine):
    driver = make_engine(max_num_seqs=6, max_beam_width=4)
    for _ in range(2):
        driver.submit([1, 2, 3], max_tokens=3, beam_width=4)
    names = ("active", "context", "generation", "scheduled", "waiting")
    seen = []
    while driver.engine.has_work:
        driver.step()
        stats = driver.engine.stats()
        gauges = [stats[f"{name}_requests"] for name in names]
        seen.append((*gauges, stats["total_generation_tokens"]))

    # Four rows of six: the second waits for the first's end.
    assert seen[:3] == [(2, 1, 0, 1, 1, 0), (2, 0, 1, 1, 1, 4), (2, 0, 1, 1, 1, 4)]
    assert seen[3:] == [(1, 1, 0, 1, 0, 0), (1, 0, 1, 1, 0, 4), (0,) * 6]


def test_facts_name_limits_and_backends(make_engine):
    facts = make_engine().engine.facts()

    expected = {
        "max_batch_size": 16,
        "max_num_tokens": 64,
        "max_seq_len": 128,
        "max_input_len": 127,
        "vocab_size": VOCAB,
        "logits_dtype": "float32",
        "dtype": "float32",
        "device": "cpu",
        "world_size": 1,
        "tokens_per_block": 16,
        "max_blocks": 128,
        "depth": 1,
    }
    assert {name: facts[name] for name in expected} == expected
    # Float32 has no products of its own.
    assert facts["backends"]["sampling"] == facts["backends"]["linear"]


def test_blocks_have_32_tokens_on_a_cpu_by_default(make_engine):
    assert make_engine(tokens_per_block=0).engine.stats()["kv_tokens_per_block"] == 32


def test_200_requests_are_not_mixed_up(make_engine, prompt_of):
    driver = make_engine(depth=2, max_tokens=1024)
    alone = make_engine(max_tokens=1024, enable_block_reuse=False)
    lengths = np.random.default_rng(1).integers(1, 40, 200)
    requests, expected = [], []
    for seed, length in enumerate(lengths):
        prompt = prompt_of(int(length), seed)
        requests.append(driver.submit(prompt, max_tokens=5))
        single = alone.submit(prompt, max_tokens=5)
        alone.run(max_steps=10_000)
        expected.append(alone.output(single))

    driver.run()

    assert [driver.output(request) for request in requests] == expected
    driver.check_idle()


def test_a_full_queue_refuses_with_unavailable_and_not_with_invalid(make_engine):
    driver = make_engine(max_num_seqs=1, max_queue_size=1)
    driver.submit([1], max_tokens=5)
    driver.step()
    driver.submit([1], max_tokens=5)

    text = "[request id: <id_unknown>] Exceeds maximum queue size: Maximum queue size of 1"
    with pytest.raises(RequestError, match=re.escape(text)) as caught:
        driver.submit([1], max_tokens=5)

    assert caught.value.kind is ErrorKind.UNAVAILABLE
