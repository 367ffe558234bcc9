"""Ids and texts of prepared tokenizers are those of AutoTokenizer on the same folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import CASES, LLAMA, T5, Case, added, sentencepiece_model
from transformers import AutoTokenizer

from trimaran.comm.errors import ConfigError
from trimaran.comm.tokenizers.prepare import prepare
from trimaran.comm.tokenizers.prepared import PreparedTokenizer, cleaned_up

TEXTS = (
    "Hello world", " Hello  world ", "the end\n\n of a sentence .", "it 's , isn't it ?", "",
    "größer café 日本語 🙂\u200d!", "x" * 300, "<s>a</s> b <|im_end|>c<|endoftext|> d</s>",
    "12345,6", "[MASK] is <mask> and <pad>", "<new> word<other>s <|eot_id|>",
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def expected(folder: Path) -> Any:
    """What AutoTokenizer makes of a folder; the error where it makes nothing."""
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        return error


def found(folder: Path) -> PreparedTokenizer | ConfigError:
    try:
        return prepare(folder)
    except ConfigError as error:
        return error


def check(folder: Path) -> None:
    """Compare ids, texts and special ids; a folder that AutoTokenizer refuses is refused by
    name, or is read with a note that says so."""
    wanted, ours = expected(folder), found(folder)
    if isinstance(wanted, Exception):
        if isinstance(ours, ConfigError):
            assert str(folder) in str(ours)
        else:
            assert "AutoTokenizer cannot read it" in ours.facts.notes[0]
        return
    assert isinstance(ours, PreparedTokenizer), ours
    facts, fast = ours.facts, ours.fast()
    assert (facts.end_id, facts.pad_id) == (wanted.eos_token_id, wanted.pad_token_id)
    assert not facts.notes
    for text in TEXTS:
        for adds in (True, False):
            ids = fast.encode(text, add_special_tokens=adds).ids
            assert ids == wanted.encode(text, add_special_tokens=adds), text
            for skips in (True, False):
                decoded = fast.decode(ids, skip_special_tokens=skips)
                decoded = cleaned_up(decoded) if facts.cleans_up else decoded
                assert decoded == wanted.decode(ids, skip_special_tokens=skips), text


def saved(case: Case, folder: Path) -> Path:
    """The folder as the tokenizer's own class saves it, with files of older versions."""
    source = case.make(folder / "published")
    tokenizer = expected(source)
    if isinstance(tokenizer, Exception):
        pytest.fail(f"{case.name}: {tokenizer}")
    target = folder / "saved"
    tokenizer.save_pretrained(str(target))
    shutil.copy(source / "config.json", target)
    roles = {
        name: {"content": str(token)}
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    (target / "special_tokens_map.json").write_text(json.dumps(roles))
    return target


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_published_folder_has_the_ids_and_texts_of_auto_tokenizer(name, tmp_path):
    check(BY_NAME[name].make(tmp_path / name))


SAVED = [name for name in BY_NAME if name not in ("starcoder",)]


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("name", SAVED)
def test_a_folder_that_its_class_saved_has_the_ids_and_texts_of_auto_tokenizer(name, tmp_path):
    check(saved(BY_NAME[name], tmp_path))


MANY_FILES = (
    "gpt2", "opt", "qwen2", "llama3", "deepseek", "llama", "llama-legacy", "phi3", "gemma2",
    "t5", "bert-cased", "tiktoken",
)  # fmt: skip


LEFT_OUT = (
    "tokenizer_config.json", "special_tokens_map.json", "config.json", "tokenizer.json",
    "vocabulary",
)  # fmt: skip


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.parametrize("name", MANY_FILES)
def test_a_folder_without_one_of_its_files_has_the_ids_and_texts_of_auto_tokenizer(
    name, left_out, tmp_path
):
    folder = saved(BY_NAME[name], tmp_path)
    vocabulary = {
        path.name for path in (tmp_path / "published").iterdir() if path.suffix != ".json"
    }
    for path in (tmp_path / "published").iterdir():
        # Folders of older versions hold both forms of the vocabulary.
        if left_out != "vocabulary" and not (folder / path.name).exists():
            shutil.copy(path, folder)
    if left_out == "vocabulary":
        for word in vocabulary:
            (folder / word).unlink(missing_ok=True)
    else:
        (folder / left_out).unlink(missing_ok=True)
    check(folder)


def _settings(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**values, **changes}))

    return change


def _file(name: str, values: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(json.dumps(values)) and None


CHANGES: dict[str, Callable[[Path], None]] = {
    "bos": _settings(add_bos_token=True),
    "no-bos": _settings(add_bos_token=False),
    "eos": _settings(add_eos_token=True),
    "prefix-space": _settings(add_prefix_space=True),
    "no-prefix-space": _settings(add_prefix_space=False),
    "legacy": _settings(legacy=True),
    "not-legacy": _settings(legacy=False),
    "cleaned-up": _settings(clean_up_tokenization_spaces=True),
    "split-special": _settings(split_special_tokens=True),
    "another-class": _settings(tokenizer_class="PreTrainedTokenizerFast"),
    "unknown-class": _settings(tokenizer_class="NoSuchTokenizer"),
    "another-end": _settings(eos_token="<new>"),
    "a-decoder-of-added-tokens": _settings(
        added_tokens_decoder={
            "500": added("<new>"),
            "501": added("<other>", special=False, lstrip=True),
        }
    ),
    "further-special-tokens": _settings(additional_special_tokens=["<new>"]),
    "added-tokens": _file("added_tokens.json", {"<new>": 500, "<other>": 501}),
    "a-map-with-another-end": _file("special_tokens_map.json", {"eos_token": "<new>"}),
    "another-model": _file("config.json", {"model_type": "gpt2"}),
    "no-model": _file("config.json", {"architectures": ["X"]}),
}
CHANGED = ("gpt2", "opt", "qwen2", "llama3", "deepseek", "llama", "gemma2", "t5", "bert-cased")


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize("is_saved", [False, True], ids=["published", "saved"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CHANGED)
def test_a_folder_whose_files_contradict_has_the_ids_and_texts_of_auto_tokenizer(
    name, change, is_saved, tmp_path
):
    case = BY_NAME[name]
    folder = saved(case, tmp_path) if is_saved else case.make(tmp_path / name)
    CHANGES[change](folder)
    check(folder)


@pytest.mark.parametrize(
    ("name", "options", "beside"),
    [
        ("any_name.model", LLAMA, ()),
        ("spiece.model", T5, ("T5Tokenizer", "spiece.model")),
    ],
)
def test_a_file_is_read_as_a_folder_that_holds_it_alone(tmp_path, name, options, beside):
    kind = "unigram" if beside else "bpe"
    sentencepiece_model(kind, name=name, **options)(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(tmp_path / name, folder / ("spiece.model" if beside else "tokenizer.model"))
    if beside:
        config = {"tokenizer_class": beside[0]}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    check(folder)
    assert prepare(tmp_path / name).raw == prepare(folder).raw


def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path):
    (tmp_path / "notes.txt").write_text("no tokenizer")
    with pytest.raises(
        ConfigError, match=r"notes.txt cannot be used: notes.txt is no tokenizer"
    ):
        prepare(tmp_path / "notes.txt")


def test_a_fill_token_of_code_llama_is_named_at_the_start(tmp_path):
    case = BY_NAME["codellama"]
    folder = replace(case, name="infilling", settings={}).make(tmp_path / "infilling")
    ours, wanted = prepare(folder), expected(folder)
    assert ours.facts.notes[0].startswith("texts are not cut at <FILL_ME>: write ")
    text = "def f(x):\n    return x"
    assert ours.fast().encode(text).ids == wanted.encode(text)
