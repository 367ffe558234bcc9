"""The text of the demo models: its split into parts, its tokenizer, its token ids."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
MAX_LENGTH = 1024

_PIECE_BYTES = 8192
_PIECES_PER_HELD_OUT = 33
_HEADING = re.compile(r"^(CHAPTER|Chapter|STAVE|BOOK|PART|Letter|Produced by)\b")
_LONG_LINE = 40


@dataclass(frozen=True)
class Split:
    """Pieces of whole paragraphs, in the order of the text."""

    train: list[str]
    choose: list[str]
    """Decides when training stops and which candidate is kept."""

    report: list[str]
    """Used for the published figures only."""


def split_text(text: str) -> Split:
    """Cut the text into pieces of about 8 KiB; of 33 in a row one is held out.

    Held-out pieces are spread over all books and go to ``choose`` and ``report`` in turn. A
    long paragraph that also stands in a held-out piece is taken out of the training text.
    """
    pieces: list[list[str]] = [[]]
    size = 0
    for line in text.splitlines():
        if size >= _PIECE_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(line)
        size += len(line.encode()) + 1
    held_out = pieces[_PIECES_PER_HELD_OUT // 2 :: _PIECES_PER_HELD_OUT]
    secret = {line for piece in held_out for line in piece if len(line) > _LONG_LINE}
    train = [
        [line for line in piece if line not in secret]
        for number, piece in enumerate(pieces)
        if number % _PIECES_PER_HELD_OUT != _PIECES_PER_HELD_OUT // 2
    ]
    return Split(
        train=["\n".join(piece) + "\n" for piece in train],
        choose=["\n".join(piece) + "\n" for piece in held_out[0::2]],
        report=["\n".join(piece) + "\n" for piece in held_out[1::2]],
    )


def train_tokenizer(pieces: list[str]) -> Tokenizer:
    """A byte-level BPE that can spell any text and begins each prompt with ``<s>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files as Hugging Face names them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        **special,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", special)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(folder / "generation_config.json", generation)


def encode_training(tokenizer: Tokenizer, pieces: list[str]) -> np.ndarray:
    """One stream of ids; ``</s> <s>`` stand where a chapter or a book begins."""
    chapters: list[list[str]] = [[]]
    for line in "".join(pieces).splitlines(keepends=True):
        if _HEADING.match(line) and chapters[-1]:
            chapters.append([])
        chapters[-1].append(line)
    encoded = tokenizer.encode_batch(
        ["".join(chapter) for chapter in chapters], add_special_tokens=False
    )
    ids = [np.array([BOS_ID, *chapter.ids, EOS_ID], dtype=np.int32) for chapter in encoded]
    return np.concatenate(ids)


def encode_pieces(tokenizer: Tokenizer, pieces: list[str]) -> list[np.ndarray]:
    """The ids of each piece, ``<s>`` first."""
    return [np.array(tokenizer.encode(piece).ids, dtype=np.int32) for piece in pieces]


def _write_json(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
