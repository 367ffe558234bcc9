"""How large the logits of one answer may be: what does not fit is refused before it runs."""

from __future__ import annotations

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.sampling_params import SamplingParams

MAX_ANSWER_BYTES = (2 << 30) - (16 << 20)
"""A gRPC message ends at 2 GiB; some is left to the other outputs."""

_ITEM_BYTES = {"float32": 4, "float16": 2}


def check_logits(
    sampling: SamplingParams,
    num_prompt_tokens: int,
    vocab_size: int,
    max_seq_len: int,
    *,
    is_streaming: bool,
) -> None:
    """Check that one answer can hold the logits that a sample asks for.

    Raises:
        RequestError: names the bytes, the limit and what would be less.
    """
    row_bytes = vocab_size * _ITEM_BYTES[sampling.logits_dtype]
    num_rows = 0
    if sampling.return_context_logits:
        num_rows += num_prompt_tokens
    if sampling.return_generation_logits:
        num_tokens = max(0, min(sampling.max_tokens, max_seq_len - num_prompt_tokens))
        num_rows += sampling.beam_width * (1 if is_streaming else num_tokens)
    if num_rows * row_bytes > MAX_ANSWER_BYTES:
        raise RequestError(
            f"the logits of {num_rows} tokens over {vocab_size} ids are {num_rows * row_bytes} "
            f"bytes, but an answer holds {MAX_ANSWER_BYTES}; ask for fewer tokens, stream "
            "generation logits, or set logits_datatype to TYPE_FP16"
        )
