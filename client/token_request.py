"""The tensors of a token-level request, from the flags of the token-level client."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException

from trimaran.client.prompt_files import lora, prompt_table, read_ids
from trimaran.client.stream import ServerError
from trimaran.client.tensors import present, row, tensor
from trimaran.client.token_flags import DEFAULT_TEXT
from trimaran.client.vocabulary import Vocabulary
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json

# The default text in GPT-2's vocabulary, for a run without a tokenizer.
_DEFAULT_IDS = (28524, 287, 5093, 12, 23316, 4881, 11, 30022, 263, 8776, 355, 257)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt's ids and the end ids of a request."""

    ids: list[int]
    end_id: int
    pad_id: int
    vocabulary: Vocabulary | None

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> Prompt:
        """The prompt that the flags name.

        Raises:
            ConfigError: a text without a tokenizer, or an unusable file.
        """
        vocabulary = Vocabulary(args.tokenizer_dir) if args.tokenizer_dir else None
        end_id, pad_id = args.end_id, args.pad_id
        if vocabulary is not None:
            end_id = args.end_id if vocabulary.end_id is None else vocabulary.end_id
            pad_id = args.pad_id if vocabulary.pad_id is None else vocabulary.pad_id
        if args.input_tokens_csv and args.text != DEFAULT_TEXT:
            raise ConfigError("--text has no effect beside --input-tokens-csv: leave out one")
        if args.input_tokens_csv:
            ids = read_ids("--input-tokens-csv", args.input_tokens_csv)
        elif vocabulary is not None:
            ids = vocabulary.encode(args.text)
        elif args.text == DEFAULT_TEXT:
            ids = list(_DEFAULT_IDS)
        else:
            raise ConfigError(
                "--text needs --tokenizer-dir DIR. Without one, give ids: "
                "--input-tokens-csv FILE"
            )
        return cls(ids, end_id, pad_id, vocabulary)


def request_inputs(args: argparse.Namespace, prompt: Prompt, seed_name: str) -> list[Any]:
    """The input tensors. ``seed_name`` is the served model's name of the seed."""
    inputs = [
        tensor("input_ids", [prompt.ids], np.int32),
        row("input_lengths", len(prompt.ids), np.int32),
        row("request_output_len", args.request_output_len, np.int32),
        row("beam_width", args.beam_width, np.int32),
        row("temperature", args.temperature, np.float32),
        row("runtime_top_k", args.top_k, np.int32),
        row("runtime_top_p", args.top_p, np.float32),
        row("end_id", prompt.end_id, np.int32),
        row("pad_id", prompt.pad_id, np.int32),
        row("streaming", args.streaming, bool),
        row("num_return_sequences", args.num_return_sequences, np.int32),
        row("repetition_penalty", args.repetition_penalty, np.float32),
        row("presence_penalty", args.presence_penalty, np.float32),
        row("frequency_penalty", args.frequency_penalty, np.float32),
        row(seed_name, args.seed, np.uint64),
        *flag_tensors(args),
        *lora(args),
    ]
    if args.draft_tokens_csv:
        draft = read_ids("--draft-tokens-csv", args.draft_tokens_csv)
        inputs.append(tensor("draft_input_ids", [draft], np.int32))
    inputs += _prompt_table(args, prompt)
    inputs += _lookahead(args.lookahead_config)
    return present(inputs)


def flag_tensors(args: argparse.Namespace, num_rows: int = 1) -> list[Any]:
    """Tensors of the flags that add outputs to the answer, or limit it."""
    names = (
        "exclude_input_in_output", "return_log_probs", "return_context_logits",
        "return_generation_logits", "return_perf_metrics", "return_kv_cache_reuse_stats",
    )  # fmt: skip
    return [row(name, True, bool, num_rows) for name in names if getattr(args, name)]


def stop_inputs() -> list[Any]:
    """The tensors of a request that stops the request with the same id."""
    return [
        tensor("input_ids", [[0]], np.int32),
        row("input_lengths", 0, np.int32),
        row("request_output_len", 0, np.int32),
        row("stop", True, bool),
    ]


def seed_name(client: Any, model: str, seed: int | None) -> str:
    """The model's name of the seed; older and newer repositories differ."""
    return "seed" if seed is not None and has_input(client, model, "seed") else "random_seed"


def has_output(client: Any, model: str, name: str) -> bool:
    """Whether the served model declares an output."""
    return name in {each.name for each in _metadata(client, model).outputs}


def has_input(client: Any, model: str, name: str) -> bool:
    """Whether the served model declares an input."""
    return name in {each.name for each in _metadata(client, model).inputs}


def _metadata(client: Any, model: str) -> Any:
    try:
        return client.get_model_metadata(model)
    except InferenceServerException as error:
        raise ServerError(error.message()) from error


def _prompt_table(args: argparse.Namespace, prompt: Prompt) -> list[Any]:
    tensors = []
    if args.prompt_task_id and not args.prompt_embedding_table_path:
        raise ConfigError(
            f"--prompt-task-id {args.prompt_task_id} needs --prompt-embedding-table-path FILE"
        )
    if args.prompt_embedding_table_path:
        tensors += prompt_table(
            args.prompt_embedding_table_path, args.prompt_task_id, args.dtype
        )
    if args.prompt_table_extra_id is not None:
        if args.vocab_size is None:
            raise ConfigError("--prompt_table_extra_id needs --vocab_size")
        extra = [args.prompt_table_extra_id * (i >= args.vocab_size) for i in prompt.ids]
        tensors.append(tensor("prompt_table_extra_ids", [extra], np.uint64))
    elif args.vocab_size is not None:
        raise ConfigError("--vocab_size has no effect without --prompt_table_extra_id ID")
    return tensors


def _lookahead(config: str | None) -> list[Any]:
    if config is None:
        return []
    try:
        numbers = parse_json(config)
    except ValueError:
        numbers = None
    if (
        not isinstance(numbers, list)
        or len(numbers) != 3
        or any(type(number) is not int for number in numbers)
    ):
        raise ConfigError(
            f"--lookahead_config is {config!r} but must be three whole numbers, as in [7,7,7]"
        )
    window, ngram, verification = numbers
    return [
        row("lookahead_window_size", window, np.int32),
        row("lookahead_ngram_size", ngram, np.int32),
        row("lookahead_verification_set_size", verification, np.int32),
    ]
