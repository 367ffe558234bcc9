"""Experts of one token in Triton's interpreter: the sums of the plain twin."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.experts.floats import MeasuredExperts
from trimaran.kernels.tables.grouped_table import GroupedTable
from trimaran.kernels.triton.few_tokens.few_experts import can_stream, stream_experts


def make(tokens, experts, chosen, hidden, inner):
    generator = torch.Generator().manual_seed(inner)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x = random(tokens, hidden + 16).half()[:, :hidden]
    ids = random(tokens, experts).topk(chosen, dim=-1)[1].int()
    gate_up = (random(experts, 2 * inner, hidden) / hidden**0.5).half()
    down = (random(experts, hidden, inner) / inner**0.5).half()
    return x, random(tokens, chosen).softmax(-1), ids, gate_up, down


def twin(x, weights, ids, gate_up, down, first=0):
    matrices = gate_up.float(), down.float()
    return reference.expert_mlp(x.float(), weights, ids, *matrices, first)


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner"),
    [(1, 4, 2, 128, 256), (1, 8, 3, 256, 128), (2, 5, 2, 384, 384)],
)
def test_sums_are_those_of_the_plain_twin(tokens, experts, chosen, hidden, inner):
    inputs = make(tokens, experts, chosen, hidden, inner)

    actual = stream_experts(*inputs)

    assert actual.dtype == torch.float16
    torch.testing.assert_close(actual.float(), twin(*inputs), atol=4e-3, rtol=4e-3)


def test_ranks_with_some_of_the_experts_sum_to_the_result_of_all_experts():
    # Ranks with one, zero and two of the token's experts.
    x, weights, _, gate_up, down = make(1, 6, 3, 128, 640)
    ids = torch.tensor([[4, 2, 0]], dtype=torch.int32)
    parts = [
        stream_experts(
            x, weights, ids, gate_up[first:end].clone(), down[first:end].clone(), first
        )
        for first, end in ((0, 1), (1, 2), (2, 6))
    ]

    expected = twin(x, weights, ids, gate_up, down)
    torch.testing.assert_close(sum(parts).float(), expected, atol=4e-3, rtol=4e-3)


def test_a_rank_without_any_of_the_chosen_experts_gives_zeros():
    x, weights, _, gate_up, down = make(1, 4, 2, 128, 128)
    ids = torch.tensor([[5, 7]], dtype=torch.int32)

    assert not stream_experts(x, weights, ids, gate_up, down).any()


def test_batches_whose_tokens_seldom_share_an_expert_use_the_streaming_kernel():
    def gate_up(
        inner: int, hidden: int, experts: int = 8, dtype: torch.dtype = torch.float16
    ) -> torch.Tensor:
        return torch.empty((experts, 2 * inner, hidden), dtype=dtype, device="meta")

    assert can_stream(1, 2, gate_up(14336, 4096))
    assert not can_stream(0, 2, gate_up(14336, 4096))
    assert not can_stream(2, 2, gate_up(14336, 4096))
    assert can_stream(3, 6, gate_up(1408, 2048, experts=64))
    assert not can_stream(4, 6, gate_up(1408, 2048, experts=64))
    assert not can_stream(1, 2, gate_up(14336 + 64, 4096))
    assert not can_stream(1, 2, gate_up(14336, 4000))
    assert not can_stream(1, 2, gate_up(14336, 4096, dtype=torch.float32))


def test_a_mixture_of_experts_streams_a_single_token():
    inputs = make(1, 4, 2, 128, 256)
    mixture = MeasuredExperts(torch.device("cpu"), torch.float16, GroupedTable({}))

    assert mixture.expert_mlp(*inputs).equal(stream_experts(*inputs))
