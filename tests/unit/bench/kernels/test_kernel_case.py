"""Cases of kernels: their limits, their inputs in turn, and that they run."""

from __future__ import annotations

import pytest
import torch

from trimaran.bench.kernels import cases_elementwise
from trimaran.bench.kernels.kernel_case import KernelCase, in_turn


def test_the_limit_of_a_case_is_the_slower_of_bytes_and_operations():
    case = KernelCase(
        name="product", shape="2 x 2", dtype="bfloat16", run=int, num_bytes=4000, flops=6000
    )
    assert case.limit_s(bytes_per_s=1000, flops_per_s=1000) == 6
    assert case.limit_s(bytes_per_s=500, flops_per_s=1000) == 8


def test_a_case_rotates_through_its_inputs():
    run = in_turn(lambda value: value, ["a", "b"])
    assert [run() for _ in range(3)] == ["a", "b", "a"]


@pytest.mark.parametrize(
    "make",
    [
        cases_elementwise._norm,
        cases_elementwise._norm_with_residual,
        cases_elementwise._silu_and_mul,
    ],
)
def test_a_case_and_its_peer_give_the_same(make):
    case = make(torch.device("cpu"), torch.float16, 1)
    assert case.peer is not None
    torch.testing.assert_close(case.run(), case.peer(), atol=2e-2, rtol=2e-3)


def test_rotation_is_counted_with_what_it_reads_and_writes():
    case = cases_elementwise._rope_and_cache(torch.device("cpu"), torch.float16, 2)
    case.run()
    # 48 heads read, 40 rotated and 16 stored, of 256 bytes each; 512 bytes of angles.
    assert case.num_bytes == 2 * (104 * 256 + 512)
