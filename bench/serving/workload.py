"""The requests of a benchmark: prompts, lengths and the times at which they are due."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.client.prompt_files import read_dataset
from trimaran.client.vocabulary import Vocabulary
from trimaran.comm.errors import ConfigError

SEED = 420

UNPACED = -1
"""The rate of requests that are due at once."""

# Rows of (shortest, longest, weight): a mix of chat and summarisation lengths.
HISTOGRAMS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "example_ip": ((16, 64, 18), (64, 128, 27), (128, 256, 30), (256, 512, 18), (512, 768, 7)),
    "example_op": ((8, 32, 15), (32, 64, 30), (64, 128, 35), (128, 256, 20)),
}


@dataclass(frozen=True, slots=True)
class Item:
    """One request of the workload."""

    ids: list[int]
    output_len: int


class Workload:
    """Creates items. The same seed creates the same items."""

    def __init__(self, vocab_size: int, seed: int = SEED) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def fixed(self, count: int, input_len: int, output_len: int) -> list[Item]:
        """Random prompts of one length."""
        return [Item(self._ids(input_len), output_len) for _ in range(count)]

    def normal(
        self,
        count: int,
        input_mean_std: tuple[float, float],
        output_mean_std: tuple[float, float],
    ) -> list[Item]:
        """Random prompts whose lengths are normally distributed, at least 1 token."""
        inputs = self._random.normal(*input_mean_std, count)
        outputs = self._random.normal(*output_mean_std, count)
        return self._items(inputs, outputs)

    def histogram(self, count: int, key: str) -> list[Item]:
        """Random prompts whose lengths follow the two tables of ``key``.

        Raises:
            ConfigError: the key is unknown.
        """
        if f"{key}_ip" not in HISTOGRAMS:
            names = sorted({name[:-3] for name in HISTOGRAMS})
            raise ConfigError(
                f"--histogram-key is {key!r} but must be one of {', '.join(names)}"
            )
        return self._items(self._lengths(count, f"{key}_ip"), self._lengths(count, f"{key}_op"))

    def dataset(
        self, count: int, path: str, vocabulary: Vocabulary, op_tokens_per_word: float
    ) -> list[Item]:
        """The first prompts of a file, a JSON list of objects with input, instruction, output.

        Raises:
            ConfigError: the file is malformed.
        """
        items = []
        num_tokens = num_words = 0
        for record in read_dataset(path)[:count]:
            text = record["input"] + " " + record["instruction"]
            ids = vocabulary.encode(text)
            num_tokens += len(ids)
            num_words += len(text.split(" "))
            output_len = int(len(record["output"].split(" ")) * op_tokens_per_word)
            items.append(Item(ids, max(1, output_len)))
        print(f"Tokenizer: Tokens per word =  {num_tokens / max(1, num_words):.3f}")
        return items

    def unseen_prompts(self, items: Sequence[Item]) -> list[Item]:
        """Random prompts of the same lengths, which no prefix cache has seen."""
        return [Item(self._ids(len(item.ids)), item.output_len) for item in items]

    def delays(self, count: int, rate: float, distribution: str) -> list[float]:
        """Seconds from the start at which each request is due; all 0 for `UNPACED`."""
        if rate == UNPACED:
            return [0.0] * count
        if distribution == "constant":
            gaps = np.full(count, 1 / rate)
        else:
            gaps = self._random.exponential(1 / rate, count)
        due: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
        return due

    def _items(self, inputs: Iterable[float], outputs: Iterable[float]) -> list[Item]:
        return [
            Item(self._ids(max(1, round(i))), max(1, round(o)))
            for i, o in zip(inputs, outputs, strict=True)
        ]

    def _lengths(self, count: int, table: str) -> Iterable[float]:
        rows = HISTOGRAMS[table]
        weights = np.array([weight for _, _, weight in rows], dtype=float)
        chosen = self._random.choice(len(rows), count, p=weights / weights.sum())
        return [float(self._random.integers(rows[i][0], rows[i][1])) for i in chosen]

    def _ids(self, length: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._vocab_size, length).tolist()
        return ids


def within(items: Sequence[Item], max_input_len: int | None) -> list[Item]:
    """The items whose prompts are short enough.

    Raises:
        ConfigError: all prompts are too long.
    """
    kept = [item for item in items if max_input_len is None or len(item.ids) <= max_input_len]
    if not kept:
        raise ConfigError(
            f"no prompt has at most --max-input-len {max_input_len} tokens; the shortest has "
            f"{min((len(item.ids) for item in items), default=0)}"
        )
    return kept
