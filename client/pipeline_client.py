"""`trimaran client pipeline`: compares texts made step by step with those of the text
models.
"""

from __future__ import annotations

import argparse
import ast
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimaran.client.prompt_files import read_dataset
from trimaran.client.request_flags import DEFAULT_URLS, add_concurrency, add_protocol
from trimaran.client.step_client import GrpcSteps, HttpSteps, StepClient, one_of, text_of
from trimaran.client.stream import ServerError, check_names, check_url
from trimaran.client.text_client import MismatchError, Texts
from trimaran.comm.errors import ConfigError

_BLS = "tensorrt_llm_bls"
_TOKENS_PER_WORD = 1.3
_WARM_UP = 10
_FLAGS = ("return_log_probs", "return_context_logits", "return_generation_logits")
# Inputs of the text models, their types, and the token model's names for them.
_INPUTS: dict[str, tuple[Any, str]] = {
    "beam_width": (np.int32, "beam_width"),
    "top_k": (np.int32, "runtime_top_k"),
    "top_p": (np.float32, "runtime_top_p"),
    "temperature": (np.float32, "temperature"),
    "length_penalty": (np.float32, "len_penalty"),
    "repetition_penalty": (np.float32, "repetition_penalty"),
    "presence_penalty": (np.float32, "presence_penalty"),
    "frequency_penalty": (np.float32, "frequency_penalty"),
    "min_length": (np.int32, "min_length"),
    "random_seed": (np.uint64, "random_seed"),
    **{name: (np.bool_, name) for name in _FLAGS},
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One record of the data set."""

    text: str
    output_len: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the script of Triton's TensorRT-LLM backend."""
    parser.add_argument("-v", "--verbose", action="store_true", help="print every message")
    parser.add_argument(
        "-u", "--url", metavar="HOST:PORT", help="localhost:8000 for http, 8001 for grpc"
    )
    add_protocol(parser)
    add_concurrency(parser)
    parser.add_argument(
        "--max-input-len",
        type=int,
        metavar="N",
        help="drop prompts that are longer, in estimated tokens (none)",
    )
    parser.add_argument("--dataset", required=True, metavar="FILE", help="JSON list of objects")
    for name in _FLAGS:
        parser.add_argument(
            f"--{name.replace('_', '-')}", action="store_true", help="ask for them too"
        )
    parser.add_argument("--test-bls", action="store_true", help="compare the BLS model too")
    parser.add_argument("--test-llmapi", action="store_true", help="refused: not served yet")
    parser.add_argument(
        "--model-name", default="ensemble", metavar="NAME", help="text model (ensemble)"
    )
    parser.add_argument(
        "--token-model-name",
        default="tensorrt_llm",
        metavar="NAME",
        help="token model (tensorrt_llm)",
    )
    parser.add_argument("--streaming", action="store_true", help="with grpc")
    for flag in ("--sampling-params", "--output-config"):
        parser.add_argument(
            flag, default="{}", metavar="DICT", help="further inputs, as a Python dictionary"
        )


def run(args: argparse.Namespace) -> int:
    """Compare all prompts, then time the text model. Returns 1 if the server refuses a prompt.

    Raises:
        ConfigError: flags contradict each other, or the data set holds no short prompt.
        MismatchError: two ways to a text differ.
    """
    if args.test_llmapi:
        raise ConfigError("--test-llmapi: this version does not serve the llmapi model")
    if args.streaming and args.protocol == "http":
        raise ConfigError("--streaming needs -i grpc")
    if args.concurrency < 1:
        raise ConfigError(f"--concurrency is {args.concurrency} but must be 1 or more")
    check_names(args)
    prompts = _prompts(args.dataset, args.max_input_len)
    besides = _besides(args)
    url = args.url or DEFAULT_URLS[args.protocol]
    check_url(url)
    steps = (HttpSteps if args.protocol == "http" else GrpcSteps)(url, verbose=args.verbose)
    models = [args.model_name, *([_BLS] if args.test_bls else [])]
    try:
        print(f"[INFO] Start testing on {len(prompts)} prompts.")
        for prompt in prompts:
            _compare(steps, args, models, prompt, besides)
        print("[INFO] Functionality test succeed.")
        for model in models:
            _time(steps, args, model, prompts, besides)
    except ServerError as error:
        print(f"Received an error from server:\n{error}")
        return 1
    return 0


def _prompts(path: str, max_input_len: int | None) -> list[Prompt]:
    """The records whose estimated number of tokens is within the limit, if there is one."""
    found = []
    for record in read_dataset(path):
        text = record["input"] + " " + record["instruction"]
        output_len = int(len(record["output"].split(" ")) * _TOKENS_PER_WORD)
        num_tokens = len(text.split(" ")) / _TOKENS_PER_WORD
        if max_input_len is None or num_tokens <= max_input_len:
            found.append(Prompt(text, max(1, output_len)))
    if not found:
        limit = "" if max_input_len is None else f" within --max-input-len {max_input_len}"
        raise ConfigError(f"--dataset {path}: holds no prompt{limit}")
    return found


def _besides(args: argparse.Namespace) -> dict[str, Any]:
    """The values of further inputs, by the text models' names; raises ConfigError."""
    values: dict[str, Any] = {name: True for name in _FLAGS if getattr(args, name)}
    for flag in ("sampling_params", "output_config"):
        try:
            given = ast.literal_eval(getattr(args, flag))
            values |= given
        except (ValueError, SyntaxError, TypeError) as error:
            name = f"--{flag.replace('_', '-')}"
            raise ConfigError(f"{name} is no Python dictionary: {error}") from error
    unknown = sorted(set(values) - set(_INPUTS), key=str)
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no input; known are {', '.join(_INPUTS)}")
    for name, value in values.items():
        dtype = _INPUTS[name][0]
        if not _holds(dtype, value):
            raise ConfigError(
                f"{name!r} is {value!r} but must be a number that {np.dtype(dtype)} holds"
            )
    return values


def _holds(dtype: Any, value: Any) -> bool:
    """Whether a value is a number of this type; rounded for floating-point types."""
    if not isinstance(value, (int, float)):
        return False
    if isinstance(value, bool) and dtype is not np.bool_:
        return False
    try:
        with np.errstate(over="raise", invalid="raise"):
            held = np.array(value, dtype=dtype)
    except (ValueError, OverflowError, FloatingPointError):
        return False
    return held.dtype.kind == "f" or bool(held == value)


def _compare(
    steps: StepClient,
    args: argparse.Namespace,
    models: list[str],
    prompt: Prompt,
    besides: Mapping[str, Any],
) -> None:
    expected = _step_by_step(steps, args, prompt, besides)
    for model in models:
        text = _by_model(steps, model, prompt, besides, is_streaming=args.streaming)
        if text != expected:
            raise MismatchError(
                f"{model} and its steps differ\nprompt: {prompt.text!r}\n"
                f"steps: {expected!r}\n{model}: {text!r}"
            )


def _step_by_step(
    steps: StepClient, args: argparse.Namespace, prompt: Prompt, besides: Mapping[str, Any]
) -> str:
    """Preprocessing, the token model and postprocessing, called one after another."""
    (before,) = steps.ask(
        "preprocessing",
        {
            "QUERY": text_of(prompt.text),
            "REQUEST_OUTPUT_LEN": one_of(prompt.output_len, np.int32),
        },
    )
    inputs = {
        "input_ids": before["INPUT_ID"],
        "input_lengths": before["REQUEST_INPUT_LEN"],
        "request_output_len": before["REQUEST_OUTPUT_LEN"],
        "end_id": before["OUT_END_ID"],
        "pad_id": before["OUT_PAD_ID"],
        "streaming": one_of(args.streaming, np.bool_),
    }
    for name, value in besides.items():
        dtype, token_name = _INPUTS[name]
        inputs[token_name] = one_of(value, dtype)
    responses = steps.ask(args.token_model_name, inputs)
    ids = responses[-1]["output_ids"][0, 0]
    if args.streaming and besides.get("beam_width", 1) == 1:
        ids = np.concatenate([response["output_ids"][0, 0] for response in responses])
    length = np.array([[np.count_nonzero(ids >= 0)]], dtype=np.int32)
    (after,) = steps.ask(
        "postprocessing",
        {"TOKENS_BATCH": ids[None, None].astype(np.int32), "SEQUENCE_LENGTH": length},
    )
    return bytes(after["OUTPUT"].reshape(-1)[0]).decode("utf-8", errors="replace")


def _by_model(
    steps: StepClient,
    model: str,
    prompt: Prompt,
    besides: Mapping[str, Any],
    *,
    is_streaming: bool,
) -> str:
    inputs = {
        "text_input": text_of(prompt.text),
        "max_tokens": one_of(prompt.output_len, np.int32),
        "stream": one_of(is_streaming, np.bool_),
        **{name: one_of(value, _INPUTS[name][0]) for name, value in besides.items()},
    }
    texts = Texts(is_appended=is_streaming and besides.get("beam_width", 1) == 1)
    for outputs in steps.ask(model, inputs):
        texts.take(outputs)
    return texts.text(0)


def _time(
    steps: StepClient,
    args: argparse.Namespace,
    model: str,
    prompts: list[Prompt],
    besides: Mapping[str, Any],
) -> None:
    def ask(prompt: Prompt) -> str:
        return _by_model(steps, model, prompt, besides, is_streaming=args.streaming)

    print("[INFO] Warm up for benchmarking.")
    for prompt in (prompts * _WARM_UP)[:_WARM_UP]:
        ask(prompt)
    print(f"[INFO] Start benchmarking on {len(prompts)} prompts.")
    start = time.perf_counter()
    with ThreadPoolExecutor(args.concurrency) as pool:
        list(pool.map(ask, prompts))
    print(f"[INFO] Total Latency: {(time.perf_counter() - start) * 1e3:.3f} ms")
