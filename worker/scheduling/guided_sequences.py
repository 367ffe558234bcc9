"""The sequences that follow a grammar: the ids allowed next, and requests that get stuck."""

from __future__ import annotations

from collections.abc import Callable

from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.guided.guide import Masks
from trimaran.worker.requests.request import Request, RequestStatus, Sequence
from trimaran.worker.scheduling.step_plan import ScheduledStep
from trimaran.worker.steps.step_types import NO_ID


class GuidedSequences:
    """Counts guided sequences, so that an engine without any pays nothing."""

    def __init__(self) -> None:
        self._count = 0
        """Guided sequences that have not ended."""
        self._masks = Masks()
        self._failed: list[Request] = []

    def add(self, request: Request) -> None:
        """Count a request whose sequences were just made."""
        if request.grammar is not None:
            self._count += len(request.sequences)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._count -= sequence.guide is not None

    def fill_masks(self, step: ScheduledStep) -> ScheduledStep:
        """Add the ids allowed next to the decision, for each guided sequence it samples."""
        if self._count:
            guides = [s.guide for s in step.sampled if s.guide is not None]
            if guides:
                step.decision.masks = self._masks.fill(guides).reshape(-1)
        return step

    def accept(
        self,
        sequence: Sequence,
        token_id: int,
        finish: Callable[[Sequence, FinishReason], None],
    ) -> bool:
        """Advance the sequence's guide, if it has one; False if the request fails.

        A request fails if its sampling parameters and its guide together forbid every id.
        """
        guide = sequence.guide
        if token_id != NO_ID and (guide is None or guide.accept(token_id)):
            return True
        for each in sequence.request.sequences:
            if each.status is not RequestStatus.FINISHED:
                finish(each, FinishReason.CANCELLED)
        self._failed.append(sequence.request)
        return False

    def take_failed(self) -> list[Request]:
        """Requests that failed since the last call; all of their sequences have ended."""
        failed, self._failed = self._failed, []
        return failed
