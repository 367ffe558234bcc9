"""Tokenizers of GGUF files: the ids of other programs for the same vocabulary."""

from __future__ import annotations

import itertools
import random

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests.unit.builder.gguf_files import Vocabulary, write_gguf
from trimaran.builder.gguf_tokenizer import tokenizer_of
from trimaran.worker.config.gguf_file import open_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
MERGES = ["h e", "Ġ he", "l l", "1 2", "12 3", "123 4", "Ċ Ċ", "Ġ Ġ"]


@pytest.fixture
def read(tmp_path):
    """The tokenizer of a file with this vocabulary."""

    def tokenizer(vocabulary: Vocabulary) -> Tokenizer:
        written = write_gguf(tmp_path / "model.gguf", vocabulary=vocabulary)
        return tokenizer_of(open_gguf(written.path))

    return tokenizer


def _bytewise(pre, **values):
    words = ["<s>", "</s>", "<tool>", *sorted(ByteLevel.alphabet())]
    words += [merge.replace(" ", "") for merge in MERGES] + ["Hello"]
    types = [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(words) - 3)
    return Vocabulary(
        "gpt2", words, types,
        {"merges": MERGES, "pre": pre, "bos_token_id": 0, "eos_token_id": 1, **values},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["We", "'", "LL", "Ġpay", "Ġ1234", "$!", "ĊĊ", "Ġnow"]),
        ("smollm", ["We", "'", "LL", "Ġpay", "Ġ", "1", "2", "3", "4", "$!", "ĊĊ", "Ġnow"]),
        ("llama-bpe", ["We", "'LL", "Ġpay", "Ġ", "123", "4", "$!ĊĊ", "Ġnow"]),
        ("qwen2", ["We", "'LL", "Ġpay", "Ġ", "1", "2", "3", "4", "$!ĊĊ", "Ġnow"]),
        ("tekken", ["We", "'LL", "Ġpay", "Ġ", "1", "2", "3", "4", "$!ĊĊ", "Ġnow"]),
    ],
)
def test_a_text_is_split_into_words_as_the_vocabulary_was_trained(pre, pieces, read):
    tokenizer = read(_bytewise(pre))
    split = tokenizer.pre_tokenizer.pre_tokenize_str("We'LL pay 1234$!\n\n now")
    assert [piece for piece, _ in split] == pieces


def test_a_text_begins_and_ends_with_the_tokens_that_the_file_asks_for(read):
    for values, ends in (
        ({"pre": "smollm"}, (None, None)),
        ({"pre": "llama-bpe"}, (0, None)),
        ({"pre": "smollm", "add_bos_token": True, "add_eos_token": True}, (0, 1)),
        ({"pre": "llama-bpe", "add_bos_token": False}, (None, None)),
    ):
        tokenizer = read(_bytewise(**values))
        plain = tokenizer.encode("hello", add_special_tokens=False).ids
        expected = [each for each in (ends[0], *plain, ends[1]) if each is not None]
        assert tokenizer.encode("hello").ids == expected


def test_special_tokens_are_cut_out_of_the_text_and_left_out_of_answers(read):
    tokenizer = read(_bytewise("smollm"))
    ids = tokenizer.encode("<s>hello <tool>\n\n</s>").ids
    assert (ids[0], ids[-1], 2 in ids) == (0, 1, True)
    assert tokenizer.decode(ids) == "hello <tool>\n\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello <tool>\n\n</s>"


def test_every_text_comes_back(read):
    chance = random.Random(3)
    tokenizer = read(_bytewise("llama-bpe"))
    for _ in range(200):
        text = "".join(chance.choice("he l12\n\té漢🙂'") for _ in range(chance.randint(0, 30)))
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_word_that_no_merge_reaches_is_one_token_where_the_vocabulary_says_so(read):
    assert read(_bytewise("llama-bpe")).encode("Hello", add_special_tokens=False).tokens == [
        "Hello"
    ]
    assert len(read(_bytewise("smollm")).encode("Hello").ids) > 1


def _pieces(**values):
    """A SentencePiece vocabulary with bytes, and scores in no order of ids."""
    chance = random.Random(11)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    singles = [SPACE, *"abcd"]
    longer = {
        "".join(chance.choice([SPACE, *"abcd"]) for _ in range(length))
        for length in (2, 3, 4, 5) for _ in range(15 * length)
    }  # fmt: skip
    pieces = singles + sorted(longer)
    scores = [-float(number) for number in range(len(pieces))]
    chance.shuffle(scores)
    return Vocabulary(
        "llama", words + pieces, types + [NORMAL] * len(pieces),
        {
            "scores": [0.0] * len(words) + scores, "unknown_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 2, **values,
        },
    )  # fmt: skip


def _reference(vocabulary, text):
    """SentencePiece's algorithm: join the neighbours that make the best piece, the first
    of equals, until none do; a character that is no piece becomes its bytes."""
    ids = {word: number for number, word in enumerate(vocabulary.tokens)}
    scores = vocabulary.values["scores"]
    parts = list(text.replace(" ", SPACE))
    while True:
        pairs = [
            (-scores[ids[left + right]], place)
            for place, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in ids
        ]
        if not pairs:
            break
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [
        number
        for part in parts
        for number in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])
    ]


def test_pieces_are_joined_as_sentencepiece_joins_them(read):
    chance = random.Random(5)
    vocabulary = _pieces()
    tokenizer = read(vocabulary)
    for _ in range(300):
        text = "".join(chance.choice("abcd e漢") for _ in range(chance.randint(1, 25)))
        expected = [1, *_reference(vocabulary, f" {text}")]
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(expected) == text


def test_no_space_is_put_first_where_the_file_says_so(read):
    vocabulary = _pieces(add_space_prefix=False, add_bos_token=False)
    tokenizer = read(vocabulary)
    assert tokenizer.encode("ab ba").ids == _reference(vocabulary, "ab ba")
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"
    assert isinstance(tokenizer.model, BPE)
