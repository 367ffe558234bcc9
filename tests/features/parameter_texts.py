"""The effect of each served key of config.pbtxt, and of fields of requests beside tensors."""

from __future__ import annotations

TOKEN = {
    "gpt_model_type": "`inflight_fused_batching`, `inflight_batching` or `V1`: a batch that "
    "runs to its longest",
    "gpt_model_path": "the engine folder, or a Hugging Face folder",
    "engine_dir": "the same, in repositories without in-flight batching",
    "exclude_input_in_output": "answers without the prompt, unless a request says otherwise",
    "stats_check_period_ms": "how often metrics are told",
    "normalize_log_probs": "beams' log-probabilities are divided as their scores; true",
    "gpu_device_ids": "the GPUs of each instance",
    "participant_ids": "the ranks of each instance, with `--disable-spawn-processes`",
    "num_nodes": "hosts that an instance spans, with `--multi-model`",
    "enable_trt_overlap": "whether a step is planned before the last one's ids are known",
    "enable_overlap_scheduler": "newer name of `enable_trt_overlap`",
    "disable_overlap_scheduler": "the same, the other way round",
    "max_num_sequences": "lowers the sequences that run at once",
    "max_tokens_in_paged_kv_cache": "tokens of the cache",
    "kv_cache_free_gpu_mem_fraction": "share of the memory that model and steps leave; 0.9",
    "kv_cache_host_memory_bytes": "a rank's: evicted blocks, paused sequences; 0 is none",
    "kv_cache_onboard_blocks": "`False` is refused beside host memory, where blocks would be "
    "of no use",
    "enable_kv_cache_reuse": "prompts share blocks; true",
    "max_attention_window_size": "tokens that a query sees, or as many for each layer",
    "max_kv_cache_length": "`max_attention_window_size`, by its name up to version 0.6",
    "sink_token_length": "first tokens that are seen whatever the window",
    "batch_scheduler_policy": "`guaranteed_no_evict`, `max_utilization`, `static_batch`, the "
    "old `guaranteed_completion`, or the import path of an admission policy",
    "enable_chunked_context": "prompts may be cut into steps; true",
    "lora_cache_max_adapter_size": "largest rank of an adapter",
    "lora_cache_gpu_memory_fraction": "share of what is left for adapters in use; 0.05",
    "lora_cache_host_memory_bytes": "a rank's memory for adapters; 1 GiB",
    "lora_prefetch_dir": "a folder with a subfolder for each adapter",
    "lookahead_window_size": "the largest of a request, and its default; 7",
    "lookahead_ngram_size": "the largest of a request, and its default; 7",
    "lookahead_verification_set_size": "the largest of a request, and its default; 7",
    "medusa_choices": "the tree of drafts, at most `--max_draft_len` nodes; that of the build",
    "eagle_choices": "the tree of drafts, at most `--max_draft_len` nodes; that of the build",
    "max_beam_width": "most beams of a request; that of the engine where unset",
    "decoding_mode": "`medusa`, `eagle`, `redrafter` and `lookahead` must be what the engine "
    "was built for; `top_k`, `top_p` and `top_k_top_p` forbid beams; `auto`, `beam_search`",
    "guided_decoding_backend": "`xgrammar` turns guided decoding on",
    "tokenizer_dir": "the tokenizer of guided decoding; the engine folder's where unset",
    "xgrammar_tokenizer_info_path": "the same, as a file with the vocabulary",
    "cuda_graph_mode": "decode steps run from CUDA graphs; true",
    "cuda_graph_cache_size": "most graphs; 0 is no limit",
}
_TOKENIZER = "a tokenizer's folder; must be set"
PREPROCESSING = {
    "tokenizer_dir": _TOKENIZER,
    "add_special_tokens": "whether prompts begin with what the tokenizer adds; true (false "
    "in repositories of versions 0.9 and 0.10 that leave it open)",
}
POSTPROCESSING = {
    "tokenizer_dir": _TOKENIZER,
    "skip_special_tokens": "whether texts lack special tokens; true",
}
TEXT = {
    "accumulate_tokens": "each response of a stream has the whole text so far",
    "tensorrt_llm_model_name": "the token model; `tensorrt_llm`",
    "tensorrt_llm_draft_model_name": "the model whose tokens are drafts for the token model",
}
FIXED = {"FORCE_CPU_ONLY_INPUT_TENSORS": "inputs come by way of the host"}

SETTINGS = {
    "triton_max_batch_size": "most prompts of one request",
    "decoupled_mode": "streams, batches and several sequences; without it one response",
    "logits_datatype": "type of the logits in responses",
    "max_queue_delay_microseconds": "requests wait so long for others to start with",
    "max_queue_size": "requests that wait, of each priority level; more are refused with 503",
}
_INSTANCES = "one instance serves all requests at once"
SETTINGS_WITHOUT_EFFECT = {
    "triton_backend": "`tensorrtllm` and `python` are the same engine",
    "preprocessing_instance_count": _INSTANCES,
    "postprocessing_instance_count": _INSTANCES,
    "bls_instance_count": _INSTANCES,
    "encoder_input_features_data_type": "the input that has it is refused",
}
REQUEST_PARAMETERS = {
    "cache_salt": "requests share cached blocks only under equal salts",
    "max_draft_tokens": "most draft tokens of a step; 0 for none",
    "priority": "level 1 goes first, where the model has `priority_levels`",
    "request_type": "`context_and_generation`; the halves of disaggregated serving are refused",
    "timeout": "microseconds to the first token, where the model allows it",
}
VARIABLES = {
    "TRTLLM_ORCHESTRATOR": "1 stands for `--multi-model`",
    "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "0 stands for `--disable-spawn-processes`",
    "FORCE_DETERMINISTIC": "1 stands for `--deterministic`",
    "TLLM_LOG_LEVEL": "`DEBUG` and `TRACE` stand for `--log-verbose 1`",
    "CUDA_VISIBLE_DEVICES": "GPUs that are left out are not used",
}
