"""The layouts that every family is tested in, and which of them apply to it."""

from __future__ import annotations

from typing import Any

from trimaran.worker.config.engine_config import ParallelConfig

LAYOUTS = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tp_size=2),
    "tp4": ParallelConfig(tp_size=4),
    "pp2": ParallelConfig(pp_size=2),
    "tp2·pp2": ParallelConfig(tp_size=2, pp_size=2),
    "tp2, ep2": ParallelConfig(tp_size=2, moe_tp_size=1, moe_ep_size=2),
    "tp4, moe_tp2·ep2": ParallelConfig(tp_size=4, moe_tp_size=2, moe_ep_size=2),
    "dp2, ep2": ParallelConfig(dp_size=2, moe_tp_size=1, moe_ep_size=2),
}


def applies(layout: str, config: Any) -> bool:
    """Whether a configuration of transformers can run so: only experts are shared out."""
    return LAYOUTS[layout].expert_parts == 1 or hasattr(config, "num_experts_per_tok")


def cases(configs: dict[str, Any], world_size: int) -> list[tuple[str, str]]:
    """(model, layout) of all models in all layouts of so many ranks that apply."""
    return [
        (name, layout)
        for name, config in configs.items()
        for layout, parallel in LAYOUTS.items()
        if parallel.world_size == world_size and applies(layout, config)
    ]
