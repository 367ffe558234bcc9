"""Preprocessing and postprocessing as models of their own, and the tokenizers under them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest
from transformers import GPT2Tokenizer
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.models.sample_inputs import SampleInputs
from trimaran.server.models.sampling_inputs import word_list
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.repository.signatures import adds_special_tokens


async def _preprocess(served, **inputs):
    (response,) = await served.infer("preprocessing", **{"REQUEST_OUTPUT_LEN": 9, **inputs})
    return {tensor.name: tensor for tensor in response.outputs}


@pytest.mark.feature(
    "output:INPUT_ID",
    "output:REQUEST_INPUT_LEN",
    "output:DECODER_INPUT_ID",
    "output:REQUEST_DECODER_INPUT_LEN",
    "output:REQUEST_OUTPUT_LEN",
    "output:OUT_END_ID",
    "output:OUT_PAD_ID",
    "output:BAD_WORDS_IDS",
    "output:STOP_WORDS_IDS",
    "output:EMBEDDING_BIAS",
    of="preprocessing",
)
async def test_text_becomes_the_tensors_of_the_token_model(serve):
    async with serve() as served:
        encode = served.tokenizer.encode_now
        tensors = await _preprocess(served, QUERY="größer 東京")
        values = {name: tensor.data.tolist() for name, tensor in tensors.items()}
        ids = encode("größer 東京", True)
        assert values == {
            "INPUT_ID": [ids],
            "REQUEST_INPUT_LEN": [[len(ids)]],
            "DECODER_INPUT_ID": [[2]],
            "REQUEST_DECODER_INPUT_LEN": [[1]],
            "REQUEST_OUTPUT_LEN": [[9]],
            "OUT_END_ID": [[1]],
            "OUT_PAD_ID": [[2]],
            "BAD_WORDS_IDS": [[[], []]],
            "STOP_WORDS_IDS": [[[], []]],
            "EMBEDDING_BIAS": [[]],
        }
        declared = {t.name: t.data_type for t in served.models["preprocessing"].config.output}
        assert set(values) <= set(declared)
        assert {t.datatype for t in tensors.values()} == {"INT32", "FP32"}


async def test_a_batch_is_padded_to_its_longest(serve):
    async with serve() as served:
        texts = np.array([["a much longer text"], ["b"]], dtype=object)
        words = np.array([["stop", "no"], ["halt now", "x"]], dtype=object)
        tensors = await _preprocess(
            served,
            QUERY=np.vectorize(str.encode, otypes=[object])(texts),
            REQUEST_OUTPUT_LEN=np.array([[3], [4]], np.int32),
            STOP_WORDS_DICT=np.vectorize(str.encode, otypes=[object])(words),
            PAD_ID=np.array([[7], [8]], np.int32),
        )
        encode = served.tokenizer.encode_now
        ids = [encode(text, True) for (text,) in texts]
        rows = tensors["INPUT_ID"].data.tolist()
        assert rows == [ids[0], ids[1] + [8] * (len(ids[0]) - len(ids[1]))]
        assert tensors["REQUEST_INPUT_LEN"].data.tolist() == [[len(ids[0])], [len(ids[1])]]
        assert tensors["REQUEST_OUTPUT_LEN"].data.tolist() == [[3], [4]]
        lists = tensors["STOP_WORDS_IDS"].data
        for row, (first, second) in zip(lists, words, strict=True):
            one, two = encode(first, False), encode(second, False)
            assert row[0].tolist()[: len(one) + len(two)] == one + two
            assert set(row[0].tolist()[len(one) + len(two) :]) <= {0}
            ends = [len(one), len(one) + len(two)]
            assert row[1].tolist() == ends + [-1] * (row.shape[1] - 2)


@pytest.mark.feature("output:OUT_PROMPT_TABLE_EXTRA_IDS", of="preprocessing")
async def test_extra_ids_are_reported_for_each_token(serve):
    async with serve() as served:
        tensors = await _preprocess(served, QUERY="x", PROMPT_TABLE_EXTRA_ID=5)
        extra = tensors["OUT_PROMPT_TABLE_EXTRA_IDS"]
        # Only ids beyond the vocabulary have an extra id, and no text has such ids.
        assert extra.datatype == "UINT64"
        assert extra.data.tolist() == [[0] * tensors["REQUEST_INPUT_LEN"].data.item()]


async def test_an_empty_placeholder_word_is_padding_alone(serve):
    async with serve() as served:
        tensors = await _preprocess(served, QUERY="x", STOP_WORDS_DICT="", BAD_WORDS_DICT="")
        for name in ("STOP_WORDS_IDS", "BAD_WORDS_IDS"):
            assert tensors[name].data.tolist() == [[[0], [-1]]]
            assert word_list(SampleInputs(tensors, 0, True), name) == ()


async def test_outputs_come_in_the_order_of_the_replaced_model(serve):
    async with serve() as served:
        tensors = await _preprocess(served, QUERY="x", PROMPT_TABLE_EXTRA_ID=5)
    assert list(tensors) == [
        "INPUT_ID", "DECODER_INPUT_ID", "BAD_WORDS_IDS", "STOP_WORDS_IDS", "REQUEST_INPUT_LEN",
        "REQUEST_DECODER_INPUT_LEN", "REQUEST_OUTPUT_LEN", "EMBEDDING_BIAS", "OUT_END_ID",
        "OUT_PAD_ID", "OUT_PROMPT_TABLE_EXTRA_IDS",
    ]  # fmt: skip


async def test_decoder_texts_are_encoded_like_prompts(serve):
    async with serve() as served:
        tensors = await _preprocess(served, QUERY="x", DECODER_QUERY="hello")
        ids = served.tokenizer.encode_now("hello", True)
        assert tensors["DECODER_INPUT_ID"].data.tolist() == [ids]
        assert tensors["REQUEST_DECODER_INPUT_LEN"].data.tolist() == [[len(ids)]]


@pytest.mark.feature("parameter:add_special_tokens", of="preprocessing")
async def test_special_tokens_are_added_only_where_configured(serve):
    async with serve(add_special_tokens="false") as served:
        tensors = await _preprocess(served, QUERY="x")
        assert tensors["INPUT_ID"].data.tolist() == [served.tokenizer.encode_now("x", False)]


@pytest.mark.parametrize(
    ("name", "key", "adds"),
    [
        ("QUERY", "add_special_tokens", False),  # versions 0.9 and 0.10
        ("QUERY", "tokenizer_type", True),  # versions 0.5 and 0.6
        ("DECODER_QUERY", "add_special_tokens", True),
    ],
)
def test_an_open_parameter_means_what_the_version_meant(name, key, adds):
    config = ModelConfig()
    config.input.add(name=name)
    config.parameters[key].string_value = "${" + key + "}"
    assert adds_special_tokens(config) is adds


async def test_preprocessing_returns_only_requested_outputs(serve):
    async with serve() as served:
        tensors = await _preprocess(served, QUERY="x", outputs=("OUT_END_ID",))
        assert list(tensors) == ["OUT_END_ID"]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"QUERY": b"\xff\xfe"}, "input 'QUERY' is not UTF-8"),
        (
            {"EMBEDDING_BIAS_WORDS": ["a", "b"], "EMBEDDING_BIAS_WEIGHTS": [1.0]},
            "2 words but 1 weights; give one weight a word",
        ),
        ({"QUERY": "x" * 1_048_577}, "'QUERY' has 1048577 bytes but may have at most 1048576"),
        ({"DECODER_QUERY": "x" * 1_048_577}, "'DECODER_QUERY' has 1048577 bytes but may have"),
        ({"IMAGE_URL": "http://x/y.png"}, "input 'IMAGE_URL' is set but images are not served"),
    ],
)
async def test_preprocessing_refuses_by_name(serve, inputs, text):
    async with serve() as served:
        with pytest.raises(RequestError, match=text):
            await _preprocess(served, **{"QUERY": "x", **inputs})


@pytest.mark.parametrize(
    "inputs",
    [
        {"QUERY": "word " * 200_000},
        {"STOP_WORDS_DICT": ["word " * 50_000]},
        {"BAD_WORDS_DICT": [f"word {n}" for n in range(24_000)]},
        {"EMBEDDING_BIAS_WORDS": ["word " * 50_000], "EMBEDDING_BIAS_WEIGHTS": [1.0]},
    ],
    ids=lambda inputs: next(iter(inputs)),
)
async def test_long_texts_do_not_block_the_event_loop(serve, inputs):
    async with serve() as served:
        work = asyncio.ensure_future(_preprocess(served, **{"QUERY": "x", **inputs}))
        num_turns = 0
        while not work.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        assert work.result()
    # Work between two rounds of the loop would be invisible to other tasks.
    assert num_turns > 20


@pytest.mark.parametrize("name", ["STOP_WORDS_DICT", "BAD_WORDS_DICT", "EMBEDDING_BIAS_WORDS"])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["x"] * 65_537, "holds 65537 words but may hold at most 65536; send fewer"),
        (
            ["x" * 2000] * 200,
            "holds words of 400000 bytes together but may hold at most 262144",
        ),
    ],
    ids=["many", "long"],
)
async def test_expensive_word_lists_are_refused_before_tokenization(serve, name, words, text):
    weights = {"EMBEDDING_BIAS_WEIGHTS": [1.0] * len(words)}
    inputs = {name: words, **(weights if name == "EMBEDDING_BIAS_WORDS" else {})}
    async with serve() as served:
        with pytest.raises(RequestError, match=f"input '{name}' {text}"):
            await _preprocess(served, QUERY="x", **inputs)


async def test_the_word_limit_counts_the_words_of_all_samples(serve):
    queries = np.array([[b"x"], [b"y"]], dtype=object)
    words = np.array([[b"a"] * 40_000] * 2, dtype=object)
    async with serve() as served:
        with pytest.raises(RequestError, match="'STOP_WORDS_DICT' holds 80000 words"):
            await served.infer(
                "preprocessing",
                QUERY=queries,
                REQUEST_OUTPUT_LEN=np.ones((2, 1), np.int32),
                STOP_WORDS_DICT=words,
            )


async def _postprocess(served, ids, lengths):
    (response,) = await served.infer(
        "postprocessing",
        TOKENS_BATCH=np.array(ids, np.int32),
        SEQUENCE_LENGTH=np.array(lengths, np.int32),
    )
    (tensor,) = response.outputs
    return [text.decode() for text in tensor.data]


@pytest.mark.feature("output:OUTPUT", "parameter:skip_special_tokens", of="postprocessing")
@pytest.mark.parametrize(("skip", "end"), [("true", ""), ("no", "</s>"), ("${x}", "")])
async def test_each_beam_of_each_sample_has_its_text(serve, skip, end):
    async with serve(skip_special_tokens=skip) as served:
        encode = served.tokenizer.encode_now
        texts = [["größer 東京", "b"], ["🙂 hi", "four words are here"]]
        rows = [[[*encode(text, False), 1] for text in beams] for beams in texts]
        width = max(len(ids) for beams in rows for ids in beams)
        padded = [[ids + [-1] * (width - len(ids)) for ids in beams] for beams in rows]
        lengths = [[len(ids) for ids in beams] for beams in rows]
        assert await _postprocess(served, padded, lengths) == [
            text + end for beams in texts for text in beams
        ]


async def test_beams_without_ids_have_an_empty_text(serve):
    async with serve() as served:
        texts = await _postprocess(served, np.empty((2, 3, 0)), np.zeros((2, 3)))
    assert texts == [""] * 6


@pytest.mark.parametrize(
    ("ids", "lengths", "text"),
    [
        ([[[5, -1]]], [[2]], "TOKENS_BATCH holds -1 within the first 2 ids"),
        ([[[5], [6]]], [[1]], "SEQUENCE_LENGTH has 1 lengths, but TOKENS_BATCH has 2 beams"),
    ],
)
async def test_postprocessing_refuses_invalid_ids(serve, ids, lengths, text):
    async with serve() as served:
        with pytest.raises(RequestError, match=text):
            await _postprocess(served, ids, lengths)


# ---- tokenizer folders ------------------------------------------------------------------


def test_the_pad_token_defaults_to_the_end_token(tokenizer_folder, tmp_path):
    (tmp_path / "tokenizer.json").symlink_to(tokenizer_folder / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = Tokenizer(str(tmp_path))
    assert (tokenizer.end_id, tokenizer.pad_id) == (1, 1)


def test_a_slow_tokenizer_is_converted_once(tmp_path):
    letters = {chr(256 + i) if i < 33 else chr(i): i for i in range(33, 127)}
    vocab = {**letters, "Ġ": 127, "lo": 128, "Ġlo": 129, "<|endoftext|>": 130}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nl o\nĠ lo\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = Tokenizer(str(tmp_path))
    slow = GPT2Tokenizer.from_pretrained(str(tmp_path))
    ids = tokenizer.encode_now("hello lo", False)
    assert ids == slow.encode("hello lo")
    assert tokenizer.decode(ids) == "hello lo"
    assert tokenizer.end_id == 130
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "is no folder and no file"),
        ("{", "tokenizer.json cannot be read"),
        ("", "cannot be used: AutoTokenizer cannot read it"),
    ],
)
def test_a_folder_without_a_tokenizer_is_refused(tmp_path, content, text):
    folder = tmp_path / "tokenizer"
    if content is not None:
        folder.mkdir()
        if content:
            (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=text):
        Tokenizer(str(folder))


def test_pipelines_import_neither_torch_nor_transformers():
    program = (
        "import sys, trimaran.server.models.factory; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
