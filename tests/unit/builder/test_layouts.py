"""In every layout a built file holds what its rank would cut from the checkpoint itself."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.worker.models import models
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import load_checkpoint
from trimaran.worker.parallel.tensor_parallel import ExpertRanks, ShardPosition

DENSE = ["--tp-size 4", "--tp-size 3", "--tp-size 2 --pp-size 3", "--pp-partition 1,REST"]
EXPERTS = [
    *DENSE,
    "--tp-size 2 --moe-ep-size 2",
    "--tp-size 4 --moe-tp-size 2 --moe-ep-size 2",
    "--dp-size 2 --moe-ep-size 2",
    "--tp-size 2 --pp-partition 1,REST --dp-size 2 --moe-tp-size 2 --moe-ep-size 2",
]
CASES = {
    "qwen3-tied-biases": (models.dense_configs(), DENSE),
    "mixtral": (models.expert_configs(), EXPERTS),
    "gpt-oss": (models.sink_configs(), EXPERTS),
    "qwen2-moe-normalised-mixed": (models.expert_configs(), EXPERTS),
}


def _in_memory(source: EngineFolder, rank: int, built: EngineFolder):
    """The parameters of one rank that shards the checkpoint when it loads it."""
    mapping = built.mapping
    layout = ParallelLayout(
        rank=rank, tp_size=mapping.tp_size, pp_size=mapping.pp_size, dp_size=mapping.dp_size
    )
    place = ShardPosition(layout.stage_ranks.index(rank), len(layout.stage_ranks))
    model = build_model(
        source.config,
        StageRange.of(
            source.config.num_hidden_layers,
            layout.pp_rank,
            layout.pp_size,
            mapping.pp_partition,
        ),
        ShardPosition(layout.tp_rank, layout.tp_size),
        dtype=torch.float32,
        device=models.CPU,
        experts=ExpertRanks(mapping.moe_ep_size, place),
    )
    load_checkpoint(model, source.weight_files)
    return dict(model.named_parameters())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A Hugging Face folder of each configuration."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, (configs, _) in CASES.items():
        models.save_huggingface(folder / name, configs[name])
    return folder


@pytest.mark.matrix(keep=14)
@pytest.mark.parametrize(
    ("name", "flags"), [(name, flags) for name in CASES for flags in CASES[name][1]]
)
def test_a_built_file_equals_the_shard_that_a_rank_cuts_from_the_checkpoint(
    name, flags, checkpoints, tmp_path, trimaran
):
    source = EngineFolder.load(checkpoints / name)
    flags = flags.replace("REST", str(source.config.num_hidden_layers - 1))
    done = trimaran("build", "--checkpoint", checkpoints / name, "--output",
                    tmp_path / "engine", *flags.split())  # fmt: skip
    assert done.code == 0, done.err
    built = EngineFolder.load(tmp_path / "engine")
    for rank, path in enumerate(built.weight_files):
        mine = load_file(path)
        expected = _in_memory(source, rank, built)
        assert mine.keys() == expected.keys()
        assert all(mine[key].equal(expected[key]) for key in mine), rank
