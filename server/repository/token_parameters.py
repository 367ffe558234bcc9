"""Every parameter that a token-level model's config.pbtxt may carry, and what becomes of it."""

from __future__ import annotations

from trimaran.server.repository.parameter_table import Known, accepted, refused, served

_TRT_ONLY = "it tunes TensorRT, which is not used here"
_NO_DRAFT = "speculative decoding is not served by this version"
_NO_ENCODER = "encoder-decoder models are not served by this version"
_NO_DISAGGREGATION = "disaggregated serving is not served by this version"
_OBSOLETE = "it is obsolete; the engine folder and the flags of `trimaran serve` hold it"

TOKEN_PARAMETERS: dict[str, Known] = {
    "gpt_model_type": served(
        "str", "inflight_fused_batching", "inflight_batching", "V1", "v1"
    ),
    "context_model_name": refused("str", _NO_DISAGGREGATION),
    "generation_model_name": refused("str", _NO_DISAGGREGATION),
    "gpt_model_path": served("str"),
    "encoder_model_path": refused("str", _NO_ENCODER),
    "FORCE_CPU_ONLY_INPUT_TENSORS": accepted("str", ""),
    "exclude_input_in_output": served("bool"),
    "cancellation_check_period_ms": accepted("int", "cancellation is immediate"),
    "stats_check_period_ms": served("int", low=1),
    "recv_poll_period_ms": accepted("int", "nothing polls"),
    "iter_stats_max_iterations": accepted("int", "the metrics hold the last iteration"),
    "request_stats_max_iterations": accepted("int", "the metrics hold the last iteration"),
    "normalize_log_probs": served("bool"),
    "gpu_device_ids": served("str"),
    "participant_ids": served("str"),
    "num_nodes": served("int", low=1),
    "worker_path": refused("str", "it was renamed: use 'executor_worker_path'"),
    "executor_worker_path": accepted("str", "ranks run the program trimaran-rank"),
    "gpu_weights_percent": refused("float", "weights are not streamed", "1", "1.0"),
    "enable_trt_overlap": served("bool"),
    "enable_overlap_scheduler": served("bool"),
    "disable_overlap_scheduler": served("bool"),
    "max_num_sequences": served("int", low=1),
    "max_num_tokens": accepted("str", _OBSOLETE),
    "tokenizer_type": accepted("str", _OBSOLETE),
    "max_tokens_in_paged_kv_cache": served("int", low=1),
    "kv_cache_free_gpu_mem_fraction": served("float"),
    "cross_kv_cache_fraction": refused("float", _NO_ENCODER),
    "kv_cache_host_memory_bytes": served("int", low=0),
    "kv_cache_onboard_blocks": served("bool"),
    "enable_kv_cache_reuse": served("bool"),
    "max_attention_window_size": served("str"),
    "sink_token_length": served("int", low=0),
    "batch_scheduler_policy": served(
        "str", "max_utilization", "guaranteed_no_evict", "guaranteed_completion", "static_batch"
    ),
    "enable_chunked_context": served("bool"),
    "lora_cache_optimal_adapter_size": accepted(
        "int", "an adapter takes what it needs: its cache has no pages"
    ),
    "lora_cache_max_adapter_size": served("int", low=1),
    "lora_cache_gpu_memory_fraction": served("float", low=0, high=1),
    "lora_cache_host_memory_bytes": served("int", low=0),
    "lora_prefetch_dir": served("str"),
    "max_beam_width": served("int", low=1),
    "decoding_mode": refused(
        "str", "it asks for drafts, which are not served",
        "auto", "top_k", "top_p", "top_k_top_p", "beam_search",
        allowed=(
            "auto", "top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter",
            "lookahead", "eagle",
        ),
    ),
    "lookahead_window_size": refused("int", _NO_DRAFT),
    "lookahead_ngram_size": refused("int", _NO_DRAFT),
    "lookahead_verification_set_size": refused("int", _NO_DRAFT),
    "medusa_choices": refused("str", _NO_DRAFT),
    "eagle_choices": refused("str", _NO_DRAFT),
    "speculative_decoding_fast_logits": refused(
        "bool", _NO_DRAFT, "False", "false", "FALSE", "0"
    ),
    "guided_decoding_backend": served("str", "xgrammar"),
    "tokenizer_dir": served("str"),
    "xgrammar_tokenizer_info_path": served("str"),
    "enable_context_fmha_fp32_acc": accepted("bool", _TRT_ONLY),
    "multi_block_mode": accepted("bool", _TRT_ONLY),
    "cuda_graph_mode": served("bool"),
    "cuda_graph_cache_size": served("int", low=0),
}  # fmt: skip
