"""What an engine can never admit, said at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from collections.abc import Sequence as List

from trimaran.comm.errors import RefusedError, RequestError, with_request_id
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import KEY, Request, Sequence
from trimaran.worker.scheduling.beam_group import num_further_blocks


def check_limits(request: Request, config: SchedulerConfig, cache: KVCacheManager) -> None:
    """Refuse a request that the limits can never admit.

    Raises:
        RequestError: names the value, the limit and the remedy.
    """
    num_prompt, sampling = request.num_prompt_tokens, request.sampling
    num_seqs = max(sampling.num_return_sequences, sampling.beam_width)
    if num_seqs > config.max_num_seqs:
        name = "beam_width" if sampling.beam_width > 1 else "num_return_sequences"
        raise RequestError(
            f"{name} is {num_seqs} but this engine runs at most "
            f"{config.max_num_seqs} sequences at once. Ask for fewer."
        )
    total = num_prompt + request.sampling.max_tokens
    longest = max(num_prompt, total - 1)
    num_blocks = most_held(sampling, longest, config, cache)
    num_blocks += num_further_blocks(sampling, cache, num_prompt, num_blocks)
    if num_blocks > cache.num_blocks:
        raise RequestError(
            f"a prompt of {num_prompt} tokens and {request.sampling.max_tokens} new ones "
            f"need {num_blocks} KV cache blocks of {cache.block_size} tokens but the "
            f"cache has {cache.num_blocks}. Shorten the prompt, lower max_tokens, or "
            "give the engine a larger KV cache."
        )
    if sampling.beam_width > 1 and num_prompt <= cache.switch_at < total - 1:
        raise RequestError(
            f"beam_width is {sampling.beam_width} and a prompt of {num_prompt} tokens with "
            f"{sampling.max_tokens} new ones outgrows the {cache.switch_at} tokens up to which "
            "the model's positions are those of short contexts, which beams cannot do. Lower "
            f"max_tokens to {cache.switch_at + 1 - num_prompt}, or ask for one beam."
        )
    if not config.enable_chunked_context and num_prompt > config.max_num_batched_tokens:
        raise RequestError(
            f"a prompt of {num_prompt} tokens exceeds the {config.max_num_batched_tokens} "
            "tokens of one step (max_num_tokens). Shorten it, or enable chunked context."
        )


def check_queue(
    request: Request,
    config: SchedulerConfig,
    queues: List[tuple[list[Sequence], Collection[Request]]],
    num_free: int,
) -> None:
    """Refuse a request that the queue of its priority has no place for.

    ``queues``, one a lane, are each in the order in which it will get the ``num_free`` places
    among the running sequences, and the requests beside it join it; who is about to get one
    does not wait. A replayed request has its place. A binary search a lane, however many wait.

    Raises:
        RefusedError: there are as many.
    """
    level, levels = -request.priority, config.level_queue_sizes
    limit = levels[level - 1] if levels else config.max_queue_size
    if not limit or request.output_ids:
        return
    first, end = 0, sum(len(waiting) + len(expected) for waiting, expected in queues)
    if levels:
        first, end = (
            sum(
                bisect_left(waiting, (bound,), key=KEY)
                + sum(-other.priority < bound for other in expected)
                for waiting, expected in queues
            )
            for bound in (level, level + 1)
        )
    if end - max(first, num_free) < limit:
        return
    place = f" by priority level {level}" if levels else ""
    text = (
        f"Exceeds maximum queue size: Maximum queue size of {limit} has been reached{place}, "
        "please try again later"
    )
    raise RefusedError(with_request_id(request.client_id, text))


def most_held(
    sampling: SamplingParams, num_tokens: int, config: SchedulerConfig, cache: KVCacheManager
) -> int:
    """Blocks that one sequence of ``num_tokens`` holds at once."""
    if sampling.num_return_sequences > 1 or sampling.beam_width > 1:
        # What one needs no more, others may: all blocks are kept.
        return cache.blocks_for(num_tokens)
    return cache.most_held(num_tokens, config.max_num_batched_tokens)
