"""A step's result travels from the last stage to rank 0 unchanged."""

from __future__ import annotations

import pytest
import torch

from trimaran.comm.errors import ProtocolError
from trimaran.worker.execution.step_result import decode_sampled, encode_sampled
from trimaran.worker.steps.step_types import KeptLogits, SampledTokens


def test_a_result_with_everything_survives_encoding():
    logits = KeptLogits(
        {1: [torch.randn(3, 5), torch.randn(2, 5).half()]}, {0: torch.randn(5).bfloat16()}
    )
    sent = SampledTokens(
        token_ids=[5, 150_000, 0],
        log_probs=[-0.5, -1.25, 0.0],
        logits=logits,
        beams=[([1, 2, 3], [-0.5, -1.5, float("-inf")])],
    )

    received = decode_sampled(encode_sampled(4, sent), 4)

    assert (received.token_ids, received.log_probs) == (sent.token_ids, sent.log_probs)
    assert received.beams == sent.beams
    assert received.logits is not None
    for mine, theirs in zip(received.logits.context[1], logits.context[1], strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert torch.equal(received.logits.generation[0], logits.generation[0])


def test_a_result_of_another_step_is_a_protocol_error():
    payload = encode_sampled(4, SampledTokens(token_ids=[1]))

    with pytest.raises(ProtocolError, match="the result of step 4 where that of 5"):
        decode_sampled(payload, 5)
    with pytest.raises(ProtocolError, match="cannot decode"):
        decode_sampled(b"\x01", 5)
