"""A request and its sequences, from submission to the last token."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from trimaran.comm.messages.messages import FinishReason
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.word_automaton import WordAutomaton, WordState
from trimaran.worker.config.speculation_config import LookaheadSizes
from trimaran.worker.guided.guide import Guide
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import RetentionPlan, SequenceBlocks, root_hash


@dataclass(slots=True)
class SequenceFigures:
    """Blocks of the prompt, and times in nanoseconds on this host's monotonic clock."""

    arrival_ns: int
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_new_blocks: int = 0
    """Blocks taken for the prompt. The copy of a cached partial block counts too."""

    num_reused_blocks: int = 0
    """Blocks of the prompt that were in the prefix cache and are read alone. A block that the
    prompt writes on in counts as new."""

    num_draft_tokens: int = 0
    """Draft tokens that were verified."""

    num_accepted_draft_tokens: int = 0
    """Draft tokens that became output."""

    def started(self, num_prompt_blocks: int, num_reused: int) -> None:
        """The sequence has started. A resumption after preemption does not count."""
        if self.first_scheduled_ns:
            return
        self.first_scheduled_ns = time.monotonic_ns()
        self.num_reused_blocks = num_reused
        self.num_new_blocks = max(0, num_prompt_blocks - num_reused)

    def token(self) -> None:
        """Another output token is known."""
        self.last_token_ns = time.monotonic_ns()
        if not self.first_token_ns:
            self.first_token_ns = self.last_token_ns

    def to_wire(self) -> dict[str, int]:
        """The figures by the names of the front end's outputs."""
        return {
            "kv_cache_alloc_new_blocks": self.num_new_blocks,
            "kv_cache_reused_blocks": self.num_reused_blocks,
            "kv_cache_alloc_total_blocks": self.num_new_blocks,
            "arrival_time_ns": self.arrival_ns,
            "first_scheduled_time_ns": self.first_scheduled_ns,
            "first_token_time_ns": self.first_token_ns,
            "last_token_time_ns": self.last_token_ns,
            "total_draft_tokens": self.num_draft_tokens,
            "total_accepted_draft_tokens": self.num_accepted_draft_tokens,
        }


class RequestStatus(IntEnum):
    """The state of a sequence."""

    NEW = 0
    """Not queued yet: the sequence forks off once the prompt is computed."""
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class Beams(Protocol):
    """The beams of one request, attached to its first sequence, the leader.

    `scheduling.beam_group.BeamGroup` implements this and adds the selection among beams, which
    the scheduler alone uses. All other modules use beams through this interface.
    """

    width: int
    beams: list[Sequence]
    """The leader first."""

    awaited_step: int
    """The step whose result the next selection is made from."""

    def start_over(self) -> None:
        """Forget all output: the same output is found again."""
        ...

    def num_further_blocks(self, cache: KVCacheManager, num_blocks: int) -> int:
        """Blocks of all but the leader, if each has ``num_blocks``."""
        ...

    def reserve(self, cache: KVCacheManager, num_blocks: int) -> None:
        """Reserve ``num_blocks`` for each but the leader; the caller has checked."""
        ...

    def release(self, cache: KVCacheManager) -> None:
        """Free the blocks and the reservations of all but the leader."""
        ...

    def enter_rows(self, free_rows: list[int]) -> None:
        """Take rows for all but the leader."""
        ...

    def leave_rows(self) -> list[int]:
        """Give back the rows of all but the leader."""
        ...

    def payload(self) -> dict[str, Any]:
        """The best outputs so far, best first, for a message's extras."""
        ...

    def logits(self) -> list[list[Any]]:
        """Logits of each output of `payload`, in its order; empty if the client wants none."""
        ...

    def forget(self) -> None:
        """Let go of all outputs and of their logits: everything was sent."""
        ...


class Sequence:
    """One stream of tokens of a request.

    ``token_ids`` are the ids on the host: the prompt, then the output. The step being
    planned may build on ``num_pending`` more, which steps in flight sample on the device.
    ``num_computed_tokens`` counts the tokens whose KV is written once all launched steps end.
    """

    __slots__ = (
        "beams",
        "blocks",
        "capacity",
        "cum_log_prob",
        "drafts",
        "end_ids",
        "figures",
        "finish_reason",
        "guide",
        "has_told_prompt",
        "index",
        "is_preempted",
        "key",
        "last_step",
        "look_at",
        "max_len",
        "num_computed_before",
        "num_computed_tokens",
        "num_pending",
        "num_prompt_tokens",
        "num_unverified",
        "parent",
        "preempted_at",
        "publish_at",
        "request",
        "row",
        "status",
        "stop_state",
        "token_ids",
    )

    def __init__(
        self, request: Request, position: int, token_ids: array[int], num_groups: int
    ) -> None:
        self.request = request
        self.index = request.sequence_index + position
        self.key: tuple[int, ...] = (-request.priority, request.number, position)
        """Order of admission; the reverse is the order of preemption."""
        self.token_ids = token_ids
        self.num_prompt_tokens = request.num_prompt_tokens
        self.max_len = request.num_prompt_tokens + request.sampling.max_tokens
        self.end_ids = frozenset((request.sampling.end_id, *request.sampling.end_ids))
        self.stop_state: WordState[int] | None = None
        """How much of stop words the output ends with; None without stop words."""
        if request.stop_words:
            # `ends_by` takes the last id of a replayed output as it takes any other.
            self.stop_state = request.stop_words.after(request.output_ids[:-1])
        self.look_at = 0
        """Number of known tokens from which a new one may end the sequence or fill a block."""
        self.num_computed_tokens = 0
        self.num_computed_before = 0
        """``num_computed_tokens`` before ``last_step``."""
        self.num_pending = 0
        self.num_unverified = 0
        """Draft tokens that steps in flight verify. The sequence has up to so many tokens more
        than ``num_pending`` says, and up to so many more are computed."""
        self.row = -1
        self.last_step = 0
        """The last step that computes tokens of this sequence."""
        root = root_hash(request.cache_salt, request.adapter_id)
        self.blocks = SequenceBlocks(num_groups, root)
        self.blocks.retention = request.retention
        self.capacity = 0
        """Tokens that the blocks hold, while the sequence has a row."""
        self.publish_at = 0
        """``num_computed_tokens`` from which another full block can be published."""
        self.parent: Sequence | None = None
        self.beams: Beams | None = None
        """The beam group of the sequence, if it is a beam."""
        self.status = RequestStatus.NEW
        self.finish_reason = FinishReason.NOT_FINISHED
        self.is_preempted = False
        self.preempted_at = 0
        """The last step before its last preemption."""
        self.has_told_prompt = False
        """Whether the prompt's logits were sent."""
        self.cum_log_prob = 0.0
        """Sum over the output sampled here, without the output that a replay brought."""
        self.guide: Guide | None = None
        """The state of its grammar."""
        self.drafts: Any = None
        """`scheduling.draft_rows` keeps the state of its drafts here."""
        self.figures: SequenceFigures | None = None
        if request.sampling.return_perf_metrics:
            self.figures = SequenceFigures(request.arrival_ns)

    def preempt(self, step: int) -> None:
        """Back to the queue. Within its priority, the sequence that was preempted first is the
        first to resume, and the last to be preempted again."""
        self.num_computed_tokens = 0
        self.is_preempted = True
        self.preempted_at = step
        self.key = (self.key[0], -1, step, *self.key[-2:])

    @property
    def is_alone(self) -> bool:
        """Whether it shares no blocks with other sequences of its request."""
        return self.beams is None and len(self.request.sequences) == 1

    @property
    def num_output_tokens(self) -> int:
        """Output ids on the host."""
        return len(self.token_ids) - self.num_prompt_tokens

    def ends_by(self, token_id: int) -> FinishReason:
        """Whether the output ends the sequence with its latest id; called once for each."""
        if self.stop_state is not None:
            self.stop_state = self.request.stop_words.next(self.stop_state, token_id)
            if self.stop_state.ends_word:
                return FinishReason.STOP_WORDS
        if len(self.token_ids) >= self.max_len or self._is_behind_drafts(token_id):
            return FinishReason.LENGTH
        if self.guide is not None and self.guide.is_complete:
            return FinishReason.END_ID
        return FinishReason.NOT_FINISHED

    def _is_behind_drafts(self, token_id: int) -> bool:
        """Whether the output ends because its latest id is no draft id, or the first behind."""
        if not self.request.ends_after_drafts:
            return False
        place, drafts = self.num_output_tokens - 1, self.request.draft_token_ids
        return place >= len(drafts) or drafts[place] != token_id


_automata: WeakValueDictionary[tuple[tuple[int, ...], ...], WordAutomaton[int]]
_automata = WeakValueDictionary()


def _automaton(words: tuple[tuple[int, ...], ...]) -> WordAutomaton[int]:
    """The automaton of these words: the sequences of a client's request share it, each of
    which is a request here."""
    found = _automata.get(words)
    if found is None:
        found = _automata[words] = WordAutomaton(words)
    return found


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt, its sampling parameters, and 1 to n sequences."""

    source: Hashable
    """The connection that submitted it."""

    request_id: int
    """Unique per source."""

    number: int
    """Order of arrival."""

    prompt_ids: array[int]
    sampling: SamplingParams
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    """Output that clients already have: the request is replayed."""

    sequence_index: int = 0
    """Index of the first sequence."""

    priority: int = 0
    has_adapter: bool = False
    adapter_id: int = 0
    """The adapter's number on its dp rank, once it is known; 0 for none."""

    cache_salt: bytes = b""
    retention: RetentionPlan | None = None
    """How long its KV blocks are kept."""

    prompt_table: dict[str, Any] | None = None
    """`PromptTable.to_wire()`."""

    is_streaming: bool = False
    """Whether the client wants each token at once."""

    client_id: str = ""
    """The client's own id; not unique."""

    draft_token_ids: tuple[int, ...] = ()
    """Ids that the client expects after the prompt; the engine verifies them."""

    draft_acceptance_threshold: float = 0.0
    """0 accepts the draft ids that the model chooses itself."""

    draft_logits: npt.NDArray[np.float32] | None = None
    """[n, V]: the logits from which the last n of ``draft_token_ids`` were drawn, for
    rejection sampling."""

    lookahead: LookaheadSizes | None = None
    """The sizes of lookahead decoding; None for the engine's."""

    max_draft_tokens: int | None = None
    """Most draft tokens of a step; None for the engine's limit, 0 for no drafts."""

    ends_after_drafts: bool = False
    """Whether the output ends at the first id that is no draft id, or that follows the last
    draft id."""

    stop_words: WordAutomaton[int] = field(init=False)
    """Shared by requests of equal stop words."""

    sequences: list[Sequence] = field(default_factory=list)

    guide: Guide | None = None
    """What the output must follow, in the state before the first new id."""

    dp_rank: int = 0
    """The data-parallel rank that the request runs on."""

    arrival_ns: int = field(default_factory=time.monotonic_ns)
    """Time of arrival on this host's monotonic clock."""

    has_extras: bool = field(init=False)
    """Whether its outputs are more than ids."""

    may_get_stuck: bool = field(init=False)
    """Whether its sampling parameters may forbid every id at once."""

    def __post_init__(self) -> None:
        sampling = self.sampling
        self.stop_words = _automaton(sampling.stop_words)
        self.has_extras = (
            sampling.return_log_probs
            or sampling.return_context_logits
            or sampling.return_generation_logits
            or sampling.return_perf_metrics
            or sampling.beam_width > 1
        )
        self.may_get_stuck = (
            any(sampling.bad_words)
            or sampling.no_repeat_ngram_size > 0
            or bool(sampling.embedding_bias)
            or bool(sampling.guide_type)
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    @property
    def is_finished(self) -> bool:
        """Whether all sequences have finished."""
        return all(s.status is RequestStatus.FINISHED for s in self.sequences)

    def row_sampling(self) -> dict[str, Any]:
        """What the ranks need of the sampling parameters. Rank 0 alone looks for stop words;
        of beams their last ids count as candidates."""
        wire = self.sampling.to_wire()
        if self.sampling.beam_width == 1:
            wire.pop("stop_words", None)
        return wire

    def start_sequences(self, num_groups: int) -> None:
        """Make the sequences; the first computes the prompt, the others fork off it."""
        # A beam search starts with the leader; its group makes the other beams.
        is_beam = self.sampling.beam_width > 1
        for position in range(1 if is_beam else self.sampling.num_return_sequences):
            ids = self.prompt_ids + self.output_ids
            sequence = Sequence(self, position, ids, num_groups)
            if self.guide is not None:
                sequence.guide = self.guide.fork() if position else self.guide
            self.sequences.append(sequence)
        for sequence in self.sequences[1:]:
            sequence.parent = self.sequences[0]


KEY = attrgetter("key")


def remove_by_key(sequences: list[Sequence], sequence: Sequence) -> None:
    """Take one out of a list that is ordered by key; no two keys are equal."""
    place = bisect_left(sequences, sequence.key, key=KEY)
    assert sequences[place] is sequence, "a sequence is not where its key says"
    del sequences[place]
