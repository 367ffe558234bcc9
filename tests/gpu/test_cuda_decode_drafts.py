"""Decodes of one sequence, a token and its drafts, which read their keys together."""

from __future__ import annotations

import random

import pytest
import torch

from tests.gpu.test_cuda_decode import DEVICE, TOLERANCE, Step
from tests.gpu.test_cuda_decode_bytes import ByteStep
from trimaran.kernels.attention import AttentionMetadata
from trimaran.kernels.cuda import decode as cuda_decode
from trimaran.kernels.kv_quantization import KV_DTYPES
from trimaran.worker.config.draft_tree import MC_SIM_7B_63, DraftTree, DynamicTree

pytestmark = pytest.mark.gpu


@pytest.fixture(params=list(TOLERANCE), ids=str)
def dtype(request):
    return request.param


class Drafted:
    """A step of decodes, and behind them the draft rows of some; mixed into a `Step`, whose
    lengths are those with all drafts.

    Without ``shares_reads`` each row reads its keys alone.
    """

    counts: list[int]
    shares_reads = True
    trees = None
    """The tree of each sequence's drafts; None: chains, without masks."""

    def order(self):
        """The sequence and the length of each row."""
        drafts = list(enumerate(self.counts))
        random.Random(len(drafts)).shuffle(drafts)
        pairs = [(n, self.lengths[n] - count) for n, count in enumerate(self.counts)]
        for number, count in drafts:
            first = self.lengths[number] - count + 1
            pairs += [(number, first + place) for place in range(count)]
        return pairs

    def metadata(self, **_part):
        pairs = self.order()
        rows, lens = torch.tensor(pairs).int().to(DEVICE).T.contiguous()
        return AttentionMetadata(
            query_start_loc=torch.arange(len(lens) + 1).int().to(DEVICE),
            seq_lens=lens,
            block_tables=self.tables.to(DEVICE),
            slot_mapping=torch.empty(0, dtype=torch.int64),
            max_query_len=1,
            max_seq_len=max(self.lengths),
            num_decodes=len(lens),
            rows=rows,
            shares_rows=True,
            tree_masks=self.masks(),
        )

    def masks(self):
        """The mask of each row, in the rows' order."""
        if self.trees is None:
            return None
        words = [-1] * len(self.counts)
        for number, length in self.order()[len(self.counts) :]:
            place = length - 1 - (self.lengths[number] - self.counts[number])
            words.append(self.trees[number].masks[place])
        return torch.tensor(words, dtype=torch.int64, device=DEVICE)


class DraftedStep(Drafted, Step):
    """Over a cache of the queries' dtype."""


class DraftedByteStep(Drafted, ByteStep):
    """Over a cache of one byte a number."""


def drafted(dtype, lengths, counts, kind="", **shape):
    """A step of sequences of these lengths and numbers of drafts; each row has a query."""
    longest = [length + count for length, count in zip(lengths, counts, strict=True)]
    if kind:
        step = DraftedByteStep(kind, dtype, longest, **shape)
    else:
        step = DraftedStep(dtype, longest, **shape)
    step.counts = counts
    heads, size = step.query.shape[1:]
    draw = torch.Generator().manual_seed(3)
    query = torch.randn(len(step.order()), heads + 3, size, generator=draw)
    # Queries of unlike sizes change the references of weights at different keys.
    query *= torch.rand(len(query), 1, 1, generator=draw) * 4
    step.query = query.to(dtype).to(DEVICE)[:, :heads]
    return step


LENGTHS = [1, 15, 31, 62, 63, 64, 255, 300, 511, 512, 700, 4094, 4500]
COUNTS = [3, 5, 1, 3, 2, 7, 0, 3, 3, 4, 6, 5, 8]
SHAPES = [(32, 8, 128), (8, 8, 64), (16, 2, 128), (6, 2, 64), (5, 1, 64), (7, 1, 128)]


@pytest.mark.parametrize("kind", ["", *KV_DTYPES])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_drafts_attend_as_in_the_torch_twin(dtype, heads, kv_heads, size, kind):
    for block, most in ((8, 5), (32, len(LENGTHS)), (64, len(LENGTHS))):
        shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "block": block}
        step = drafted(dtype, LENGTHS[:most], COUNTS[:most], kind, **shape)
        step.check(step.run())
        step.check(step.run(is_fixed=True))


@pytest.mark.parametrize("seed", range(8))
def test_random_batches_with_drafts_agree_with_the_torch_twin(dtype, seed):
    draw = random.Random(seed)
    most, number = draw.choice([40, 300, 3000]), draw.choice([1, 5, 50, 200])
    lengths = [draw.randint(1, most) for _ in range(number)]
    counts = [draw.choice([0, 0, 1, 3, 5]) for _ in lengths]
    step = drafted(dtype, lengths, counts, heads=8, kv_heads=2, block=draw.choice([8, 32]))
    step.check(step.run())


@pytest.mark.parametrize("kind", ["", *KV_DTYPES])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_a_deterministic_result_does_not_depend_on_the_drafts_beside_it(
    dtype, heads, kv_heads, size, kind
):
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size}
    step = drafted(dtype, LENGTHS, COUNTS, kind, **shape)
    together = step.run(is_fixed=True)
    step.shares_reads = False
    assert step.run(is_fixed=True).equal(together)
    # The first rows have no draft, or one.
    pairs = step.order()
    for counts in ([0] * len(COUNTS), [min(1, count) for count in COUNTS]):
        few = drafted(dtype, LENGTHS, counts, kind, **shape)
        few.cache, few.tables, few.spec = step.cache, step.tables, step.spec
        places = [pairs.index(pair) for pair in few.order()]
        query = step.query[places]
        assert few.run(query=query, is_fixed=True).equal(together[places])


def test_a_graph_serves_other_drafts_than_it_was_captured_with(dtype):
    step = drafted(dtype, [900, 64, 300, 2000], [3, 5, 0, 2])
    wanted = step.run()
    metadata = step.metadata()
    rows, lengths = metadata.rows.clone(), metadata.seq_lens.clone()
    metadata.rows.zero_()
    metadata.seq_lens.fill_(1)
    output = torch.empty_like(wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            cuda_decode.decode(
                step.query, step.cache, metadata, step.spec, output, shares_reads=True
            )
    metadata.rows.copy_(rows)
    metadata.seq_lens.copy_(lengths)
    for _ in range(3):
        graph.replay()
    assert output.equal(wanted)


def random_trees(counts, seed=1):
    """Trees of so many nodes; the last one of all nodes of `MC_SIM_7B_63`."""
    draw = random.Random(seed)
    grown = [DynamicTree([draw.randint(-1, n - 1) for n in range(count)]) for count in counts]
    return [*grown[:-1], DraftTree(MC_SIM_7B_63)]


TREES = {
    "short": ([1, 15, 31, 62, 63, 64, 255, 300, 511], [3, 16, 1, 9, 63, 0, 31, 7, 63]),
    "long": ([700, 4094, 4500], [4, 5, 63]),
}
"""Lengths and numbers of nodes. The torch twin pads all rows to the longest one."""


@pytest.mark.parametrize("kind", ["", *KV_DTYPES])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_drafts_in_trees_attend_as_in_the_torch_twin(dtype, heads, kv_heads, size, kind):
    for block, name in ((8, "short"), (32, "long"), (64, "short")):
        shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "block": block}
        step = drafted(dtype, *TREES[name], kind, **shape)
        step.trees = random_trees(step.counts)
        for step.shares_reads in (True, False):
            step.check(step.run())
            step.check(step.run(is_fixed=True))


@pytest.mark.parametrize("kind", ["", *KV_DTYPES])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_a_deterministic_result_in_a_tree_does_not_depend_on_other_nodes(
    dtype, heads, kv_heads, size, kind
):
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size}
    lengths, counts = map(list.__add__, *TREES.values())
    step = drafted(dtype, lengths, counts, kind, **shape)
    step.trees = random_trees(counts)
    together = step.run(is_fixed=True)
    step.shares_reads = False
    assert step.run(is_fixed=True).equal(together)
    pairs = step.order()
    few = drafted(dtype, lengths, [min(2, count) for count in counts], kind, **shape)
    few.cache, few.tables, few.spec, few.trees = step.cache, step.tables, step.spec, step.trees
    places = [pairs.index(pair) for pair in few.order()]
    query = step.query[places]
    assert few.run(query=query, is_fixed=True).equal(together[places])


def test_masks_of_chains_change_no_result(dtype):
    step = drafted(dtype, LENGTHS, COUNTS)
    for step.shares_reads in (True, False):
        step.trees = None
        wanted = step.run(is_fixed=True)
        step.trees = [DynamicTree(range(-1, count - 1)) for count in COUNTS]
        assert set(step.masks().tolist()) == {-1}
        assert step.run(is_fixed=True).equal(wanted)
