"""Trees of drafts by plain tensors: a draft of each node, and a walk along the target's own
choices. Nothing is cached, and no mask is needed, since each path is computed by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.unit.worker.speculation.head_reference import (
    Counts,
    EagleReference,
    MedusaReference,
    RedrafterReference,
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


class Growing:
    """The limits of trees that are grown; ``choices`` are the numbers of nodes."""

    def __init__(self, width, depth, num_nodes):
        self.width, self.depth, self.choices = width, depth, range(num_nodes)


class EagleDynamic(EagleReference):
    """The dynamic trees of EAGLE-2. A node is the path of the tokens to it."""

    growing: Growing

    def draft_tree(self, ids, states, last, choices):
        """The id of as many paths as there are ``choices``, the likeliest ones."""
        joined = torch.cat([states[tap] for tap in self.taps], -1)
        known, chain = list(ids[1:]), self._times(joined, "fc")
        runs = {(): (known, chain, self._layer(torch.tensor(known), chain))}
        scores, level = {(): 0.0}, [()]
        for depth in range(self.growing.depth):
            children = {}
            for path in level:
                known, chain, outputs = runs[path]
                logits = self._times(self._norm(outputs[-1:], "norm"), "lm_head")[0]
                likely = logits.log_softmax(-1).sort(descending=True)
                for own in range(self.growing.width):
                    draft = likely.indices[own].item()
                    draft += int(self.weights["d2t"][draft])
                    children[(*path, draft)] = scores[path] + likely.values[own].item()
            scores.update(children)
            level = sorted(children, key=lambda path: -children[path])[: self.growing.width]
            for path in level if depth + 1 < self.growing.depth else ():
                known, chain, outputs = runs[path[:-1]]
                known, chain = [*known, path[-1]], torch.cat((chain, outputs[-1:]))
                runs[path] = known, chain, self._layer(torch.tensor(known), chain)
        del scores[()]
        found = sorted(scores, key=lambda path: -scores[path])[: len(choices)]
        return {path: path[-1] for path in found}


class RedrafterBeams(RedrafterReference):
    """The beam search of ReDrafter. A node is the path of the tokens to it."""

    growing: Growing

    def draft_tree(self, ids, states, last, choices):
        """The id of as many paths as there are ``choices``: those of the last beams first."""
        width, scores = self.growing.width, {}
        beams = {(): (0.0, torch.zeros(self.values["hidden_size"]), ids[-1])}
        for _ in range(self.growing.depth):
            found = {}
            for path, (score, state, token) in beams.items():
                state = self.next_state(state, token)
                log_probs = self.logits(last[-1], state).log_softmax(-1)
                for own in log_probs.topk(width).indices.tolist():
                    found[(*path, own)] = score + log_probs[own].item(), state, own
            kept = sorted(found, key=lambda path: -found[path][0])[:width]
            beams = {path: found[path] for path in kept}
            scores.update({path: found[path][0] for path in kept})
        alive = {path[:end] for path in beams for end in range(1, len(path) + 1)}
        order = sorted(scores, key=lambda path: (path not in alive, -scores[path]))
        return {path: path[-1] for path in order[: len(choices)]}


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
