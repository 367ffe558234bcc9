"""The tokenizer and chat template of a GGUF file, written as a Hugging Face folder has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from trimaran.builder.output_folder import TOKENIZER_FILES
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import read_text
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind
from trimaran.worker.config.gguf_file import GgufFile, is_gguf, open_gguf

_TOKENIZER, _CONFIG, _TEMPLATE = TOKENIZER_FILES

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Kinds of tokens in ``tokenizer.ggml.token_type``."""

_SPACE = "\u2581"
"""What SentencePiece writes for a space."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{NUMBERS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _WORDS.replace("{NUMBERS}", "{1,3}")
_QWEN2 = _WORDS.replace("{NUMBERS}", "")
_REGEXES = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN,
}  # fmt: skip
"""Expressions that split a text into words, by ``tokenizer.ggml.pre``."""

_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Vocabularies whose words are single tokens even where merges would not reach them."""

_BEGIN_FIRST = ("llama-bpe", "llama3", "llama-v3")
"""Vocabularies whose texts begin with a token where the file does not say so."""

_GPT2_WORDS = ("default", "gpt-2", "mpt", "olmo")
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")


def tokenizer_files(source: EngineFolder) -> dict[str, str]:
    """The texts of a tokenizer's files by their names, for a GGUF file or a converted GGUF
    file. Empty for other checkpoints, which have a folder for their tokenizer.

    Raises:
        ConfigError: the file's vocabulary is of a kind that is not read.
    """
    if source.kind is FolderKind.CHECKPOINT:
        paths = [source.path / name for name in TOKENIZER_FILES]
        return {path.name: read_text(path) for path in paths if path.is_file()}
    if not is_gguf(source.path):
        return {}
    file = open_gguf(source.path)
    files = {
        _TOKENIZER: tokenizer_of(file).to_str(),
        _CONFIG: json.dumps(_settings(file), indent=2, ensure_ascii=False) + "\n",
        _TEMPLATE: file.value("tokenizer.chat_template", ""),
    }
    return {name: text for name, text in files.items() if text}


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts into a folder, by their names."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """The tokenizer that a file describes.

    Raises:
        ConfigError: its vocabulary is of a kind that is not read, or incomplete.
    """
    kind = file.value("tokenizer.ggml.model")
    tokens, types = _listed(file, "tokens"), _listed(file, "token_type")
    if kind == "gpt2":
        tokenizer, begins = _bytewise(file, tokens)
    elif kind == "llama":
        tokenizer, begins = _sentencepiece(file, tokens, types)
    else:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}, which is not read. Read are gpt2 "
            "and llama; name the model's Hugging Face folder."
        )
    for word, token_type in zip(tokens, types, strict=True):
        if token_type in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            is_special = token_type != _USER_DEFINED
            tokenizer.add_tokens([AddedToken(word, special=is_special, normalized=False)])
    _surround(tokenizer, file, tokens, begins)
    return tokenizer


def _listed(file: GgufFile, name: str) -> list[Any]:
    found = file.value(f"tokenizer.ggml.{name}")
    if not isinstance(found, list):
        raise ConfigError(
            f"{file.path}: the key tokenizer.ggml.{name} is missing. Download the file again, "
            "or name the model's Hugging Face folder."
        )
    return found


def _bytewise(file: GgufFile, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """A byte-level BPE, and whether texts begin with a token by default."""
    pre = str(file.value("tokenizer.ggml.pre", "default"))
    splits: list[Any]
    if pre in _REGEXES:
        splits = [pre_tokenizers.Split(Regex(_REGEXES[pre]), "isolated")]
    elif pre in _DIGITS_APART:
        splits = [pre_tokenizers.Digits(individual_digits=True)]
    elif pre in _GPT2_WORDS:
        splits = []
    else:
        known = sorted((*_REGEXES, *_DIGITS_APART, *_GPT2_WORDS))
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre is {pre!r}, which is not read. Read are "
            f"{', '.join(known)}; name the model's Hugging Face folder."
        )
    cut = [each.partition(" ") for each in _listed(file, "merges")]
    merges = [(left, right) for left, _, right in cut]
    tokenizer = _with_merges(file, tokens, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    by_regex = pre not in _REGEXES
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, pre in _BEGIN_FIRST


def _sentencepiece(
    file: GgufFile, tokens: Sequence[str], types: Sequence[int]
) -> tuple[Tokenizer, bool]:
    """A BPE of SentencePiece, whose merges follow from the scores of its pieces."""
    unknown = next((w for w, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges(tokens, _listed(file, "scores"))
    tokenizer = _with_merges(
        file, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    has_prefix = file.value("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _with_merges(
    file: GgufFile, tokens: Sequence[str], merges: Sequence[tuple[str, str]], **settings: Any
) -> Tokenizer:
    """A BPE of these tokens; raises `ConfigError` if they do not fit the merges."""
    vocabulary = {word: number for number, word in enumerate(tokens)}
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **settings))
    except Exception as error:  # the library raises no narrower type
        raise ConfigError(
            f"{file.path}: the vocabulary cannot be used: {error}. Download the file again."
        ) from None


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, those that make the best pieces first."""
    vocabulary = {word: number for number, word in enumerate(tokens)}
    found: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for piece, number in vocabulary.items():
        for place in range(1, len(piece)):
            left, right = vocabulary.get(piece[:place]), vocabulary.get(piece[place:])
            if left is not None and right is not None:
                pair = piece[:place], piece[place:]
                found.append((-scores[number], number, left, right, pair))
    return [pair for *_, pair in sorted(found)]


def _surround(
    tokenizer: Tokenizer, file: GgufFile, tokens: Sequence[str], begins: bool
) -> None:
    """Let texts begin and end with the tokens that the file asks for."""
    first = _token(file, tokens, "bos")
    last = _token(file, tokens, "eos")
    if not file.value("tokenizer.ggml.add_bos_token", begins):
        first = None
    if not file.value("tokenizer.ggml.add_eos_token", False):
        last = None
    if first is None and last is None:
        return
    words = [first or "", "$A", last or ""]
    pair = [first or "", "$B:1", last or ""]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[word for word in words if word],
        pair=[word for word in (*words, *pair) if word],
        special_tokens=[(word, tokens.index(word)) for word in {first, last} if word],
    )


def _token(file: GgufFile, tokens: Sequence[str], name: str) -> str | None:
    number = file.value(f"tokenizer.ggml.{name}_token_id")
    if number is not None and number >= len(tokens):
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.{name}_token_id is {number} but there are "
            f"{len(tokens)} tokens. Download the file again."
        )
    return None if number is None else tokens[number]


def _settings(file: GgufFile) -> dict[str, Any]:
    """The contents of ``tokenizer_config.json``."""
    tokens = _listed(file, "tokens")
    words = {
        "bos_token": _token(file, tokens, "bos"),
        "eos_token": _token(file, tokens, "eos"),
        "unk_token": _token(file, tokens, "unknown"),
        "pad_token": _token(file, tokens, "padding"),
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: word for name, word in words.items() if word is not None},
        "model_max_length": file.model_value("context_length"),
        "clean_up_tokenization_spaces": False,
    }
