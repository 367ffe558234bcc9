"""The CPU kernels against their torch twins, and their independence of the batch."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def ops(request, dtype):
    yield CpuOps(load_library(), dtype, request.param)
    CpuOps(load_library(), dtype, 1)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def _close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    limit = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=limit * scale, rtol=limit)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 16, 33, 100])
@pytest.mark.parametrize(("width", "outputs"), [(64, 96), (1408, 40), (37, 19), (8, 1)])
def test_linear_is_that_of_torch(ops, dtype, rows, width, outputs):
    x, weight = _random(rows, width, dtype=dtype), _random(outputs, width, dtype=dtype, seed=1)
    bias = _random(outputs, dtype=dtype, seed=2)

    actual = ops.linear(x, weight, bias)

    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    _close(actual, exact.to(dtype), scale=width**0.5)


def test_logits_are_not_rounded_to_the_weights_dtype(ops, dtype):
    x, weight = _random(3, 64, dtype=dtype), _random(50, 64, dtype=dtype, seed=1)
    logits = ops.logits(x, weight)
    torch.testing.assert_close(logits, x.float() @ weight.float().T, atol=1e-4, rtol=1e-5)


def test_a_rows_product_does_not_depend_on_the_rows_beside_it(ops, dtype):
    x, weight = _random(40, 200, dtype=dtype), _random(70, 200, dtype=dtype, seed=1)

    together = ops.linear(x, weight)

    for count in (1, 2, 3, 7, 16, 39):
        assert ops.linear(x[:count].clone(), weight).equal(together[:count])
        assert ops.linear(x[-count:], weight).equal(together[-count:])


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("width", [50, 256])
def test_a_tokens_gated_gelu_does_not_depend_on_the_tokens_beside_it(ops, dtype, width, name):
    gate_up = _random(40, 2 * width, dtype=dtype)

    together = ops.gelu_and_mul(gate_up, name)

    for count in (1, 2, 5, 17):
        assert ops.gelu_and_mul(gate_up[:count].clone(), name).equal(together[:count])
        assert ops.gelu_and_mul(gate_up[-count:].clone(), name).equal(together[-count:])


@pytest.mark.parametrize("width", [64, 500, 16, 7])
def test_norms_are_those_of_the_reference(ops, dtype, width):
    x, weight = _random(9, width, dtype=dtype), _random(width, dtype=dtype, seed=1)
    bias = _random(width, dtype=dtype, seed=2)

    _close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), 4)
    _close(
        ops.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5), 4
    )


def test_fused_norms_leave_the_sum_in_the_residual(ops, dtype):
    x, weight = _random(9, 96, dtype=dtype), _random(96, dtype=dtype, seed=1)
    bias, residual = _random(96, dtype=dtype, seed=2), _random(9, 96, dtype=dtype, seed=3)
    ours, theirs = residual.clone(), residual.clone()

    normed = ops.add_rms_norm(x, ours, weight, 1e-5)

    _close(normed, reference.add_rms_norm(x, theirs, weight, 1e-5), 4)
    assert ours.equal(theirs)
    ours, theirs = residual.clone(), residual.clone()
    normed = ops.add_layer_norm(x, ours, weight, bias, 1e-5)
    _close(normed, reference.add_layer_norm(x, theirs, weight, bias, 1e-5), 4)
    assert ours.equal(theirs)


@pytest.mark.parametrize("width", [96, 21])
def test_silu_and_mul_is_that_of_the_reference_over_the_whole_range(ops, dtype, width):
    x = _random(5, 2 * width, dtype=dtype) * 20
    _close(ops.silu_and_mul(x), reference.silu_and_mul(x), 4)


@pytest.mark.parametrize("name", ["gelu_new", "gelu", "relu"])
def test_activations_are_those_of_the_reference(ops, dtype, name):
    x = _random(5, 77, dtype=dtype) * 4
    _close(ops.activation(x, name), reference.activation(x, name))


@pytest.mark.parametrize("head_size", [64, 16, 24])
def test_rotation_is_that_of_the_reference_on_strided_heads(ops, dtype, head_size):
    qkv = _random(7, 6, head_size, dtype=dtype)
    angles = torch.outer(torch.arange(50.0), torch.arange(head_size // 2) + 0.5)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([0, 3, 49, 2, 2, 17, 1])
    ours, theirs = qkv.clone(), qkv.clone()

    ops.rotate(ours[:, :4], table, positions)

    reference.rotate(theirs[:, :4], table, positions)
    _close(ours, theirs)
    assert ours[:, 4:].equal(qkv[:, 4:])


def test_keys_and_values_are_written_to_their_slots_alone(ops, dtype):
    pool = torch.zeros((6, 3, 2, 4, 2, 16), dtype=dtype)
    expected = pool.clone()
    qkv = _random(5, 8, 16, dtype=dtype)
    slots = torch.tensor([0, 23, 7, 8, 13])

    ops.write_kv(qkv[:, 4:6], qkv[:, 6:], pool[:, 1], slots)

    reference.write_kv(qkv[:, 4:6], qkv[:, 6:], expected[:, 1], slots)
    assert pool.equal(expected)


@pytest.mark.parametrize(("num_queries", "num_kv", "size"), [(12, 2, 20), (4, 4, 64)])
def test_norms_of_heads_are_those_of_the_reference(ops, dtype, num_queries, num_kv, size):
    heads = _random(5, num_queries + 2 * num_kv, size, dtype=dtype)
    weights = _random(size, dtype=dtype, seed=1), _random(size, dtype=dtype, seed=2)
    expected = heads.clone()
    reference.norm_heads(expected, *weights, num_kv, 1e-5)

    ops.norm_heads(heads, *weights, num_kv, 1e-5)

    _close(heads, expected)
    assert heads[:, -num_kv:].equal(expected[:, -num_kv:])


class _Batch:
    """Sequences of (cached tokens, queries) over a pool whose unused memory is NaN."""

    def __init__(self, dtype, sequences, *, heads=4, kv_heads=2, head_size=32, block_size=8):
        self.starts = torch.tensor([0, *(q for _, q in sequences)]).cumsum(0).int()
        self.lens = torch.tensor([past + q for past, q in sequences], dtype=torch.int32)
        most = -(-int(self.lens.max()) // block_size)
        order = torch.randperm(
            most * len(sequences), generator=torch.Generator().manual_seed(5)
        )
        self.tables = order.int().view(len(sequences), most)
        shape = (len(order), 2, 2, block_size, kv_heads, head_size)
        pool = torch.full(shape, float("nan"), dtype=dtype)
        self.cache = pool[:, 1]
        for row, length in zip(self.tables.long(), self.lens.tolist(), strict=True):
            slots = torch.cat([block * block_size + torch.arange(block_size) for block in row])
            key = _random(length, kv_heads, head_size, dtype=dtype, seed=length)
            value = _random(length, kv_heads, head_size, dtype=dtype, seed=length + 1)
            reference.write_kv(key, value, self.cache, slots[:length])
        self.query = _random(int(self.starts[-1]), heads, head_size, dtype=dtype, seed=9)
        self.longest = (max(q for _, q in sequences), int(self.lens.max()))
        self.spec = AttentionSpec(scale=head_size**-0.5)

    def run(self, ops, first=0, end=None, num_decodes=0, masks=None):
        """Attention of the sequences from ``first`` to ``end``."""
        end = len(self.lens) if end is None else end
        tokens = slice(int(self.starts[first]), int(self.starts[end]))
        chosen = slice(first, end)
        metadata = AttentionMetadata(
            query_start_loc=self.starts[first : end + 1] - self.starts[first],
            seq_lens=self.lens[chosen],
            block_tables=self.tables[chosen],
            slot_mapping=self.lens[chosen].long(),
            max_query_len=self.longest[0],
            max_seq_len=self.longest[1],
            num_decodes=num_decodes,
            tree_masks=masks,
        )
        return ops.paged_attention(self.query[tokens], self.cache, metadata, self.spec)


MIXED = [(0, 1), (7, 1), (8, 1), (30, 1), (0, 8), (5, 20), (9, 7), (200, 3)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"),
    [
        (4, 2, 32, 8),
        (8, 1, 64, 32),
        (4, 4, 16, 16),
        (32, 1, 16, 4),
        (6, 2, 80, 16),
        (2, 1, 24, 5),
    ],
)
def test_attention_over_decodes_and_chunks_is_that_of_the_reference(
    ops, dtype, heads, kv_heads, head_size, block_size
):
    batch = _Batch(
        dtype, MIXED, heads=heads, kv_heads=kv_heads, head_size=head_size, block_size=block_size
    )
    _close(batch.run(ops), batch.run(reference))


SPECS = [
    AttentionSpec(scale=0.2, window=1),
    AttentionSpec(scale=0.2, window=7),
    AttentionSpec(scale=0.2, window=40, num_sinks=3),
    AttentionSpec(scale=0.2, window=18, num_sinks=20),
    AttentionSpec(scale=0.2, window=1000, num_sinks=3),
    AttentionSpec(scale=2.0, soft_cap=1.5),
    AttentionSpec(scale=0.5, window=19, num_sinks=8, soft_cap=20.0),
    AttentionSpec(scale=0.2, position_bias=_random(6, 240, dtype=torch.float32, seed=5)),
    AttentionSpec(
        scale=0.2, window=9, position_bias=_random(6, 203, dtype=torch.float32, seed=6)
    ),
    AttentionSpec(scale=0.2, sink_logits=_random(6, dtype=torch.float32, seed=7)),
    AttentionSpec(
        scale=0.2, window=9, num_sinks=3, sink_logits=_random(6, dtype=torch.float32, seed=8)
    ),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_windows_sinks_and_caps_are_those_of_the_reference(ops, dtype, spec):
    batch = _Batch(dtype, MIXED, heads=6)
    batch.spec = spec
    expected = batch.run(reference)
    if spec.window:
        # Blocks that no query sees may belong to other sequences.
        for row, past in zip(batch.tables.long(), (p for p, _ in MIXED), strict=True):
            first, end = -(-spec.num_sinks // 8), max(0, past + 1 - spec.window) // 8
            batch.cache[row[first:end]] = float("nan")

    _close(batch.run(ops), expected)
    _close(batch.run(reference), expected)


TREE_MASKS = [-1, 1, -3, -(1 << 20) | 5, -(1 << 63) | 0x5555, 0x7FFF_0000_FFFF_0001]
"""Words of trees; each row sees itself."""


@pytest.mark.parametrize("name", ["reference", "own"])
def test_a_row_of_a_tree_does_not_see_keys_that_its_mask_hides(ops, dtype, name):
    lengths = [1, 20, 64, 65, 80, 200]
    for word in TREE_MASKS:
        batch = _Batch(dtype, [(length - 1, 1) for length in lengths])
        masks = torch.full((len(lengths),), word)
        actual = batch.run(ops if name == "own" else reference, num_decodes=6, masks=masks)
        for number, length in enumerate(lengths):
            # The same without the hidden keys, in a sequence of the keys that are seen.
            seen = [k for k in range(length) if length - k > 64 or word >> length - 1 - k & 1]
            row = batch.tables[number].long()
            slots = torch.tensor([int(row[k // 8]) * 8 + k % 8 for k in seen])
            keys, values = (
                batch.cache[slots // 8, kind, slots % 8].float().repeat_interleave(2, 1)
                for kind in (0, 1)
            )
            query = batch.query[number].float() * batch.spec.scale
            weights = torch.einsum("nh,lnh->nl", query, keys).softmax(-1)
            expected = torch.einsum("nl,lnh->nh", weights, values)
            _close(actual[number], expected.to(dtype))


def test_a_sequences_attention_does_not_depend_on_the_sequences_beside_it(ops, dtype):
    batch = _Batch(dtype, MIXED)
    together = batch.run(ops)
    for number in range(len(MIXED)):
        alone = batch.run(ops, number, number + 1)
        rows = slice(int(batch.starts[number]), int(batch.starts[number + 1]))
        assert alone.equal(together[rows]), MIXED[number]


@pytest.mark.parametrize("num_decodes", [1, 3, 4])
def test_the_split_between_decodes_and_prompts_does_not_change_attention(num_decodes):
    batch = _Batch(torch.float32, MIXED)

    parted = batch.run(reference, num_decodes=num_decodes)

    torch.testing.assert_close(parted, batch.run(reference), rtol=1e-6, atol=1e-6)


def test_decode_and_prompt_parts_of_a_step_hold_each_token_once():
    batch = _Batch(torch.float32, [(7, 1), (8, 1), (5, 20)])
    metadata = AttentionMetadata(
        query_start_loc=batch.starts,
        seq_lens=batch.lens,
        block_tables=batch.tables,
        slot_mapping=torch.arange(24),  # two tokens are padding
        max_query_len=20,
        max_seq_len=25,
        num_decodes=2,
        rows=torch.tensor([2, 0, 1]).int(),
    )

    (decode_tokens, decodes), (chunk_tokens, chunks) = metadata.parts()

    assert (decode_tokens, chunk_tokens) == (slice(0, 2), slice(2, None))
    assert decodes.query_start_loc.tolist() == [0, 1, 2]
    assert chunks.query_start_loc.tolist() == [0, 20]
    assert (decodes.num_decodes, decodes.max_query_len) == (2, 1)
    assert (chunks.num_decodes, chunks.max_query_len) == (0, 20)
    assert chunks.slot_mapping.tolist() == list(range(2, 24))
    assert chunks.tables().equal(batch.tables[1:2])
    assert decodes.tables().equal(batch.tables[[2, 0]])


@pytest.mark.parametrize("spec", [None, *SPECS], ids=str)
def test_a_chunked_prompt_has_the_attention_of_a_whole_prompt(ops, dtype, spec):
    whole = _Batch(dtype, [(0, 50)])
    whole.spec = spec or whole.spec
    expected = whole.run(ops)
    for first, end in ((0, 1), (1, 14), (14, 50)):
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, end - first]).int(),
            seq_lens=torch.tensor([end]).int(),
            block_tables=whole.tables,
            slot_mapping=torch.arange(first, end),
            max_query_len=end - first,
            max_seq_len=end,
        )
        query = whole.query[first:end]
        actual = ops.paged_attention(query, whole.cache, metadata, whole.spec)
        assert actual.equal(expected[first:end])
