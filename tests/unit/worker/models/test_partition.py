"""Heads and widths that the ranks do not divide: the share of each rank, and completeness."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.models.families import family_configs
from tests.unit.worker.models import models
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import load_checkpoint
from trimaran.worker.parallel.partition import even_partition, partition_heads
from trimaran.worker.parallel.tensor_parallel import ShardPosition

HEADS = [
    (8, 8), (8, 4), (8, 2), (8, 1), (12, 2), (12, 3), (71, 1), (6, 3), (15, 3), (25, 5),
    (14, 2), (32, 8), (40, 10), (9, 9),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_every_head_is_on_one_rank_beside_its_key_value_head(num_heads, num_kv_heads, size):
    if size > num_heads:
        size = num_heads
    group = num_heads // num_kv_heads
    partitions = [partition_heads(num_heads, num_kv_heads, rank, size) for rank in range(size)]

    found = []
    for partition in partitions:
        queries, keys = partition.queries, partition.keys
        assert (queries.size, keys.size) == (
            partitions[0].queries.size,
            partitions[0].keys.size,
        )
        # A rank's heads are grouped evenly, heads of zeros included.
        local_group = queries.size // keys.size
        assert local_group * keys.size == queries.size
        for place in range(queries.count):
            head = queries.first + place
            assert keys.first + place // local_group == head // group
            assert place // local_group < keys.count
            found.append(head)
    assert sorted(found) == list(range(num_heads))
    # The smallest possible number of key-value heads on a rank.
    assert partitions[0].keys.size == -(-num_kv_heads // size)


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        ((32, 8), 4, (8, 2)),
        ((32, 8), 16, (2, 1)),
        ((71, 1), 2, (36, 1)),
        ((71, 1), 4, (18, 1)),
        ((12, 12), 8, (2, 2)),
        ((14, 2), 4, (4, 1)),
        ((15, 3), 2, (10, 2)),
        ((40, 10), 4, (12, 3)),
    ],
)
def test_ranks_hold_few_padding_heads(heads, size, expected):
    partition = partition_heads(*heads, num_ranks=size)
    assert (partition.queries.size, partition.keys.size) == expected


@pytest.mark.parametrize(("whole", "size"), [(96, 4), (104, 3), (11008, 6), (10, 4), (7, 2)])
def test_a_width_is_divided_between_ranks_in_order_and_aligned(whole, size):
    partitions = [even_partition(whole, rank, size) for rank in range(size)]

    parts = [
        range(partition.first, partition.first + partition.count) for partition in partitions
    ]
    assert list(itertools.chain(*parts)) == list(range(whole))
    assert len({partition.size for partition in partitions}) == 1
    assert whole % size == 0 or partitions[0].size % 8 == 0


@pytest.mark.parametrize("name", ["qwen3-tied-biases", "mixtral", "deepseek3"])
def test_padding_weights_of_a_rank_are_set_to_zero(name, tmp_path):
    config = family_configs()[name]
    config.num_attention_heads, config.intermediate_size = 10, 50
    if name == "deepseek3":
        config.num_key_value_heads, config.moe_intermediate_size = 10, 26
    models.save_huggingface(tmp_path, config)
    found = EngineFolder.load(tmp_path)
    stage = StageRange.of(found.config.num_hidden_layers, 0, 1)
    model = build_model(
        found.config, stage, ShardPosition(3, 4), dtype=torch.float32, device=models.CPU
    )
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))

    load_checkpoint(model, found.weight_files)

    assert all(parameter.isfinite().all() for parameter in model.parameters())
    # The last of four ranks has room for three heads, and fewer than three.
    partition = model.layers["1"].attention.o_proj.input_partition
    assert 0 < partition.count < partition.size
    assert not model.layers["1"].attention.o_proj.weight[:, partition.count :].any()
    if name != "deepseek3":
        rows = model.layers["1"].attention.qkv_proj.weight[: partition.size]
        assert rows[: partition.count].any(dim=1).all() and not rows[partition.count :].any()
