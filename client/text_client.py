"""`trimaran client text`: prompts to a text-level model, and the texts of its responses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimaran.client.prompt_files import lora
from trimaran.client.request_flags import add_adapters, add_outputs, add_sampling, hide
from trimaran.client.stream import InferStream, ServerError, add_url_arguments, open_client
from trimaran.client.tensors import Array, present, print_extra, row, tensor
from trimaran.client.token_request import flag_tensors, has_output, seed_name
from trimaran.comm.errors import ConfigError, TrimaranError
from trimaran.comm.files.input_files import parse_json


@dataclass(slots=True)
class Texts:
    """Texts by (batch, sequence, beam). Responses of a batch come in any order."""

    is_appended: bool
    """Whether a response holds only new text, rather than all of it."""
    by_place: dict[tuple[int, int, int], str] = field(default_factory=dict)
    last: dict[str, Array] = field(default_factory=dict)
    """The last value of every other output."""

    def take(self, outputs: dict[str, Array]) -> str:
        """Add one response. Returns its new text of the first sequence's first beam."""
        self.last |= {
            name: array
            for name, array in outputs.items()
            if array.size and name != "text_output"
        }
        if "text_output" not in outputs:
            return ""
        batch, sequence = _index(outputs, "batch_index"), _index(outputs, "sequence_index")
        texts = [_decoded(item) for item in outputs["text_output"].reshape(-1)]
        for beam, text in enumerate(texts):
            place = (batch, sequence, beam)
            before = self.by_place.get(place, "") if self.is_appended else ""
            self.by_place[place] = before + text
        return texts[0] if texts else ""

    def text(self, batch: int) -> str:
        """The first sequence's first beam for one prompt."""
        return self.by_place.get((batch, 0, 0), "")

    def labelled(self) -> Iterator[tuple[str, str]]:
        """Every text with its position, in the dimensions that differ."""
        places = sorted(self.by_place)
        names = ("batch", "sequence", "beam")
        differing = [axis for axis in range(3) if len({place[axis] for place in places}) > 1]
        for place in places:
            label = ", ".join(f"{names[axis]} {place[axis]}" for axis in differing)
            yield label, self.by_place[place]


def _index(outputs: dict[str, Array], name: str) -> int:
    """The index that a response carries; a missing index means 0."""
    return int(outputs[name].flat[0]) if name in outputs else 0


def _decoded(item: bytes | str) -> str:
    return item.decode("utf-8", errors="replace") if isinstance(item, bytes) else item


class MismatchError(TrimaranError):
    """The server's text is not the expected one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the text-level client of Triton's TensorRT-LLM backend."""
    add_url_arguments(parser)
    parser.add_argument(
        "-p",
        "--prompt",
        required=True,
        metavar="TEXT",
        help="a text, or a JSON list of texts",
    )
    parser.add_argument(
        "--model-name",
        default="ensemble",
        metavar="NAME",
        help="ensemble (default) or tensorrt_llm_bls",
    )
    parser.add_argument(
        "-i", "--protocol", choices=("grpc",), default="grpc", help="accepted, without effect"
    )
    parser.add_argument("-S", "--streaming", action="store_true", help="text as it comes")
    parser.add_argument(
        "-o", "--output-len", type=int, default=100, metavar="N", help="tokens (100)"
    )
    parser.add_argument("--request-id", default="", metavar="ID", help="to stop it by")
    parser.add_argument(
        "--batch-inputs", action="store_true", help="all prompts in one request"
    )
    parser.add_argument(
        "--overwrite-output-text", action="store_true",
        help="a response holds the whole text so far (BLS with accumulate_tokens)",
    )  # fmt: skip
    parser.add_argument("--expected-outputs", metavar="TEXT", help="a text, or a JSON list")
    parser.add_argument("--check-outputs", action="store_true", help="fail on other texts")
    _add_sampling(parser)
    _add_extras(parser)
    hide(
        parser, "verbose", "num_return_sequences", "beam_width", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "end_id", "pad_id", "embedding_bias_words",
        "embedding_bias_weights", "guided_decoding_guide_type", "guided_decoding_guide",
        "return_log_probs", "return_context_logits", "return_generation_logits",
        "return_perf_metrics", "return_kv_cache_reuse_stats", "protocol", "lora_path",
        "lora_task_id", "lora_name",
        "dtype",
    )  # fmt: skip


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    add_sampling(group)
    add = group.add_argument
    add("--end-id", type=int, metavar="ID", help="id that ends the output; -1: none does")
    add("--pad-id", type=int, metavar="ID", help="accepted; answers are padded with -1")
    add(
        "--stop-words", nargs="+", default=[], metavar="WORD",
        help="texts that end the output, and stay in it",
    )  # fmt: skip
    add(
        "--bad-words", nargs="+", default=[], metavar="WORD", help="texts that do not come"
    )  # fmt: skip
    add(
        "--embedding-bias-words", nargs="+", default=[], metavar="WORD",
        help="texts whose ids' logits are raised",
    )  # fmt: skip
    add(
        "--embedding-bias-weights", nargs="+", type=float, default=[], metavar="W",
        help="by so much each",
    )  # fmt: skip
    add(
        "--guided-decoding-guide-type", metavar="TYPE",
        help="json, json_schema, regex, ebnf_grammar, choice or structural_tag",
    )  # fmt: skip
    add("--guided-decoding-guide", metavar="TEXT", help="what the output follows")


def _add_extras(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("outputs and adapters")
    add_outputs(group)
    add_adapters(group)


def run(args: argparse.Namespace) -> int:
    """Send the prompts and print the texts. Returns 0 if all went as the flags expect."""
    prompts = _texts(args.prompt)
    expected = _texts(args.expected_outputs) if args.expected_outputs is not None else None
    if args.check_outputs and (expected is None or len(expected) != len(prompts)):
        raise ConfigError(
            f"--check-outputs needs --expected-outputs with one text a prompt: "
            f"{len(prompts)} prompts, {len(expected or [])} texts"
        )
    if expected is not None and not args.check_outputs:
        raise ConfigError("--expected-outputs has no effect without --check-outputs")
    if len(args.embedding_bias_words) != len(args.embedding_bias_weights):
        raise ConfigError(
            f"--embedding-bias-words has {len(args.embedding_bias_words)} words but "
            f"--embedding-bias-weights has {len(args.embedding_bias_weights)} weights"
        )
    try:
        done = _all_texts(args, prompts)
    except ServerError as error:
        print(f"Received an error from server:\n{error}")
        return 1
    if args.check_outputs and expected is not None:
        _compare(done, expected)
    return 0


def _all_texts(args: argparse.Namespace, prompts: list[str]) -> list[str]:
    """Run and show every request; the first text of each prompt."""
    batches = [prompts] if args.batch_inputs else [[prompt] for prompt in prompts]
    done: list[str] = []
    with open_client(args) as client:
        if len(batches[0]) > 1 and not has_output(client, args.model_name, "batch_index"):
            # Responses of a batch come in any order.
            print(
                f"--batch-inputs: model '{args.model_name}' has no output batch_index, which "
                "says whose text a response is: each prompt is a request of its own.",
                file=sys.stderr,
            )
            batches = [[prompt] for prompt in prompts]
        seed = seed_name(client, args.model_name, args.seed)
        with InferStream(client, None, None) as stream:
            for batch in batches:
                texts = _exchange(args, stream, batch, seed)
                _show(args, texts)
                done += [texts.text(index) for index in range(len(batch))]
    return done


def _texts(argument: str) -> list[str]:
    """The texts of an argument: a JSON list, or else one text."""
    try:
        value = parse_json(argument)
    except ValueError:
        return [argument]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value
    return [value] if isinstance(value, str) else [argument]


def _exchange(
    args: argparse.Namespace, stream: InferStream, prompts: list[str], seed: str
) -> Texts:
    """Run one request to its end."""
    # With several beams or accumulated tokens a response replaces earlier text.
    is_whole = args.overwrite_output_text or args.beam_width > 1
    texts = Texts(is_appended=args.streaming and not is_whole)
    is_single = len(prompts) == 1 and (args.num_return_sequences or 1) == 1
    is_live = texts.is_appended and is_single
    stream.send(args.model_name, request_inputs(args, prompts, seed), args.request_id)
    is_final = False
    while not is_final:
        response = stream.receive()
        if response is not None:
            fresh = texts.take(response.outputs)
            is_final = response.is_final
            if is_live:
                print(fresh, end="\n" if is_final else "", flush=True)
    return texts


def request_inputs(args: argparse.Namespace, prompts: list[str], seed: str) -> list[Any]:
    """The tensors of one request; every tensor has a row for each prompt."""
    num_rows = len(prompts)

    def each(name: str, value: Any, dtype: Any) -> Any:
        return row(name, value, dtype, num_rows)

    def words(name: str, values: list[Any], dtype: Any) -> Any:
        return tensor(name, [values] * num_rows, dtype) if values else None

    return present([
        tensor("text_input", [[prompt] for prompt in prompts], str),
        each("max_tokens", args.output_len, np.int32),
        each("stream", args.streaming, bool),
        each("beam_width", args.beam_width, np.int32),
        each("temperature", args.temperature, np.float32),
        each("num_return_sequences", args.num_return_sequences, np.int32),
        each("repetition_penalty", args.repetition_penalty, np.float32),
        each("presence_penalty", args.presence_penalty, np.float32),
        each("frequency_penalty", args.frequency_penalty, np.float32),
        each("top_k", args.top_k, np.int32),
        each("top_p", args.top_p, np.float32),
        each(seed, args.seed, np.uint64),
        each("end_id", args.end_id, np.int32),
        each("pad_id", args.pad_id, np.int32),
        each("guided_decoding_guide_type", args.guided_decoding_guide_type, str),
        each("guided_decoding_guide", args.guided_decoding_guide, str),
        words("stop_words", args.stop_words, str),
        words("bad_words", args.bad_words, str),
        words("embedding_bias_words", args.embedding_bias_words, str),
        words("embedding_bias_weights", args.embedding_bias_weights, np.float32),
        *flag_tensors(args, num_rows),
        *lora(args, num_rows),
    ])  # fmt: skip


def _show(args: argparse.Namespace, texts: Texts) -> None:
    was_live = args.streaming and texts.is_appended and len(texts.by_place) == 1
    if not was_live:
        for place, text in texts.labelled():
            print(f"{place}: {text}" if place else text)
    print_extra(args, texts.last)


def _compare(texts: list[str], expected: list[str]) -> None:
    for number, (text, wanted) in enumerate(zip(texts, expected, strict=True)):
        if text != wanted:
            raise MismatchError(
                f"prompt {number}: the server's text is not the expected one\n"
                f"expected: {wanted!r}\nreceived: {text!r}"
            )
