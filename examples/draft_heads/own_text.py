"""Texts of the target itself: greedy outputs behind beginnings that come from a given text.

A head drafts what the target would write, so that it learns more from the target's own outputs
than from other texts. A target with a chat template answers questions about words and sentences
of the text in one half of the rows. The other half, or all rows of other targets, continues
passages.
"""

from __future__ import annotations

import random
import re
import time

import torch
from target import Target
from torch import Tensor
from writer import Writer

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
PASSAGE_IDS = 8, 64
"""Least and most ids of a passage that is continued."""

_PASSAGE_CHARS = 600
_SENTENCE_CHARS = 60, 240


def own_rows(
    target: Target, text: str, num_rows: int, length: int, batch: int, seconds: float
) -> tuple[Tensor, Tensor]:
    """Rows of ids [M, L], and the number of ids of each row up to its end id [M]. Fewer rows
    if no further batch may begin after ``seconds``."""
    began = time.monotonic()
    rng = random.Random(1234)
    words = sorted(set(re.findall(r"\b[a-z]{4,}\b", text)))
    writer = Writer(target, batch, length)
    rows, lengths, num_left = [], [], num_rows
    while num_left and time.monotonic() - began < seconds:
        count = min(batch, num_left)
        num_left -= count
        beginnings = _passages(target, text, count, length // 2, rng)
        if target.tokenizer.chat_template:
            questions = _questions(text, words, count // 2, rng)
            beginnings[: count // 2] = _chat_ids(target, questions)
        # A row has room for an output: a longer question would lack its end.
        beginnings = [ids for ids in beginnings if 0 < len(ids) <= length // 2]
        ids, counts = writer.write(beginnings)
        rows.append(ids)
        lengths.append(counts)
    found = torch.cat(rows), torch.cat(lengths)
    took = time.monotonic() - began
    print(f"{len(found[0])} own texts, {int(found[1].sum())} ids, {took:.0f} s", flush=True)
    return found


def _chat_ids(target: Target, questions: list[str]) -> list[list[int]]:
    """The ids of questions as the chat template writes them."""
    turns = [[{"role": "user", "content": each}] for each in questions]
    prompts = target.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False
    )
    encoded: list[list[int]] = target.tokenizer(prompts, add_special_tokens=False)["input_ids"]
    return encoded


def _passages(
    target: Target, text: str, count: int, most: int, rng: random.Random
) -> list[list[int]]:
    """Passages from any places of the text, of ``most`` ids at most."""
    passages = [_passage(text, _PASSAGE_CHARS, rng) for _ in range(count)]
    encoded = target.tokenizer(passages, add_special_tokens=False)
    return [ids[: min(most, rng.randint(*PASSAGE_IDS))] for ids in encoded["input_ids"]]


def _passage(text: str, num_chars: int, rng: random.Random) -> str:
    """Whole words from any place of the text."""
    start = rng.randrange(len(text) - num_chars)
    return text[start : start + num_chars].partition(" ")[2].rpartition(" ")[0]


def _questions(text: str, words: list[str], count: int, rng: random.Random) -> list[str]:
    """Questions about sentences of the text, and twice as many about its words."""
    found = []
    for number in range(count):
        if number % 3 == 0:
            passage = _passage(text, rng.randint(*_SENTENCE_CHARS), rng)
            found.append(rng.choice(ABOUT_SENTENCES).format(passage))
            continue
        template = rng.choice(ABOUT_WORDS)
        found.append(template.format(*rng.sample(words, template.count("{}"))))
    return found
