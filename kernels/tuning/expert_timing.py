"""The time of a layer's experts with the tile shapes of both grouped products."""

from __future__ import annotations

import statistics
from dataclasses import astuple

import torch
from torch import Tensor

from trimaran.kernels.experts.floats import MeasuredExperts
from trimaran.kernels.tables.grouped_table import Cut, GroupedTable
from trimaran.kernels.tuning.expert_candidates import MixtureSizes
from trimaran.kernels.tuning.graph_timing import captured, replays_s

NUM_LAYERS = 3
SUSTAINED_TOKENS = 512
"""Tokens from which the clock falls under load, so that means over some time count."""

Pair = tuple[Cut, Cut]
"""Tile shapes of the gated and of the plain product."""


class ExpertTimer:
    """The experts of some layers, one after another in a CUDA graph, with random choices.

    From `SUSTAINED_TOKENS` on a trial runs for ``trial_s``.
    """

    def __init__(
        self,
        sizes: MixtureSizes,
        device: torch.device,
        dtype: torch.dtype,
        trial_s: float = 0.5,
    ) -> None:
        self.sizes = sizes
        self._device, self._dtype, self._trial_s = device, dtype, trial_s
        shapes = (
            (sizes.experts, 2 * sizes.inner, sizes.hidden),
            (sizes.experts, sizes.hidden, sizes.inner),
        )
        self._weights = [[self._drawn(*shape) for shape in shapes] for _ in range(NUM_LAYERS)]

    def time_us(self, tokens: int, cuts: Pair | None) -> float:
        """Median time of a layer's experts with these tile shapes, or its mean under load;
        without tile shapes, by the derived rule.
        """
        rows = tokens * self.sizes.chosen
        entries: dict[str, list[tuple[int, list[int] | None]]] = {}
        for name, cut in zip(self.sizes.names, cuts or (), strict=False):
            entries[name] = [(rows, list(astuple(cut)))]
        mixture = MeasuredExperts(
            self._device, self._dtype, GroupedTable(entries), has_own=True
        )
        x, chosen = self._inputs(tokens)

        def run() -> None:
            for (gate_up, down), choice in zip(self._weights, chosen, strict=True):
                mixture.expert_mlp(x, *choice, gate_up, down)

        graph = captured(run)
        if tokens < SUSTAINED_TOKENS:
            return 1e6 * statistics.median(replays_s(graph) for _ in range(9)) / NUM_LAYERS
        once_s = replays_s(graph, 2)
        replays_s(graph, int(0.4 * self._trial_s / once_s) + 1)
        return 1e6 * replays_s(graph, int(0.6 * self._trial_s / once_s) + 1) / NUM_LAYERS

    def _inputs(self, tokens: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Rows, and each layer's weights and ids of random experts; equal in every trial."""
        generator = torch.Generator(self._device).manual_seed(tokens)
        x = torch.randn(
            (tokens, self.sizes.hidden), device=self._device, dtype=self._dtype,
            generator=generator,
        )  # fmt: skip
        chosen = []
        for _ in self._weights:
            every = self.sizes.experts * self.sizes.parts
            odds = torch.rand((tokens, every), device=self._device, generator=generator)
            weights, ids = odds.topk(self.sizes.chosen)
            chosen.append((weights, ids.int()))
        return x, chosen

    def _drawn(self, *shape: int) -> Tensor:
        return 0.02 * torch.randn(shape, device=self._device, dtype=self._dtype)
