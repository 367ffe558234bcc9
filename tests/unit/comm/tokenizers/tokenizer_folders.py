"""Tokenizer folders of many classes, over small vocabularies that are trained here."""

from __future__ import annotations

import base64
import functools
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "Hello world, this is the end of a sentence, and so on.",
    "The quick brown fox jumps over the lazy dog 1234567890 times!",
    "It's what I'm sure you're not; don't say they've n't.",
    "naïve café größer Ünïcödé 日本語と中文 東京 🙂",
    "def snake_case(camelCase):\n    return [0] += 1;\n\n\tx",
    "  two  spaces   and\ttabs ",
] * 6
Writer = Callable[[Path], None]


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


@functools.cache
def _byte_level(num_ids: int = 420) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=num_ids,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def byte_level(*specials: str, at_start: bool = False) -> Writer:
    """Writes ``vocab.json`` and ``merges.txt``."""

    def write(folder: Path) -> None:
        vocab, merges = _byte_level()
        words = sorted(vocab, key=vocab.__getitem__)
        words = [*specials, *words] if at_start else [*words, *specials]
        _write_json(folder / "vocab.json", {word: n for n, word in enumerate(words)})
        lines = ["#version: 0.2", *(" ".join(merge) for merge in merges), ""]
        (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")

    return write


@functools.cache
def _sentencepiece(kind: str, options: tuple[tuple[str, Any], ...]) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=kind,
        minloglevel=2,
        hard_vocab_limit=False,
        num_threads=1,
        **dict(options),
    )
    return model.getvalue()


def sentencepiece_model(
    kind: str = "bpe", *, name: str = "tokenizer.model", **options: Any
) -> Writer:
    """Writes a SentencePiece model."""
    options = {"vocab_size": 420 if kind == "bpe" else 200, **options}

    def write(folder: Path) -> None:
        (folder / name).write_bytes(_sentencepiece(kind, tuple(sorted(options.items()))))

    return write


LLAMA = {
    "byte_fallback": True, "character_coverage": 0.99, "normalization_rule_name": "identity",
    "split_digits": True, "remove_extra_whitespaces": False,
}  # fmt: skip
GEMMA = {
    **LLAMA, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>",
    "eos_piece": "<eos>", "bos_piece": "<bos>", "add_dummy_prefix": False,
    "user_defined_symbols": "<mask>,<start_of_turn>,<end_of_turn>",
}  # fmt: skip
ALBERT = {
    "pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "pad_piece": "<pad>",
    "control_symbols": "[CLS],[SEP],[MASK]",
}  # fmt: skip
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "pad_piece": "<pad>"}


def word_pieces(*specials: str, **options: Any) -> Writer:
    """Writes ``vocab.txt``."""

    def write(folder: Path) -> None:
        tokenizer = Tokenizer(models.WordPiece(unk_token=specials[1]))
        tokenizer.normalizer = normalizers.BertNormalizer(**options)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(
            vocab_size=260, special_tokens=list(specials), show_progress=False
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        vocab = tokenizer.get_vocab()
        words = sorted(vocab, key=vocab.__getitem__)
        (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")

    return write


BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_json(
    *specials: str, split: str = "", begin: str = "", ordinary: tuple[str, ...] = ()
) -> Writer:
    """Writes a byte-level ``tokenizer.json`` with added tokens."""

    def write(folder: Path) -> None:
        vocab, merges = _byte_level()
        fast = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
        if split:
            from tokenizers import Regex

            cut = pre_tokenizers.Split(Regex(split), "isolated")
            fast.pre_tokenizer = pre_tokenizers.Sequence([cut, pre])
        else:
            fast.pre_tokenizer = pre
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens(list(specials))
        fast.add_tokens(list(ordinary))
        if begin:
            fast.post_processor = processors.TemplateProcessing(
                single=f"{begin} $A", special_tokens=[(begin, fast.token_to_id(begin))]
            )
        fast.save(str(folder / "tokenizer.json"))

    return write


def tiktoken_file(name: str) -> Writer:
    """Writes a vocabulary in tiktoken's format."""

    def write(folder: Path) -> None:
        vocab, _ = _byte_level()
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}
        lines = []
        for word, rank in sorted(vocab.items(), key=lambda item: item[1]):
            raw = bytes(bytes_of[character] for character in word)
            lines.append(f"{base64.b64encode(raw).decode()} {rank}\n")
        (folder / name).write_text("".join(lines))

    return write


@dataclass(frozen=True)
class Case:
    """A tokenizer folder as its publisher made it."""

    name: str
    write: Writer
    model_type: str
    tokenizer_class: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``tokenizer_config.json``."""

    model: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``config.json``."""

    def make(self, folder: Path) -> Path:
        """Write the folder."""
        folder.mkdir(parents=True)
        self.write(folder)
        settings = dict(self.settings)
        if self.tokenizer_class:
            settings["tokenizer_class"] = self.tokenizer_class
        if settings:
            _write_json(folder / "tokenizer_config.json", settings)
        _write_json(folder / "config.json", {"model_type": self.model_type, **self.model})
        return folder


END = "<|endoftext|>"
_ADDED = {
    "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
}  # fmt: skip


def added(content: str, *, special: bool = True, **options: Any) -> dict[str, Any]:
    """A token of ``added_tokens_decoder``."""
    return {"content": content, "special": special, **_ADDED, **options}


def named(content: str) -> dict[str, Any]:
    """A token with a role, as ``tokenizer_config.json`` holds it."""
    return {"__type": "AddedToken", **added(content)}


_LLAMA3_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>")
CASES = (
    Case("gpt2", byte_level(END), "gpt2", "GPT2Tokenizer"),
    Case("gpt2-bare", byte_level(END), "gpt2", settings={"model_max_length": 64}),
    Case("gpt2-fast", byte_level(END), "gpt2", "GPT2TokenizerFast", {"add_prefix_space": True}),
    Case(
        "opt", byte_level("<pad>", "</s>", "<unk>", at_start=True), "opt", "GPT2Tokenizer",
        {"add_bos_token": True, "bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>",
         "unk_token": "</s>"},
    ),
    Case("gpt-neox", tokenizer_json(END, "<|padding|>"), "gpt_neox", "GPTNeoXTokenizer"),
    Case(
        "bloom", tokenizer_json("<unk>", "<s>", "</s>", "<pad>"), "bloom",
        "BloomTokenizerFast",
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
    ),
    Case(
        "falcon", tokenizer_json(">>TITLE<<", ">>ABSTRACT<<", END), "falcon",
        "PreTrainedTokenizerFast", {"eos_token": END},
    ),
    Case(
        "starcoder", byte_level(END, "<fim_prefix>", "<fim_middle>"), "gpt_bigcode",
        "GPT2TokenizerFast", {"additional_special_tokens": [END, "<fim_prefix>"]},
    ),
    Case("starcoder2", byte_level(END), "starcoder2", "GPT2Tokenizer"),
    Case("phi", byte_level(END), "phi", "CodeGenTokenizer", {"add_prefix_space": False}),
    Case(
        "qwen2", byte_level(END, "<|im_start|>", "<|im_end|>"), "qwen2", "Qwen2Tokenizer",
        {"eos_token": "<|im_end|>", "pad_token": END, "add_prefix_space": False,
         "added_tokens_decoder": {"420": added(END), "422": added("<|im_end|>"),
                                  "421": added("<|im_start|>"),
                                  "423": added("<tool_call>", special=False)},
         "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    ),
    Case("qwen2-bare", byte_level(END), "qwen2"),
    Case("qwen3", byte_level(END, "<|im_end|>"), "qwen3", "Qwen2Tokenizer",
         {"eos_token": "<|im_end|>"}),
    Case(
        "llama3", tokenizer_json(*_LLAMA3_TOKENS, split=LLAMA3, begin=_LLAMA3_TOKENS[0]),
        "llama", "PreTrainedTokenizerFast",
        {"bos_token": _LLAMA3_TOKENS[0], "eos_token": "<|eot_id|>",
         "clean_up_tokenization_spaces": True,
         "model_input_names": ["input_ids", "attention_mask"]},
        {"eos_token_id": [421, 422]},
    ),
    Case(
        "deepseek", tokenizer_json("<bos>", "<eos>", split=LLAMA3, begin="<bos>"),
        "deepseek_v3", "LlamaTokenizerFast",
        {"add_bos_token": True, "add_eos_token": False, "legacy": True, "bos_token": "<bos>",
         "eos_token": "<eos>", "pad_token": "<eos>"},
    ),
    Case("llama", sentencepiece_model(**LLAMA), "llama", "LlamaTokenizer"),
    Case("llama-model-alone", sentencepiece_model(**LLAMA), "llama"),
    Case(
        "llama-legacy", sentencepiece_model(**LLAMA), "llama", "LlamaTokenizer",
        {"legacy": True, "add_bos_token": True, "add_eos_token": True,
         "bos_token": named("<s>"), "eos_token": named("</s>"), "unk_token": named("<unk>")},
    ),
    Case(
        "codellama", sentencepiece_model(**LLAMA), "llama", "CodeLlamaTokenizer",
        {"fill_token": None, "prefix_token": None, "middle_token": None,
         "suffix_token": None, "eot_token": None},
    ),
    Case("mistral", sentencepiece_model(**LLAMA), "mistral", "LlamaTokenizer",
         {"legacy": False, "add_bos_token": True}),
    Case("mixtral", sentencepiece_model(**LLAMA), "mixtral", "LlamaTokenizer",
         {"add_bos_token": True, "clean_up_tokenization_spaces": False}),
    Case(
        "phi3", sentencepiece_model(**LLAMA), "phi3", "LlamaTokenizer",
        {"legacy": False, "eos_token": END, "pad_token": END,
         "added_tokens_decoder": {"420": added(END), "421": added("<|assistant|>", rstrip=True),
                                  "422": added("<|end|>", rstrip=True)}},
    ),
    Case("gemma", sentencepiece_model(**GEMMA), "gemma", "GemmaTokenizer"),
    Case("gemma2", sentencepiece_model(**GEMMA), "gemma2", "GemmaTokenizerFast",
         {"add_bos_token": True, "spaces_between_special_tokens": False}),
    Case("internlm2", sentencepiece_model(**LLAMA), "internlm2", "LlamaTokenizer"),
    Case("t5", sentencepiece_model("unigram", name="spiece.model", **T5), "t5", "T5Tokenizer",
         {"extra_ids": 4}),
    Case("mt5", sentencepiece_model("unigram", name="spiece.model", **T5), "mt5", "T5Tokenizer",
         {"extra_ids": 0, "legacy": False}),
    Case("xlm-roberta", sentencepiece_model("unigram", name="sentencepiece.bpe.model"),
         "xlm-roberta", "XLMRobertaTokenizer"),
    Case("albert", sentencepiece_model("unigram", name="spiece.model", **ALBERT), "albert",
         "AlbertTokenizer"),
    Case("bert", word_pieces(*BERT), "bert", "BertTokenizer"),
    Case("bert-cased", word_pieces(*BERT, lowercase=False), "bert", "BertTokenizerFast",
         {"do_lower_case": False, "clean_up_tokenization_spaces": True}),
    Case("electra", word_pieces(*BERT), "electra", "ElectraTokenizer"),
    Case("roberta", byte_level("<s>", "<pad>", "</s>", "<unk>", "<mask>", at_start=True),
         "roberta", "RobertaTokenizer"),
    Case("cohere", tokenizer_json("<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>",
                                  "<BOS_TOKEN>", "<EOS_TOKEN>", "<|END_OF_TURN_TOKEN|>",
                                  begin="<BOS_TOKEN>"), "cohere", "CohereTokenizerFast",
         {"add_bos_token": True}),
    Case(
        "tiktoken", tiktoken_file("tiktoken.model"), "llama", "PreTrainedTokenizerFast",
        {"added_tokens_decoder": {"420": added("<|begin|>"), "422": added("<|eot|>")},
         "bos_token": "<|begin|>", "eos_token": "<|eot|>"},
    ),
    Case("tiktoken-as-model", tiktoken_file("tokenizer.model"), "llama",
         "PreTrainedTokenizerFast", {"eos_token": END}),
)  # fmt: skip
