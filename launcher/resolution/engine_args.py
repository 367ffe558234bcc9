"""From a token-level model's folder, its config.pbtxt and the flags to an `EngineConfig`."""

from __future__ import annotations

import importlib.util
import os
import re
import sys

from trimaran.comm.errors import ConfigError
from trimaran.comm.tokenizers.prepare import has_tokenizer
from trimaran.launcher.placement.hosts import num_visible_gpus, torch_is_cpu_only
from trimaran.launcher.resolution.engine_flags import EngineFlags
from trimaran.launcher.resolution.speculation_args import speculation_config
from trimaran.server.inference.queue_policy import QueuePolicy
from trimaran.server.repository.model_repository import RepositoryModel
from trimaran.server.repository.parameter_table import is_class_path
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    GuidedConfig,
    LoraConfig,
    ParallelConfig,
    SchedulerConfig,
)
from trimaran.worker.config.engine_folder import BuildConfig, EngineFolder, FolderKind
from trimaran.worker.config.host_limits import usable_cores
from trimaran.worker.config.kv_cache_dtype import check_scales_exist, resolve_kv_cache_dtype
from trimaran.worker.config.parallel_sizes import layout_of
from trimaran.worker.config.shard_file import read_tensor_entries

_BATCHING = {
    "inflight_fused_batching": "inflight_fused_batching",
    "inflight_batching": "inflight_fused_batching",
    "V1": "V1",
    "v1": "V1",
}
_POLICIES = {
    "max_utilization": "max_utilization",
    "guaranteed_no_evict": "guaranteed_no_evict",
    "guaranteed_completion": "guaranteed_no_evict",
    "static_batch": "static_batch",
}
_DEFAULT_POLICY = "guaranteed_no_evict"
_HUGGINGFACE_MAX_NUM_SEQS = 256

_CPU_STEP_TOKENS = 256
"""Tokens in a step of CPUs unless ``--max-num-tokens`` says otherwise: running requests wait
for the prompts of the step."""

_WINDOWS = ("max_attention_window_size", "max_kv_cache_length")  # The latter up to 0.6.
_HOST_BYTES = "kv_cache_host_memory_bytes"
_ONBOARD = "kv_cache_onboard_blocks"
_OVERLAPS = {
    "enable_trt_overlap": True,
    "enable_overlap_scheduler": True,
    "disable_overlap_scheduler": False,
}
"""Old and newer names, and the value of each that requests overlapped steps."""


def engine_config(
    model: RepositoryModel, flags: EngineFlags, num_named: int = 0
) -> EngineConfig:
    """One model's engine, not yet placed on GPUs.

    ``num_named`` is the number of devices or ranks that config.pbtxt names: it sets the world
    size of a folder that was built for no particular one.

    Raises:
        ConfigError: the folder is unusable, or a key and a flag contradict each other.
    """
    engine_dir = _engine_dir(model)
    folder = EngineFolder.load(engine_dir, check_weights=flags.load_format != "random")
    folder = folder.quantized(flags.quantization)
    _check_kv_cache_dtype(folder, flags)
    try:
        parallel = _parallel(folder, flags, num_named)
    except ConfigError as error:
        if flags.sizes.world_size or not num_named:
            raise
        raise ConfigError(f"{model.config_path} places it on {num_named}: {error}") from None
    flags.experts.check(
        folder.config.num_experts, parallel.expert_parts, is_deterministic=flags.deterministic
    )
    device = resolve_device(flags.device)
    graphs = model.parameters.get_bool("cuda_graph_mode")
    scheduler = _scheduler(model, folder, flags, parallel.pp_size)
    return EngineConfig(
        model=model.name,
        engine_dir=engine_dir,
        dtype=flags.dtype,
        load_format=flags.load_format,
        quantization=flags.quantization,
        verify_weights=flags.verify_weights,
        device=device,
        num_threads=flags.num_threads or threads_of_a_rank(device, parallel.world_size),
        deterministic=flags.deterministic,
        cuda_graphs=True if graphs is None else graphs,
        max_cuda_graphs=model.parameters.get_int("cuda_graph_cache_size") or 0,
        prompt_graph_tokens=flags.prompt_graph_tokens,
        collective_graphs=flags.collective_graphs,
        first_layer_table=flags.first_layer_table,
        all_reduce=flags.all_reduce,
        guided=_guided(model, engine_dir, flags),
        parallel=parallel,
        scheduler=scheduler,
        cache=cache_config(
            model,
            flags.tokens_per_block or folder.build.tokens_per_block,
            scheduler,
            flags.kv_cache_dtype,
        ),
        lora=lora_config(model, folder, has_graphs=flags.adapter_graphs),
        experts=flags.experts,
    )


def _check_kv_cache_dtype(folder: EngineFolder, flags: EngineFlags) -> None:
    """Refuse a dtype of the KV cache that the model cannot have, before any rank starts."""
    dtype = folder.config.dtype if flags.dtype == "auto" else flags.dtype
    kind = resolve_kv_cache_dtype(flags.kv_cache_dtype, folder.config, folder.path, dtype)
    if kind == "int8" and flags.load_format != "random":
        files = folder.weight_files if folder.kind is FolderKind.HUGGINGFACE else ()
        tensors = [file for file in files if file.suffix == ".safetensors"]
        names = (name for file in tensors for name in read_tensor_entries(file))
        check_scales_exist(kind, folder.path, names)


def _guided(model: RepositoryModel, engine_dir: str, flags: EngineFlags) -> GuidedConfig:
    values = model.parameters
    backend = values.get_str("guided_decoding_backend") or ""
    if backend and importlib.util.find_spec(backend) is None:
        raise ConfigError(
            f"{model.config_path}: guided_decoding_backend is {backend}, which is not "
            "installed. Install the extra 'guided' (pip install 'trimaran[guided]')."
        )
    paths = {"tokenizer_dir": "", "xgrammar_tokenizer_info_path": ""}
    for key in paths if backend else ():
        path = values.get_str(key) or ""
        if path and not os.path.exists(path):
            raise ConfigError(f"{model.config_path}: {key} is {path}, which does not exist")
        paths[key] = os.path.abspath(path) if path else ""
    if backend and not any(paths.values()) and not has_tokenizer(engine_dir):
        raise ConfigError(
            f"{model.config_path}: Guided decoding requires tokenizer's information. Please "
            f"provide 'tokenizer_dir': {engine_dir} holds no tokenizer."
        )
    return GuidedConfig(
        backend=backend,
        tokenizer_dir=paths["tokenizer_dir"],
        tokenizer_info_path=paths["xgrammar_tokenizer_info_path"],
        timeout_s=flags.guide_timeout_s,
        step_timeout_s=flags.guide_step_timeout_s,
        max_processes=flags.max_guide_processes,
    )


def resolve_device(device: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is the GPU if this machine and this torch have one."""
    if device != "auto":
        return device
    return "cuda" if num_visible_gpus() and not torch_is_cpu_only() else "cpu"


def _engine_dir(model: RepositoryModel) -> str:
    # Models without in-flight batching have the key engine_dir.
    values = model.parameters
    path = values.get_str("gpt_model_path") or values.get_str("engine_dir")
    if not path:
        raise ConfigError(
            f"{model.folder}/config.pbtxt: gpt_model_path (engine_dir) is not set. Fill it: "
            f"trimaran fill-template -i {model.folder}/config.pbtxt engine_dir:FOLDER"
        )
    if not os.path.isdir(path):
        raise ConfigError(
            f"{model.folder}/config.pbtxt: Decoder (GPT) model path at {path} does not exist."
        )
    return str(os.path.abspath(path))


def _parallel(folder: EngineFolder, flags: EngineFlags, num_named: int) -> ParallelConfig:
    return layout_of(flags.sizes, folder, num_named)


def _most_step_tokens(build: BuildConfig, flags: EngineFlags) -> int:
    """The tokens of a step, if neither the folder nor the flags ask for fewer: a batch that was
    asked for fits."""
    if resolve_device(flags.device) != "cpu":
        return sys.maxsize
    is_default = build.max_batch_size == BuildConfig().max_batch_size
    asked = flags.max_batch_size or (0 if is_default else build.max_batch_size)
    return max(_CPU_STEP_TOKENS, asked)


def _scheduler(
    model: RepositoryModel, folder: EngineFolder, flags: EngineFlags, num_stages: int
) -> SchedulerConfig:
    build, values = folder.build, model.parameters
    chunked = values.get_bool("enable_chunked_context")
    max_tokens = flags.max_num_tokens or build.max_num_tokens
    if chunked is not False and not flags.max_num_tokens:
        max_tokens = min(max_tokens, _most_step_tokens(build, flags))
    is_huggingface = folder.kind is FolderKind.HUGGINGFACE
    built_seqs = _HUGGINGFACE_MAX_NUM_SEQS if is_huggingface else build.max_batch_size
    max_seqs = flags.max_batch_size or min(built_seqs, max_tokens)
    max_seqs = min(max_seqs, values.get_int("max_num_sequences") or max_seqs)
    # Only an explicit batch size can be above the token budget.
    if max_seqs > max_tokens:
        raise ConfigError(
            f"--max-batch-size {max_seqs}: a step computes at most {max_tokens} tokens "
            "(--max-num-tokens, or else the folder's), so a full decode step would not fit. "
            "Lower the first or raise the second."
        )
    queue = QueuePolicy(model.config)
    return SchedulerConfig(
        max_num_batched_tokens=max_tokens,
        max_num_seqs=max_seqs,
        max_seq_len=folder.max_seq_len,
        max_input_len=min(build.max_input_len, folder.max_seq_len),
        policy=_policy(model),
        batching=_choice(model, "gpt_model_type", _BATCHING, "inflight_fused_batching"),
        enable_chunked_context=True if chunked is None else chunked,
        max_beam_width=_max_beam_width(model, folder),
        max_queue_size=queue.max_queue_size(0),
        level_queue_sizes=queue.queue_sizes,
        expected_output_tokens=flags.expected_output_tokens,
        depth=steps_in_flight(model, flags.depth, num_stages),
        speculation=speculation_config(model, folder, flags),
    )


def _max_beam_width(model: RepositoryModel, folder: EngineFolder) -> int:
    """The value of config.pbtxt, or else the one that the folder was built for."""
    built = folder.build.max_beam_width
    width = model.parameters.get_int("max_beam_width") or built
    if folder.kind is FolderKind.ENGINE and width > built:
        raise ConfigError(
            f"{model.config_path}: max_beam_width is {width} but {folder.path} was built for "
            f"{built}. Lower it, or build again with --max-beam-width {width}."
        )
    mode = model.parameters.get_str("decoding_mode") or "auto"
    if width > 1 and mode.startswith("top"):
        raise ConfigError(
            f"{model.config_path}: max_beam_width is {width} but decoding_mode is {mode}, "
            "which has no beams. Leave decoding_mode unset, or set max_beam_width to 1."
        )
    return width


def _policy(model: RepositoryModel) -> str:
    """The name of a built-in admission policy, or an import path that rank 0 imports."""
    key = "batch_scheduler_policy"
    value = model.parameters.get_str(key) or ""
    return value if is_class_path(value) else _choice(model, key, _POLICIES, _DEFAULT_POLICY)


def _choice(model: RepositoryModel, key: str, known: dict[str, str], default: str) -> str:
    value = model.parameters.get_str(key)
    if not value:
        return default
    if value not in known:
        raise ConfigError(
            f"{model.folder}/config.pbtxt: {key} is {value!r} but must be one of "
            f"{', '.join(known)}"
        )
    return known[value]


def threads_of_a_rank(device: str, num_ranks: int) -> int:
    """CPU threads of each of this host's ranks: the cores divided by the ranks."""
    if device != "cpu":
        return 1
    return max(1, usable_cores() // num_ranks)


def lora_config(
    model: RepositoryModel, folder: EngineFolder, *, has_graphs: bool
) -> LoraConfig:
    """The caches of adapters, whose sizes a built folder limits.

    Raises:
        ConfigError: the adapter folder does not exist, or a size is over the engine's limit.
    """
    values, usual = model.parameters, LoraConfig()
    largest = values.get_int("lora_cache_max_adapter_size")
    fraction = values.get_float("lora_cache_gpu_memory_fraction")
    host_bytes = values.get_int("lora_cache_host_memory_bytes")
    adapters = values.get_str("lora_prefetch_dir") or ""
    limit = folder.build.max_lora_rank
    if largest is not None and largest > limit and folder.kind is FolderKind.ENGINE:
        raise ConfigError(
            f"{model.folder}/config.pbtxt: lora_cache_max_adapter_size is {largest}, but the "
            f"engine folder is built for adapters of size {limit} at most. Lower it, or "
            f"build again with --max-lora-rank {largest}."
        )
    if adapters and not os.path.isdir(adapters):
        raise ConfigError(
            f"{model.folder}/config.pbtxt: lora_prefetch_dir is {adapters!r}, which is no "
            "folder. Name the folder that holds a subfolder for each adapter."
        )
    return LoraConfig(
        max_adapter_size=largest or limit,
        gpu_memory_fraction=usual.gpu_memory_fraction if fraction is None else fraction,
        host_memory_bytes=usual.host_memory_bytes if host_bytes is None else host_bytes,
        prefetch_dir=os.path.abspath(adapters) if adapters else "",
        has_graphs=has_graphs,
    )


def cache_config(
    model: RepositoryModel, tokens_per_block: int, scheduler: SchedulerConfig, dtype: str
) -> CacheConfig:
    """The KV cache of one model.

    Raises:
        ConfigError: a value is invalid, or two contradict each other.
    """
    values = model.parameters
    fraction = values.get_float("kv_cache_free_gpu_mem_fraction")
    if fraction is not None and not 0 < fraction <= 1:
        raise ConfigError(
            f"{model.folder}/config.pbtxt: kv_cache_free_gpu_mem_fraction is {fraction} but "
            "must be above 0 and at most 1"
        )
    host_bytes = values.get_int(_HOST_BYTES) or 0
    if host_bytes and values.get_bool(_ONBOARD) is False:
        raise ConfigError(
            f"{model.folder}/config.pbtxt: {_ONBOARD} is False but blocks on the host "
            f"({_HOST_BYTES} {host_bytes}) can be used on the device only. Set it to True, or "
            f"{_HOST_BYTES} to 0."
        )
    reuse = values.get_bool("enable_kv_cache_reuse")
    windows = _windows(model)
    try:
        cache = CacheConfig(
            tokens_per_block=tokens_per_block,
            max_tokens=values.get_int("max_tokens_in_paged_kv_cache") or 0,
            free_memory_fraction=0.9 if fraction is None else fraction,
            enable_block_reuse=True if reuse is None else reuse,
            attention_windows=windows,
            num_sinks=values.get_int("sink_token_length") or 0,
            host_bytes=host_bytes,
            dtype=dtype,
        )
        cache.check_use_of_host(scheduler)
    except ConfigError as error:
        raise ConfigError(f"{model.folder}/config.pbtxt: {error}") from None
    return cache


def steps_in_flight(model: RepositoryModel, depth: int | None, num_stages: int) -> int:
    """``depth``, unless the model's keys request sequential steps; 0 if neither sets it, for
    the device's default.

    Raises:
        ConfigError: two keys contradict each other, or the depth is useless for this pipeline.
    """
    most = num_stages + 1
    if depth is not None and depth > most:
        raise ConfigError(
            f"--depth is {depth} but with {num_stages} pipeline stage(s) at most {most} steps "
            f"are in flight. Lower it to 1 to {most}, or leave it out."
        )
    said = {
        key: value == is_on
        for key, is_on in _OVERLAPS.items()
        if (value := model.parameters.get_bool(key)) is not None
    }
    if len(set(said.values())) > 1:
        raise ConfigError(
            f"{model.folder}/config.pbtxt: {' and '.join(said)} contradict each other. Leave "
            "one of them."
        )
    if False in said.values():
        return 1
    return depth or (max(2, num_stages) if said else 0)


def _windows(model: RepositoryModel) -> tuple[int, ...]:
    key = next((key for key in _WINDOWS if model.parameters.get_str(key) is not None), "")
    if (text := model.parameters.get_str(key)) is None:
        return ()
    parts = [part.strip() for part in text.strip("[] ").split(",")]
    if not all(re.fullmatch(r"\d+", part) for part in parts):
        raise ConfigError(
            f"{model.folder}/config.pbtxt: {key} is {text!r} but must be a number of "
            "tokens, or one a layer, as in 4096,8192"
        )
    return tuple(map(int, parts))
