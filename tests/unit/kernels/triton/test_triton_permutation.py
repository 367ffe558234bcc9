"""MoE permutation in Triton's interpreter: rows to their experts and back."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels.triton.experts import sort_assignments
from trimaran.kernels.triton.permutation import permute_rows, unpermute_rows


@pytest.mark.parametrize(("tokens", "chosen", "width"), [(1, 2, 40), (50, 4, 1100)])
def test_rows_are_grouped_by_expert_and_return_weighted(tokens, chosen, width):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width + 8, generator=generator)[:, :width]
    weights = torch.rand(tokens, chosen, generator=generator)
    ids = torch.rand(tokens, 8, generator=generator).topk(chosen)[1].int()
    # This rank has the experts 2 to 5.
    order, totals, positions = sort_assignments(ids, 4, 2)

    permuted = permute_rows(x, positions)
    gathered = unpermute_rows(permuted, positions, weights)

    num_here = int(totals.sum())
    assert permuted[:num_here].equal(x[order[:num_here].long() // chosen])
    is_here = ((ids >= 2) & (ids < 6)).float()
    expected = x * (weights * is_here).sum(1, keepdim=True)
    torch.testing.assert_close(gathered, expected)
