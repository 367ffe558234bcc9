"""Deltas of text join to the text of all ids, however the ids come."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from trimaran.server.models.tokenizer import (
    ByteDetokenizer,
    IncrementalDetokenizer,
    Tokenizer,
    WindowDetokenizer,
)

TEXT = "größer 東京🙂🎉  and so on, 👨‍👩‍👧‍👦 a\n\tb — Ünïcödé кириллица 🏳️‍🌈 the end"


@pytest.fixture(scope="session")
def fallback_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer like that of LLaMA 2: words carry their leading space, and rare characters
    are one id a byte."""
    folder = tmp_path_factory.mktemp("fallback")
    tokenizer = FastTokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["▁the▁end▁of▁a▁sentence,▁and▁so▁on "] * 20, trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    # Bytes are ordinary ids; only the training above must not touch them.
    special = [f"<0x{i:02X}>" for i in range(256)]
    text = path.read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(_without_added(text, special), encoding="utf-8")
    return folder


def _without_added(text: str, contents: list[str]) -> str:
    document = json.loads(text)
    document["added_tokens"] = [
        token for token in document["added_tokens"] if token["content"] not in contents
    ]
    return json.dumps(document)


@pytest.fixture(params=["byte_level", "fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind of tokenizer in turn."""
    name = {"byte_level": "tokenizer_folder", "fallback": "fallback_folder"}[request.param]
    return Tokenizer(str(request.getfixturevalue(name)))


def _deltas(
    tokenizer: Tokenizer,
    prompt: list[int],
    ids: list[int],
    draw: random.Random,
    most: int,
    make: Callable[[Tokenizer, list[int]], IncrementalDetokenizer] = Tokenizer.detokenizer,
) -> list[str]:
    detokenizer = make(tokenizer, prompt)
    deltas, start = [], 0
    while start < len(ids):
        end = start + draw.randint(1, most)
        deltas.append(detokenizer.push(ids[start:end], is_last=end >= len(ids)))
        start = end
    return deltas


@pytest.mark.parametrize("make", [Tokenizer.detokenizer, WindowDetokenizer])
@pytest.mark.parametrize("most", [1, 2, 5, 50])
def test_deltas_join_to_the_text_after_the_prompt(tokenizer, most, make):
    draw = random.Random(most)
    ids = tokenizer.encode_now(TEXT * 3, False)
    whole = tokenizer.decode(ids)
    assert whole == TEXT * 3
    for _ in range(40):
        # A prompt that ends inside a character is no text.
        num_prompt = draw.randrange(1, len(ids))
        prompt_text = tokenizer.decode(ids[:num_prompt])
        if prompt_text.endswith("\ufffd"):
            continue
        deltas = _deltas(tokenizer, ids[:num_prompt], ids[num_prompt:], draw, most, make)
        assert prompt_text + "".join(deltas) == whole
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with added tokens, of letters that stand for bytes and others."""
    folder = tmp_path_factory.mktemp("odd")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast = FastTokenizer(
        BPE({character: n for n, character in enumerate(sorted(alphabet))}, [])
    )
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens(["<call>", "é", "日本", "Ġx", "a b"])
    fast.add_special_tokens(["<end>", "\u3000"])
    fast.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("folder", ["tokenizer_folder", "odd_folder"])
def test_deltas_of_any_ids_of_a_byte_level_tokenizer_join_to_the_librarys_text(
    folder, skips, request
):
    """Broken characters, added and special tokens, ids outside the vocabulary."""
    tokenizer = Tokenizer(str(request.getfixturevalue(folder)))
    draw = random.Random(5)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.num_ids + 3) for _ in range(draw.randint(1, 60))]
        detokenizer = tokenizer.detokenizer([], skips)
        assert isinstance(detokenizer, ByteDetokenizer)
        cuts = sorted(draw.randrange(len(ids) + 1) for _ in range(draw.randint(0, 20)))
        parts = [ids[a:b] for a, b in pairwise([0, *cuts, len(ids)])]
        text = "".join(detokenizer.push(part) for part in parts)
        assert text + detokenizer.push([], is_last=True) == tokenizer.decode_raw(ids, skips)


def test_a_character_that_begins_in_the_prompts_ids_is_shown_whole(tokenizer_folder):
    tokenizer = Tokenizer(str(tokenizer_folder))
    ids = tokenizer.encode_now("a 🙂 b", False)
    middle = next(n for n in range(len(ids)) if tokenizer.decode(ids[:n]).endswith("\ufffd"))
    assert _deltas(tokenizer, ids[:middle], ids[middle:], random.Random(0), 9) == ["🙂 b"]


class Counting:
    """A tokenizer that records the number of ids in each call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids, self.facts = tokenizer.special_ids, tokenizer.facts
        self.lengths: list[int] = []

    def decode_raw(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.lengths.append(len(ids))
        return self._tokenizer.decode_raw(ids, skip_special_tokens)


def test_the_cost_of_a_detokenized_step_is_independent_of_the_sequence_length(tokenizer):
    counting = Counting(tokenizer)
    ids = tokenizer.encode_now(TEXT, False)
    detokenizer = WindowDetokenizer(counting, ids * 20)
    text = "".join(detokenizer.push([token]) for token in ids * 20)
    assert text.endswith("the end")
    assert max(counting.lengths) <= 32
    assert len(counting.lengths) < 60 * len(ids)

    # Nothing new, as for another sequence's step: nothing to decode.
    counting.lengths.clear()
    assert [detokenizer.push([]) for _ in range(3)] == ["", "", ""]
    assert not counting.lengths


def test_a_skipped_id_does_not_swallow_the_next_space(tokenizer):
    ids = tokenizer.encode_now("so on", False)
    end = tokenizer.encode_now(" and so on", False)
    special = min(tokenizer.special_ids)
    detokenizer = tokenizer.detokenizer(ids)
    text = "".join(detokenizer.push([token]) for token in [special, special, *end])
    assert text.startswith(" ")
    assert text.strip() == "and so on"


def test_special_ids_become_text_unless_skipped(tokenizer_folder):
    tokenizer = Tokenizer(str(tokenizer_folder))
    detokenizer = tokenizer.detokenizer([0], skip_special_tokens=False)
    assert detokenizer.push([1]) == "</s>"


def test_an_unfinished_character_shows_only_at_the_end(tokenizer):
    ids = tokenizer.encode_now("🙂", False)
    detokenizer = tokenizer.detokenizer(tokenizer.encode_now("a", False))
    early = "".join(detokenizer.push([token]) for token in ids[:-1])
    assert early.strip() == ""
    assert set(detokenizer.push([], is_last=True)) == {"\ufffd"}


def test_invalid_bytes_are_shown_after_a_few_tokens(tokenizer_folder):
    tokenizer = Tokenizer(str(tokenizer_folder))
    (first_byte,) = (i for i in range(600) if tokenizer._fast.id_to_token(i) == "ð")
    detokenizer = tokenizer.detokenizer([0])
    deltas = [detokenizer.push([first_byte]) for _ in range(100)]
    assert len("".join(deltas)) > 60


def test_a_replacement_character_that_the_model_wrote_is_kept(tokenizer):
    ids = tokenizer.encode_now("a \ufffd b", False)
    for most in (1, 9):
        deltas = _deltas(
            tokenizer, tokenizer.encode_now("a", False), ids, random.Random(0), most
        )
        assert "".join(deltas).strip() == "a \ufffd b"


SPACED = ["I 'm here . It is n't a test , is it ?", "do n ' t say so !", "seven eves ' vest"]


@pytest.fixture(scope="module")
def spaced_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose decoded words are apart, and whose class cleans that up."""
    folder = tmp_path_factory.mktemp("spaced")
    words = sorted({word for text in SPACED for word in text.split()})
    fast = FastTokenizer(
        WordLevel({word: n for n, word in enumerate(["<unk>", *words])}, "<unk>")
    )
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.save(str(folder / "tokenizer.json"))
    settings = {"clean_up_tokenization_spaces": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("text", SPACED)
def test_deltas_of_text_that_is_cleaned_up_join_to_the_whole_text(spaced_folder, text, skips):
    tokenizer = Tokenizer(str(spaced_folder))
    ids = tokenizer.encode_now(text, False)
    detokenizer = tokenizer.detokenizer([], skips)
    deltas = [detokenizer.push([each]) for each in ids[:-1]]
    deltas.append(detokenizer.push(ids[-1:], is_last=True))
    reference = PreTrainedTokenizerFast.from_pretrained(str(spaced_folder))
    assert "".join(deltas) == tokenizer.decode(ids) == reference.decode(ids)
    assert tokenizer.decode(ids) != text
