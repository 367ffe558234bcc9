"""The kernels that find the ids and the scores of a network's drafts, beside torch."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels.triton.drafts import likeliest_ids, log_sums


@pytest.mark.parametrize(("rows", "ids"), [(1, 40), (3, 2048), (2, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_the_largest_logits_wins(rows, ids, dtype):
    torch.manual_seed(ids)
    padded = torch.randn(rows, ids + 24).to(dtype)
    # Few values, so that several logits are the largest; padding is larger, and is no id.
    padded = (padded * 2).round()
    padded[:, ids:] = 100.0
    logits = padded[:, :ids]
    offsets = torch.randint(0, 1000, (ids,))

    expected = logits.float().argmax(dim=-1)

    assert torch.equal(likeliest_ids(logits), expected)
    assert torch.equal(likeliest_ids(logits, offsets), expected + offsets[expected])


@pytest.mark.parametrize(("rows", "ids"), [(1, 40), (3, 2048), (2, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logarithm_of_a_sum_is_that_of_torch(rows, ids, dtype):
    torch.manual_seed(ids)
    padded = (torch.randn(rows, ids + 24) * 9).to(dtype)
    padded[:, ids:] = 100.0
    logits = padded[:, :ids]
    logits[:, ::3] = float("-inf")

    expected = logits.float().logsumexp(dim=-1)

    assert torch.allclose(log_sums(logits), expected, atol=1e-5, rtol=1e-6)


def test_logits_that_are_no_numbers_have_valid_ids():
    logits = torch.full((2, 3000), float("-inf"))
    logits[1, ::7] = float("nan")

    found = likeliest_ids(logits, torch.zeros(3000, dtype=torch.int64))

    assert ((found >= 0) & (found < 3000)).all()
