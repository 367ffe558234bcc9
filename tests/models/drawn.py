"""Configurations drawn from the keys of `field_cases`, and engines to serve them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tests.models.families import family_configs
from tests.models.field_cases import SERVED
from tests.models.group_run import engine_config
from tests.models.layouts import LAYOUTS, applies
from tests.unit.worker.models import models
from trimaran.launcher.cli.main import main
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.config.pretrained_families import FAMILIES
from trimaran.worker.models.registry import DTYPES

CONFIGS = family_configs()
ARCHITECTURES = {family.model_type: name for name, family in reversed(FAMILIES.items())}
_WIDTHS = ("intermediate_size", "n_inner", "ffn_hidden_size", "moe_intermediate_size")
_PREFIX, _PROMPTS = 45, 5


@dataclass(slots=True)
class Drawn:
    """A model, its engine, and its requests."""

    values: dict[str, Any]
    """The values of the model's ``config.json``."""

    config: EngineConfig
    theirs: Any
    """Transformers' model of the same files."""

    prompts: list[list[int]]


def drawn(name: str, number: int, num_ranks: int, folder: Path) -> Drawn:
    """The draw of this number for a model of `family_configs`, its files in ``folder``."""
    chance = random.Random(f"{name} {number} {num_ranks}")
    while True:
        # Some keys are incompatible: transformers then makes no model, or a model that cannot
        # run.
        values = _draw_values(chance, name)
        try:
            config = AutoConfig.for_model(**json.loads(json.dumps(values)))
            theirs = _save(chance, values, config, folder)
            theirs(torch.tensor([[0, 1]]))
            break
        except (AttributeError, RuntimeError, ValueError):
            continue
    layouts = [
        layout
        for layout, parallel in LAYOUTS.items()
        if parallel.world_size == num_ranks and applies(layout, config)
    ]
    engine = _draw_engine(chance, folder, chance.choice(layouts))
    return Drawn(values, engine, theirs, _draw_prompts(chance, values["vocab_size"]))


def _draw_values(chance: random.Random, name: str) -> dict[str, Any]:
    """Sizes, and up to four of the keys that most checkpoints do not have."""
    values = json.loads(json.dumps(CONFIGS[name].to_dict()))
    values["vocab_size"] = chance.choice((97, 150, 201))
    for key in _WIDTHS:
        if values.get(key):
            values[key] = chance.choice((37, 50, 104))
    if values.get("num_key_value_heads") and "kv_lora_rank" not in values:
        values["num_key_value_heads"] = chance.choice((1, 2, 3, 4, 6, 12))
    for changes in chance.sample(list(SERVED[name].values()), chance.randint(1, 4)):
        values.update(changes)
    values["architectures"] = [ARCHITECTURES[values["model_type"]]]
    values["dtype"] = chance.choice(list(DTYPES))
    # Transformers derives omitted keys from other keys, but not null values.
    made = ("layer_types", "rope_parameters")
    return {key: value for key, value in values.items() if key not in made or value is not None}


def _save(chance: random.Random, values: dict[str, Any], config: Any, folder: Path) -> Any:
    """Weights in the dtype and the files that were drawn; transformers has them in float32."""
    for path in folder.iterdir():
        path.unlink()
    file_size = chance.choice(("5GB", "100KB"))
    models.save_huggingface(folder, config, dtype=DTYPES[values["dtype"]], file_size=file_size)
    (folder / "config.json").write_text(json.dumps(values))
    return models.load_huggingface(folder, config)


def _draw_engine(chance: random.Random, folder: Path, layout: str) -> EngineConfig:
    """Engines of the folder, or of an engine folder built from it; with long and short
    steps, and with a cache for all or for few sequences."""
    parallel = LAYOUTS[layout]
    source = folder
    if chance.random() < 0.7:
        source = folder.with_name(folder.name + "-engine")
        words = ["build", "--checkpoint", folder, "--output", source, "--dtype", "float32",
                 "--workers", 1]  # fmt: skip
        for name in ("tp_size", "pp_size", "dp_size", "moe_tp_size", "moe_ep_size"):
            if getattr(parallel, name) > 1:
                words += [f"--{name.replace('_', '-')}", getattr(parallel, name)]
        assert main([str(word) for word in words]) == 0
    config = engine_config(source, parallel)
    few_tokens = 112 if parallel.world_size == 1 else 256
    return replace(
        config,
        scheduler=replace(
            config.scheduler,
            max_num_batched_tokens=chance.choice((9, 40, 300)),
            max_num_seqs=chance.choice((2, 8)),
            policy=chance.choice(("max_utilization", "guaranteed_no_evict")),
        ),
        cache=replace(
            config.cache,
            max_tokens=chance.choice((few_tokens, 1024)),
            tokens_per_block=chance.choice((4, 8, 16)),
        ),
    )


def _draw_prompts(chance: random.Random, vocab_size: int) -> list[list[int]]:
    """Prompts of one token up to more than any window and LongRoPE's short factors; some
    prompts share a prefix."""
    prefix = [chance.randrange(vocab_size) for _ in range(_PREFIX)]
    prompts = []
    for _ in range(_PROMPTS):
        length = chance.choice((1, 4, 16, 28, 45))
        tail = [chance.randrange(vocab_size) for _ in range(length)]
        prompts.append(prefix + tail if chance.random() < 0.5 else tail)
    return prompts
