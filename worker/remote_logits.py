"""How many logits a front end on another host may be told at once."""

from __future__ import annotations

from trimaran.comm.bulk_extras import MAX_REMOTE_BYTES
from trimaran.comm.errors import RequestError
from trimaran.comm.messages import Submit

_ITEM_BYTES = {"float16": 2}
"""Of types other than float32."""


def check_remote_logits(message: Submit, vocab_size: int, max_seq_len: int) -> None:
    """Refuse logits that are too large for one message to another host: it would be dropped,
    as one that reads nothing, and all of its requests with it.

    Raises:
        RequestError: names the bytes, the limit and what would be less.
    """
    sampling, num_prompt = message.sampling, len(message.prompt_ids) // 4
    count, width = sampling.get("num_return_sequences", 1), sampling.get("beam_width", 1)
    num_rows = 0
    if sampling.get("return_context_logits"):
        # The sequences of a request may all begin in one step; beams share their prompt.
        num_rows = num_prompt * (count if width == 1 else 1)
    if sampling.get("return_generation_logits"):
        is_whole = width > 1 and not message.streaming
        room = max(1, max_seq_len - num_prompt)
        num_tokens = min(sampling.get("max_tokens", room), room) if is_whole else 1
        num_rows = max(num_rows, count * num_tokens)
    num_bytes = num_rows * vocab_size * _ITEM_BYTES.get(sampling.get("logits_dtype", ""), 4)
    if num_bytes > MAX_REMOTE_BYTES:
        raise RequestError(
            f"logits of {num_rows} tokens at once are {num_bytes} bytes, but a front end on "
            f"another host than rank 0 takes {MAX_REMOTE_BYTES}. Shorten the prompt, ask for "
            "fewer sequences or tokens, let beams stream, or set logits_datatype to TYPE_FP16."
        )
