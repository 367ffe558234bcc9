"""Tokens of each expert: counted on the model's device, read without a host wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from trimaran.comm.messages.messages import ExpertReport
from trimaran.kernels.routing import ExpertCounter
from trimaran.worker.layers.experts import ExpertMLP
from trimaran.worker.models.interfaces import CausalLM

# Shapes: L layers with experts in this rank's stage, X experts of a layer.


class Balances(Protocol):
    """The interface of an expert balancer."""

    def after_step(self) -> None:
        """Count a step, and rebalance if the interval has passed."""
        ...


class ExpertLoads:
    """Tokens of every expert in a stage's layers since the start, on the model's device.

    The routing kernel counts. All ranks of a tensor group have the same counts; the first rank
    reports them.
    """

    def __init__(
        self, mixtures: dict[int, ExpertMLP], num_tokens: Tensor | None, last_layer: int
    ) -> None:
        """``mixtures`` are by the number of their layer; ``last_layer`` is the number of the
        model's last. ``num_tokens`` as in `ExpertCounter`."""
        self.layers = sorted(mixtures)
        first = mixtures[self.layers[0]].router.weight
        shape = (len(self.layers), first.shape[0])
        self.counts_LX = torch.zeros(shape, dtype=torch.int64, device=first.device)
        for counts, number in zip(self.counts_LX, self.layers, strict=True):
            mixtures[number].router.counter = ExpertCounter(counts, num_tokens)
        self._last = mixtures[last_layer].router if last_layer in mixtures else None
        # Not None: kernels without a counter are other kernels, which would be compiled too.
        self._unread = ExpertCounter(torch.zeros_like(self.counts_LX[0]), num_tokens)
        is_gpu = first.device.type == "cuda"
        self._host_LX = torch.zeros(shape, dtype=torch.int64, pin_memory=is_gpu)
        self._copied: torch.cuda.Event | None = None
        if is_gpu:
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.balancer: Balances | None = None
        """The balancer that uses the counts, if any."""

    @classmethod
    def of(cls, model: CausalLM, num_tokens: Tensor | None) -> ExpertLoads | None:
        """Count a model's layers from now on; None if no layer has experts."""
        mixtures = mixtures_of(model)
        last = model.config.num_hidden_layers - 1
        return cls(mixtures, num_tokens, last) if mixtures else None

    @contextmanager
    def skip_last_layer(self) -> Iterator[None]:
        """A context in which tokens in the model's last layer are not counted."""
        if self._last is None:
            yield
            return
        counter, self._last.counter = self._last.counter, self._unread
        try:
            yield
        finally:
            self._last.counter = counter

    def reset(self) -> None:
        """Set all counts to 0."""
        self.counts_LX.zero_()

    def after_step(self) -> None:
        """Let the balancer rebalance if due. Collective over the ranks that share experts."""
        if self.balancer is not None:
            self.balancer.after_step()

    def begin(self) -> None:
        """Start to copy the counts to the host."""
        self._host_LX.copy_(self.counts_LX, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def is_ready(self) -> bool:
        """Whether `finish` would return without a wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def finish(self) -> ExpertReport:
        """The counts whose copy was started last. Any thread may call this and wait."""
        if self._copied is not None:
            # A new thread's current device is the first GPU, where it would take memory.
            torch.cuda.set_device(self.counts_LX.device)
            self._copied.synchronize()
        return ExpertReport(layers=self.layers, counts=self._host_LX.numpy().tobytes())


def mixtures_of(model: CausalLM) -> dict[int, ExpertMLP]:
    """A stage's mixtures of experts by the number of their layer."""
    return {
        int(name.split(".")[1]): module
        for name, module in model.named_modules()
        if isinstance(module, ExpertMLP)
    }
