"""What a step produced, as one message to each front end that is concerned."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping
from typing import Any

from trimaran.comm.messages import StepOutput
from trimaran.worker.request import Sequence
from trimaran.worker.scheduler import Emission


class _Columns:
    """The parallel arrays of one message under construction."""

    __slots__ = ("extras", "indices", "num_tokens", "reasons", "request_ids", "token_ids")

    def __init__(self) -> None:
        self.request_ids = array("Q")
        self.indices = array("H")
        self.num_tokens = array("H")
        self.reasons = bytearray()
        self.token_ids = array("i")
        self.extras: dict[int, dict[str, Any]] = {}

    def message(self, step: int) -> StepOutput:
        return StepOutput(
            step=step,
            request_ids=self.request_ids.tobytes(),
            sequence_indices=self.indices.tobytes(),
            num_tokens=self.num_tokens.tobytes(),
            finish_reasons=bytes(self.reasons),
            token_ids=self.token_ids.tobytes(),
            extras=self.extras,
        )


def step_outputs(
    step: int, emissions: list[Emission], log_probs: Mapping[Sequence, float] | None = None
) -> list[tuple[Hashable, StepOutput]]:
    """The messages of one step, by source; rows in the order of ``emissions``.

    ``log_probs`` has the new ids' log-probabilities; they go to requests that asked.
    """
    columns_of: dict[Hashable, _Columns] = {}
    for sequence, token_id, reason in emissions:
        request = sequence.request
        columns = columns_of.get(request.source)
        if columns is None:
            columns = columns_of[request.source] = _Columns()
        has_token = token_id >= 0
        if log_probs is not None and request.sampling.return_log_probs:
            _add_log_probs(columns, sequence, log_probs, has_token)
        columns.request_ids.append(request.request_id)
        columns.indices.append(sequence.index)
        columns.num_tokens.append(has_token)
        columns.reasons.append(reason)
        if has_token:
            columns.token_ids.append(token_id)
    return [(source, columns.message(step)) for source, columns in columns_of.items()]


def _add_log_probs(
    columns: _Columns,
    sequence: Sequence,
    log_probs: Mapping[Sequence, float],
    has_token: bool,
) -> None:
    new = [log_probs[sequence]] if has_token else []
    sequence.cum_log_prob += sum(new)
    columns.extras[len(columns.request_ids)] = {
        "log_probs": new,
        "cum_log_prob": sequence.cum_log_prob,
    }
