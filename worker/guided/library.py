"""XGrammar with one tokenizer: from a client's guide to a compiled grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.comm.files.input_files import parse_json, read_text
from trimaran.worker.config.engine_config import GuidedConfig
from trimaran.worker.guided.json_schemas import check_pattern, read_schema
from trimaran.worker.guided.matcher import CompiledGuide
from trimaran.worker.guided.structural_tags import read_structural_tag

_THREADS = 1
"""With several threads the library hangs if a thread gets no memory. Near the memory limit,
which counts a thread's stack and heap, no thread can start."""

_OUT_OF_MEMORY = ("std::bad_alloc", "Resource temporarily unavailable")
"""The library's whole error message where it gets no memory, or no thread."""

_LONGEST_REASON = 500
"""Most characters of the library's error message that are passed to the client."""
_PLACE = re.compile(r"^\[[\d:.]+\] \S+:\d+: (Check failed: .* is false: )?")
"""The library's prefix that names the line of its own source."""

_REGEX = re.compile(r'Regex\s*\(\s*"((?:[^"\\]|\\.)*)"', re.DOTALL)
"""A regular expression that a grammar quotes."""

_LENGTH = re.compile(r'"(min|max)Length"')
_COUNTED = re.compile(r"""^(\w+ ::= \(\(\[\^\\"\\\\)\\r\\n(\]\)\))$""", re.MULTILINE)
"""The library's rule for a character of a string whose length is limited."""
_WITHOUT_CONTROLS = r"\1\\0-\\x1f\2"

_IN_STRING = "json_string=true"
"""The library's mark of a regular expression that cannot end its JSON string early."""


class Library:
    """Compiles guides for one tokenizer by XGrammar (Dong et al., MLSys 2025).

    A compilation takes from 0.1 ms to hours, and releases Python's lock.
    """

    def __init__(self, xgrammar: ModuleType, info: Any, cache_bytes: int) -> None:
        """``cache_bytes`` limits the cache of masks for other guides with the same parts."""
        self._xgrammar = xgrammar
        self._info = info
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=_THREADS, cache_limit_bytes=cache_bytes
        )
        self.kinds: Mapping[str, Callable[[str], Any]] = {
            "json": lambda _: self._compiler.compile_builtin_json_grammar(),
            "json_schema": self._compile_schema,
            "regex": self._compile_regex,
            "ebnf_grammar": self._compile_ebnf,
            "choice": lambda guide: self._compiler.compile_grammar(_choice_grammar(guide)),
            "structural_tag": self._compile_structural_tag,
        }
        """The compiling function of each type of guide."""

    @classmethod
    def load(
        cls, config: GuidedConfig, engine_dir: str, vocab_size: int, cache_bytes: int
    ) -> Library:
        """Read the tokenizer's vocabulary.

        Raises:
            ConfigError: XGrammar cannot be imported, or the tokenizer cannot be read.
        """
        xgrammar = _import()
        info = _tokenizer_info(xgrammar, config, engine_dir, vocab_size)
        return cls(xgrammar, info, cache_bytes)

    @classmethod
    def from_text(cls, text: str, cache_bytes: int) -> Library:
        """The inverse of `to_text`."""
        xgrammar = _import()
        return cls(xgrammar, xgrammar.TokenizerInfo.deserialize_json(text), cache_bytes)

    @property
    def vocab_size(self) -> int:
        """Ids of the model, each with a bit in a mask."""
        return int(self._info.vocab_size)

    def to_text(self) -> str:
        """Text from which another process makes an equal library."""
        return str(self._info.serialize_json())

    def compile(self, kind: str, guide: str) -> CompiledGuide:
        """Compile ``guide``, without a time limit.

        Raises:
            RequestError: the guide is not valid for its type.
            MemoryError: the process may not have the memory that the guide takes.
        """
        try:
            compiled = self.kinds[kind](guide)
        except (RequestError, MemoryError):
            raise
        # The library passes on exceptions of its C++ code, mostly RuntimeError.
        except Exception as error:
            reason = _PLACE.sub("", str(error).strip())
            if reason in _OUT_OF_MEMORY:
                raise MemoryError(reason) from error
            if len(reason) > _LONGEST_REASON:
                # The reason may repeat the guide, and gRPC clients refuse a status of 8 KiB.
                reason = f"{reason[:_LONGEST_REASON]}..."
            raise RequestError(
                f"guided_decoding_guide is no {kind} that can be followed: {reason}"
            ) from error
        return CompiledGuide(self._xgrammar, compiled, self.vocab_size)

    def _compile_schema(self, guide: str) -> Any:
        guide, patterns = read_schema(guide)
        for pattern in patterns:
            self._check_in_string(pattern)
        if _LENGTH.search(guide) is None:
            return self._compiler.compile_json_schema(guide)
        # JSON strings may not hold unescaped control characters. The library does not check
        # this rule in strings whose characters are counted.
        grammar = str(self._xgrammar.Grammar.from_json_schema(guide))
        return self._compiler.compile_grammar(_COUNTED.sub(_WITHOUT_CONTROLS, grammar))

    def _check_in_string(self, pattern: str) -> None:
        """Refuse a regular expression that needs a character which JSON strings must escape.

        For such an expression the library drops the rule that excludes these characters, and
        then allows text that is not JSON.
        """
        schema = json.dumps({"type": "string", "pattern": pattern})
        if _IN_STRING not in str(self._xgrammar.Grammar.from_json_schema(schema)):
            raise RequestError(
                f"the pattern {pattern[:100]!r} asks for a quotation mark, a backslash or a "
                "control character, which have no place in a JSON string as they are. Leave "
                "it out of the pattern."
            )

    def _compile_structural_tag(self, guide: str) -> Any:
        guide, patterns = read_structural_tag(guide)
        for pattern in patterns:
            self._check_in_string(pattern)
        if _LENGTH.search(guide) is None:
            return self._compiler.compile_structural_tag(guide)
        grammar = str(self._xgrammar.Grammar.from_structural_tag(guide))
        return self._compiler.compile_grammar(_COUNTED.sub(_WITHOUT_CONTROLS, grammar))

    def _compile_regex(self, guide: str) -> Any:
        check_pattern(guide)
        return self._compiler.compile_regex(guide)

    def _compile_ebnf(self, guide: str) -> Any:
        for quoted in _REGEX.findall(guide):
            check_pattern(re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL))
        return self._compiler.compile_grammar(guide)


def _import() -> ModuleType:
    try:
        import xgrammar
    except ImportError as error:
        # A dependency may be missing instead of XGrammar: only the cause names the package.
        raise ConfigError(
            f"guided_decoding_backend is xgrammar, which cannot be imported ({error}). Install "
            "the extra 'guided' (pip install trimaran[guided]), or leave the parameter unset."
        ) from error
    module: ModuleType = xgrammar
    return module


def _tokenizer_info(
    xgrammar: ModuleType, config: GuidedConfig, engine_dir: str, vocab_size: int
) -> Any:
    if config.tokenizer_info_path:
        return _info_of_file(xgrammar, config.tokenizer_info_path, vocab_size)
    # Imported late: only engines that serve guides load a tokenizer, which takes a second.
    from transformers import AutoTokenizer

    folder = config.tokenizer_dir or engine_dir
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"Guided decoding requires tokenizer's information. Please provide "
            f"'tokenizer_dir'. In {folder}: {error}"
        ) from error


def _info_of_file(xgrammar: ModuleType, path: str, vocab_size: int) -> Any:
    """The info from a file with ``encoded_vocab``, ``tokenizer_str`` and ``stop_token_ids``."""
    try:
        values = parse_json(read_text(path))
        info = xgrammar.TokenizerInfo
        found = info._detect_metadata_from_hf(values["tokenizer_str"])
        return info(
            values["encoded_vocab"],
            found["vocab_type"],
            vocab_size=vocab_size,
            stop_token_ids=values["stop_token_ids"],
            add_prefix_space=found["add_prefix_space"],
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"xgrammar_tokenizer_info_path {path} is not a file with encoded_vocab, "
            f"tokenizer_str and stop_token_ids: {error!r}"
        ) from error


def _choice_grammar(guide: str) -> str:
    """A grammar of the strings of a JSON list."""
    try:
        choices = json.loads(guide)
    except ValueError as error:
        raise RequestError(f"a guide of type 'choice' must be a JSON list: {error}") from error
    if not (isinstance(choices, list) and choices and all(_is_text(c) for c in choices)):
        raise RequestError(
            "a guide of type 'choice' must be a JSON list of strings that are not empty"
        )
    # Escapes would cut a character beyond 16 bits into two surrogates, which are no text.
    texts = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return "root ::= " + " | ".join(texts)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
