"""The content of each output, in one line."""

from __future__ import annotations

_FIGURES = {
    "kv_cache_alloc_new_blocks": "blocks of the cache that were new",
    "kv_cache_reused_blocks": "blocks that the cache had",
    "kv_cache_alloc_total_blocks": "blocks taken for the prompt",
    "arrival_time_ns": "when the request came, on the monotonic clock of rank 0's host",
    "first_scheduled_time_ns": "when its first step was planned",
    "first_token_time_ns": "when its first token was there",
    "last_token_time_ns": "when its last one was",
    "acceptance_rate": "accepted part of the draft tokens; 0 without drafts",
    "total_accepted_draft_tokens": "draft tokens that became output",
    "total_draft_tokens": "draft tokens that were checked",
}
_BOTH = {
    "cum_log_probs": "of each beam; divided by length as `normalize_log_probs` says",
    "output_log_probs": "of each token, padded with -1",
    "context_logits": "of every token of the prompt, in the first response",
    "generation_logits": "of the new tokens",
    "finish_reason": "`stop`, `length`, `cancelled`, in the last response",
    "batch_index": "the prompt of a batch above 1",
    "sequence_index": "the draw, of `num_return_sequences` above 1",
    "num_input_tokens": "tokens of the prompt",
    "num_output_tokens": "tokens of the output so far",
    **_FIGURES,
}
TOKEN = {
    "output_ids": "[1, beams, n], padded with -1; of a stream the new ones",
    "sequence_length": "ids of each beam that count",
    **_BOTH,
}
TEXT = {"text_output": "a text for each beam; of a stream the new text", **_BOTH}
PREPROCESSING = {
    "INPUT_ID": "ids of the prompts, padded to the longest",
    "REQUEST_INPUT_LEN": "their lengths",
    "DECODER_INPUT_ID": "ids of `DECODER_QUERY`, or one pad id",
    "REQUEST_DECODER_INPUT_LEN": "their lengths",
    "BAD_WORDS_IDS": "ids and ends of the words",
    "STOP_WORDS_IDS": "the same",
    "EMBEDDING_BIAS": "one value an id; empty without words",
    "REQUEST_OUTPUT_LEN": "as it came",
    "OUT_END_ID": "of the request, or the tokenizer's",
    "OUT_PAD_ID": "of the request, or the tokenizer's",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "one a token; where `PROMPT_TABLE_EXTRA_ID` came",
}
POSTPROCESSING = {"OUTPUT": "a text for each beam"}
NEVER = {
    "context_phase_params": "disaggregated serving is not served",
}
