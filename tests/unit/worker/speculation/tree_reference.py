"""Trees of drafts by plain tensors: a draft of each node, and a walk along the target's own
choices. Nothing is cached, and no mask is needed, since each path is computed by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.unit.worker.speculation.head_reference import (
    Counts,
    EagleReference,
    MedusaReference,
)


class MedusaTree(MedusaReference):
    """Node (.., r) of depth d is the token of rank r of head d."""

    def draft_tree(self, ids, states, last, choices):
        """The id of each path of ``choices``."""
        likely = []
        for head in range(max(map(len, choices))):
            block = f"{head}.0.linear"
            inner = last[-1] @ self._weight(f"{block}.weight").T + self._weight(f"{block}.bias")
            logits = (last[-1] + F.silu(inner)) @ self._weight(f"{head}.1.weight").T
            likely.append(logits.sort(descending=True).indices.tolist())
        return {path: likely[len(path) - 1][path[-1]] for path in choices}


class EagleTree(EagleReference):
    """Node (.., r) is the token of rank r behind the path before."""

    def draft_tree(self, ids, states, last, choices):
        """The id of each path of ``choices``, parents first."""
        joined = torch.cat([states[tap] for tap in self.taps], -1)
        chain, known = self._times(joined, "fc"), list(ids[1:])
        runs = {(): (known, chain, self._layer(torch.tensor(known), chain))}
        found = {}
        for path in choices:
            known, chain, outputs = runs[path[:-1]]
            logits = self._times(self._norm(outputs[-1:], "norm"), "lm_head")[0]
            own = logits.sort(descending=True).indices[path[-1]].item()
            found[path] = own + int(self.weights["d2t"][own])
            known = [*known, found[path]]
            chain = torch.cat((chain, outputs[-1:]))
            runs[path] = known, chain, self._layer(torch.tensor(known), chain)
        return found


@torch.no_grad()
def generate_by_tree(target, head, prompt, num_tokens, tree):
    """Greedy output with trees, and the counts; see `head_reference.generate`."""
    ids, end, counts = list(prompt), len(prompt) + num_tokens, Counts()
    drafts: dict[tuple[int, ...], int] = {}
    while len(ids) < end:
        counts.drafts += bool(drafts)
        path: tuple[int, ...] | None = ()
        accepted: list[int] = []
        while path is not None:
            result = target(torch.tensor([ids + accepted]), output_hidden_states=True)
            own = int(result.logits[0, -1].argmax())
            behind = [node for node in drafts if node[:-1] == path and drafts[node] == own]
            path = behind[0] if behind else None
            accepted.append(own)
        counts.accepted += len(accepted) - 1
        ids += accepted
        known = len(ids) - 1
        states = [each[0, :known] for each in result.hidden_states]
        choices = tree.choices[: max(0, end - len(ids) - 1)]
        drafts = head.draft_tree(ids, states, states[-1], choices) if choices else {}
    return ids[len(prompt) :], counts
