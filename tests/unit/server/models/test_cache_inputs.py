"""KV cache inputs of a request reach the engine, or are refused by name and value."""

from __future__ import annotations

import pytest

from trimaran.comm.errors import RequestError
from trimaran.server.models.token_inputs import salted

PROMPT = {"input_ids": [7, 8, 9], "input_lengths": 3, "request_output_len": 5}
FOREVER = -1


def ids(submit):
    return list(range(10))


def ranges(**changes):
    return {
        "retention_token_range_starts": [0, 100],
        "retention_token_range_ends": [100, -1],
        "retention_token_range_priorities": [90, 20],
        **changes,
    }


@pytest.mark.feature(
    "input:retention_token_range_starts",
    "input:retention_token_range_ends",
    "input:retention_token_range_priorities",
    "input:retention_token_range_durations_ms",
    "input:retention_decode_priority",
    "input:retention_decode_duration_ms",
)
@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, None),
        (
            ranges(),
            {"ranges": [[0, 100, 90, -1], [100, 1 << 62, 20, -1]], "output": [35, -1]},
        ),
        (
            ranges(
                retention_token_range_durations_ms=[500, -1],
                retention_decode_priority=0,
                retention_decode_duration_ms=30,
            ),
            {"ranges": [[0, 100, 90, 500], [100, 1 << 62, 20, -1]], "output": [0, 30]},
        ),
        ({"retention_decode_priority": 80}, {"ranges": [], "output": [80, FOREVER]}),
    ],
)
async def test_retention_settings_reach_the_engine(serve, inputs, expected):
    async with serve() as served:
        engine = await served.dial(ids)
        await served.infer("tensorrt_llm", **PROMPT, **inputs)
        assert engine.submits[0].retention == expected


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            ranges(retention_token_range_ends=[100]),
            "retention_token_range_ends must be provided, and have the same length as "
            "retention_token_range_starts",
        ),
        (
            {"retention_token_range_starts": [0], "retention_token_range_ends": [4]},
            "retention_token_range_priorities must be provided, and have the same length",
        ),
        (
            ranges(retention_token_range_durations_ms=[5]),
            "retention_token_range_durations_ms must be provided, and have the same length",
        ),
        ({"retention_token_range_ends": [5]}, "retention_token_range_ends must be provided"),
        (ranges(retention_token_range_priorities=[101, 0]), "holds 101 but priorities are"),
        (ranges(retention_token_range_starts=[5, 200], retention_token_range_ends=[5, 300]),
         "hold the range 5 to 5"),
        (ranges(retention_token_range_durations_ms=[0, 5]), "durations_ms holds 0 but must be"),
        ({"retention_decode_duration_ms": 5}, "Set retention_decode_priority too"),
    ],
)  # fmt: skip
async def test_invalid_retention_settings_are_refused(serve, inputs, text):
    async with serve() as served:
        engine = await served.dial(ids)
        with pytest.raises(RequestError) as got:
            await served.infer("tensorrt_llm", **PROMPT, **inputs)
        assert engine.submits == []
    assert text in str(got.value)


def test_a_cache_salt_need_not_be_utf8():
    salt = b"gr\xfcn".decode("utf-8", "surrogateescape")
    assert salted({"cache_salt": salt}, b"") != salted({"cache_salt": "gr\xfcn"}, b"")


def test_cache_salts_separate_requests_with_other_separators_too():
    keys = [
        salted(parameters, key)
        for parameters in ({}, {"cache_salt": "one"}, {"cache_salt": "two"})
        for key in (b"", b"table")
    ]

    assert len(set(keys)) == 6
    assert salted({"cache_salt": "one"}, b"") == salted({"cache_salt": "one"}, b"")
    for salt in ("", 7):
        with pytest.raises(RequestError, match="must be a text that is not empty"):
            salted({"cache_salt": salt}, b"")


@pytest.mark.feature("parameter:cache_salt", of="request")
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
async def test_a_cache_salt_reaches_the_engine_from_every_model(serve, model):
    inputs = PROMPT if model == "tensorrt_llm" else {"text_input": "x", "max_tokens": 2}
    async with serve() as served:
        engine = await served.dial(ids)
        for salt in ("one", "two"):
            await served.infer(model, **inputs, parameters={"cache_salt": salt})
        first, second = (submit.cache_salt for submit in engine.submits)
        assert first == salted({"cache_salt": "one"}, b"")
        assert second == salted({"cache_salt": "two"}, b"") != first


@pytest.mark.feature("parameter:request_type", of="request")
async def test_request_types_of_disaggregated_serving_are_refused(serve):
    async with serve() as served:
        await served.dial(ids)
        whole = {"request_type": "context_and_generation"}
        (response,) = await served.infer("tensorrt_llm", **PROMPT, parameters=whole)
        assert response.is_final
        for model, inputs in (
            ("tensorrt_llm", PROMPT),
            ("ensemble", {"text_input": "x", "max_tokens": 2}),
        ):
            half = {"request_type": "context_only"}
            with pytest.raises(RequestError, match="disaggregated serving is not served"):
                await served.infer(model, **inputs, parameters=half)
