"""The first layer's queries, keys and values by token id: a look-up in place of a product.

They depend only on a token's embedding until the rotary embedding, so the table is computed
once for the whole vocabulary (Graef, "Transformer tricks: Precomputing the first layer",
arXiv:2402.13388). Each step then saves a norm and a product.
"""

from __future__ import annotations

import logging

import torch

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.models.interfaces import CausalLM

logger = logging.getLogger(__name__)

MAX_SHARE = 0.02
"""Largest fraction of a GPU's memory for a table that the configuration does not ask for. The
table of an 8B Llama (1.6 GB) gains 0.2 %, about as much as that memory as KV cache gains."""


def uses_first_layer_table(
    config: EngineConfig, model: CausalLM, gpu_memory: tuple[int, int] | None
) -> bool:
    """Whether this rank uses a table; all stages give the same answer.

    ``gpu_memory``: free and total bytes of the rank's GPU; None on a CPU. Collective over
    the tensor group.

    Raises:
        ConfigError: the configuration asks for a table that cannot be made.
    """
    asked = config.first_layer_table
    if asked is False:
        return False
    reason = _why_not(config, model, gpu_memory)
    if asked and reason:
        raise ConfigError(
            f"first-layer-table is set but {reason}: no product is looked up then. Serve "
            "without it."
        )
    return not reason


def make_first_layer_table(model: CausalLM, most_tokens: int) -> None:
    """Compute the model's table, ``most_tokens`` rows at a time.

    A stage without the first layer computes none. Collective over the tensor group.
    """
    project = model.first_projection()
    if project is None:
        return
    ids = torch.arange(model.config.vocab_size, dtype=torch.int32, device=model.device)
    with torch.inference_mode():
        table = torch.cat([project(chunk) for chunk in torch.split(ids, most_tokens)])
    model.first_layer_table = table
    logger.info("first product looked up, %.2f GiB for %d ids", table.nbytes / 2**30, len(ids))


def _why_not(config: EngineConfig, model: CausalLM, gpu_memory: tuple[int, int] | None) -> str:
    """The reason why this rank cannot use a table; empty if it can."""
    if gpu_memory is None:
        return "the device is cpu"
    if config.deterministic:
        return "tokens shall be deterministic, with adapters' places kept in every product"
    if model.config.num_hidden_layers == 1:
        return "the first layer is the last one, which makes queries of some tokens alone"
    if not model.stage.is_first:
        return ""
    project = model.first_projection()
    if project is None:
        return f"{type(model).__name__} begins with no product of token ids alone"
    with torch.inference_mode():
        row = project(torch.zeros(1, dtype=torch.int32, device=model.device))
    num_bytes = model.config.vocab_size * row.nbytes
    free, total = gpu_memory
    size = f"its table takes {num_bytes / 2**30:.2f} GiB"
    # `torch.cat` needs memory for the parts and the table at the same time.
    if 2 * num_bytes > free:
        return f"{size}, and twice as much is needed of the {free / 2**30:.2f} GiB free"
    if not config.first_layer_table and num_bytes > MAX_SHARE * total:
        return f"{size}, above {MAX_SHARE:.0%} of the memory"
    return ""
