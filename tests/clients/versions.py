"""Repositories as each version of Triton's TensorRT-LLM backend declares them: our templates,
without the tensors that came later, and with the types and the wires of the version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from trimaran.launcher.cli.fill_template import fill
from trimaran.launcher.cli.init_repo import DEFAULTS, MODELS, template
from trimaran.server.repository.signatures import PASSED_ON

VERSIONS = tuple(f"0.{minor}" for minor in range(5, 19))
NON_BATCHED = "gpt"
"""The repository without in-flight batching that versions also have."""

# The version in which each tensor came, for models of tokens and of texts.
_STEPS = {
    5: "QUERY BAD_WORDS_DICT STOP_WORDS_DICT REQUEST_OUTPUT_LEN INPUT_ID REQUEST_INPUT_LEN "
    "BAD_WORDS_IDS STOP_WORDS_IDS TOKENS_BATCH OUTPUT input_ids input_lengths "
    "request_output_len end_id pad_id beam_width temperature runtime_top_k runtime_top_p "
    "len_penalty repetition_penalty min_length presence_penalty random_seed stop streaming "
    "output_ids",
    6: "EMBEDDING_BIAS_WORDS EMBEDDING_BIAS_WEIGHTS EMBEDDING_BIAS SEQUENCE_LENGTH "
    "stop_words_list bad_words_list embedding_bias return_log_probs prompt_embedding_table "
    "prompt_vocab_size sequence_length cum_log_probs output_log_probs",
    7: "draft_input_ids",
    8: "END_ID PAD_ID OUT_END_ID OUT_PAD_ID frequency_penalty return_context_logits "
    "return_generation_logits lora_weights lora_config context_logits generation_logits",
    9: "draft_logits lora_task_id",
    10: "draft_acceptance_threshold runtime_top_p_min runtime_top_p_decay "
    "runtime_top_p_reset_ids early_stopping beam_search_diversity_rate",
    11: "DECODER_QUERY DECODER_INPUT_ID REQUEST_DECODER_INPUT_LEN decoder_input_ids "
    "decoder_input_lengths",
    12: "batch_index",
    13: "PROMPT_TABLE_EXTRA_ID OUT_PROMPT_TABLE_EXTRA_IDS prompt_table_extra_ids",
    14: "num_return_sequences exclude_input_in_output context_phase_params sequence_index",
    15: "IMAGE_BYTES IMAGE_URL PIXEL_VALUES ASPECT_RATIO_IDS ASPECT_RATIO_MASK "
    "CROSS_ATTENTION_MASK encoder_input_features encoder_output_lengths cross_attention_mask",
    16: "VIDEO_BYTES IMAGE_SIZES IS_VIDEO_INPUT return_kv_cache_reuse_stats "
    "skip_cross_attn_blocks kv_cache_alloc_new_blocks kv_cache_reused_blocks "
    "kv_cache_alloc_total_blocks",
    17: "retention_token_range_starts retention_token_range_ends "
    "retention_token_range_priorities retention_token_range_durations_ms "
    "retention_decode_priority retention_decode_duration_ms",
}
_TEXTS = {
    5: "text_input max_tokens bad_words stop_words end_id pad_id top_k top_p temperature "
    "length_penalty repetition_penalty min_length presence_penalty random_seed beam_width "
    "stream text_output",
    6: "return_log_probs prompt_embedding_table prompt_vocab_size embedding_bias_words "
    "embedding_bias_weights cum_log_probs output_log_probs",
    8: "frequency_penalty return_context_logits return_generation_logits context_logits "
    "generation_logits",
    9: "num_draft_tokens use_draft_logits",
    11: "decoder_text_input",
    12: "image_input batch_index",
    13: "prompt_table_extra_id",
    14: "num_return_sequences sequence_index",
    15: "lora_task_id lora_weights lora_config",
    16: "image_bytes_input image_url_input video_bytes_input exclude_input_in_output "
    "return_kv_cache_reuse_stats kv_cache_alloc_new_blocks kv_cache_reused_blocks "
    "kv_cache_alloc_total_blocks",
}
_UNSIGNED_UNTIL = 6
_UNSIGNED = frozenset(
    ("REQUEST_OUTPUT_LEN", "request_output_len", "max_tokens", "end_id", "pad_id", "beam_width",
     "runtime_top_k", "top_k", "min_length", "prompt_vocab_size")
)  # fmt: skip
_PASSED_UNTIL = 13
"""Postprocessing passed the token model's other outputs on."""

_FIRST_BLS = 7


def minor_of(version: str) -> int:
    """The second number of a version."""
    return int(version.partition(".")[2])


def write_repository(
    root: Path, version: str, *, tokenizer: Path, engine: Path, is_decoupled: bool
) -> None:
    """Write the models that a version has."""
    values = {
        **DEFAULTS,
        "tokenizer_dir": str(tokenizer),
        "engine_dir": str(engine),
        "decoupled_mode": str(is_decoupled),
        "max_beam_width": "4",
        "lora_prefetch_dir": "",
    }
    minor = minor_of(version)
    configs = {name: _config(name, values, minor) for name in MODELS}
    if minor < _FIRST_BLS:
        del configs["tensorrt_llm_bls"]
    _rewire(configs, minor)
    for name, config in configs.items():
        (root / name / "1").mkdir(parents=True)
        text = text_format.MessageToString(config)
        (root / name / "config.pbtxt").write_text(text)


def _config(model: str, values: Mapping[str, str], minor: int) -> ModelConfig:
    text = fill(template(model), {k: v for k, v in values.items() if k in template(model)})
    config = text_format.Parse(re.sub(r"(?<=: )\$\{\w+\}", "1", text), ModelConfig())
    since = _TEXTS if model in ("ensemble", "tensorrt_llm_bls") else _STEPS
    known = {name for first, names in since.items() if first <= minor for name in names.split()}
    for side in ("input", "output"):
        kept = [tensor for tensor in getattr(config, side) if tensor.name in known]
        config.ClearField(side)  # type: ignore[arg-type]
        for tensor in kept:
            if minor <= _UNSIGNED_UNTIL and tensor.name in _UNSIGNED:
                tensor.data_type = DataType.TYPE_UINT32
            getattr(config, side).append(tensor)
    return config


def _rewire(configs: Mapping[str, ModelConfig], minor: int) -> None:
    """Remove wires of absent tensors, and lead outputs through the last step."""
    ensemble = configs["ensemble"]
    inputs = {tensor.name for tensor in ensemble.input}
    written = set(inputs)
    for step in ensemble.ensemble_scheduling.step:
        model = configs[step.model_name]
        has_input, has_output = ({t.name for t in ts} for ts in (model.input, model.output))
        for name, source in list(step.input_map.items()):
            if name not in has_input or source not in written:
                del step.input_map[name]
        for name, target in list(step.output_map.items()):
            is_inner = target.startswith("_") or target == "text_output"
            if name not in has_output or not (is_inner or _declares(ensemble, target)):
                del step.output_map[name]
        written.update(step.output_map.values())
    if minor in range(_UNSIGNED_UNTIL, _PASSED_UNTIL + 1):
        _pass_on(configs)


def _pass_on(configs: Mapping[str, ModelConfig]) -> None:
    _, token, post = configs["ensemble"].ensemble_scheduling.step
    for output in configs["tensorrt_llm"].output:
        name = output.name.upper()
        if name not in PASSED_ON or output.name not in token.output_map:
            continue
        target = token.output_map[output.name]
        token.output_map[output.name] = f"_{name}"
        post.input_map[name] = f"_{name}"
        post.output_map[f"OUT_{name}"] = target
        model = configs["postprocessing"]
        added = model.input.add(
            name=name, data_type=output.data_type, dims=output.dims, optional=True
        )
        model.output.add(name=f"OUT_{name}", data_type=added.data_type, dims=added.dims)


def _declares(config: ModelConfig, name: str) -> bool:
    return any(tensor.name == name for tensor in config.output)


def datatype_of(version: str, name: str, usual: str) -> str:
    """The datatype of an input, whose ``usual`` one is that of later versions."""
    is_unsigned = minor_of(version) <= _UNSIGNED_UNTIL and name in _UNSIGNED
    return "UINT32" if is_unsigned else usual


def versions_since(minor: int) -> Iterator[str]:
    """The versions from a minor one on."""
    return (version for version in VERSIONS if minor_of(version) >= minor)
