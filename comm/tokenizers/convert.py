"""The child process that reads a tokenizer folder with transformers and writes what it read.

    python -m trimaran.comm.tokenizers.convert FOLDER_OR_FILE TARGET

A failure goes to standard error as one line behind `FAILURE`.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trimaran.comm.files.input_files import read_json_object, special_tokens
from trimaran.comm.tokenizers.prepared import (
    TOKENIZER_FILE,
    cleaned_up,
    read_tokenizer,
    write_prepared,
)

FAILURE = "tokenizer-failure: "
"""What the line with the cause begins with."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_TEXTS = (
    "Hello world", " leading", "  two  spaces ", "trailing ", "a\nb\n\n c\t d",
    "it's, isn't it ?", "I 'm sure you 're not . Do n't !", "12345 3.14 1,000", "x", " ", "\n",
    "na\u00efve caf\u00e9 \u00dcn\u00efc\u00f6d\u00e9", "\u65e5\u672c\u8a9e\u3068\u4e2d\u6587",
    "\U0001f642 emoji \U0001f469\u200d\U0001f4bb", "e\u0301\u00a0\u200b\ufeff",
    "snake_case(camelCase)[0] += 1;", "SHOUTING " * 3, "\ud7ff\U0010ffff", "\ufb01 \u2460",
)  # fmt: skip
"""Texts on which the result is compared with the class that read the folder."""

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_NUM_IDS = 64
"""The first and the last ids of a vocabulary that are decoded for the comparison."""


_SINGLE = "single"
"""Folder beside the result that holds a file which was named in place of a folder."""


class _RefusedError(Exception):
    """The folder cannot be read; the text is the cause."""


def main() -> None:
    """Convert one folder."""
    # The process ends with its folder: collections would only take time.
    gc.disable()
    folder, target = map(Path, sys.argv[1:])
    os.environ.update(_ENVIRONMENT)
    # Tokenizers need no torch, whose import takes seconds.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        if not folder.is_dir():
            folder = _folder_of(folder, target)
        _check_packages(folder)
        _check_file(folder)
        _check_class(folder)
        patch_sentencepiece()
        tokenizer, notes = _read(folder)
        raw, more = _fast_form(tokenizer, folder)
        facts = _facts(tokenizer, (*notes, *more))
        _compare(tokenizer, raw, facts)
    except _RefusedError as error:
        sys.exit(FAILURE + " ".join(str(error).split()))
    shutil.rmtree(target / _SINGLE, ignore_errors=True)
    write_prepared(target, raw, facts)


def _folder_of(file: Path, parent: Path) -> Path:
    """A new folder in ``parent`` that holds a file alone, by the name that transformers looks
    for."""
    folder = parent / _SINGLE
    folder.mkdir()
    with file.open("rb") as opened:
        is_json = opened.read(64).lstrip().startswith(b"{")
    if is_json:
        name = TOKENIZER_FILE
    elif _is_tiktoken(file) or not _is_t5(file):
        name = "tokenizer.model"
    else:
        name = "spiece.model"
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    (folder / name).symlink_to(file.resolve())
    return folder


def _is_t5(file: Path) -> bool:
    """Whether a SentencePiece model has the special ids of T5, whose class adds tokens."""
    if find_spec("sentencepiece") is None:
        return False
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(file))
    except Exception as error:
        raise _RefusedError(
            f"{file.name} is no tokenizer.json, no SentencePiece model and no tiktoken file"
        ) from error
    return (model.pad_id(), model.eos_id(), model.bos_id()) == (0, 1, -1)


def _check_packages(folder: Path) -> None:
    """Name the package that reads the folder's vocabulary, if it is missing: transformers tries
    other readers, and names a package that does not help."""
    if (folder / TOKENIZER_FILE).exists():
        return
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".model", ".tiktoken") or not path.is_file():
            continue
        package = "tiktoken" if _is_tiktoken(path) else "sentencepiece"
        if find_spec(package) is None:
            raise _RefusedError(
                f"{path.name} is read by the package {package}, which is not installed. "
                f"Install the package (pip install {package})"
            )


def patch_sentencepiece() -> None:
    """Let transformers parse SentencePiece models with its own messages where those of the
    package want a newer protobuf than the installed one."""
    try:
        import sentencepiece.sentencepiece_model_pb2  # noqa: F401
    except ImportError:
        return
    # protobuf's own error is no ImportError.
    except Exception:
        from transformers.utils import sentencepiece_model_pb2_new

        sys.modules["sentencepiece.sentencepiece_model_pb2"] = sentencepiece_model_pb2_new


def _is_tiktoken(path: Path) -> bool:
    """Whether a vocabulary has tiktoken's lines of text: bytes in base64, and a rank."""
    with path.open("rb") as file:
        words = file.readline(1 << 10).split()
    return len(words) == 2 and words[1].isdigit()


def _check_file(folder: Path) -> None:
    path = folder / TOKENIZER_FILE
    if not path.exists():
        return
    try:
        read_tokenizer(path.read_bytes())
    except Exception as error:
        raise _RefusedError(f"{path} cannot be read: {error}") from error


def _check_class(folder: Path) -> None:
    """Refuse a class of transformers that is no tokenizer: AutoTokenizer calls any class that
    the folder names, and some read their files by unpickling."""
    import transformers

    for file in ("tokenizer_config.json", "config.json"):
        path = folder / file
        name = read_json_object(path).get("tokenizer_class") if path.exists() else None
        if not isinstance(name, str) or name == "AutoTokenizer":
            continue
        try:
            found: Any = getattr(transformers, name, None)
        # A class whose packages are missing cannot be called either.
        except Exception:
            continue
        is_class = isinstance(found, type)
        if is_class and issubclass(found, transformers.PreTrainedTokenizerBase):
            continue
        # A class whose packages are missing says so itself.
        if found is None or (is_class and ".dummy_" in found.__module__):
            continue
        raise _RefusedError(
            f"{file} names {name} as its tokenizer_class, which is no tokenizer of transformers"
        )


def _read(folder: Path) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer that transformers makes of the folder, and notes about it."""
    from transformers import AutoTokenizer

    reasons = []
    for reader, read in (
        ("AutoTokenizer", AutoTokenizer.from_pretrained),
        *_other_readers(folder),
    ):
        try:
            found = read(str(folder), local_files_only=True, trust_remote_code=False)
        # Classes raise what their files make them raise.
        except Exception as error:
            reasons.append(f"{reader} cannot read it: {_first_line(error)}")
            continue
        # What else was tried and failed tells an operator nothing.
        notes = [f"{reasons[0]}. It is read by {reader}"] if reasons else []
        return found, tuple(notes)
    raise _RefusedError("; ".join(dict.fromkeys(reasons)))


def _other_readers(folder: Path) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What reads a folder that AutoTokenizer does not: the class that the folder names, and
    its ``tokenizer.json`` with the special tokens that files name."""
    import transformers

    path = folder / "tokenizer_config.json"
    values = read_json_object(path) if path.exists() else {}
    name = values.get("tokenizer_class")
    named: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if hasattr(named, "from_pretrained"):
        yield f"its class {name}", named.from_pretrained
    path = folder / TOKENIZER_FILE
    if path.exists():
        tokens = special_tokens(folder, _ROLES)
        alone = partial(
            transformers.PreTrainedTokenizerFast, tokenizer_file=str(path), **tokens
        )
        yield f"{TOKENIZER_FILE} and its special tokens alone", lambda *_, **__: alone()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _fast_form(tokenizer: Any, folder: Path) -> tuple[bytes, tuple[str, ...]]:
    """The ``tokenizer.json`` of a tokenizer, converted if its class runs in Python."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return fast.to_str().encode(), ()
    from transformers.convert_slow_tokenizer import convert_slow_tokenizer

    try:
        return convert_slow_tokenizer(tokenizer).to_str().encode(), ()
    except Exception as error:
        name = type(tokenizer).__name__
        path = folder / TOKENIZER_FILE
        if path.exists():
            note = f"{name} runs in Python; tokenizer.json is used in its place"
            return path.read_bytes(), (note,)
        raise _RefusedError(
            f"its class {name} runs in Python and has no form as tokenizer.json, in which "
            "the front end reads tokenizers"
        ) from error


def _facts(tokenizer: Any, notes: tuple[str, ...]) -> dict[str, Any]:
    """The fields of `TokenizerFacts`."""
    fill = _fill_token(tokenizer)
    if fill is not None:
        marks = (getattr(tokenizer, f"{part}_token") for part in ("prefix", "suffix", "middle"))
        notes = (
            *notes,
            f"texts are not cut at {fill}: write {', '.join(map(str, marks))} into a text that "
            "is to be filled in",
        )
    return {
        "class_name": type(tokenizer).__name__,
        "end_id": tokenizer.eos_token_id,
        "pad_id": tokenizer.pad_token_id,
        "cleans_up": _cleans_up(tokenizer),
        "splits_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "notes": notes,
    }


def _cleans_up(tokenizer: Any) -> bool:
    """Whether `decode` cleans up: newer versions of transformers ignore the flag for BPE."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    fast = getattr(tokenizer, "backend_tokenizer", None)
    has_exception = hasattr(tokenizer, forced)
    if fast is None or not has_exception or type(fast.model).__name__ != "BPE":
        return True
    return bool(getattr(tokenizer, forced))


def _compare(tokenizer: Any, raw: bytes, facts: dict[str, Any]) -> None:
    """Refuse a result that gives other ids or other text than the class itself."""
    fast = read_tokenizer(raw, facts["splits_special_tokens"])
    name = facts["class_name"]
    lists = [[each] for each in _some_ids(fast)]
    for text in _some_texts(tokenizer):
        for adds in (True, False):
            try:
                wanted = tokenizer.encode(text, add_special_tokens=adds)
            # Classes raise what their files make them raise.
            except Exception as error:
                raise _RefusedError(
                    f"its class {name} cannot encode {text!r}: {_first_line(error)}"
                ) from error
            found = fast.encode(text, add_special_tokens=adds).ids
            if list(wanted) != found:
                raise _RefusedError(
                    f"its class {name} encodes {text!r} as {list(wanted)[:20]}, but its "
                    f"tokenizer.json as {found[:20]}"
                )
        lists.append(found)
    for ids in lists:
        for skips in (True, False):
            wanted = tokenizer.decode(ids, skip_special_tokens=skips)
            text = fast.decode(ids, skip_special_tokens=skips)
            text = cleaned_up(text) if facts["cleans_up"] else text
            if wanted != text:
                raise _RefusedError(
                    f"its class {name} decodes {ids[:20]} as {wanted!r}, but its "
                    f"tokenizer.json as {text!r}"
                )


def _some_texts(tokenizer: Any) -> Iterator[str]:
    yield from _TEXTS
    fill = _fill_token(tokenizer)
    for token in tokenizer.all_special_tokens[:_NUM_IDS]:
        if token != fill:
            yield f"a{token} b {token}c"


def _fill_token(tokenizer: Any) -> str | None:
    """The token at which the class of Code Llama cuts a text into prefix and suffix."""
    found = getattr(tokenizer, "fill_token", None)
    return None if found is None else str(found)


def _some_ids(fast: Any) -> list[int]:
    known = sorted(fast.get_vocab(with_added_tokens=True).values())
    return sorted({*known[:_NUM_IDS], *known[-_NUM_IDS:]})


if __name__ == "__main__":
    main()
