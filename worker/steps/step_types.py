"""The data of one engine step: the decision and the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import numpy.typing as npt

from trimaran.comm.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

Int32Array = npt.NDArray[np.int32]

_ARRAYS = (
    "rows",
    "num_scheduled_tokens",
    "num_computed_tokens",
    "sampled",
    "new_blocks",
    "block_copies",
    "finished_rows",
    "masks",
    "transfers",
    "decode_ids",
    "behind_drafts",
    "proposals",
    "tree_masks",
    "tree_runs",
    "path_moves",
)
_COLUMNS = {
    "new_blocks": 4, "block_copies": 3, "transfers": 4, "proposals": 5, "tree_masks": 2,
    "tree_runs": 3, "path_moves": 2,
}  # fmt: skip


def int32s(values: Sequence[Any], num_columns: int = 0) -> Int32Array:
    """An int32 array of ``values``; a table if ``num_columns`` is given."""
    array = np.array(values, dtype=np.int32)
    return array.reshape(-1, num_columns) if num_columns else array


_NONE = int32s(())


def num_hidden(words: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The number of zero bits of each word."""
    as_bytes = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), 8)
    ones = np.unpackbits(as_bytes, axis=1).sum(axis=1, dtype=np.int32)
    return 64 - ones  # type: ignore[no-any-return]


class TransferKind(IntEnum):
    """Copies of KV blocks between device and host, concurrent with steps."""

    MOVE = 0
    """From a block, as earlier steps wrote it, to a host slot; starts before the loads."""
    LOAD = 1
    """From a host slot to a block."""
    WAIT = 2
    """The step waits for all loads of the named step and of earlier steps."""


@dataclass(slots=True, kw_only=True)
class NewRow:
    """The sequence in a row, sent once: a new sequence, or one that resumes.

    ``token_ids`` holds the prompt and the output known so far. A preempted or replayed
    sequence differs from a new one only in having output.
    """

    row: int
    token_ids: Int32Array
    num_prompt_tokens: int
    sequence_index: int = 0
    """Part of the sampling noise's key."""

    sampling: dict[str, Any] = field(default_factory=dict)
    """`SamplingParams.to_wire()`."""

    adapter_id: int = 0
    prompt_table: dict[str, Any] | None = None
    """`PromptTable.to_wire()`, if the prompt holds virtual tokens."""


@dataclass(slots=True, kw_only=True)
class TokenWrite:
    """Ids that the host writes to a row's token table, from a position on."""

    row: int
    start: int
    token_ids: Int32Array


@dataclass(slots=True, kw_only=True)
class DraftRule:
    """How draft tokens of one sequence are accepted, if not by the model's own draws."""

    sampled_rows: Int32Array
    """Indices into ``sampled`` of the rows that sample where the draft tokens stand."""

    token_ids: Int32Array
    """The draft tokens."""

    threshold: float = 0.0
    logits: npt.NDArray[np.float32] | None = None
    """[n, V]: the logits from which each draft token was drawn."""

    def to_wire(self) -> list[Any]:
        """A msgpack list; raw arrays."""
        logits = None if self.logits is None else self.logits.tobytes()
        return [self.sampled_rows.tobytes(), self.token_ids.tobytes(), self.threshold, logits]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> DraftRule:
        """The inverse of `to_wire`."""
        rows, ids = (np.frombuffer(raw, np.int32) for raw in wire[:2])
        logits = None
        if wire[3] is not None:
            logits = np.frombuffer(wire[3], np.float32).reshape(len(ids), -1)
        return cls(sampled_rows=rows, token_ids=ids, threshold=wire[2], logits=logits)


@dataclass(slots=True, kw_only=True)
class SchedulerOutput:
    """The decision of one step: flat arrays that hold changes alone.

    Entry i of the three parallel arrays schedules ``num_scheduled_tokens[i]`` tokens of
    the sequence in ``rows[i]``, after the ``num_computed_tokens[i]`` that have KV already.
    Decodes come first. A rank applies, in this order: ``path_moves``, ``finished_rows``,
    ``new_rows``, ``transfers``, ``block_copies``, ``new_blocks``, the forward pass.
    """

    step: int
    rows: Int32Array
    num_scheduled_tokens: Int32Array
    num_computed_tokens: Int32Array
    sampled: Int32Array
    """Entries (indices into ``rows``) whose last token's logits are sampled, ascending."""

    new_blocks: Int32Array
    """[n, 4]: KV group, row, index in the row's block table, block id."""

    block_copies: Int32Array
    """[n, 3]: KV group, source block, destination block."""

    finished_rows: Int32Array
    transfers: Int32Array = field(default_factory=lambda: int32s((), 4))
    """[n, 4]: `TransferKind`, KV group, from, to; a wait has the step in the second column and
    zeros in the others."""

    new_rows: list[NewRow] = field(default_factory=list)
    masks: Int32Array = field(default_factory=lambda: int32s(()))
    """[m * ceil(V / 32)]: the allowed next ids of the m sampled rows with guides, concatenated
    in order of ``sampled``; see `guided.guide`."""

    token_writes: list[TokenWrite] = field(default_factory=list)
    """Written to the token tables together with the new rows."""

    num_decodes: int = 0
    """Leading entries that compute one token of output each; other entries follow."""

    num_drafts: int = 0
    """The last so many decodes compute draft tokens, each in its sequence's row."""

    draft_rules: list[DraftRule] = field(default_factory=list)
    """Rules of sequences whose drafts are not verified by the model's own draws alone."""

    decode_ids: Int32Array = field(default_factory=lambda: int32s(()))
    """The tokens that the last so many decodes compute: drafts that the host has; in a pipeline
    those of all decodes, because the first stage has sampled none. The ranks that need the
    other tokens have sampled or drafted them."""

    behind_drafts: Int32Array = field(default_factory=lambda: int32s(()))
    """Decodes of sequences whose drafts in the preceding step were not verified when this step
    was planned. ``num_computed_tokens`` counts all of these drafts as accepted; ranks subtract
    the rejected ones."""

    @property
    def known_decodes(self) -> slice:
        """The decodes of ``decode_ids``."""
        return slice(self.num_decodes - len(self.decode_ids), self.num_decodes)

    @property
    def num_recomputed(self) -> int:
        """Decodes that are not sampled: they compute known output again."""
        return self.num_decodes - int(self.sampled.searchsorted(self.num_decodes))

    proposals: Int32Array = field(default_factory=lambda: int32s((), 5))
    """[n, 5]: for each sequence for which a network drafts after the step, or whose next step
    may be planned before the step's result: the index in ``sampled`` of the row that samples
    its next id; the index of its first draft row and the number of these rows; the tokens for
    which it has blocks; the number of ids to draft."""

    tree_masks: Int32Array = field(default_factory=lambda: int32s((), 2))
    """[num_drafts, 2]: `DraftTree.masks` of the draft rows, the lower half first; -1 in chains,
    and 0 (`draft_tree.UNKNOWN_MASK`) where ranks have the masks of their last dynamic tree.
    Only engines whose drafts are trees send them. ``num_computed_tokens`` of these rows are
    slots, of which a tree has one for each node."""

    tree_runs: Int32Array = field(default_factory=lambda: int32s((), 3))
    """[n, 3]: for each sequence with draft rows, if ``tree_masks`` is sent: the index in
    ``sampled`` of the row that samples in place of a first draft, the index of the first draft
    row, and the number of these rows. The ranks move what an accepted path has computed to
    consecutive slots."""

    path_moves: Int32Array = field(default_factory=lambda: int32s((), 2))
    """[n, 2]: slots from and to which earlier stages of a pipeline move what an accepted path
    has computed, all at once; the last stage has moved its entries."""

    @property
    def hidden_rows(self) -> Int32Array:
        """int32 [S]: rows between a row and the tokens before it that it does not see: a slot
        minus these is a position. Empty if all are 0. Rows whose masks ranks alone have count
        as 0."""
        if not len(self.tree_masks):
            return _NONE
        words = np.ascontiguousarray(self.tree_masks).view(np.int64)[:, 0]
        hidden = np.zeros(len(self.rows), dtype=np.int32)
        end = self.num_decodes
        hidden[end - len(words) : end] = np.where(words == 0, 0, num_hidden(words))
        return hidden

    @property
    def draft_nodes(self) -> Int32Array:
        """int32 [num_drafts]: the number of each draft row's node in its tree, if
        ``tree_masks`` is sent."""
        counts = self.tree_runs[:, 2]
        nodes: Int32Array = np.arange(counts.sum(), dtype=np.int32)
        return nodes - np.repeat(np.cumsum(counts) - counts, counts)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.num_scheduled_tokens.sum())

    def encode(self) -> bytes:
        """A msgpack list: three integers, the raw arrays, new rows, token writes, draft
        rules."""
        arrays = [getattr(self, name).tobytes() for name in _ARRAYS]
        rows = [
            [
                new.row,
                new.token_ids.tobytes(),
                new.num_prompt_tokens,
                new.sequence_index,
                new.sampling,
                new.adapter_id,
                new.prompt_table,
            ]
            for new in self.new_rows
        ]
        writes = [
            [each.row, each.start, each.token_ids.tobytes()] for each in self.token_writes
        ]
        rules = [rule.to_wire() for rule in self.draft_rules]
        packed: bytes = msgpack.packb(
            [self.step, self.num_decodes, self.num_drafts, arrays, rows, writes, rules]
        )
        return packed

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> SchedulerOutput:
        """The inverse of `encode`; arrays are read-only views of ``payload``'s parts.

        Raises:
            ProtocolError: ``payload`` is not an encoded decision.
        """
        try:
            step, num_decodes, num_drafts, raw_arrays, raw_rows, raw_writes, rules = (
                msgpack.unpackb(payload, strict_map_key=False)
            )
            arrays = {
                name: np.frombuffer(raw, dtype=np.int32)
                for name, raw in zip(_ARRAYS, raw_arrays, strict=True)
            }
            for name, num_columns in _COLUMNS.items():
                arrays[name] = arrays[name].reshape(-1, num_columns)
            new_rows = [
                NewRow(
                    row=row,
                    token_ids=np.frombuffer(ids, dtype=np.int32),
                    num_prompt_tokens=num_prompt,
                    sequence_index=index,
                    sampling=sampling,
                    adapter_id=adapter,
                    prompt_table=table,
                )
                for row, ids, num_prompt, index, sampling, adapter, table in raw_rows
            ]
            writes = [
                TokenWrite(row=row, start=start, token_ids=np.frombuffer(ids, dtype=np.int32))
                for row, start, ids in raw_writes
            ]
            return cls(
                step=step,
                num_decodes=num_decodes,
                num_drafts=num_drafts,
                new_rows=new_rows,
                token_writes=writes,
                draft_rules=[DraftRule.from_wire(rule) for rule in rules],
                **arrays,
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(
                f"cannot decode a step's decision of {len(payload)} bytes: {error}"
            ) from error


NO_ID = -2
"""Stands for a sampled id if every id is forbidden; -1 is taken as the end id of requests that
have none."""


@dataclass(slots=True)
class KeptLogits:
    """One step's logits that clients ask for, by index into the step's ``sampled``.

    The tensors are on the host once the step's result is.
    """

    context: dict[int, list[Tensor]] = field(default_factory=dict)
    """[P, V] in parts, for prompts whose first new token the step samples."""

    generation: dict[int, Tensor] = field(default_factory=dict)
    """[V], from which the token was sampled, before penalties and masks."""


@dataclass(slots=True, kw_only=True)
class SampledTokens:
    """One step's sampled ids, on the host: entry i belongs to ``sampled[i]``."""

    token_ids: list[int]
    """`NO_ID` in a row in which every id is forbidden."""

    log_probs: list[float] | None = None
    """Log-probability of each id under the model; only if some request asked."""

    logits: KeptLogits | None = None
    """Logits that requests asked for; None if there are none."""

    beams: list[tuple[list[int], list[float]]] = field(default_factory=list)
    """The likeliest ids of each sampled beam, in order, and their log-probabilities."""

    proposals: list[list[int]] = field(default_factory=list)
    """The ids that a network drafted, in order of the decision's ``proposals``."""

    by_dp_rank: list[SampledTokens] = field(default_factory=list)
    """With data parallelism, the result of each dp rank; all other fields are unset then."""
