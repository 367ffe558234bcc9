"""Draft tokens in requests to the token model, and limits of draft tokens in text requests."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.server.models.conftest import FACTS
from tests.unit.server.models.test_draft_rounds import ANSWER, REQUEST, told, verified
from trimaran.comm.errors import RequestError
from trimaran.server.direct.direct_text import DirectText
from trimaran.server.inference.request import InferRequest
from trimaran.server.models.sampling_inputs import LOOKAHEAD


async def test_an_engine_that_verifies_no_drafts_refuses_them(serve):
    facts = {name: value for name, value in FACTS.items() if name != "max_draft_len"}
    async with serve() as served:
        engine = await served.dial(lambda submit: [7], facts=facts)
        with pytest.raises(RequestError, match="this engine: the engine verifies no draft"):
            await served.infer(
                "tensorrt_llm", input_ids=[1], input_lengths=1, request_output_len=4,
                draft_input_ids=[7],
            )  # fmt: skip
    assert engine.submits == []


async def test_an_engine_that_has_no_lookahead_refuses_its_sizes(serve):
    facts = {**FACTS, "lookahead": ()}
    sizes = dict.fromkeys(LOOKAHEAD, 4)
    async with serve() as served:
        engine = await served.dial(lambda submit: [7], facts=facts)
        with pytest.raises(RequestError, match="model instance lookahead parameters are not"):
            await served.infer(
                "tensorrt_llm", input_ids=[1], input_lengths=1, request_output_len=4, **sizes
            )
    assert engine.submits == []


async def test_sizes_of_lookahead_reach_the_engine(serve):
    sizes = dict(zip(LOOKAHEAD, (4, 2, 1), strict=True))
    async with serve() as served:
        engine = await served.dial(lambda submit: [7])
        for further in (sizes, {}):
            await served.infer(
                "tensorrt_llm", input_ids=[1], input_lengths=1, request_output_len=4, **further
            )
    assert [tuple(submit.lookahead) for submit in engine.submits] == [(4, 2, 1), ()]


@pytest.mark.feature("parameter:max_draft_tokens", of="request")
async def test_a_request_with_drafts_has_the_accepted_ids_and_one_more(serve):
    async with serve() as served:
        engine = await served.dial(verified(list(range(10, 30))))
        engine.extras = lambda ids: {
            "figures": {"total_draft_tokens": 3, "total_accepted_draft_tokens": 2}
        }
        (response,) = await served.infer(
            "tensorrt_llm", input_ids=[1], input_lengths=1, request_output_len=15,
            draft_input_ids=[10, 11, 99], draft_logits=np.ones((1, 3, 600), np.float32),
            exclude_input_in_output=True, return_perf_metrics=True,
            draft_acceptance_threshold=0.25, parameters={"max_draft_tokens": 4},
        )  # fmt: skip
        for further in ({"runtime_top_k": 9}, {"runtime_top_k": 9, "random_seed": 3}):
            await served.infer(
                "tensorrt_llm", input_ids=[1], input_lengths=1, request_output_len=15,
                draft_input_ids=[10, 11], draft_logits=np.ones((1, 2, 600), np.float32),
                **further,
            )  # fmt: skip
        with pytest.raises(RequestError, match="'max_draft_tokens' is -1 but must be a whole"):
            await served.infer(
                "tensorrt_llm", input_ids=[1], input_lengths=1, request_output_len=4,
                parameters={"max_draft_tokens": -1},
            )  # fmt: skip

    assert told(response)["output_ids"] == [[[10, 11, 12]]]
    assert told(response)["acceptance_rate"] == [[pytest.approx(2 / 3)]]
    submit, drawn, seeded = engine.submits
    assert np.frombuffer(submit.draft_logits, "<f4").tolist() == [1.0] * 1800
    # A request with a seed has the ids that it has without drafts.
    assert len(drawn.draft_logits) == 4 * 1200
    assert not seeded.draft_logits
    assert submit.draft_token_ids == [10, 11, 99]
    assert submit.draft_acceptance_threshold == 0.25
    assert submit.max_draft_tokens == 4


@pytest.mark.feature("parameter:max_draft_tokens", of="request")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_a_text_request_limits_the_draft_tokens_of_a_step(serve, model):
    async with serve() as served:
        engine = await served.dial(served.answer(ANSWER))
        direct = DirectText.of(served.models[model])
        request = InferRequest(model_name=model, parameters={"max_draft_tokens": 0})
        await served.infer(model, **REQUEST, parameters={"max_draft_tokens": 0})

        # The short way, which has no drafts, leaves the request to the long one.
        assert direct.reader.of_values(request, REQUEST) is None
        assert [submit.max_draft_tokens for submit in engine.submits] == [0]
