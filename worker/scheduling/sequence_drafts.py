"""One sequence's drafts: their source, their acceptance, and those that were not verified."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as List
from itertools import pairwise

from trimaran.worker.config.draft_tree import AnyTree, DynamicTree, accepted_path
from trimaran.worker.requests.request import RequestStatus, Sequence
from trimaran.worker.scheduling.step_plan import DraftRun
from trimaran.worker.speculation.controller import AcceptanceRate
from trimaran.worker.speculation.drafters import Drafter, NetworkDrafter
from trimaran.worker.speculation.lookahead import LookaheadDrafter


class SequenceDrafts:
    """A sequence's drafter, its acceptance rate, and the drafts that were not verified.

    A network's drafts are on the device first. The step behind theirs may be planned before the
    host has them: that step's run gets its ids once they arrive.
    """

    __slots__ = (
        "_asked", "_guess_rate", "_is_put_off", "_lookahead", "_network", "_rate", "_unknown",
        "drafter", "most", "tree", "unverified", "unverified_at", "unverified_tree",
    )  # fmt: skip

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        typical: AcceptanceRate,
        typical_guess: AcceptanceRate | None = None,
    ) -> None:
        """``most`` draft tokens a step."""
        self.drafter = drafter
        self._lookahead = drafter if isinstance(drafter, LookaheadDrafter) else None
        self._network = drafter if isinstance(drafter, NetworkDrafter) else None
        self.most = most
        self.tree: AnyTree | None = None
        """The tree of the last proposal that the host has; None for chains."""
        self._rate, self._guess_rate = AcceptanceRate(typical), AcceptanceRate(typical_guess)
        self.unverified = array("i")
        """Drafts that were made but not verified, behind ``unverified_at`` ids."""
        self.unverified_at = 0
        self.unverified_tree: AnyTree | None = None
        self._asked = 0, 0
        self._unknown: DraftRun | None = None
        self._is_put_off = False

    @property
    def is_on_device(self) -> bool:
        """Whether ranks make the drafts, and have them before the host."""
        return self._network is not None

    @property
    def is_guess(self) -> bool:
        """Whether the last proposal was the window of lookahead, which is seldom accepted."""
        return self._lookahead is not None and self._lookahead.is_guess

    @property
    def rate(self) -> AcceptanceRate:
        """The acceptance of proposals like the last one."""
        return self._guess_rate if self.is_guess else self._rate

    def observe(self, run: DraftRun, num_known: int, own: List[int]) -> None:
        """Learn from a verified draft behind ``num_known`` ids, in whose place the model chose
        its ``own`` ids."""
        if run.tree is not None:
            self._observe_path(run.tree, len(run.token_ids), [*run.path, None])
            return
        num_same = len(run.path)
        self.rate.observe(run.num_accepted, has_rejected=num_same < len(run.token_ids))
        if self._lookahead is not None:
            self._lookahead.observe(num_known, own, num_same)

    def _observe_path(self, tree: AnyTree, num_nodes: int, path: List[int | None]) -> None:
        """Learn from a path through the first nodes of a tree, which None ends if no child
        was right: the first child of each node on the path was accepted or not."""
        at: int | None
        num_right = 0
        for at, following in pairwise([-1, *path]):
            assert at is not None
            first = tree.first_child(at, num_nodes)
            if first is None:
                continue
            if following == first:
                num_right += 1
            else:
                self._rate.observe(num_right, has_rejected=True)
                num_right = 0
        if num_right:
            self._rate.observe(num_right, has_rejected=False)

    def put_off(self, sequence: Sequence, ids: array[int], *, is_known: bool) -> None:
        """A step verifies none of these drafts; without ``is_known`` their ids will arrive."""
        self.rate.idle()
        if not is_known:
            self._is_put_off = True
        # Guesses follow from the verified ones: without rows their acceptance says nothing.
        # Drafts of a guided sequence are the first path of a tree alone.
        elif not self.is_guess and (self.tree is None or sequence.guide is None):
            self._keep(sequence, ids)

    def _keep(self, sequence: Sequence, ids: array[int]) -> None:
        self.unverified, self.unverified_tree = ids, self.tree
        self.unverified_at = len(sequence.token_ids)

    def compare(self, sequence: Sequence) -> None:
        """Learn from drafts that were made but not verified, once the output is known.

        So the rate of a sequence stays current while it verifies no drafts.
        """
        new = sequence.token_ids[self.unverified_at :]
        if not new:
            return
        ids, tree = self.unverified, self.unverified_tree
        self.unverified = array("i")
        if tree is not None:
            path = accepted_path(tree.parents, ids, new, by_depth=True)
            # Drafts behind the output are neither right nor wrong.
            ends = [None] if len(path) < len(new) else []
            self._observe_path(tree, len(ids), [*path, *ends])
            return
        pairs = list(zip(ids, new, strict=False))
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
        self._rate.observe(same, has_rejected=same < len(pairs))

    # ---- a network's drafts --------------------------------------------------------------

    def ask(self, step: int, count: int) -> None:
        """A network drafts ``count`` ids after ``step``."""
        self._asked = step, count

    def num_unknown(self, step: int) -> int:
        """Ids that a network drafts after ``step``, whose result the host does not have."""
        asked, count = self._asked
        return count if asked == step else 0

    def tree_of(self, *, is_known: bool) -> AnyTree | None:
        """The tree of the drafts that a step verifies, which the host may not have yet."""
        is_dynamic = isinstance(self.tree, DynamicTree)
        return DynamicTree() if is_dynamic and not is_known else self.tree

    def await_ids(self, run: DraftRun) -> None:
        """A step verifies drafts whose ids the host does not have yet."""
        self._unknown = run

    def arrived(
        self,
        sequence: Sequence,
        ids: array[int],
        num_usable: int,
        tree: DynamicTree | None = None,
    ) -> None:
        """A network's ids are here, with its ``tree`` if that is dynamic. If the next
        step was not planned without them, it may verify the first ``num_usable``."""
        run, is_put_off = self._unknown, self._is_put_off
        self._unknown, self._is_put_off = None, False
        if tree is not None:
            self.tree = tree
        if run is not None:
            run.token_ids = ids[: len(run.token_ids)]
            if run.tree is not None:
                run.tree = self.tree
        elif sequence.status is not RequestStatus.RUNNING:
            return
        elif is_put_off:
            if self.unverified:
                self.compare(sequence)
            self._keep(sequence, ids)
        elif self._network is not None:
            self._network.offer(sequence, ids[:num_usable])
