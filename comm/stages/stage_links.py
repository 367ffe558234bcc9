"""The two ends of a link between pipeline stages: the interface of every transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: T tokens of the step, D hidden size.


class StageSender(ABC):
    """The sending end of a stage.

    There are slots for as many steps as can be in flight, used in turn, so that a sender does
    not wait for the next stage.
    """

    transport = ""
    timeout_s: float
    """Longest wait for the other end."""

    peer = -1
    """The rank at the other end, for error texts."""

    @abstractmethod
    def send(self, hidden_TD: Tensor) -> None:
        """Send a step's hidden states; ``hidden_TD`` may be overwritten afterwards.

        On a GPU: by kernels that are launched afterwards on the current stream.

        Raises:
            PeerLostError: the next stage took no step for ``timeout_s``.
        """

    def close(self) -> None:
        """Free the resources of this end."""
        return


class StageReceiver(ABC):
    """The receiving end of a stage: steps arrive in the order in which they were sent."""

    transport = ""
    timeout_s: float
    peer = -1

    @abstractmethod
    def receive(self, num_tokens: int) -> Tensor:
        """The next step's hidden states [T, D], which the caller may read and overwrite until
        its next call.

        Waits for them; on a GPU the current stream waits.

        Raises:
            PeerLostError: the preceding stage sent no step for ``timeout_s``.
        """

    def close(self) -> None:
        """Free the resources of this end."""
        return


@dataclass(frozen=True, slots=True)
class HiddenShape:
    """The shape of a link: up to ``max_tokens`` vectors a step, ``num_slots`` steps at once."""

    max_tokens: int
    hidden_size: int
    dtype: torch.dtype
    num_slots: int

    @property
    def num_bytes(self) -> int:
        """Size of all slots."""
        return self.num_slots * self.max_tokens * self.hidden_size * self.dtype.itemsize

    def empty(self, device: torch.device, num_slots: int = 0) -> Tensor:
        """Memory for so many slots, or for all, [slots, max tokens, D]."""
        shape = (num_slots or self.num_slots, self.max_tokens, self.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=device)


def took_nothing(sender: StageSender) -> str:
    """An error text that names the next stage."""
    return f"rank {sender.peer}, the next stage, took no step for {sender.timeout_s:.3g} s"


def sent_nothing(receiver: StageReceiver) -> str:
    """An error text that names the preceding stage."""
    return (
        f"rank {receiver.peer}, the stage before, sent no hidden states for "
        f"{receiver.timeout_s:.3g} s"
    )
