"""Settings that move experts, and the refusal of settings without effect."""

from __future__ import annotations

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.experts_config import ExpertsConfig


def test_experts_divided_between_ranks_may_be_rebalanced():
    ExpertsConfig().check(0, 1)
    ExpertsConfig(rebalance_steps=100).check(8, 2)
    ExpertsConfig(rebalance_steps=100, num_redundant=8).check(8, 2)


@pytest.mark.parametrize(
    ("steps", "redundant", "experts", "parts", "words"),
    [
        (0, 2, 8, 2, "--moe-redundant-experts is 2 but --moe-rebalance-steps is 0"),
        (10, 0, 0, 1, "it has no experts"),
        (10, 0, 8, 1, "all ranks have a part of every expert.*--moe-ep-size"),
        (10, 3, 8, 2, "is 3 but must be a multiple of the 2 parts.*at most 8"),
        (10, 10, 8, 2, "is 10 but must be a multiple of the 2 parts.*at most 8"),
    ],
)
def test_rebalancing_settings_without_effect_are_refused(
    steps, redundant, experts, parts, words
):
    config = ExpertsConfig(rebalance_steps=steps, num_redundant=redundant)

    with pytest.raises(ConfigError, match=words):
        config.check(experts, parts)


def test_expert_rebalancing_is_refused_in_deterministic_mode():
    with pytest.raises(ConfigError, match="--deterministic is set"):
        ExpertsConfig(rebalance_steps=10).check(8, 2, is_deterministic=True)
