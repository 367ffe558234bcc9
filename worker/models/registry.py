"""Architectures by name, and the loading of a model from an engine's configuration."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import ParallelLayout
from trimaran.kernels.adapters import kernel_variants
from trimaran.kernels.dispatch import select_ops
from trimaran.kernels.operators import Ops
from trimaran.kernels.tables.tuned_choices import TunedChoices, tuned_files
from trimaran.kernels.torch_ops import TorchOps
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.linear import LayerContext
from trimaran.worker.models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from trimaran.worker.models.gemma import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
)
from trimaran.worker.models.gpt2 import GPT2LMHeadModel
from trimaran.worker.models.gpt_neox import (
    FalconForCausalLM,
    GPTJForCausalLM,
    GPTNeoXForCausalLM,
)
from trimaran.worker.models.gpt_oss import GptOssForCausalLM
from trimaran.worker.models.interfaces import CausalLM, StageRange
from trimaran.worker.models.llama import (
    LlamaForCausalLM,
    Mistral3ForConditionalGeneration,
    MistralForCausalLM,
)
from trimaran.worker.models.mixtral import MixtralForCausalLM
from trimaran.worker.models.phi import Phi3ForCausalLM, PhiForCausalLM
from trimaran.worker.models.quantized_layers import choose_methods, finish_weights, log_methods
from trimaran.worker.models.qwen import (
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)
from trimaran.worker.models.weights.kv_scales import quantize_kv_cache, quantized_kv_dtype
from trimaran.worker.models.weights.weight_loader import (
    fill_random,
    load_checkpoint,
    load_shard,
)
from trimaran.worker.parallel.tensor_parallel import ONE_PART, ExpertRanks, TensorGroup

logger = logging.getLogger(__name__)

MODELS: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Mistral3ForConditionalGeneration": Mistral3ForConditionalGeneration,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen2MoeForCausalLM": Qwen2MoeForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "GPTJForCausalLM": GPTJForCausalLM,
    "GPTNeoXForCausalLM": GPTNeoXForCausalLM,
    "FalconForCausalLM": FalconForCausalLM,
    "PhiForCausalLM": PhiForCausalLM,
}

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def dtype_by_name(name: str) -> torch.dtype:
    """The torch dtype of this name."""
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r} but must be one of auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def build_model(
    config: PretrainedConfig,
    stage: StageRange,
    tp: TensorGroup,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops | None = None,
    max_seq_len: int = 0,
    experts: ExpertRanks = ONE_PART,
) -> CausalLM:
    """A rank's model with memory for its weights, which are not loaded yet.

    With a `ShardPosition` as ``tp`` the model can be loaded and saved without peers. ``ops``
    are torch's unless given. ``max_seq_len`` is the longest sequence that will run, 0 for the
    longest that the model allows.
    """
    if config.architecture not in MODELS:
        raise ConfigError(
            f"the architecture {config.architecture!r} is not served. Served are "
            f"{', '.join(MODELS)}."
        )
    context = LayerContext(
        tp,
        ops or TorchOps(),
        dtype,
        device,
        max_seq_len,
        experts.num_parts,
        experts.ranks,
        config.quantization,
    )
    model = MODELS[config.architecture](config, stage, context).eval()
    choose_methods(model)
    return model


def _choices(
    config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> TunedChoices | None:
    """The measured choices of kernels for a GPU; None where no chooser asks for them."""
    if device.type != "cuda" or config.deterministic or dtype == torch.float32:
        return None
    card = torch.cuda.get_device_name(device)
    choices = TunedChoices(card, tuned_files(config.engine_dir))
    logger.info("%s", choices)
    return choices


def _compile_ahead(
    config: EngineConfig,
    folder: EngineFolder,
    device: torch.device,
    dtype: torch.dtype,
    choices: TunedChoices | None,
) -> None:
    """Start to compile the slowest kernels of a folder's model on a GPU."""
    from trimaran.kernels.compile_ahead import ModelSizes, compile_ahead

    model = folder.config
    # Quantized experts, and those that run the same way for any rows, have other kernels.
    has_products = choices is not None and model.quantization is None
    num_experts = model.num_experts // config.parallel.expert_parts if has_products else 0
    sizes = ModelSizes(model.hidden_size, model.vocab_size, num_experts)
    kv_dtype = quantized_kv_dtype(folder, config.cache.dtype, dtype)
    compile_ahead(
        device, dtype, sizes, _adapter_variants(config), kv_dtype, choices,
        has_drafts=config.scheduler.speculation.is_on,
        has_trees=config.scheduler.speculation.has_trees,
    )  # fmt: skip


def _adapter_variants(config: EngineConfig) -> list[tuple[int, int]]:
    """The kernels of the adapters that the engine may serve."""
    if not config.lora.gpu_memory_fraction:
        return []
    has_large_blocks = not config.deterministic
    return kernel_variants(config.lora.max_adapter_size, has_large_blocks=has_large_blocks)


def load_model(
    config: EngineConfig,
    layout: ParallelLayout,
    tp: TensorGroup,
    device: torch.device,
    *,
    expert_ranks: TensorGroup | None = None,
) -> CausalLM:
    """This rank's model, ready to run. Local: does not wait for other ranks.

    The folder is an engine folder of these parallel sizes, or a Hugging Face folder that is
    sharded here. ``expert_ranks`` are the ranks of all data-parallel ranks that share experts.
    """
    start = time.monotonic()
    is_random = config.load_format == "random"
    folder = EngineFolder.load(config.engine_dir, check_weights=not is_random)
    folder = folder.quantized(config.quantization)
    parallel = config.parallel
    folder.check_parallel(
        layout.tp_size, layout.pp_size, parallel.expert_parts, parallel.expert_dp_size
    )
    dtype = dtype_by_name(folder.config.dtype if config.dtype == "auto" else config.dtype)
    num_layers = folder.config.num_hidden_layers
    stage = StageRange.of(num_layers, layout.pp_rank, layout.pp_size, parallel.pp_partition)
    choices = _choices(config, device, dtype)
    if device.type == "cuda":
        _compile_ahead(config, folder, device, dtype, choices)
    ops = select_ops(device, dtype, config.num_threads, config.deterministic, choices)
    model = build_model(
        folder.config,
        stage,
        tp,
        dtype=dtype,
        device=device,
        ops=ops,
        max_seq_len=config.scheduler.max_seq_len,
        experts=ExpertRanks(parallel.expert_parts, expert_ranks),
    )
    if is_random:
        fill_random(model)
    elif folder.kind is FolderKind.HUGGINGFACE:
        logger.info("%s carries no checksums of its weights to compare", folder.path)
        load_checkpoint(model, folder.weight_files)
    else:
        shard = folder.shard_of(layout.rank)
        load_shard(model, shard, is_verified=config.verify_weights)
    _limit_attention(model, config.cache, config.scheduler.max_seq_len)
    quantize_kv_cache(model, folder, config.cache.dtype, has_weights=not is_random)
    finish_weights(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    log_methods(model)
    num_bytes = model.num_weight_bytes
    logger.info(
        "weights ready: %.2f GiB in %.1f s", num_bytes / 2**30, time.monotonic() - start
    )
    return model


def _limit_attention(model: CausalLM, cache: CacheConfig, max_seq_len: int) -> None:
    """Limit each layer's window to its own and that of ``cache``.

    A window that no sequence exceeds is dropped, because faster kernels serve full attention.
    """
    served = cache.windows_of(model.config.layer_windows, max_seq_len, model.stage.num_layers)
    for number, layer in zip(model.layer_numbers(), model.layers.values(), strict=True):
        attention: Any = layer.attention
        window = served[number]
        if window != attention.backend.spec.window:
            attention.backend.limit(window, cache.num_sinks if window else 0)
