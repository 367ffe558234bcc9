"""The two ends of a link between pipeline stages: what every transport implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: T tokens of the step, D hidden size.


class StageSender(ABC):
    """The end of a stage that hands its hidden states on.

    There is memory for as many steps as can be in flight, so that a sender never waits for
    the stage behind it; each step goes to the next place in turn.
    """

    transport = ""
    timeout_s: float
    """Longest wait for the other end."""

    peer = -1
    """The rank at the other end, for what is said of it."""

    @abstractmethod
    def send(self, hidden_TD: Tensor) -> None:
        """Hand on a step's hidden states, which may be overwritten afterwards.

        On a GPU by what is launched afterwards on the current stream.

        Raises:
            PeerLostError: the next stage took nothing for ``timeout_s``.
        """

    def close(self) -> None:
        """Free what this end holds."""
        return


class StageReceiver(ABC):
    """The other end: the stages' steps come in the order in which they were sent."""

    transport = ""
    timeout_s: float
    peer = -1

    @abstractmethod
    def receive(self, num_tokens: int) -> Tensor:
        """The next step's hidden states [T, D]: the caller's to read and to overwrite until
        it calls again.

        Waits for them; on a GPU the current stream does.

        Raises:
            PeerLostError: the stage before sent nothing for ``timeout_s``.
        """

    def close(self) -> None:
        """Free what this end holds."""
        return


@dataclass(frozen=True, slots=True)
class HiddenShape:
    """What a link carries: at most ``max_tokens`` vectors a step, of so many steps at once."""

    max_tokens: int
    hidden_size: int
    dtype: torch.dtype
    num_slots: int

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.num_slots * self.max_tokens * self.hidden_size * self.dtype.itemsize

    def empty(self, device: torch.device, num_slots: int = 0) -> Tensor:
        """Memory for so many slots, or for all, [slots, max tokens, D]."""
        shape = (num_slots or self.num_slots, self.max_tokens, self.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=device)


def took_nothing(sender: StageSender) -> str:
    """Who is missing, in words: the next stage."""
    return f"rank {sender.peer}, the next stage, took no step for {sender.timeout_s:.3g} s"


def sent_nothing(receiver: StageReceiver) -> str:
    """Who is missing, in words: the stage before."""
    return (
        f"rank {receiver.peer}, the stage before, sent no hidden states for "
        f"{receiver.timeout_s:.3g} s"
    )
