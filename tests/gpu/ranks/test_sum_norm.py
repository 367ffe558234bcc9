"""Sums within the next norm: bit by bit those of a separate sum and norm."""

from __future__ import annotations

import pytest
import torch

from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.collectives.torch_groups import map_peer_memory
from trimaran.kernels.cuda.sum_norm import SumNorm, region_bytes
from trimaran.kernels.triton.norm import rms_norm
from trimaran.kernels.triton.peer_sum import PeerSum
from trimaran.kernels.triton.peer_sum import region_bytes as peer_region_bytes
from trimaran.worker.parallel import sum_norms
from trimaran.worker.parallel.sum_norms import try_sum_norm

pytestmark = pytest.mark.gpu

EPS = 1e-5
MAX_ROWS = 256
SLOT_BYTES = 8 << 20


@pytest.fixture(scope="module")
def group(world):
    group = connect_group(world, torch.device("cuda", world.local_rank), 60.0)
    yield group
    group.close()


@pytest.fixture(scope="module")
def sum_norm(group):
    memory = map_peer_memory(group, region_bytes(group.size, MAX_ROWS))
    sums = SumNorm(memory.addresses, group.rank, MAX_ROWS, group.device, memory)
    yield sums
    group.barrier()


@pytest.fixture(scope="module")
def peer_sum(group):
    memory = map_peer_memory(group, peer_region_bytes(group.size, SLOT_BYTES))
    sums = PeerSum(
        memory.addresses, group.rank, SLOT_BYTES, SLOT_BYTES, group.device, memory
    )  # fmt: skip
    yield sums
    group.barrier()


class Sample:
    """Random arguments of a sum and the following norm, different on every rank."""

    def __init__(self, group, shape, dtype, parts=0):
        generator = torch.Generator(group.device).manual_seed(group.rank + shape[0])

        def draw(size, of):
            return torch.randn(size, generator=generator, device=group.device).to(of)

        self.x = draw((parts, *shape), torch.float32) if parts else draw(shape, dtype)
        self.residual = draw(shape, dtype)
        self.weight = draw(shape[1:], dtype)

    def expected(self, peer_sum):
        """The norm and the residual, by two kernels."""
        total, residual = self.x, self.residual.clone()
        if self.x.dim() == 3:
            total = self.x[0]
            for part in self.x[1:]:
                total = total + part
        total = total.to(residual.dtype).clone()
        peer_sum(total)
        return rms_norm(total, self.weight, EPS, residual), residual


BF16, FLOAT16, FLOAT = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "width", "parts"),
    [
        (BF16, 256, 0), (BF16, 512, 2), (BF16, 1000, 0), (BF16, 1024, 3), (BF16, 2048, 0),
        (BF16, 4096, 0), (BF16, 4096, 2), (BF16, 4096, 4), (BF16, 5120, 1), (BF16, 8192, 0),
        (BF16, 8192, 4), (FLOAT16, 256, 0), (FLOAT16, 4096, 4), (FLOAT16, 8192, 0),
        (FLOAT, 256, 0), (FLOAT, 512, 0), (FLOAT, 1024, 4), (FLOAT, 2048, 2), (FLOAT, 3000, 0),
        (FLOAT, 4096, 0), (FLOAT, 4096, 4),
    ],
    ids=str,
)  # fmt: skip
def test_a_fused_sum_and_norm_has_the_bits_of_both_operators(
    group, sum_norm, peer_sum, dtype, width, parts
):
    for rows in (1, 2, 64, 7, 256, 1):
        sample = Sample(group, (rows, width), dtype, parts)
        assert sum_norm.takes(sample.residual)
        # Compiled before any rank waits for another.
        sum_norm.load(dtype, width)
        expected = sample.expected(peer_sum)

        normed = sum_norm(sample.x, sample.residual, sample.weight, EPS)

        assert torch.equal(sample.residual, expected[1])
        assert torch.equal(normed, expected[0])


def test_rows_may_be_strided(group, sum_norm, peer_sum):
    sample = Sample(group, (5, 4096), torch.bfloat16)
    wide = torch.zeros(5, 4200, dtype=torch.bfloat16, device=group.device)
    wide[:, :4096] = sample.residual
    sample.residual = wide[:, :4096]
    expected = sample.expected(peer_sum)

    normed = sum_norm(sample.x, sample.residual, sample.weight, EPS)

    assert torch.equal(sample.residual, expected[1])
    assert torch.equal(normed, expected[0])
    assert not wide[:, 4096:].any()


def test_graphs_with_different_rows_alternate_on_delayed_ranks(group, sum_norm, peer_sum):
    samples = {
        rows: [Sample(group, (rows, 4096), torch.bfloat16, parts) for parts in (0, 4, 0)]
        for rows in (1, 3, 64, 256)
    }
    # A graph cannot capture the loading of a kernel.
    sum_norm.load(torch.bfloat16, 4096)
    graphs, outputs = {}, {}
    for rows, each in samples.items():
        graphs[rows] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[rows], capture_error_mode="thread_local"):
            outputs[rows] = [
                sum_norm(one.x, one.residual, one.weight, EPS) for one in each
            ]  # fmt: skip
    order = torch.Generator().manual_seed(5)
    lateness = torch.Generator().manual_seed(group.rank)
    all_rows = list(samples)
    is_equal = torch.ones((), dtype=torch.bool, device=group.device)
    for _ in range(60):
        rows = all_rows[int(torch.randint(len(all_rows), (), generator=order))]
        expected = [one.expected(peer_sum) for one in samples[rows]]
        torch.cuda._sleep(int(torch.randint(1, 100_000, (), generator=lateness)))

        graphs[rows].replay()

        for one, normed, (norm, residual) in zip(
            samples[rows], outputs[rows], expected, strict=True
        ):
            is_equal &= (normed == norm).all() & (one.residual == residual).all()
    assert bool(is_equal)


def test_a_group_uses_fused_sums_after_a_comparison(group):
    assert try_sum_norm(group, sum_norms.MAX_ROWS, is_exact=True) == ""

    assert group.sum_norm is not None
    assert group.transports()["sum_norm"] == "peer push"
