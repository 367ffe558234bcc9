"""The products that `trimaran tune` measures: those of the rank's own layers."""

from __future__ import annotations

import pytest

from trimaran.bench.limits.shapes import pretrained_config
from trimaran.kernels.tuning.expert_candidates import MixtureSizes
from trimaran.worker.config.engine_config import ParallelConfig
from trimaran.worker.models.tunable import Tunable

NAMES = {
    "llama1b": [
        "3072x2048 plain", "2048x2048 parts", "16384x2048 gated", "2048x8192 parts",
        "128256x2048 plain",
    ],
    # Biases of queries, keys and values; GELU in place of SiLU, and norms before sums.
    "qwen25_7b": [
        "4608x3584 plain", "3584x3584 parts", "37888x3584 gated", "3584x18944 parts",
        "152064x3584 plain",
    ],
    "gemma2_9b": [
        "8192x3584 plain", "3584x4096 plain", "28672x3584 plain", "3584x14336 plain",
        "256000x3584 plain",
    ],
    "deepseek_lite": [
        "3648x2048 plain", "2048x2048 parts", "21888x2048 gated", "2048x10944 parts",
        "5632x2048 gated", "2048x2816 plain", "102400x2048 plain",
    ],
}  # fmt: skip


@pytest.mark.parametrize("shape", NAMES)
def test_every_product_of_a_rank_is_measured_once_in_its_kind(shape):
    found = Tunable.of(pretrained_config(shape, layers=2), ParallelConfig())

    assert [product.name for product in found.products] == NAMES[shape]
    experts = MixtureSizes(experts=64, chosen=6, hidden=2048, inner=1408)
    assert found.mixtures == ((experts,) if shape == "deepseek_lite" else ())


def test_a_rank_of_several_measures_its_share():
    parallel = ParallelConfig(tp_size=2, moe_tp_size=1, moe_ep_size=2)
    found = Tunable.of(pretrained_config("qwen3_30b", layers=1), parallel)

    names = [product.name for product in found.products]
    assert names == ["2560x2048 plain", "2048x2048 parts", "75968x2048 plain"]
    assert found.mixtures == (
        MixtureSizes(experts=64, chosen=8, hidden=2048, inner=768, parts=2),
    )
