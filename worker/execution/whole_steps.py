"""Decode steps that one CUDA graph holds to their end: layers, logits, draws and ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimaran.kernels.triton.sampling import IdTargets, draw_and_store
from trimaran.worker.execution.cuda_graphs import CudaGraphs
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.step_result import Copier, LocalOutput
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.sampling.outputs import SamplerOutput
from trimaran.worker.sampling.sampling_rows import RowFeature, SamplingRows
from trimaran.worker.steps.step_times import StepMarks
from trimaran.worker.steps.step_types import SchedulerOutput

# Shapes: T tokens of the step, D hidden size.

_DRAWS = RowFeature.RANDOM | RowFeature.FILTER
"""Needs of rows whose draws a graph holds."""

_MAX_PLAIN = 256
_MAX_FILTERED = 64
"""Rows of the largest graph: without filters, and with filters, which take a GPU longer. Larger
steps keep a GPU busy for longer than the host takes for their launches."""


class WholeSteps:
    """Decode steps in which each row takes its likeliest id, or a draw from unedited logits.

    All that differs between steps is in the device's memory. A kernel writes the ids to the
    token table, from which the next step reads, and to memory with a row for each ring slot of
    the steps in flight, which is copied to the host beside later steps: read the ids of a step
    before another step of its ring slot begins.
    """

    def __init__(
        self,
        model: CausalLM,
        inputs: DeviceInputs,
        sampling: SamplingRows,
        copier: Copier | None,
    ) -> None:
        """``copier`` brings ids to the host; None if the device is the host."""
        self._copier = copier
        self._model = model
        self._inputs = inputs
        self._sampling = sampling
        self._plain: CudaGraphs | None = None
        self._filtered: CudaGraphs | None = None
        shape = inputs.num_ring_slots, _MAX_PLAIN
        self._output_ids = torch.zeros(shape, dtype=torch.int32, device=inputs.device)

    def make_graphs(
        self, sizes: list[int], launch_layers: Callable[[int], Tensor], pool: Any
    ) -> list[CudaGraphs]:
        """The graphs of steps of those ``sizes`` that are not too large, for capture.

        ``launch_layers`` launches the layers of a step of so many rows, which other graphs have
        too, and returns its hidden states.
        """
        width, dtype = self._model.config.hidden_size, self._model.dtype

        def make(kind: str, most: int, *, has_filters: bool) -> CudaGraphs:
            def launch(size: int) -> Tensor:
                self.launch_end(launch_layers(size), has_filters=has_filters)
                return self._output_ids

            def warm_up(size: int) -> None:
                shape = size, width
                hidden_TD = torch.zeros(shape, dtype=dtype, device=self._inputs.device)
                self.launch_end(hidden_TD, has_filters=has_filters)

            mine = [size for size in sizes if size <= most]
            return CudaGraphs(kind, mine, launch, pool, warm_up)

        self._plain = make("sequences with plain draws", _MAX_PLAIN, has_filters=False)
        self._filtered = make("sequences with filters", _MAX_FILTERED, has_filters=True)
        return [self._plain, self._filtered]

    def run(
        self, decision: SchedulerOutput, most_tokens: int, marks: StepMarks
    ) -> LocalOutput | None:
        """Launch a step by a graph that has room for ``most_tokens`` too; None if no graph
        holds all of the step."""
        count = len(decision.rows)
        is_sampled = decision.num_decodes == count == len(decision.sampled)
        if not is_sampled or decision.draft_rules:
            return None
        needs = self._sampling.needs(decision.rows)
        if needs & ~_DRAWS:
            return None
        graphs = self._filtered if needs & RowFeature.FILTER else self._plain
        size = 0 if graphs is None else graphs.pick(max(count, most_tokens))
        if graphs is None or not size:
            return None
        # Sends the parameters of rows that have entered.
        self._state()
        self._inputs.launch(decision, size)
        graphs.replay(size)
        marks.end()
        return self.output(count, marks)

    def launch_end(self, hidden_TD: Tensor, *, has_filters: bool) -> None:
        """Launch what follows the layers of a step that is padded to T rows."""
        count = len(hidden_TD)
        inputs = self._inputs.views(count, count, count)
        assert inputs.sampled_rows is not None
        assert inputs.sampled_lengths is not None
        target = IdTargets(
            inputs.sampled_slots, self._inputs.token_table, self._output_ids,
            self._inputs.ring_slot_on_device,
        )  # fmt: skip
        draw_and_store(
            self._model.compute_logits(hidden_TD), inputs.sampled_rows, inputs.sampled_lengths,
            self._state(), target, has_filters=has_filters,
        )  # fmt: skip

    def output(self, count: int, marks: StepMarks) -> LocalOutput:
        """The result of the last launched step, of ``count`` rows."""
        ids = self._output_ids[self._inputs.ring_slot, :count]
        return LocalOutput(SamplerOutput(ids), ids, self._copier, marks)

    def _state(self) -> Tensor:
        state = self._sampling.device_state
        assert state is not None, "a GPU's sampler has its parameters on the device"
        return state.tensor()
