"""Draft rows: a step's rows that verify draft tokens, and the tokens that they yield."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from typing import TypeAlias

from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.draft_tree import AnyTree, DynamicTree
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.config.speculation_config import LOOKAHEAD
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Request, RequestStatus, Sequence
from trimaran.worker.scheduling.path_moves import PathMoves
from trimaran.worker.scheduling.sequence_drafts import SequenceDrafts
from trimaran.worker.scheduling.step_plan import DraftRun, Emission, ScheduledStep, StepPlan
from trimaran.worker.speculation.controller import AcceptanceRate, DraftController, DraftReach
from trimaran.worker.speculation.draft_counts import DraftCounts
from trimaran.worker.speculation.drafters import (
    MAX_NEW,
    Drafter,
    IndexRoom,
    NetworkDrafter,
    NgramDrafter,
    RequestDrafter,
)
from trimaran.worker.speculation.lookahead import LookaheadDrafter
from trimaran.worker.speculation.tree_rates import NodeRates, TreeRates

_MIN_FREE = 0.02
"""Share of the KV cache's blocks that must be free for drafts to take new blocks."""

_MIN_REST, _MAX_REST = 4, 64
"""After a step without worthwhile drafts, steps until n-grams or a network draft again: at
first, and after many such steps in a row."""

_NOT_FINISHED = FinishReason.NOT_FINISHED

_MEASURED = 2
"""Further steps without drafts, if the first of them is to measure the time without drafts."""


_Candidate: TypeAlias = "tuple[int, Sequence, array[int]]"
"""A sequence that a step samples, its index among these, and its draft ids."""


def _can_be_drafted(sequence: Sequence, plan: StepPlan) -> bool:
    """Whether drafts may follow what a step computes of a sequence."""
    # Forks begin in this step.
    if sequence in plan.first_samples:
        return False
    # The rows of a prompt whose logits are kept are its own alone.
    is_prompt = sequence.num_computed_before < sequence.num_prompt_tokens
    return not (is_prompt and sequence.request.sampling.return_context_logits)


class DraftRows:
    """Adds draft rows to a planned step, and takes in the tokens of these rows.

    Draft rows come last: they take what budget, rows and blocks a step leaves, and preempt no
    sequence. The model's own token is drawn in each row, from logits that all processors have
    edited with the draft tokens before the row as output. Draft tokens are accepted as far as
    they are equal to these own tokens, so an output is the same as without drafts. Keys and
    values of rejected tokens lie behind the computed length, and are overwritten.

    Drafts of a request and of the text follow the last known id: steps that may verify them are
    planned after the results of all steps. A network's drafts stay on the device. The next step
    is planned without the result: its rows count the drafts in flight as accepted, and blocks
    and length limits hold for this case; ranks subtract the rejected drafts.
    """

    def __init__(
        self, config: SchedulerConfig, cache: KVCacheManager, *, has_stages: bool = False
    ) -> None:
        """``has_stages``: stages of a pipeline compute a step before its ids are sampled."""
        self._config = config.speculation
        self._cache = cache
        self._max_rows = config.max_num_rows
        self.counts = DraftCounts()
        self._index_room = IndexRoom()
        self.make_drafter: Callable[[Request], Drafter]
        self.make_drafter = self._own_drafter
        """The drafter of a request without draft tokens of its own."""
        self._controller = DraftController()
        tree, self._dynamic_limits = self._config.draft_tree, self._config.dynamic_limits
        self._tree: AnyTree | None = tree
        self._ranks: TreeRates | NodeRates | None = None
        if tree is not None:
            self._ranks = TreeRates(tree)
        elif self._dynamic_limits is not None:
            self._tree, self._ranks = DynamicTree(), NodeRates(self._dynamic_limits.num_nodes)
        self._max_seq_len = config.max_seq_len
        self.path_moves: PathMoves | None = None
        """Moves that earlier stages of a pipeline have not been told; None for one stage."""
        if has_stages and self._config.has_trees:
            self.path_moves = PathMoves(cache.block_size)
        self._reach = DraftReach(self._config.drafted_counts)
        """Tokens that a network drafts for each sequence."""
        self._typical, self._typical_asked = AcceptanceRate(), AcceptanceRate()
        """The acceptance of all sequences' drafts, and of drafts that requests brought."""
        self._typical_guess = AcceptanceRate()
        """The acceptance of the windows of lookahead."""
        self._rest, self._next_rest = 0, _MIN_REST
        """Steps in which no n-gram drafts are made, of now and of the next pause."""
        self._awaited: set[int] = set()
        """Steps in flight after which the host must know the lengths of sequences."""
        self._num_in_flight = 0
        self._last_end = 0.0
        """The last result, or the planning of the first step after a time without steps."""

    def _own_drafter(self, request: Request) -> Drafter:
        if self._config.is_network:
            return NetworkDrafter()
        if self._config.drafter == LOOKAHEAD:
            sizes = request.lookahead or self._config.lookahead
            return LookaheadDrafter(sizes, self._index_room)
        return NgramDrafter(self._index_room)

    # ---- plan ----------------------------------------------------------------------------

    def begin(self) -> None:
        """The planning of a step begins."""
        self._index_room.left = MAX_NEW
        if not self._num_in_flight:
            self._last_end = time.perf_counter()

    def needs_results(self, running: List[Sequence]) -> bool:
        """Whether to await all results before the next step: drafts that the host makes are in
        flight, or may be worthwhile in the next step."""
        if self._awaited:
            return True
        for sequence in running:
            drafts = self._drafts_of(sequence)
            # A guided sequence is in no step before its last id is known.
            if drafts is None or drafts.drafter.is_spent or sequence.guide is not None:
                continue
            if self._stays_on_device(drafts):
                continue
            if drafts.drafter.is_asked or not self._rest:
                return True
        return False

    def _stays_on_device(self, drafts: SequenceDrafts) -> bool:
        """Whether a sequence's steps are planned before its drafts are known or verified."""
        return drafts.is_on_device and self._config.is_overlapped

    def extend(self, plan: StepPlan) -> None:
        """Add draft rows for the sequences that a step samples, and ask a network for the next
        drafts."""
        sampled = plan.sampled()
        plan.has_trees = self._config.has_trees
        runs = self._extend(plan, sampled)
        if self._config.is_network:
            self._ask_network(plan, sampled, runs)
        self._num_in_flight += 1
        is_awaited = plan.has_proposals and not self._config.is_overlapped
        stay = (self._stays_on_device(run.sequence.drafts) for run in runs.values())
        if is_awaited or not all(stay):
            self._awaited.add(plan.step)

    def _ask_network(
        self, plan: StepPlan, sampled: List[Sequence], runs: dict[int, DraftRun]
    ) -> None:
        """Let the network draft for the sequences that a step samples, behind the drafts that
        the step verifies, ``runs`` by index in ``sampled``, and the sampled id."""
        forking = plan.first_samples
        reach = 0 if self._rest else self._reach.value_of(plan.num_decodes)
        for place, sequence in enumerate(sampled):
            drafts = sequence.drafts or self._drafts_of(sequence)
            if not drafts or drafts.drafter.is_asked or sequence in forking:
                continue
            if sequence.num_pending != 1 and not self._stays_on_device(drafts):
                continue
            run = runs.get(place)
            # The step adds one id at least, and no draft if all are rejected.
            room = self._room_of(sequence) + (0 if run is None else len(run.token_ids))
            count = max(0, min(drafts.most, room - 1, reach))
            # Without further drafts, ranks still must verify those of the step.
            if not count and (run is None or not self._stays_on_device(drafts)):
                continue
            most_known = self._most_known(sequence)
            end = most_known + count
            if count and end > sequence.capacity:
                self._grow(plan, sequence, min(end, sequence.max_len))
            if count and self._dynamic_limits is not None:
                # Without blocks for these, deep nodes are guesses, which cost acceptance alone.
                end = most_known + self._dynamic_limits.num_slots
                self._grow(plan, sequence, min(end, self._max_seq_len))
            plan.ask_network(place, sequence, run, count)
            # The sampled id has an entry in the network's cache, the last draft has none.
            drafts.ask(plan.step, min(count, max(0, sequence.capacity - most_known)))

    def _extend(self, plan: StepPlan, sampled: List[Sequence]) -> dict[int, DraftRun]:
        """Add draft rows. Returns the drafts by their sequence's index in ``sampled``."""
        runs: dict[int, DraftRun] = {}
        room = min(plan.budget, self._max_rows - len(sampled) - plan.num_further_rows)
        if room <= 0:
            return runs
        asked, own = self._candidates(plan, sampled)
        for place, sequence, ids in asked:
            room -= self._add(plan, place, sequence, ids[:room], runs)
        # The gain beside prompts is not known: their steps take times of their own.
        if not own or (plan.has_chunks and self._config.is_adaptive):
            return runs
        counts = [len(ids) for _, _, ids in own]
        if self._config.is_adaptive:
            counts = self._counts_of(plan, own, counts, room)
        for (place, sequence, ids), count in zip(own, counts, strict=True):
            used = self._add(plan, place, sequence, ids[: min(count, room)], runs)
            room -= used
            if not used:
                sequence.drafts.put_off(sequence, ids, is_known=sequence.num_pending == 1)
        return runs

    def _counts_of(
        self, plan: StepPlan, own: List[_Candidate], most: List[int], room: int
    ) -> list[int]:
        """The draft tokens of each candidate that are worth their time, ``most`` at most."""
        rates = [sequence.drafts.rate.value for _, sequence, _ in own]
        shape = None if self._ranks is None else self._ranks.shape
        counts = self._controller.choose(plan.num_decodes, rates, most, room, shape)
        if any(counts):
            self._reach.observe(plan.num_decodes, counts)
        if self._controller.is_measuring:
            self._rest = _MEASURED
        elif any(counts) or not all(sequence.drafts.is_guess for _, sequence, _ in own):
            # Guesses alone are no reason for a pause: the next step may have an n-gram.
            self._pause(is_worthwhile=any(counts))
        return counts

    def _pause(self, *, is_worthwhile: bool) -> None:
        """Choose for how many steps no n-gram drafts are made."""
        self._rest = 0 if is_worthwhile else self._next_rest
        longer = min(2 * self._next_rest, _MAX_REST)
        self._next_rest = _MIN_REST if is_worthwhile else longer

    def _candidates(
        self, plan: StepPlan, sampled: List[Sequence]
    ) -> tuple[list[_Candidate], list[_Candidate]]:
        """Sequences with the drafts of their requests, and sequences with drafts of ours."""
        asked: list[_Candidate] = []
        own: list[_Candidate] = []
        self._rest = max(0, self._rest - 1)
        for place, sequence in enumerate(sampled):
            drafts = sequence.drafts or self._drafts_of(sequence)
            if not drafts or not _can_be_drafted(sequence, plan):
                continue
            if self._rest and not drafts.drafter.is_asked:
                continue
            if drafts.unverified:
                drafts.compare(sequence)
            ids = self._ids_for(sequence, drafts, plan.step)
            if ids:
                candidates = asked if drafts.drafter.is_asked else own
                candidates.append((place, sequence, ids))
        return asked, own

    def _ids_for(self, sequence: Sequence, drafts: SequenceDrafts, step: int) -> array[int]:
        """Draft ids that ``step``, the next one, may verify: zeros if ranks alone have them."""
        most = max(0, min(drafts.most, self._room_of(sequence)))
        if sequence.num_pending > 1:
            # A step in flight samples another id, behind which ranks draft themselves.
            is_known = self._stays_on_device(drafts)
            count = drafts.num_unknown(step - 1) if is_known else 0
            return array("i", [0]) * min(count, most)
        if sequence.guide is not None:
            return array("i", sequence.guide.draft_ids[:most])
        return drafts.drafter.propose(sequence, most) if most else array("i")

    def propose(self, sequence: Sequence) -> array[int]:
        """Draft ids behind the output of a guided sequence. Those that the guide allows may be
        verified once their masks are known."""
        drafts = self._drafts_of(sequence)
        if drafts is None or (self._rest and not drafts.drafter.is_asked):
            return array("i")
        most = min(drafts.most, self._room_of(sequence))
        ids = drafts.drafter.propose(sequence, most) if most > 0 else array("i")
        return ids if drafts.tree is None else drafts.tree.chain_of(ids)

    def _drafts_of(self, sequence: Sequence) -> SequenceDrafts | None:
        """The state of a sequence's drafts; None if it has none."""
        if sequence.drafts is None:
            sequence.drafts = self._new_drafts(sequence.request) or False
        return sequence.drafts or None

    def _new_drafts(self, request: Request) -> SequenceDrafts | None:
        most = self._config.max_draft_tokens
        if request.max_draft_tokens is not None:
            most = min(most, request.max_draft_tokens)
        if not most or request.sampling.beam_width > 1:
            return None
        if request.draft_token_ids:
            return SequenceDrafts(RequestDrafter(request), most, self._typical_asked)
        # A prompt table's ids are not in the vocabulary, and may be at an earlier place.
        if self._config.drafter == "draft_tokens" or request.prompt_table is not None:
            return None
        drafts = SequenceDrafts(
            self.make_drafter(request), most, self._typical, self._typical_guess
        )
        drafts.tree = self._tree
        return drafts

    def _most_known(self, sequence: Sequence) -> int:
        """Tokens of a sequence, without the id that the step in planning samples, if all drafts
        in flight and in planning are accepted."""
        num_sampled = max(0, sequence.num_pending - 1)
        return len(sequence.token_ids) + num_sampled + sequence.num_unverified

    def _room_of(self, sequence: Sequence) -> int:
        """Draft tokens behind which a sequence may have one more token."""
        most = sequence.max_len
        if not sequence.blocks.is_long:
            most = min(most, self._cache.switch_at)
        return most - self._most_known(sequence) - 1

    def _add(
        self,
        plan: StepPlan,
        place: int,
        sequence: Sequence,
        ids: array[int],
        runs: dict[int, DraftRun],
    ) -> int:
        """Add rows for as many of these drafts as the sequence's blocks hold; their number."""
        start = self._most_known(sequence)
        if start + len(ids) > sequence.capacity:
            self._grow(plan, sequence, start + len(ids))
            ids = ids[: max(0, sequence.capacity - start)]
        if ids:
            run = DraftRun(sequence, ids, start, is_known=sequence.num_pending == 1, own=place)
            if sequence.guide is None:
                # The masks of guides are those of a chain.
                run.tree = sequence.drafts.tree_of(is_known=run.is_known)
            runs[place] = run
            plan.add_drafts(run)
            sequence.num_unverified += len(ids)
            if not run.is_known:
                sequence.drafts.await_ids(run)
        return len(ids)

    def _grow(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> None:
        """Take blocks for drafts, if the cache is far from full or blocks are reserved."""
        blocks, cache = sequence.blocks, self._cache
        if num_tokens <= sequence.capacity:
            return
        if cache.window.num_tokens and sequence.is_alone:
            # The scheduler does this for sequences that outgrow their blocks: drafts take
            # blocks before that.
            cache.free_outside_window(blocks, sequence.num_computed_before)
        num_blocks = blocks.num_blocks
        if blocks.max_blocks:
            # Drafts in flight and in planning together may be more than a chunk.
            num_left = blocks.max_blocks - blocks.num_held
            has_room = cache.blocks_for(num_tokens) - num_blocks <= num_left
        else:
            has_room = cache.num_available > _MIN_FREE * cache.num_blocks
        if has_room and cache.grow(blocks, num_tokens):
            plan.add_blocks(sequence.row, blocks, num_blocks)
            sequence.capacity = blocks.num_blocks * cache.block_size

    # ---- results -------------------------------------------------------------------------

    def verified(
        self, step: ScheduledStep, token_ids: List[int], emitted: list[Emission]
    ) -> Iterator[tuple[Sequence, int]]:
        """The sequences of a step with their new tokens, in order; several tokens of a
        sequence follow each other. The reader takes in each token before the next one. Tokens
        that can end no sequence are taken in here, into ``emitted``."""
        first, last = step.drafts[0].first, step.drafts[-1]
        behind = last.first + len(last.token_ids)
        runs = {run.own: run for run in step.drafts}
        for places in (range(first), range(behind, len(token_ids))):
            for place in places:
                run = runs.get(place)
                if run is None:
                    yield step.sampled[place], token_ids[place]
                    continue
                own = run.accept(token_ids)
                if self.path_moves is not None and run.tree is not None:
                    self.path_moves.add(run)
                count = len(run.path)
                if not self._take_in(run, own, count, emitted):
                    yield from self._accepted(run, own, count)

    def _take_in(
        self, run: DraftRun, own: list[int], count: int, emitted: list[Emission]
    ) -> bool:
        """Take in the tokens of one sequence as `Scheduler.update_from_output` would one by
        one, if none of them needs a closer look; whether that was so."""
        sequence = run.sequence
        known, new = sequence.token_ids, own[: count + 1]
        num_known = len(known)
        if sequence.status is not RequestStatus.RUNNING or sequence.stop_state:
            return False
        if num_known + count + 1 >= sequence.look_at:
            return False
        if not sequence.end_ids.isdisjoint(new):
            return False
        sequence.num_pending -= 1
        sequence.num_unverified -= len(run.token_ids)
        sequence.num_computed_tokens += count
        known.extend(new)
        emitted += [(sequence, token_id, _NOT_FINISHED) for token_id in new]
        run.num_accepted = count
        self._learn(run, num_known, own)
        return True

    def _accepted(
        self, run: DraftRun, own: list[int], count: int
    ) -> Iterator[tuple[Sequence, int]]:
        """The tokens of one sequence: those equal to its drafts, and the one behind them."""
        sequence = run.sequence
        sequence.num_unverified -= len(run.token_ids)
        if sequence.status is RequestStatus.FINISHED:
            yield sequence, own[0]
            return
        # Each new token takes one from the count of pending tokens.
        sequence.num_pending += count
        # A sequence that was preempted meanwhile has nothing computed.
        if sequence.status is RequestStatus.RUNNING:
            sequence.num_computed_tokens += count
        num_known, num_before = len(sequence.token_ids), sequence.num_output_tokens
        for token_id in own[: count + 1]:
            yield sequence, token_id
        # The reader has taken all tokens in: those behind an end did not become output.
        run.num_accepted = min(count, sequence.num_output_tokens - num_before)
        self._learn(run, num_known, own)

    def _learn(self, run: DraftRun, num_known: int, own: List[int]) -> None:
        """Learn from a verified draft behind ``num_known`` ids, and count it."""
        sequence, num_drafts = run.sequence, len(run.token_ids)
        sequence.drafts.observe(run, num_known, own)
        if self._ranks is not None and run.tree is not None:
            self._ranks.observe(num_drafts, run.path)
        figures = sequence.figures
        self.counts.add(num_drafts, run.num_accepted)
        if figures is not None:
            figures.num_draft_tokens += num_drafts
            figures.num_accepted_draft_tokens += run.num_accepted

    def _take_proposals(self, step: ScheduledStep) -> None:
        """Hand each sequence the ids that a network drafted, as far as its blocks reached."""
        wanted = step.decision.proposals[:, 3:].tolist()
        told = step.proposed or [[]] * len(wanted)
        for sequence, ids, (limit, count) in zip(step.proposers, told, wanted, strict=True):
            # The sampled id has an entry, the last draft has none.
            num_usable = max(0, limit - len(sequence.token_ids) + 1)
            tree = None
            if self._dynamic_limits is not None and ids:
                # The nodes' parents stand behind their ids.
                half = len(ids) // 2
                tree = DynamicTree(ids[half : half + count])
            sequence.drafts.arrived(sequence, array("i", ids[:count]), num_usable, tree)

    def done(self, step: ScheduledStep) -> None:
        """The result of a step was taken in: learn its time."""
        self._take_proposals(step)
        self._awaited.discard(step.decision.step)
        self._num_in_flight -= 1
        # With steps in flight the time between two results counts.
        now = time.perf_counter()
        seconds, self._last_end = now - self._last_end, now
        decision = step.decision
        num_rows = decision.num_decodes
        is_measured = bool(step.drafts) or not step.proposers
        is_measured = is_measured and not decision.num_recomputed
        if num_rows == len(decision.rows) and is_measured:
            # A step that verifies drafts also makes the next ones: both count.
            self._controller.record(num_rows, seconds, is_drafted=bool(step.drafts))
