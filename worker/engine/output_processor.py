"""The engine's messages to front ends: each step's outputs, and gauges."""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor

from trimaran.comm.messages.messages import STATS_KEYS, StepOutput
from trimaran.worker.engine.compilations import Compilations
from trimaran.worker.engine.interfaces import EngineStep, StepScheduler
from trimaran.worker.engine.loading import LoadedEngine
from trimaran.worker.requests.request import Sequence
from trimaran.worker.scheduling.step_plan import Emission, ScheduledStep
from trimaran.worker.steps.step_times import StepTimes
from trimaran.worker.steps.step_types import SampledTokens


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
    step: int, emissions: list[Emission], details: StepDetails | None = None
) -> list[tuple[Hashable, StepOutput]]:
    """The messages of one step, by source; rows in the order of ``emissions``.

    Requests that asked for ``details`` get them.
    """
    columns_of: dict[Hashable, _Columns] = {}
    for sequence, token_id, reason in emissions:
        request = sequence.request
        columns = columns_of.get(request.source)
        if columns is None:
            columns = columns_of[request.source] = _Columns()
        has_token = token_id >= 0
        if request.has_extras:
            extras = _extras(sequence, details, has_token)
            if extras:
                columns.extras[len(columns.request_ids)] = extras
        columns.request_ids.append(request.request_id)
        columns.indices.append(sequence.index)
        columns.num_tokens.append(has_token)
        columns.reasons.append(reason)
        if has_token:
            columns.token_ids.append(token_id)
    return [(source, columns.message(step)) for source, columns in columns_of.items()]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.numpy().data.cast("B")


class StepDetails:
    """One step's outputs other than ids, by sequence."""

    def __init__(self, step: ScheduledStep, sampled: SampledTokens) -> None:
        sequences = step.sampled
        self._log_probs = sampled.log_probs
        self._places = {sequence: place for place, sequence in enumerate(sequences)}
        self._later: dict[Sequence, Iterator[int]] = {}
        for run in step.drafts:
            self._places[run.sequence] = run.own
            self._later[run.sequence] = run.accepted_rows()
        self.context_logits: dict[Sequence, list[Tensor]] = {}
        self._generation: dict[int, Tensor] = {}
        logits = sampled.logits
        if logits is not None:
            self.context_logits = {sequences[i]: x for i, x in logits.context.items()}
            self._generation = logits.generation

    @classmethod
    def of(cls, step: ScheduledStep, sampled: SampledTokens) -> StepDetails | None:
        """The details, or None if there are none."""
        if sampled.log_probs is None and sampled.logits is None:
            return None
        return cls(step, sampled)

    def log_prob(self, sequence: Sequence) -> float:
        """The log-probability of a sequence's next token."""
        assert self._log_probs is not None
        return self._log_probs[self._places[sequence]]

    def generation_logits(self, sequence: Sequence) -> Tensor | None:
        """The logits of a sequence's next token, if they are kept."""
        return self._generation.get(self._places[sequence])

    def pass_token(self, sequence: Sequence) -> None:
        """All of a sequence's next token was told: the one behind it comes next."""
        if sequence in self._later:
            place = self._places[sequence]
            self._places[sequence] = next(self._later[sequence], place)


def _extras(sequence: Sequence, details: StepDetails | None, has_token: bool) -> dict[str, Any]:
    """Outputs other than ids. Lists have one item per token, so front ends can join steps."""
    sampling = sequence.request.sampling
    extras: dict[str, Any] = {}
    if sequence.figures is not None:
        if has_token or sequence.beams is not None:
            sequence.figures.token()
        # With every token: a stop word in the text ends a request at the front end.
        extras["figures"] = sequence.figures.to_wire()
    if sequence.beams is not None:
        extras["beams"] = sequence.beams.payload()
        logits = sequence.beams.logits()
        if logits:
            extras["beams"]["num_logits"] = [len(each) for each in logits]
            extras["logits_dtype"] = sampling.logits_dtype
            extras["generation_logits"] = [_bytes(x) for each in logits for x in each]
    if details is None:
        return extras
    if sampling.return_log_probs and sequence.beams is None:
        new = [details.log_prob(sequence)] if has_token else []
        sequence.cum_log_prob += sum(new)
        extras["log_probs"], extras["cum_log_prob"] = new, sequence.cum_log_prob
    chunks = details.context_logits.get(sequence)
    if chunks is not None and not sequence.has_told_prompt:
        sequence.has_told_prompt = True
        extras["logits_dtype"] = sampling.logits_dtype
        extras["context_logits"] = [_bytes(chunk) for chunk in chunks]
    if not has_token:
        return extras
    of_token = details.generation_logits(sequence)
    if of_token is not None:
        extras["logits_dtype"] = sampling.logits_dtype
        extras["generation_logits"] = [_bytes(of_token)]
    details.pass_token(sequence)
    return extras


class EngineStats:
    """The gauges of the last step, for metrics. An idle engine reports no request."""

    def __init__(
        self,
        loaded: LoadedEngine,
        scheduler: StepScheduler,
        times: StepTimes,
        compilations: Compilations,
    ) -> None:
        self._loaded = loaded
        self._scheduler = scheduler
        self._times = times
        self._compilations = compilations
        self._process = psutil.Process()
        self._last: EngineStep | None = None
        self._num_active = 0
        self._num_accepted = 0
        """Draft tokens that became output by the results of this iteration."""

    def begin(self) -> None:
        """An iteration begins: results, and then the next step."""
        self._num_accepted = 0

    def taken(self, step: ScheduledStep) -> None:
        """The result of a step was taken in."""
        self._num_accepted += sum(run.num_accepted for run in step.drafts)

    def record(self, step: EngineStep) -> None:
        """Record a step that was just scheduled."""
        self._last = step
        self._num_active = self._scheduler.num_active

    def values(self) -> dict[str, float]:
        """One value for each of ``STATS_KEYS``."""
        values: dict[str, float] = {
            **self._of_requests(),
            **self._of_cache(),
            **self._of_adapters(),
            **self._of_memory(),
            "micro_batch_id": self._scheduler.micro_batch,
            "v1_batching": self._scheduler.config.is_v1,
            "empty_generation_slots": self._scheduler.num_empty_slots,
            "iteration_counter": self._scheduler.step,
            "timestamp_us": time.time_ns() // 1000,
            **self._times.values(),
            **self._scheduler.draft_counts.values(),
            **self._compilations.values(),
        }
        assert values.keys() == set(STATS_KEYS)
        return values

    def _of_requests(self) -> dict[str, float]:
        last = self._last if self._scheduler.has_requests else None
        active = self._scheduler.num_active if last is None else self._num_active
        scheduled = 0 if last is None else last.num_scheduled
        context = 0 if last is None else last.num_context
        generated = 0 if last is None else last.num_generation_tokens + self._num_accepted
        preempted = self._scheduler.preemptions
        return {
            "active_requests": active,
            "max_requests": len(self._loaded.caches) * self._loaded.limits.max_num_seqs,
            "scheduled_requests": scheduled,
            "context_requests": context,
            "waiting_requests": active - scheduled,
            "generation_requests": scheduled - context,
            "paused_requests": preempted.num_waiting,
            "paused_sequences": preempted.num_sequences,
            "paused_tokens": preempted.num_tokens,
            "total_context_tokens": 0 if last is None else last.num_context_tokens,
            "total_generation_tokens": generated,
        }

    def _of_cache(self) -> dict[str, float]:
        caches = self._loaded.caches
        hosts = [host for cache in caches for host in cache.hosts]
        num_blocks = sum(cache.num_blocks for cache in caches)
        num_free = sum(cache.num_free for cache in caches)
        return {
            "kv_max_blocks": num_blocks,
            "kv_free_blocks": num_free,
            "kv_used_blocks": num_blocks - num_free,
            "kv_tokens_per_block": caches[0].block_size,
            "kv_reused_blocks": sum(cache.num_reused_blocks for cache in caches),
            "kv_host_max_blocks": sum(host.num_slots for host in hosts),
            "kv_host_used_blocks": sum(host.num_used for host in hosts),
            "kv_host_moved_blocks": sum(host.num_stored for host in hosts),
            "kv_host_loaded_blocks": sum(host.num_loaded for host in hosts),
        }

    def _of_adapters(self) -> dict[str, float]:
        ranks = self._loaded.adapters
        return {
            "lora_host_adapters": ranks[0].num_on_host,
            "lora_device_adapters": sum(rank.num_on_device for rank in ranks),
            "lora_used_adapters": sum(rank.num_used for rank in ranks),
            "lora_loaded_adapters": sum(rank.num_loaded for rank in ranks),
        }

    def _of_memory(self) -> dict[str, float]:
        device = self._loaded.runner.inputs.device
        is_gpu = device.type == "cuda"
        return {
            "cpu_memory_bytes": self._process.memory_info().rss,
            "gpu_memory_bytes": torch.cuda.memory_allocated(device) if is_gpu else 0,
            "pinned_memory_bytes": self._loaded.runner.pinned_bytes,
        }
