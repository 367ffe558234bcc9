"""Use of the first-layer table, and the reasons against its use."""

from __future__ import annotations

import pytest

from tests.unit.worker.models import models
from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.control.control_plane import LocalControlPlane
from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import EngineConfig, RankConfig
from trimaran.worker.engine.engine import Engine
from trimaran.worker.models.first_layer_table import uses_first_layer_table

TABLE = 150 * (8 + 4 + 4) * 16 * 4
"""Bytes of the model's table."""


@pytest.fixture
def model_of(tmp_path):
    def make(config):
        models.save_huggingface(tmp_path, config)
        return models.load_ours(tmp_path)

    return make


def looks_up(model, memory, **changes):
    config = EngineConfig(model="test", engine_dir="/m", **changes)
    return uses_first_layer_table(config, model, memory)


@pytest.mark.parametrize(
    ("memory", "changes", "expected"),
    [
        ((50 * TABLE, 50 * TABLE), {}, True),
        ((50 * TABLE, 50 * TABLE), {"first_layer_table": False}, False),
        ((50 * TABLE, 50 * TABLE), {"deterministic": True}, False),
        # More than a fiftieth of the memory: only on request.
        ((49 * TABLE, 49 * TABLE), {}, False),
        ((49 * TABLE, 49 * TABLE), {"first_layer_table": True}, True),
        ((2 * TABLE - 1, 99 * TABLE), {}, False),
        (None, {}, False),
    ],
)
def test_a_first_layer_table_is_built_where_the_time_saved_is_worth_the_memory(
    model_of, memory, changes, expected
):
    assert looks_up(model_of(models.llama_config()), memory, **changes) is expected


@pytest.mark.parametrize(
    ("config", "memory", "changes", "complaint"),
    [
        (models.llama_config(), None, {}, "but the device is cpu"),
        (
            models.llama_config(),
            (2 * TABLE - 1, 99 * TABLE),
            {},
            "its table takes 0.00 GiB, and twice as much is needed of the 0.00 GiB free",
        ),
        (models.llama_config(), (TABLE, TABLE), {"deterministic": True}, "be deterministic"),
        (models.llama_config(num_hidden_layers=1), (TABLE, TABLE), {}, "is the last one"),
        (models.gpt2_config(), (TABLE, TABLE), {}, "GPT2LMHeadModel begins with no product"),
    ],
)
def test_a_requested_first_layer_table_that_cannot_be_built_is_refused_with_the_reason(
    model_of, config, memory, changes, complaint
):
    with pytest.raises(
        ConfigError, match=f"^first-layer-table is set.*{complaint}.*Serve with"
    ):
        looks_up(model_of(config), memory, first_layer_table=True, **changes)


def test_an_engine_on_a_cpu_refuses_a_first_layer_table(model_folder):
    config = EngineConfig(
        model="test", engine_dir=str(model_folder), device="cpu", first_layer_table=True
    )
    control, tp = LocalControlPlane(), SingleRankGroup()
    rank = RankConfig(engine=config, group="test")

    with pytest.raises(ConfigError, match="first-layer-table is set but the device is cpu"):
        Engine.load(rank, ParallelLayout(), control, tp)
