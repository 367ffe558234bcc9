"""The content of a device's KV blocks after each step, computed from decisions alone."""

from __future__ import annotations

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Sequence
from trimaran.worker.scheduling.step_plan import ScheduledStep
from trimaran.worker.steps.step_types import TransferKind

Place = tuple[int, int]
"""KV group and block, or group and slot of the host."""


class _Row:
    """The ids and the block tables of one row."""

    def __init__(self, token_ids: list[int], num_groups: int) -> None:
        self.token_ids = token_ids
        self.tables: list[dict[int, int]] = [{} for _ in range(num_groups)]


class DeviceMemory:
    """Executes steps like a rank, and checks that each token finds the KV that the token
    attends to.

    The KV of a token is identified by all ids up to it. The checks therefore notice a block
    that was allocated too early, copied too late or found under a wrong hash. Loads from the
    host end when a step needs the blocks, or at `finish_loads`.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._rows: dict[int, _Row] = {}
        self._blocks: dict[Place, dict[int, int]] = {}
        """KV by position in the block."""
        self._slots: dict[Place, dict[int, int]] = {}
        self._loads: list[tuple[int, Place, Place]] = []
        """Step, slot and block of the loads in flight."""

    def finish_loads(self, step: int) -> None:
        """The loads of all steps up to this one are complete."""
        for started, slot, block in self._loads:
            if started <= step:
                self._blocks[block] = dict(self._slots[slot])
        self._loads = [load for load in self._loads if load[0] > step]

    def execute(self, step: ScheduledStep, running: list[Sequence]) -> None:
        """Execute a step whose rows hold the ``running`` sequences.

        Raises:
            AssertionError: a token would attend to other content than the ids before it.
        """
        decision = step.decision
        self._transfer(decision.step, decision.transfers.tolist())
        for new in decision.new_rows:
            self._rows[new.row] = _Row(new.token_ids.tolist(), len(self._cache.pools))
        for write in decision.token_writes:
            self._rows[write.row].token_ids[write.start :] = write.token_ids.tolist()
        # All sources are read before any target is written.
        self._blocks |= {
            (group, target): dict(self._blocks[group, source])
            for group, source, target in decision.block_copies.tolist()
        }
        for group, row, index, block in decision.new_blocks.tolist():
            self._rows[row].tables[group][index] = block
        roots = {row: _root(s) for s in running for row in rows_of(s)}
        entries = [
            (self._rows[row], start, self._kv(row, start + count, roots[row]))
            for row, start, count in zip(
                decision.rows.tolist(),
                decision.num_computed_tokens.tolist(),
                decision.num_scheduled_tokens.tolist(),
                strict=True,
            )
        ]
        # All layers write a step's KV before they read any.
        for entry in entries:
            self._write(*entry)
        for entry in entries:
            self._read(*entry)

    def sampled(self, row: int, num_known: int, token_id: int) -> None:
        """A row goes on with an id that the device sampled, after ``num_known`` ids."""
        self._rows[row].token_ids[num_known:] = [token_id]

    def _transfer(self, step: int, transfers: list[list[int]]) -> None:
        for kind, group, source, target in transfers:
            if kind == TransferKind.MOVE:
                self._slots[group, target] = dict(self._blocks[group, source])
            elif kind == TransferKind.LOAD:
                self._loads.append((step, (group, source), (group, target)))
            else:
                self.finish_loads(group)

    def _kv(self, row: int, num_tokens: int, root: int) -> list[int]:
        """The KV of a row's first tokens."""
        ids = self._rows[row].token_ids
        assert len(ids) >= num_tokens, "a step computes a token that its rank has not received"
        found = []
        for token_id in ids[:num_tokens]:
            root = hash((root, token_id))
            found.append(root)
        return found

    def _block(self, row: _Row, group: int, place: int) -> dict[int, int]:
        block = group, row.tables[group][place // self._cache.block_size]
        assert block not in {target for _, _, target in self._loads}, (
            "the block is being loaded"
        )
        return self._blocks.setdefault(block, {})

    def _write(self, row: _Row, start: int, kv: list[int]) -> None:
        size = self._cache.block_size
        for group in range(len(self._cache.pools)):
            for place in range(start, len(kv)):
                self._block(row, group, place)[place % size] = kv[place]

    def _read(self, row: _Row, start: int, kv: list[int]) -> None:
        size, window = self._cache.block_size, self._cache.window
        for place, expected in enumerate(kv):
            is_seen = place // size < window.num_sinks or place > start - window.num_tokens
            if is_seen or not window.num_tokens:
                for group in range(len(self._cache.pools)):
                    found = self._block(row, group, place).get(place % size)
                    assert found == expected, f"the KV of token {place} is another's"


def rows_of(sequence: Sequence) -> list[int]:
    """The rows of a sequence: one, or one a beam."""
    beams = [sequence] if sequence.beams is None else sequence.beams.beams
    return [beam.row for beam in beams]


def _root(sequence: Sequence) -> int:
    """The part of a sequence's KV identity that is not in its ids."""
    return hash((sequence.request.cache_salt, sequence.blocks.is_long))
