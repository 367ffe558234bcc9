"""A long text that is encoded in parts has the ids of the whole text."""

from __future__ import annotations

import random
import subprocess
import sys
import unicodedata

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from trimaran.server.models.encoded_texts import encode
from trimaran.server.models.long_texts import PART_CHARACTERS, can_be_cut, encode_long

# The expressions of well-known models.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_ALPHABET = "ab AB12. ,\n\té東京́'s<|>_-ñ"
_ADDED = ("<s>", "</s>", "<|end|>", "tool call")


def _splits(*expressions):
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, last])


def _tokenizer(pre_tokenizer, normalizer=None):
    fast = FastTokenizer(BPE())
    fast.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        fast.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(3)
    fast.train_from_iterator([_text(rng, 2000) for _ in range(20)], trainer)
    fast.add_special_tokens([AddedToken(each, normalized=False) for each in _ADDED[:3]])
    fast.add_tokens([AddedToken(_ADDED[3], normalized=True)])
    ids = [(each, fast.token_to_id(each)) for each in _ADDED[:2]]
    fast.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids),
        ]
    )
    return fast


def _text(rng, length):
    """Words, runs of one character, and added tokens, at random."""
    parts = []
    while sum(map(len, parts)) < length:
        part = "".join(rng.choices(_ALPHABET, k=rng.randrange(1, 30)))
        if rng.random() < 0.1:
            part = rng.choice(_ALPHABET) * rng.randrange(1, 4000)
        elif rng.random() < 0.2:
            part = rng.choice(_ADDED)
        parts.append(part)
    return "".join(parts)


LOCAL = {
    "GPT-2": _tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "Llama 3": _tokenizer(_splits(_CL100K)),
    "Qwen 2": _tokenizer(_splits(_CL100K), normalizers.NFC()),
    "GPT-4o": _tokenizer(_splits(_O200K), normalizers.Sequence([normalizers.NFC()])),
    "DeepSeek V3": _tokenizer(_splits(*_THREE)),
}


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_the_ids_of_parts_are_those_of_the_whole(name, add_special_tokens):
    fast = LOCAL[name]
    assert can_be_cut(fast)
    rng = random.Random(name)
    texts = [_text(rng, 4 * PART_CHARACTERS) for _ in range(4)]
    texts += [
        "a " * 40_000,
        "a" * 50_000 + " b",
        " " * 50_000 + "b",
        "a.1" * 20_000,
        "́" * 70_000,
    ]
    texts += ["\r\n" * 40_000 + " " * 5000 + "\nend", "<s>" * 20_000, "京都 é" * 20_000]
    for text in texts:
        right = encode(fast, [text], add_special_tokens).ids.tolist()
        assert encode_long(fast, text, add_special_tokens).tolist() == right
    assert fast.post_processor is not None


def test_random_places_of_a_cut_change_no_id():
    """Each length moves the end of a part to another character."""
    fast = LOCAL["Qwen 2"]
    text = _text(random.Random(1), 3 * PART_CHARACTERS)
    assert not unicodedata.is_normalized("NFC", text)
    for start in range(0, 60, 2):
        part = text[start : start + PART_CHARACTERS + 3000]
        right = encode(fast, [part], True).ids.tolist()
        assert encode_long(fast, part, True).tolist() == right


_PROGRAM = """
import resource
from trimaran.comm.tokenizers.prepared import read_tokenizer
from trimaran.server.models.long_texts import encode_long

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

import sys
fast = read_tokenizer(sys.stdin.buffer.read())
encode_long(fast, "a1" * 40_000, True)
before = most()
encode_long(fast, "a1" * 500_000, True)
print(most() - before)
"""


def test_a_million_ids_of_a_text_take_a_few_megabytes():
    raw = LOCAL["GPT-2"].to_str().encode()
    grown = int(subprocess.check_output([sys.executable, "-c", _PROGRAM], input=raw))
    # All at once they would take over 300 MB.
    assert grown < 40 << 20


NOT_LOCAL = {
    "a space before the text": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "Metaspace": pre_tokenizers.Metaspace(),
    "a look back": _splits(r"(?<=a)b|."),
    "the beginning of the text": _splits(r"^\s+|\S+|\s+"),
    "the end of the text": _splits(r"\S+$|\S+|\s+"),
    "words that are dropped": pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


@pytest.mark.parametrize("name", NOT_LOCAL)
def test_a_tokenizer_that_looks_elsewhere_encodes_the_whole(name):
    fast = _tokenizer(NOT_LOCAL[name])
    assert not can_be_cut(fast)
    text = "ab cd " * 10_000
    assert encode_long(fast, text, True).tolist() == encode(fast, [text], True).ids.tolist()


def test_an_added_token_that_takes_the_space_around_it_is_not_cut():
    fast = _tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False))
    fast.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert not can_be_cut(fast)
