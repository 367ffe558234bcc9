"""Sequences that follow a guide: their masks, and the requests that their guides end."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as List

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.guided.guide import Guide
from trimaran.worker.guided.mask_process import MaskProcess, receive_masks
from trimaran.worker.requests.request import Request, RequestStatus, Sequence
from trimaran.worker.scheduling.step_plan import ScheduledStep
from trimaran.worker.steps.step_types import NO_ID

_NOTHING_ALLOWED = (
    "no id can follow: the request's parameters (bad_words, no_repeat_ngram_size, "
    "embedding_bias, min_length, guided_decoding_guide) together forbid every id of the "
    "vocabulary. Relax one of them."
)

Finish = Callable[[Sequence, FinishReason], None]


class GuidedSequences:
    """Takes in the masks of guided sequences, so that an engine without any pays nothing.

    Masks come from other processes. A step waits for the masks of running sequences only as
    long as their processes have patience left: a slow guide delays other requests by 20 ms in
    all. After that its sequences join the steps before which their masks are there.
    """

    def __init__(self) -> None:
        self._count = 0
        """Guided sequences that have not ended."""
        self._awaited: dict[Guide, Sequence] = {}
        """Sequences whose next mask is to come."""
        self._failed: list[tuple[Request, RequestError]] = []
        self.propose: Callable[[Sequence], List[int]] = lambda _: ()
        """Draft ids of a sequence, for which masks are asked in advance."""

    def add(self, request: Request) -> None:
        """Count a request whose sequences were just made."""
        if request.guide is not None:
            self._count += len(request.sequences)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        if sequence.guide is not None:
            self._count -= 1
            self._awaited.pop(sequence.guide, None)
            sequence.guide.close()

    # ---- masks ---------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask for the masks behind the ids that were accepted since the last call."""
        for guide, sequence in self._awaited.items():
            if guide.new_ids:
                guide.ask(guide.new_ids, self.propose(sequence))
        for process in self._processes():
            process.flush()

    def wait(self, seconds: float) -> bool:
        """Wait for any mask, at most this long; False if none is awaited."""
        receive_masks(self._processes(), seconds)
        return bool(self._awaited)

    def receive(self, finish: Finish) -> list[tuple[Sequence, int, FinishReason]]:
        """Take in masks before a step; returns the ends of outputs that nothing can follow.

        Requests whose guides are too slow fail; see `take_failed`.
        """
        if not self._awaited:
            return []
        receive_masks(self._processes())
        self._be_patient()
        ends = []
        for guide, sequence in [item for item in self._awaited.items() if item[0].is_answered]:
            # A request that failed meanwhile took its other sequences along.
            if self._awaited.pop(guide, None) is None:
                continue
            if guide.error is not None:
                self._fail(sequence.request, guide.error, finish)
            elif guide.is_complete:
                finish(sequence, FinishReason.END_ID)
                ends.append((sequence, -1, FinishReason.END_ID))
        return ends

    def _processes(self) -> set[MaskProcess]:
        return {guide.grammar.process for guide in self._awaited}

    def _be_patient(self) -> None:
        """Wait for the masks of running sequences whose processes are punctual."""
        while True:
            processes = {
                guide.grammar.process
                for guide, sequence in self._awaited.items()
                if not guide.is_answered and sequence.status is RequestStatus.RUNNING
            }
            patient = [process for process in processes if process.patience_s > 0.0]
            if not patient:
                return
            began = time.perf_counter()
            receive_masks(patient, min(process.patience_s for process in patient))
            waited_s = time.perf_counter() - began
            for process in patient:
                process.patience_s -= waited_s

    def fill_masks(self, step: ScheduledStep) -> ScheduledStep:
        """Add the ids allowed next to the decision, for each row of guided sequences."""
        if self._count:
            places = step.draft_batch()
            masks = [
                sequence.guide.masks[places.get(index, 0)]
                for index, sequence in enumerate(step.sampled)
                if sequence.guide is not None
            ]
            if masks:
                step.decision.masks = np.concatenate(masks)
        return step

    # ---- ids -----------------------------------------------------------------------------

    def accept(self, sequence: Sequence, token_id: int, finish: Finish) -> bool:
        """Advance the sequence's guide, if it has one; False if the request fails.

        A request fails if its sampling parameters and its guide together forbid every id.
        """
        guide = sequence.guide
        if token_id != NO_ID and guide is None:
            return True
        if token_id != NO_ID and guide is not None and guide.accept(token_id):
            # `ask` follows once all ids of the step are accepted.
            self._awaited[guide] = sequence
            return True
        self._fail(sequence.request, RequestError(_NOTHING_ALLOWED), finish)
        return False

    def _fail(self, request: Request, error: RequestError, finish: Finish) -> None:
        for each in request.sequences:
            if each.status is not RequestStatus.FINISHED:
                finish(each, FinishReason.CANCELLED)
        self._failed.append((request, error))

    def take_failed(self) -> list[tuple[Request, RequestError]]:
        """Requests that failed since the last call; all of their sequences have ended."""
        failed, self._failed = self._failed, []
        return failed
