"""An admission policy in one file: short prompts first, few prompts at a time.

docs/changing-the-scheduler.md explains each method.
"""

from __future__ import annotations

from trimaran.worker.requests.request import Sequence
from trimaran.worker.scheduling.admission_policy import AdmissionPolicy, Batch

MAX_PREFILLS = 2
"""Sequences that may compute their prompt at the same time."""


class ShortestPromptFirst(AdmissionPolicy):
    """Starts the shortest prompt of a priority first, and at most `MAX_PREFILLS` at a time.

    Few concurrent prefills keep the time to the first token of a short prompt low. A long
    prompt can wait forever while short prompts keep arriving, so the policy suits batches, not
    services.
    """

    def rank(self, sequence: Sequence) -> tuple[int, ...]:
        """The queue's order within one priority: the length of the prompt."""
        return (sequence.num_prompt_tokens,)

    def admits(self, sequence: Sequence, batch: Batch) -> bool:
        """Whether fewer than `MAX_PREFILLS` sequences still compute their prompt."""
        prefills = sum(s.num_computed_tokens < s.num_prompt_tokens for s in batch.running)
        return prefills + batch.swap_ins.num_unfinished < MAX_PREFILLS
