"""The effect of each input, in one line; names are those of the models' interfaces."""

from __future__ import annotations

TOKEN = {
    "input_ids": "ids of the prompt, padded in a batch",
    "input_lengths": "tokens of each prompt; `input_ids` are cut to them",
    "request_output_len": "most new tokens; lowered to what the sequence length leaves",
    "num_return_sequences": "draws of one prompt, or the best so many beams",
    "end_id": "ends the output, without being part of it; -1 never",
    "stop_words_list": "ids that end the output, of which they are part",
    "bad_words_list": "ids that do not come",
    "embedding_bias": "added to the logits; shorter ones are filled up with 0",
    "beam_width": "hypotheses of a beam search",
    "temperature": "divides the logits; 0 is the likeliest id",
    "runtime_top_k": "keeps the k likeliest ids; 0 keeps all",
    "runtime_top_p": "keeps the fewest ids with this mass, of what top-k left; 0 is unset",
    "runtime_min_p": "keeps ids at least this share as likely as the likeliest",
    "runtime_top_p_min": "the least that a decayed top-p becomes",
    "runtime_top_p_decay": "multiplies top-p with every token",
    "runtime_top_p_reset_ids": "the id after which a decayed top-p is whole again",
    "len_penalty": "beams are ranked by log-probability over length to this power",
    "early_stopping": "true: a search ends with `beam_width` ended hypotheses; "
    "false: when none could overtake them",
    "repetition_penalty": "scales logits of ids in prompt and output",
    "min_length": "tokens before the end id may come",
    "min_tokens": "newer name of `min_length`",
    "beam_search_diversity_rate": "favours continuations of other hypotheses",
    "presence_penalty": "taken off the logits of ids in the output",
    "frequency_penalty": "the same, for each time that the id came",
    "random_seed": "key of the draws; 0 where unset",
    "seed": "newer name of `random_seed`",
    "no_repeat_ngram_size": "no n-gram comes twice, the prompt's included",
    "return_log_probs": "brings `cum_log_probs` and `output_log_probs`",
    "output_log_probs": "the same, in repositories without in-flight batching",
    "return_context_logits": "brings `context_logits`",
    "return_generation_logits": "brings `generation_logits`",
    "return_perf_metrics": "brings the figures of cache, times and drafts",
    "return_kv_cache_reuse_stats": "older name of `return_perf_metrics`",
    "return_finish_reason": "brings `finish_reason`",
    "return_num_input_tokens": "brings `num_input_tokens`",
    "return_num_output_tokens": "brings `num_output_tokens`",
    "exclude_input_in_output": "answers without the prompt; goes before the parameter",
    "stop": "ends all requests of the same id, with what they have",
    "streaming": "a response for each step with new ids",
    "prompt_embedding_table": "vectors of the ids beyond the vocabulary",
    "prompt_table_extra_ids": "which prompts with tables may share cached blocks",
    "lora_task_id": "the adapter",
    "lora_weights": "the adapter's weights, with its first request",
    "lora_config": "module, layer and size of each row of weights",
    "lora_name": "an adapter of `lora_prefetch_dir`, by its folder's name",
    "retention_token_range_starts": "ranges of the prompt whose blocks have a priority",
    "retention_token_range_ends": "their ends, exclusive; -1 is the prompt's",
    "retention_token_range_priorities": "0 to 100; low ones are evicted first",
    "retention_token_range_durations_ms": "how long priorities last; -1 is for ever",
    "retention_decode_priority": "the priority of the output's blocks",
    "retention_decode_duration_ms": "how long it lasts",
    "guided_decoding_guide_type": "`json`, `json_schema`, `regex`, `ebnf_grammar`, `choice`, "
    "`structural_tag`",
    "guided_decoding_guide": "what the output follows",
    "draft_input_ids": "ids that the model checks: the output is the accepted ids and one more",
    "draft_acceptance_threshold": "0: outputs have the law of the model; above 0, also ids of "
    "at least this probability",
    "draft_logits": "rejection sampling, for requests that draw and have no seed",
    "lookahead_window_size": "guesses behind the output that a step computes at most",
    "lookahead_ngram_size": "ids of an n-gram: a draft has one less",
    "lookahead_verification_set_size": "n-grams of one first id, which agree on one draft",
}
TOKEN_WITHOUT_EFFECT = {
    "pad_id": "responses are padded with -1",
    "encoder_output_lengths": "the encoder's output, which it measures, is refused",
    "decoder_input_ids": "preprocessing makes some; only encoder-decoder models read them",
    "decoder_input_lengths": "the same",
    "prompt_vocab_size": "the table says how many entries it has",
}
TEXT = {
    "text_input": "the prompt",
    "max_tokens": "most new tokens",
    "bad_words": "texts that do not come, as their ids: a blank before them makes others",
    "stop_words": "texts that end the output, found across tokens too; they stay in it",
    "embedding_bias_words": "words whose ids' logits are changed",
    "embedding_bias_weights": "by how much",
    "num_draft_tokens": "tokens of each round of the draft model",
    "use_draft_logits": "logits of the draft model decide too, as `draft_logits`",
}
TEXT_WITHOUT_EFFECT = {
    "decoder_text_input": "only encoder-decoder models read it",
    "prompt_table_extra_id": "no word of a text has an id of the table: the table decides "
    "which requests share blocks",
}
TEXT_REFUSED = {
    "image_input": "images are not served",
}
PREPROCESSING = {
    "QUERY": "the prompt",
    "DECODER_QUERY": "encoded into `DECODER_INPUT_ID`",
    "REQUEST_OUTPUT_LEN": "passed through",
    "BAD_WORDS_DICT": "encoded, each word without special tokens",
    "STOP_WORDS_DICT": "the same",
    "EMBEDDING_BIAS_WORDS": "words whose ids have a weight in `EMBEDDING_BIAS`",
    "EMBEDDING_BIAS_WEIGHTS": "one weight a word; weights of an id add up",
    "END_ID": "instead of the tokenizer's",
    "PAD_ID": "instead of the tokenizer's; pads `INPUT_ID`",
    "PROMPT_TABLE_EXTRA_ID": "brings `OUT_PROMPT_TABLE_EXTRA_IDS`",
}
POSTPROCESSING = {
    "TOKENS_BATCH": "ids of each beam",
    "SEQUENCE_LENGTH": "how many of them count",
}
IMAGES = "images are not served"
