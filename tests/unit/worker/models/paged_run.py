"""Steps of a model alone, over a paged cache of its own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.unit.worker.models import models
from trimaran.worker.attention.backend import AttentionMetadata, ForwardContext
from trimaran.worker.models.interfaces import CausalLM

BLOCK = 4


class PagedRun:
    """A few sequences on one model, with their blocks in mixed order."""

    def __init__(self, model: CausalLM, num_sequences: int, max_len: int = 64) -> None:
        self.model = model
        self.lengths = [0] * num_sequences
        blocks_each = -(-max_len // BLOCK)
        order = torch.randperm(
            num_sequences * blocks_each, generator=torch.Generator().manual_seed(3)
        )
        self.tables = order.view(num_sequences, blocks_each).to(torch.int32)
        spec = model.kv_cache_specs()[0]
        layers = len(model.kv_cache_specs())
        shape = (order.numel(), layers, *spec.block_shape(BLOCK))
        # NaN: content that no step wrote must not matter.
        pool = torch.full(shape, float("nan"), dtype=spec.dtype)
        self.caches = [pool[:, layer] for layer in range(layers)]

    def hidden(
        self,
        chunks: dict[int, list[int]],
        *,
        hidden: Tensor | None = None,
        wanted: Tensor | None = None,
        makes_all_queries: bool = True,
    ) -> Tensor:
        """Run one step that gives each sequence a chunk of tokens. Returns its hidden
        states, or those of the wanted tokens. If each wanted token is the last of its chunk,
        the last layer may compute only the queries of wanted tokens."""
        tokens, positions, slots, starts = [], [], [], [0]
        for sequence, ids in chunks.items():
            first = self.lengths[sequence]
            for offset, token in enumerate(ids):
                position = first + offset
                block = int(self.tables[sequence, position // BLOCK])
                tokens.append(token)
                positions.append(position)
                slots.append(block * BLOCK + position % BLOCK)
            self.lengths[sequence] += len(ids)
            starts.append(len(tokens))
        sequences = list(chunks)
        lengths = [self.lengths[s] for s in sequences]
        sizes = [len(ids) for ids in chunks.values()]
        num_decodes = next((i for i, size in enumerate(sizes) if size > 1), len(sizes))
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=self.tables[sequences],
            slot_mapping=torch.tensor(slots),
            max_query_len=max(sizes),
            max_seq_len=max(lengths),
            num_decodes=num_decodes,
        )
        context = ForwardContext(attention=metadata, kv_caches=self.caches, wanted=wanted)
        if wanted is not None and not makes_all_queries:
            context.wanted_attention = AttentionMetadata(
                query_start_loc=torch.arange(len(wanted) + 1, dtype=torch.int32),
                seq_lens=metadata.seq_lens,
                block_tables=metadata.block_tables,
                slot_mapping=metadata.slot_mapping[wanted],
                max_query_len=1,
                max_seq_len=metadata.max_seq_len,
                num_decodes=len(wanted),
            )
        ids = torch.tensor(tokens)
        return self.model.forward(ids, torch.tensor(positions), context, hidden)

    def logits(self, chunks: dict[int, list[int]]) -> Tensor:
        """Logits of every token of one step."""
        with torch.inference_mode():
            return self.model.compute_logits(self.hidden(chunks))

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Continue all prompts together: prompts in one step, then one token a step."""
        logits = self.logits(dict(enumerate(prompts)))
        ends = np.cumsum([len(prompt) for prompt in prompts]) - 1
        outputs = [[int(logits[end].argmax())] for end in ends]
        for _ in range(num_tokens - 1):
            logits = self.logits({s: output[-1:] for s, output in enumerate(outputs)})
            for row, output in enumerate(outputs):
                output.append(int(logits[row].argmax()))
        return outputs


def logits_alone_and_beside(ours: CausalLM) -> tuple[Tensor, Tensor]:
    """A prompt's logits in one step, and in two chunks beside another sequence."""
    first, second = models.prompts(21, 33)
    alone = PagedRun(ours, 1).logits({0: first})
    run = PagedRun(ours, 2)
    start = run.logits({0: first[:13], 1: second})
    rest = run.logits({1: [5], 0: first[13:]})
    return alone, torch.cat((start[:13], rest[1:]))
