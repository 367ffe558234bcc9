"""From a front end's message to a checked request, and to its compiled grammar."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.messages import Submit
from trimaran.comm.messages.sampling_fields import check_values, refuse_unserved
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.config.speculation_config import LOOKAHEAD, LookaheadSizes
from trimaran.worker.execution.prompt_tables import PromptTable
from trimaran.worker.guided.compiler import GuideCompiler
from trimaran.worker.guided.guide import Grammar, Guide
from trimaran.worker.guided.mask_process import MaskProcess, receive_masks
from trimaran.worker.kv_cache.free_blocks import Retention
from trimaran.worker.kv_cache.sequence_blocks import RetentionPlan
from trimaran.worker.requests.request import Request

_MAX_INT32 = (1 << 31) - 1
_MAX_SEQUENCES, _MAX_IDS = 1 << 16, 1 << 64
"""The numbers that `StepOutput` can hold."""


def request_from(
    source: Hashable,
    message: Submit,
    number: int,
    limits: SchedulerConfig,
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> Request:
    """The request of ``message``, with all values checked.

    ``max_tokens`` is lowered to the tokens that ``max_seq_len`` leaves after the prompt.

    Raises:
        RequestError: names the value, what is allowed and the remedy.
    """
    sampling = _sampling(message, vocab_size)
    if sampling.beam_width > 1:
        _check_beams(sampling, limits, bool(message.output_ids))
    _check_numbers(message, sampling.num_return_sequences)
    prompt, output = _ids(message.prompt_ids), _ids(message.output_ids)
    _check_prompt(prompt, limits)
    table = _prompt_table(message, hidden_size, dtype)
    num_entries = 0 if table is None else table.shape[0]
    _check_ids("input_ids", prompt, vocab_size + num_entries)
    _check_ids("output_ids", output, vocab_size)
    if output and sampling.num_return_sequences > 1 and sampling.beam_width == 1:
        raise RequestError(
            f"a request with {len(output)} output ids continues one sequence, but "
            f"num_return_sequences is {sampling.num_return_sequences}; send one request each"
        )
    _check_drafts(message, sampling, limits, vocab_size)
    room = limits.max_seq_len - len(prompt)
    if sampling.max_tokens > room:
        sampling = dataclasses.replace(sampling, max_tokens=room)
    return Request(
        source=source,
        request_id=message.request_id,
        number=number,
        prompt_ids=prompt,
        output_ids=output,
        sampling=sampling,
        sequence_index=message.sequence_index,
        priority=message.priority,
        has_adapter=bool(message.adapter_id) or message.adapter is not None,
        cache_salt=message.cache_salt,
        retention=_retention(message, len(prompt)),
        prompt_table=None if table is None else message.embeddings,
        client_id=message.client_request_id,
        is_streaming=message.streaming,
        draft_token_ids=tuple(message.draft_token_ids),
        draft_acceptance_threshold=message.draft_acceptance_threshold,
        draft_logits=_draft_logits(message, sampling, vocab_size),
        lookahead=_lookahead(message, sampling, limits),
        max_draft_tokens=message.max_draft_tokens,
        ends_after_drafts=message.ends_after_drafts,
    )


def _prompt_table(message: Submit, hidden_size: int, dtype: torch.dtype) -> PromptTable | None:
    if message.embeddings is None:
        return None
    table = PromptTable.from_wire(message.embeddings)
    table.check(hidden_size, dtype)
    return table


def _sampling(message: Submit, vocab_size: int) -> SamplingParams:
    try:
        sampling = SamplingParams.from_wire(message.sampling)
    except TypeError as error:
        raise RequestError(f"unknown sampling parameter: {error}") from error
    refuse_unserved(sampling)
    # Fields that the message leaves out have their defaults, which are valid.
    check_values(message.sampling, vocab_size)
    bad = _last_words.checked("bad_words", sampling.bad_words, range(vocab_size))
    # Ids beyond the vocabulary never occur; steps hold ids in 32 bits.
    allowed = range(-_MAX_INT32 - 1, _MAX_INT32 + 1)
    stop = _last_words.checked("stop_words", sampling.stop_words, allowed)
    _check_bias(sampling.embedding_bias, vocab_size)
    return dataclasses.replace(sampling, bad_words=bad, stop_words=stop)


def _check_bias(packed: bytes, vocab_size: int) -> None:
    """Minus infinity forbids an id; all other values must be finite."""
    if not packed:
        return
    bias = np.frombuffer(packed, "<f4")
    if bias.size != vocab_size:
        raise RequestError(
            f"embedding_bias holds {bias.size} values but must hold one for each of the "
            f"{vocab_size} vocabulary ids"
        )
    is_forbidden = np.isneginf(bias)
    wrong = bias[~np.isfinite(bias) & ~is_forbidden]
    if wrong.size:
        raise RequestError(
            f"embedding_bias holds {wrong[0]} but must hold finite numbers, or -inf for ids "
            "that must not come"
        )
    if is_forbidden.all():
        raise RequestError(
            "embedding_bias is -inf for every id of the vocabulary; leave one that may come"
        )


def _retention(message: Submit, num_prompt_tokens: int) -> RetentionPlan | None:
    said = message.retention
    if said is None:
        return None
    ranges = tuple(
        (start, end, Retention(priority, max(0, duration_ms) / 1e3))
        for start, end, priority, duration_ms in said["ranges"]
    )
    priority, duration_ms = said["output"]
    output = Retention(priority, max(0, duration_ms) / 1e3)
    return RetentionPlan(ranges, output, num_prompt_tokens)


def _check_beams(sampling: SamplingParams, limits: SchedulerConfig, has_output: bool) -> None:
    width, count = sampling.beam_width, sampling.num_return_sequences
    if width > limits.max_beam_width:
        raise RequestError(
            f"beam_width is {width} but this engine serves at most {limits.max_beam_width}. "
            "Ask for fewer beams, or build the engine with a larger --max-beam-width (for a "
            "Hugging Face folder set max_beam_width in config.pbtxt)."
        )
    if count > width:
        raise RequestError(
            f"num_return_sequences is {count} but a search with beam_width {width} finds no "
            "more sequences than it has beams. Ask for fewer, or for wider beams."
        )
    if sampling.guide_type:
        raise RequestError(
            f"guided_decoding_guide_type is {sampling.guide_type!r} together with beam_width "
            f"{width}: beams do not follow a guide. Leave one of the two out."
        )
    if has_output:
        raise RequestError(
            f"a request of beam_width {width} has output ids but a beam search starts at its "
            "prompt. Send the prompt alone."
        )


def _check_numbers(message: Submit, num_sequences: int) -> None:
    """A step's message tells requests apart by these numbers."""
    checks = (
        ("request_id", message.request_id, _MAX_IDS - 1),
        ("sequence_index", message.sequence_index, _MAX_SEQUENCES - num_sequences),
    )
    for name in ("request_id", "sequence_index", "priority"):
        value = getattr(message, name)
        if not _is_whole(value):
            raise RequestError(f"{name} is {value!r} but must be a whole number")
    for name, value, most in checks:
        if not 0 <= value <= most:
            raise RequestError(
                f"{name} is {value} but must be 0 to {most}, with num_return_sequences "
                f"{num_sequences}; number requests and their sequences from 0"
            )


def _check_drafts(
    message: Submit, sampling: SamplingParams, limits: SchedulerConfig, vocab_size: int
) -> None:
    ids, config = message.draft_token_ids, limits.speculation
    _check_words("draft_input_ids", (ids,), range(vocab_size))
    threshold = message.draft_acceptance_threshold
    # Written so that NaN is refused too.
    if type(threshold) not in (int, float) or not 0 <= threshold <= 1:
        raise RequestError(
            f"draft_acceptance_threshold is {threshold!r} but must be between 0 and 1"
        )
    most = message.max_draft_tokens
    if most is not None and (not _is_whole(most) or most < 0):
        raise RequestError(
            f"max_draft_tokens is {most!r} but must be a whole number from 0; 0 asks for no "
            "drafts"
        )
    if ids and not config.is_on:
        raise RequestError(
            f"draft_input_ids holds {len(ids)} ids but this model verifies no draft tokens. "
            "Serve with --speculative-decoding draft_tokens.",
            ErrorKind.UNSUPPORTED,
        )
    # Draft ids count from the prompt's end: those in place of known output are not drafts.
    num_drafts = max(len(ids) - len(message.output_ids) // 4, most or 0)
    if config.is_on and num_drafts > config.max_draft_tokens:
        raise RequestError(
            f"a request asks for {num_drafts} draft tokens but this model "
            f"verifies at most {config.max_draft_tokens} in a step. Send fewer, or serve with "
            "a larger --max-draft-tokens."
        )
    if ids and sampling.beam_width > 1:
        raise RequestError(
            f"draft_input_ids holds {len(ids)} ids in a request with beam_width above 1: beams "
            "follow no drafts. Leave one of the two out.",
            ErrorKind.UNSUPPORTED,
        )


def _lookahead(
    message: Submit, sampling: SamplingParams, limits: SchedulerConfig
) -> LookaheadSizes | None:
    """The sizes of a request; raises RequestError if the engine has none, or smaller ones."""
    if not message.lookahead:
        return None
    most = limits.speculation.lookahead
    is_served = limits.speculation.drafter == LOOKAHEAD and len(message.lookahead) == len(most)
    pairs = zip(message.lookahead, (1, 2, 1), most, strict=False)
    if not is_served or any(type(n) is not int or not a <= n <= b for n, a, b in pairs):
        raise RequestError(
            f"the sizes of lookahead decoding are {list(message.lookahead)} but must be three "
            f"whole numbers, at least [1, 2, 1] and at most {list(most)}, for an engine that "
            "is built for lookahead decoding. Leave them out."
        )
    if message.draft_token_ids or message.embeddings is not None or sampling.beam_width > 1:
        raise RequestError(
            f"the sizes of lookahead decoding are {list(message.lookahead)} in a request with "
            "draft_input_ids, a prompt table or beams, for which lookahead drafts nothing. "
            "Leave one of the two out.",
            ErrorKind.UNSUPPORTED,
        )
    return LookaheadSizes(*message.lookahead)


def _draft_logits(
    message: Submit, sampling: SamplingParams, vocab_size: int
) -> npt.NDArray[np.float32] | None:
    """The logits of the last draft ids, [n, V]; None if they have no effect.

    A greedy request without a threshold accepts the likeliest ids, whatever the logits are.
    """
    if not message.draft_logits:
        return None
    size = len(message.draft_logits)
    count = size // (4 * vocab_size)
    if size != 4 * vocab_size * count or count > len(message.draft_token_ids):
        raise RequestError(
            f"draft_logits holds {size} bytes but must hold {4 * vocab_size} for each of at "
            f"most {len(message.draft_token_ids)} draft_input_ids"
        )
    if sampling.is_greedy and not message.draft_acceptance_threshold:
        return None
    return np.frombuffer(message.draft_logits, "<f4").reshape(count, vocab_size)


def _ids(raw: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(raw)
    return ids


def _check_prompt(prompt: array[int], limits: SchedulerConfig) -> None:
    if not prompt:
        raise RequestError("the prompt is empty; send at least one token id")
    limit = min(limits.max_input_len, limits.max_seq_len - 1)
    if len(prompt) > limit:
        raise RequestError(
            f"Prompt length ({len(prompt)}) exceeds maximum input length ({limit}). Shorten "
            "the prompt, or build the engine with a larger --max-input-len and --max-seq-len."
        )


def _check_ids(name: str, ids: array[int], vocab_size: int) -> None:
    values = np.asarray(ids)
    for value in (values.min(), values.max()) if len(values) else ():
        if not 0 <= value < vocab_size:
            raise _no_id(name, int(value), range(vocab_size))


Words = tuple[tuple[int, ...], ...]


class _LastWords:
    """The words that were checked last: those of all sequences of a client's request are equal,
    and what is equal is checked, sorted and hashed once."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, range], Words] = {}

    def checked(self, name: str, words: Words, allowed: range) -> Words:
        """These words, as the object that was checked before if they are equal to the last.

        Raises:
            RequestError: a word holds what is no id.
        """
        if not words:
            return words
        last = self._last.get((name, allowed))
        if last != words:
            _check_words(name, words, allowed)
            last = self._last[name, allowed] = words
        return last


_last_words = _LastWords()


def _check_words(name: str, words: Sequence[Sequence[int]], allowed: range) -> None:
    least, most = allowed[0], allowed[-1]
    for word in filter(None, words):
        # There may be 65,536 ids in one word: sets and min/max are faster than a loop.
        if {*map(type, word)} != {int} or min(word) < least or max(word) > most:
            wrong = (each for each in word if not _is_whole(each) or each not in allowed)
            raise _no_id(name, next(wrong), allowed)


def _no_id(name: str, value: object, allowed: range) -> RequestError:
    return RequestError(
        f"{name} holds {value!r:.80}, which is no token id: ids are {allowed[0]} to "
        f"{allowed[-1]}"
    )


def _is_whole(value: object) -> bool:
    """Whether ``value`` is an int; True is one for isinstance, and 2.0 equals one."""
    return type(value) is int


class Compiled(NamedTuple):
    """A request with its guide in place, or the error of the guide."""

    request: Request
    error: RequestError | None


class GuidedRequests:
    """Holds requests back, in no order, until their first masks are here."""

    def __init__(self, compiler: GuideCompiler | None) -> None:
        """Without a compiler every guide is refused."""
        self._compiler = compiler
        self._held: dict[Request, Future[Grammar]] = {}
        """Requests whose guides are being compiled."""
        self._started: dict[Request, Guide] = {}
        """Requests whose first masks are being filled."""

    def __len__(self) -> int:
        return len(self._held) + len(self._started)

    def hold(self, request: Request) -> None:
        """Compile a request's guide, and hold the request meanwhile.

        Raises:
            RequestError: guides are not served, or this one is malformed.
        """
        sampling = request.sampling
        if self._compiler is None:
            raise RequestError(
                f"guided_decoding_guide_type is {sampling.guide_type!r} but this model serves "
                "no guided decoding. Set guided_decoding_backend to xgrammar in its "
                "config.pbtxt.",
                ErrorKind.UNSUPPORTED,
            )
        self._held[request] = self._compiler.submit(sampling.guide_type, sampling.guide)

    def drop(self, request: Request) -> None:
        """Hold ``request`` no longer, if it was held: it was ended."""
        guide = self._started.pop(request, None)
        if guide is not None:
            guide.close()
        future = self._held.pop(request, None)
        # A compilation that has not begun would delay the others.
        if future is not None and not future.cancel() and future.exception() is None:
            future.result().release()

    def sleep(self, seconds: float) -> None:
        """Wait for any grammar or first mask, at most this long."""
        if self._started:
            receive_masks(self._processes(), seconds)
        else:
            wait(self._held.values(), seconds, FIRST_COMPLETED)

    def take_compiled(self) -> list[Compiled]:
        """Requests whose first mask is here, or whose guide failed; they are held no longer."""
        failed = []
        for request, future in [item for item in self._held.items() if item[1].done()]:
            del self._held[request]
            error = future.exception()
            if isinstance(error, RequestError):
                failed.append(Compiled(request, error))
                continue
            end_id, output_ids = request.sampling.end_id, request.output_ids
            drafts = request.draft_token_ids[len(output_ids) :]
            self._started[request] = future.result().start(end_id, output_ids, drafts)
        for process in self._processes():
            process.flush()
        receive_masks(self._processes())
        done = [request for request, guide in self._started.items() if guide.is_answered]
        return failed + [self._take(request) for request in done]

    def _take(self, request: Request) -> Compiled:
        guide = self._started.pop(request)
        if guide.error is None:
            request.guide = guide
        else:
            guide.close()
        return Compiled(request, guide.error)

    def _processes(self) -> set[MaskProcess]:
        return {guide.grammar.process for guide in self._started.values()}

    def close(self) -> None:
        """Stop the compiler."""
        if self._compiler is not None:
            self._compiler.close()
