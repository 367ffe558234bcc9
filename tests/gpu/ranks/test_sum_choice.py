"""How tensor groups of GPUs choose their sums: norms, kernels that read peers, or NCCL."""

from __future__ import annotations

import pytest
import torch

from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.parallel import sum_norms
from trimaran.worker.parallel.sum_norms import FEW_ROWS, choose_sums_and_norms

pytestmark = pytest.mark.gpu


@pytest.fixture
def own_group(world):
    """A group without a chosen all-reduce."""
    group = connect_group(world, torch.device("cuda", world.local_rank), 60.0)
    yield group
    group.close()


def config(all_reduce, **changes):
    return EngineConfig(
        model="test", engine_dir="/m", device="cuda", all_reduce=all_reduce, **changes
    )


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_fused_sums_are_chosen_by_default_for_steps_of_few_rows(own_group, is_deterministic):
    choose_sums_and_norms(
        config("auto", deterministic=is_deterministic), own_group, own_group.device
    )

    assert own_group.sum_norm is not None
    most = FEW_ROWS[own_group.size]
    rows = torch.zeros(most + 1, 4096, dtype=torch.bfloat16, device=own_group.device)
    assert own_group.sum_norm.takes(rows[:most])
    assert not own_group.sum_norm.takes(rows)
    large = "peer two-shot" if is_deterministic else "nccl"
    assert own_group.transports()["all_reduce"] == f"peer one-shot (large: {large})"


@pytest.mark.parametrize("asked", ["auto", "fused"])
def test_a_failed_check_on_a_rank_disables_fused_sums_on_all_ranks(
    own_group, monkeypatch, caplog, asked
):
    caplog.set_level("INFO")
    found = "a norm is off" * (own_group.rank == own_group.size - 1)
    monkeypatch.setattr(sum_norms, "check_sum_norm", lambda *_, **__: found)

    if asked == "auto":
        choose_sums_and_norms(config(asked), own_group, own_group.device)
        assert "no sums are made by the norms behind them: a norm is off" in caplog.messages
    else:
        with pytest.raises(ConfigError, match="together with norms, but a norm is off"):
            choose_sums_and_norms(config(asked), own_group, own_group.device)

    assert own_group.sum_norm is None
    assert own_group.transports()["all_reduce"] == "peer one-shot (large: nccl)"
