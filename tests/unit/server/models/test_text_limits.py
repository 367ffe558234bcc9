"""The bound on a prompt's bytes refuses no text whose ids are within the limit."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from trimaran.comm.errors import RequestError
from trimaran.server.inference.text_limits import MAX_WORD_IDS, PromptBound, TextLimits
from trimaran.server.models.text_limits import longest_token_bytes

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_level(**changes):
    """A byte-level BPE tokenizer with some merges, and changes of its parts."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "ab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("c", "d")]
    tokens = [*symbols, *("".join(pair) for pair in merges)]
    fast = FastTokenizer(BPE({token: n for n, token in enumerate(tokens)}, merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in changes.items():
        setattr(fast, name, part)
    return fast


def _fallback(**changes):
    """A tokenizer in the manner of sentencepiece, with bytes for unknown characters."""
    tokens = ["<unk>", *_BYTES, *"▁abcdé", "ab", "▁▁"]
    merges = [("a", "b"), ("▁", "▁")]
    vocabulary = {token: n for n, token in enumerate(tokens)}
    model = BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    fast = FastTokenizer(model)
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.ByteFallback()
    for name, part in changes.items():
        setattr(fast, name, part)
    return fast


SOUND = {
    "bytes": _byte_level(),
    "split": _byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated"),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "composed": _byte_level(normalizer=normalizers.NFC()),
    "fallback": _fallback(),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("seed", range(40))
def test_no_text_has_more_bytes_than_its_ids_may_have(name, seed):
    fast, draw = SOUND[name], random.Random(seed)
    pieces = [
        "ab",
        "abab",
        " ",
        "    ",
        "cd",
        "é",
        "e\u0301",
        "각",
        "\u1112\u1161\u11ab",
        "🙂",
        "\0",
    ]
    text = "".join(draw.choices(pieces, k=draw.randint(1, 60)))
    longest = longest_token_bytes(fast)
    assert longest is not None
    num_ids = len(fast.encode(text, add_special_tokens=False).ids)
    assert len(text.encode()) <= longest * num_ids


def test_the_bound_is_the_longest_token_including_added_tokens():
    fast = _byte_level()
    assert longest_token_bytes(fast) == 4
    fast.add_special_tokens(["<|a special token|>"])
    assert longest_token_bytes(fast) == 19


def _with_token(**options):
    fast = _byte_level()
    fast.add_special_tokens([AddedToken("<mask>", **options)])
    return fast


UNSOUND = {
    "strips around a token": _with_token(lstrip=True),
    "strips behind a token": _with_token(rstrip=True),
    "strips": _byte_level(normalizer=normalizers.Strip()),
    "collapses spaces": _byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "shortens": _byte_level(normalizer=normalizers.Replace("abab", "a")),
    "compatibility forms": _byte_level(normalizer=normalizers.NFKC()),
    "drops spaces": _byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
        )
    ),
    "removes what splits": _byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
        )
    ),
    "lacks bytes": FastTokenizer(BPE({"a": 0, "b": 1}, [])),
    "word pieces": FastTokenizer(WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "words": FastTokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "unigram": FastTokenizer(Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_a_tokenizer_that_drops_text_has_no_bound(name):
    assert longest_token_bytes(UNSOUND[name]) is None


@pytest.mark.parametrize(
    ("limits", "max_input_len", "num_bytes", "text"),
    [
        (TextLimits(4), 896, 3585, r"exceeds maximum input length \(896\): .* at most 3584"),
        (TextLimits(None), 896, (1 << 20) + 1, "1048577 bytes but may have at most 1048576"),
        (TextLimits(None), 1 << 17, (1 << 21) + 1, "at most 2097152"),
        (TextLimits(128), 1 << 17, (1 << 21) + 1, "at most 2097152.* --max-text-bytes"),
        (TextLimits(4), None, (1 << 20) + 1, "at most 1048576"),
        (TextLimits(None, 5000), 896, 5001, "at most 5000"),
        (TextLimits(4, 5000), None, 5001, "at most 5000"),
    ],
)
def test_a_prompt_over_the_limit_is_refused(limits, max_input_len, num_bytes, text):
    limits.check_prompt("QUERY", num_bytes - 1, max_input_len)
    with pytest.raises(RequestError, match=text) as caught:
        limits.check_prompt("QUERY", num_bytes, max_input_len)
    assert f"'QUERY' has {num_bytes} bytes" in str(caught.value)


def test_a_prompt_limit_refuses_only_prompts_that_the_engine_refuses():
    bound = PromptBound(TextLimits(4), ("text_input",), 896, "in ensemble 'e', ")
    bound.check("text_input", ["é" * 1792, 7])
    bound.check("stop_words", ["a" * 4000])
    with pytest.raises(RequestError, match="at most 3584") as caught:
        bound.check("text_input", ["a", "é" * 1792 + "a"])
    assert str(caught.value).startswith(
        "in ensemble 'e', Prompt length exceeds maximum input length (896): input 'text_input' "
        "has 3585 bytes"
    )


def test_more_words_than_any_request_may_have_are_refused_where_they_are_decoded():
    bound = PromptBound(
        TextLimits(4), ("text_input",), 896, "in ensemble 'e', ", ("bad_words",)
    )
    bound.check("bad_words", ["w"] * MAX_WORD_IDS)
    with pytest.raises(RequestError) as caught:
        bound.check("bad_words", ["w"] * (MAX_WORD_IDS + 1))
    assert str(caught.value) == (
        "in ensemble 'e', input 'bad_words' holds 65537 words but may hold at most 65536; send "
        "fewer"
    )
