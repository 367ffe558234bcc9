"""The choice of all-reduces fused with norms: by configuration and hardware."""

from __future__ import annotations

import pytest
import torch

from trimaran.comm.collectives.torch_groups import NcclGroup
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_config import ALL_REDUCES, EngineConfig
from trimaran.worker.parallel import sum_norms
from trimaran.worker.parallel.sum_norms import FEW_ROWS, MAX_ROWS, choose_sums_and_norms

CPU = torch.device("cpu")


class Ranks(NcclGroup):
    """A group of this size that sums through peers' memory; all ranks answer like this one."""

    def __init__(self, size):
        self.size, self.rank, self.device = size, 0, CPU
        self.peer_sum = lambda tensor: None

    def all_gather(self, tensor, dim=-1):
        return torch.cat([tensor] * self.size, dim)


@pytest.fixture(autouse=True)
def _peers_memory_was_compared(monkeypatch):
    monkeypatch.setattr(sum_norms, "choose_sums", lambda *_: None)


def config(all_reduce, **changes):
    return EngineConfig(
        model="test", engine_dir="/m", device="cuda", all_reduce=all_reduce, **changes
    )


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("asked", ALL_REDUCES)
def test_fused_sums_take_larger_steps_when_requested_and_only_faster_steps_by_default(
    monkeypatch, asked, is_exact
):
    tried = []
    monkeypatch.setattr(
        sum_norms,
        "try_sum_norm",
        lambda _, limits, *, is_exact: tried.append((limits, is_exact)) or "",
    )

    choose_sums_and_norms(config(asked, deterministic=is_exact), Ranks(2), CPU)

    limits = {"auto": FEW_ROWS, "fused": MAX_ROWS}
    assert tried == ([(limits[asked], is_exact)] if asked in limits else [])
    assert all(most <= MAX_ROWS[size] for size, most in FEW_ROWS.items())


def test_unavailable_fused_sums_are_refused_only_when_requested_explicitly(caplog):
    caplog.set_level("INFO")
    group = Ranks(3)
    reason = "the group has 3 ranks and may have 2, 4"

    choose_sums_and_norms(config("auto"), group, CPU)

    assert group.sum_norm is None
    assert caplog.messages == [f"no sums are made by the norms behind them: {reason}"]
    with pytest.raises(ConfigError, match=f"together with norms, but {reason}, 8"):
        choose_sums_and_norms(config("fused"), group, CPU)


def test_fused_norms_need_peer_memory(caplog):
    caplog.set_level("INFO")
    group = Ranks(2)
    group.peer_sum = None

    choose_sums_and_norms(config("auto"), group, CPU)

    assert group.sum_norm is None
    assert not caplog.messages
