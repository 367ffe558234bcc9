"""Texts of the target itself: greedy outputs behind beginnings that come from a given text.

A head drafts what the target would write, so that it learns more from the target's own outputs
than from other texts. A target with a chat template answers questions about words and sentences
of the text; one output in four, or each one of other targets, continues a passage.
"""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator

import torch
from target import Target
from torch import Tensor

# Shapes: M rows, L ids of a row.

ABOUT_WORDS = (
    "Write a story about {} and {}.", "Write a short story about {}.", "What is {}?",
    "Tell me about {} and {}.", "Explain how {} works.", "Why is {} important?",
    "Describe {} in a few sentences.", "Write a letter to a friend about {} and {}.",
    "Give me some advice about {}.", "What is the difference between {} and {}?",
    "Write an essay about {}.", "Write a poem about {}.", "Explain {} to a child.",
)  # fmt: skip
ABOUT_SENTENCES = (
    "Continue this story: {}", "Explain what this means: {}", "Summarize this passage: {}",
    "Write this in simple words: {}",
)  # fmt: skip
PASSAGE_IDS = 32
"""Ids of a passage that is continued."""

_PASSAGE_CHARS = 400
_SENTENCE_IDS = 20
_SPARE = 3
"""Questions that are drawn for each one that is taken: those of frequent lengths are."""

_PARTS = 8
"""One part of so many may have beginnings of the same length."""


def own_rows(
    target: Target, text: str, num_rows: int, length: int, batch: int, seconds: float
) -> tuple[Tensor, Tensor]:
    """Rows of ids [M, L], and the number of ids of each row up to its end id [M]. Fewer rows
    if no further batch may begin after ``seconds``.

    Rows of a batch have beginnings of the same length, so that no row has padding in front.
    """
    began = time.monotonic()
    rows, lengths = [], []
    for beginnings in _batches(target, text, num_rows, length, batch):
        ids, counts = _continued(target, beginnings, length)
        rows.append(ids)
        lengths.append(counts)
        if time.monotonic() - began > seconds:
            break
    found = torch.cat(rows), torch.cat(lengths)
    took = time.monotonic() - began
    print(f"{len(found[0])} own texts, {int(found[1].sum())} ids, {took:.0f} s", flush=True)
    return found


def _batches(
    target: Target, text: str, num_rows: int, length: int, batch: int
) -> Iterator[list[list[int]]]:
    rng = random.Random(1234)
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    num_passages = num_rows // 4 if target.tokenizer.chat_template else num_rows
    for question in _questions(target, text, _SPARE * (num_rows - num_passages), rng):
        turns = [{"role": "user", "content": question}]
        ids = target.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False
        )
        if len(ids) < length // 2:
            by_length[len(ids)].append(ids)
    most = -(-num_rows // _PARTS)
    groups = [_passages(target, text, num_passages, PASSAGE_IDS, rng)]
    groups += sorted((g[:most] for g in by_length.values()), key=len, reverse=True)
    for group in groups:
        taken = group[:num_rows]
        num_rows -= len(taken)
        for start in range(0, len(taken), batch):
            yield taken[start : start + batch]


def _passages(
    target: Target, text: str, count: int, length: int, rng: random.Random
) -> list[list[int]]:
    """Passages of ``length`` ids from any places of the text."""
    found: list[list[int]] = []
    while len(found) < count:
        start = rng.randrange(len(text) - _PASSAGE_CHARS)
        passage = text[start : start + _PASSAGE_CHARS].partition(" ")[2]
        ids = target.tokenizer(passage, add_special_tokens=False)["input_ids"]
        if len(ids) >= length:
            found.append(ids[:length])
    return found


def _questions(target: Target, text: str, count: int, rng: random.Random) -> Iterator[str]:
    words = sorted(set(re.findall(r"\b[a-z]{4,}\b", text)))
    sentences = _passages(target, text, count // 3, _SENTENCE_IDS, rng)
    for ids in sentences:
        yield rng.choice(ABOUT_SENTENCES).format(target.tokenizer.decode(ids).strip())
    for _ in range(count - len(sentences)):
        template = rng.choice(ABOUT_WORDS)
        yield template.format(*rng.sample(words, template.count("{}")))


@torch.no_grad()
def _continued(
    target: Target, beginnings: list[list[int]], length: int
) -> tuple[Tensor, Tensor]:
    """The rows with the target's greedy outputs, and their lengths."""
    ids = torch.tensor(beginnings, device=target.device)
    count, start = ids.shape
    found = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False,
        max_new_tokens=length - start, eos_token_id=target.end_ids or None,
        pad_token_id=(target.end_ids or [0])[0],
    )  # fmt: skip
    rows = torch.zeros((count, length), dtype=torch.int64)
    rows[:, : found.shape[1]] = found.cpu()
    ends = torch.isin(rows[:, start:], torch.tensor(target.end_ids))
    ends = torch.cat((ends, torch.ones(count, 1, dtype=torch.bool)), dim=1)
    # The end id itself is drafted too.
    lengths = (start + ends.int().argmax(1) + 1).clamp(max=min(length, found.shape[1]))
    return rows, lengths
