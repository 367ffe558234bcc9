"""Bad and stop words under tokenizers that put a blank before a text."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from trimaran.server.models.encoded_texts import WordForms

PIECES = ("<unk>", "</s>", "▁", "▁f", "▁foo", "f", "o", "foo", "\n", "a", "b", "x", "東")
MERGES = [("▁", "f"), ("f", "o"), ("fo", "o"), ("▁f", "oo"), ("o", "o"), ("▁", "foo")]


@pytest.fixture(scope="module")
def blank_folder(tmp_path_factory):
    """A tokenizer as Llama's, of a few pieces."""
    folder = tmp_path_factory.mktemp("blank")
    pieces = [*PIECES, "fo", "oo"]
    fast = FastTokenizer(BPE({p: n for n, p in enumerate(pieces)}, MERGES, unk_token="<unk>"))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


CASES = [
    ("foo", {("▁foo",), ("foo",)}),
    (" foo", {("▁foo",), ("▁", "▁foo")}),
    ("東", {("▁", "東"), ("東",)}),
    ("\n", {("▁", "\n"), ("\n",)}),
]


@pytest.mark.parametrize("field", ["bad_words", "stop_words"])
@pytest.mark.parametrize(("word", "forms"), CASES, ids=[repr(word) for word, _ in CASES])
async def test_a_word_counts_behind_a_blank_and_without_one(
    serve, blank_folder, field, word, forms
):
    async with serve(tokenizer_dir=str(blank_folder)) as served:
        engine = await served.dial(lambda submit: [9])
        await served.texts("ensemble", text_input="a", max_tokens=2, **{field: [word]})
        pieces = (*PIECES, "fo", "oo")
        found = engine.submits[0].sampling[field]
        assert {tuple(pieces[i] for i in each) for each in found} == forms


async def test_words_of_several_lists_keep_their_own_forms(serve, blank_folder):
    async with serve(tokenizer_dir=str(blank_folder)) as served:
        engine = await served.dial(lambda submit: [9])
        words = {"bad_words": ["foo", "foo", ""], "stop_words": ["x", " "]}
        await served.texts("tensorrt_llm_bls", text_input="a", max_tokens=2, **words)
        pieces = (*PIECES, "fo", "oo")
        sampling = engine.submits[0].sampling
        bad = [tuple(pieces[i] for i in each) for each in sampling["bad_words"]]
        stop = [tuple(pieces[i] for i in each) for each in sampling["stop_words"]]
        assert sorted(bad) == [("foo",), ("▁foo",)]
        assert set(stop) == {("▁", "x"), ("x",), ("▁", "▁"), ("▁",)}


@pytest.mark.parametrize("adds", [True, False])
def test_byte_level_words_have_two_forms_only_where_a_space_is_added(adds):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(BPE({c: n for n, c in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds)
    assert (WordForms.of(fast) is not None) == adds
