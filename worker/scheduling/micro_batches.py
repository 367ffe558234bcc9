"""Which running sequences a step of a pipeline takes, so that its stages are evenly busy."""

from __future__ import annotations

from operator import attrgetter

from trimaran.worker.requests.request import KEY, Sequence

_LAST_STEP = attrgetter("last_step")


class MicroBatches:
    """Shares the running sequences out over as many steps as are in flight.

    With p stages p steps run at once, one on each. They hold different sequences: what
    follows a token is known when it has left the last stage. A prompt is no such case, and
    its chunks follow each other in consecutive steps. Each step takes an equal share of the
    sequences that decode, so that stages neither wait for a large step nor run empty ones;
    what was scheduled longest ago goes first.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def pick(self, running: list[Sequence], step: int) -> list[Sequence]:
        """Those of ``running`` that ``step`` may take, in the same order."""
        prompts: list[Sequence] = []
        ready: list[Sequence] = []
        num_decoding = 0
        for sequence in running:
            if sequence.num_computed_tokens < sequence.num_prompt_tokens:
                prompts.append(sequence)
                continue
            num_decoding += 1
            is_known = len(sequence.token_ids) > sequence.num_computed_tokens
            if is_known and not sequence.num_pending:
                ready.append(sequence)
        share = num_decoding // self.count + (step % self.count < num_decoding % self.count)
        share = max(1, share)
        if len(ready) > share:
            ready = sorted(ready, key=_LAST_STEP)[:share]
        return sorted(prompts + ready, key=KEY)
