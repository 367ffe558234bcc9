"""`trimaran client speculative`: texts made with a draft model, compared with plain texts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimaran.client.prompt_files import read_dataset
from trimaran.client.request_flags import hide
from trimaran.client.step_client import GrpcSteps, Outputs, one_of, text_of
from trimaran.client.stream import ServerError, check_url
from trimaran.client.tensors import Array
from trimaran.client.text_client import Texts
from trimaran.comm.errors import ConfigError

_TOKENS_PER_WORD = 1.3
_CONTROL, _EXCLUDE = "ensemble", "exclude_input_in_output"
# Inputs of the token and the text models, with their types.
_SAMPLING = {
    "temperature": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "end_id": np.int32,
    "pad_id": np.int32,
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, and the number of tokens that follow."""

    text: str
    output_len: int


@dataclass(slots=True)
class Drafts:
    """The drafts of one prompt, or of several."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_verifies: int = 0

    def add(self, other: Drafts) -> None:
        """Add those of another prompt."""
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.num_verifies += other.num_verifies

    def __str__(self) -> str:
        rate = self.num_accepted / self.num_drafted if self.num_drafted else 0.0
        text = f"accepted {self.num_accepted} of {self.num_drafted} draft tokens ({rate:.3f})"
        if self.num_verifies:
            a_verify = 1 + self.num_accepted / self.num_verifies
            text += f", {a_verify:.2f} tokens a verify"
        return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the two speculative scripts of Triton's TensorRT-LLM backend."""
    add = parser.add_argument
    add("-v", "--verbose", action="store_true", help="print every round of drafts")
    for name, text in (
        ("target", "server of the target model"),
        ("draft", "server of the draft model (the target's)"),
        ("control", "server of the ensemble without drafts (the target's)"),
    ):
        add(f"--url-{name}", metavar="HOST:PORT", required=name == "target", help=text)
    add("-p", "--prompt", metavar="TEXT", help="one prompt instead of a data set")
    add("--dataset", metavar="FILE", help="JSON list of objects")
    add("--max-input-len", type=int, metavar="N",
        help="drop prompts that are longer, in estimated tokens (none)")  # fmt: skip
    add("-o", "--output-len", type=int, default=100, metavar="N",
        help="tokens behind --prompt (100); a data set has lengths of its own")  # fmt: skip
    add("--num-draft-tokens", type=int, default=5, metavar="N", help="of each round (5)")
    add("--execute-bls-speculative-decoding", action="store_true",
        help="the BLS model runs the rounds, instead of this client")  # fmt: skip
    add("--use-draft-logits", action="store_true", help="for the BLS model")
    add("--disable-output-comparison", action="store_true", help="texts may differ")
    _add_models(parser)
    _add_sampling(parser)
    hide(
        parser, "verbose", "beam_width", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "end_id", "pad_id", "return_context_logits", "request_id",
        "return_generation_logits", "return_draft_model_draft_logits",
        "return_target_model_accepted_token_logits", "use_draft_logits",
    )  # fmt: skip


def _add_models(parser: argparse.ArgumentParser) -> None:
    for flag, default in (
        ("preprocessor-model-name", "preprocessing"),
        ("postprocessor-model-name", "postprocessing"),
        ("draft-tensorrt-llm-model-name", "tensorrt_llm"),
        ("target-tensorrt-llm-model-name", "tensorrt_llm"),
        ("bls-speculative-tensorrt-llm-model-name", "tensorrt_llm_bls"),
    ):
        parser.add_argument(f"--{flag}", default=default, metavar="NAME", help=f"({default})")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-b", "--beam-width", type=int, default=1, metavar="N", help="must be 1")
    add("--temperature", type=float, default=1.0, metavar="T", help="divides the logits (1)")
    for name in ("repetition", "presence", "frequency"):
        add(f"--{name}-penalty", type=float, metavar="P", help="as `client text` has it")
    add("--end-id", type=int, metavar="ID", help="id that ends the output")
    add("--pad-id", type=int, metavar="ID", help="accepted; answers are padded with -1")
    add("--stop-words", nargs="+", default=[], metavar="WORD", help="texts that end it")
    add("--bad-words", nargs="+", default=[], metavar="WORD", help="texts that do not come")
    add("--request-id", default="1", metavar="ID", help="accepted, without effect")
    add("--return-context-logits", action="store_true", help="accepted, without effect")
    add("--return-generation-logits", action="store_true", help="of the BLS model too")
    add("--return-perf-metrics", action="store_true", help="of the BLS model too: acceptance")
    add("--return-draft-model-draft-logits", action="store_true",
        help="send the target model the draft model's logits")  # fmt: skip
    add("--return-target-model-accepted-token-logits", action="store_true",
        help="ask the target model for logits")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Compare all prompts. Returns 1 if a text differs, or the server refuses a prompt.

    Raises:
        ConfigError: flags contradict each other, or the data set holds no short prompt.
    """
    prompts = _prompts(args)
    if args.beam_width != 1:
        raise ConfigError(
            f"--beam-width is {args.beam_width} but beams are not drafted. Leave it out."
        )
    if args.num_draft_tokens < 1:
        raise ConfigError(
            f"--num-draft-tokens is {args.num_draft_tokens} but must be 1 or more"
        )
    try:
        num_failed = _compare_all(_Servers(args), args, prompts)
    except ServerError as error:
        print(f"Received an error from server:\n{error}")
        return 1
    print(f"failed/total: {num_failed}/{len(prompts)}")
    return int(num_failed > 0)


class _Server(GrpcSteps):
    """A server whose answers hold the prompt, whatever its models do by default."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._has_input: dict[str, bool] = {}
        """By model: older repositories do not have the input."""

    def ask(self, model: str, inputs: Mapping[str, Array]) -> list[Outputs]:
        """See `StepClient.ask`."""
        if model not in self._has_input:
            self._has_input[model] = self.has_input(model, _EXCLUDE)
        if self._has_input[model]:
            inputs = {**inputs, _EXCLUDE: one_of(False, np.bool_)}
        return super().ask(model, inputs)


class _Servers:
    """The three servers, which may be one."""

    def __init__(self, args: argparse.Namespace) -> None:
        urls = {name: getattr(args, f"url_{name}") for name in ("target", "draft", "control")}
        for name, url in urls.items():
            check_url(url or urls["target"], f"--url-{name}")
        self.target = _Server(urls["target"])
        self.draft = _Server(urls["draft"] or urls["target"])
        self.control = _Server(urls["control"] or urls["target"])


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    if (args.prompt is None) == (args.dataset is None):
        raise ConfigError("name either --dataset FILE or --prompt TEXT")
    if args.prompt is not None:
        return [Prompt(args.prompt, args.output_len)]
    found = []
    for record in read_dataset(args.dataset):
        text = record["input"] + " " + record["instruction"]
        num_tokens = int(len(text.split(" ")) * _TOKENS_PER_WORD)
        if args.max_input_len is None or num_tokens <= args.max_input_len:
            output_len = int(len(record["output"].split(" ")) * _TOKENS_PER_WORD)
            found.append(Prompt(text, output_len))
    if not found:
        limit = (
            "" if args.max_input_len is None else f" in --max-input-len {args.max_input_len}"
        )
        raise ConfigError(f"--dataset {args.dataset}: holds no prompt{limit}")
    return found


def _compare_all(servers: _Servers, args: argparse.Namespace, prompts: list[Prompt]) -> int:
    """Compare every prompt; the number of texts that differ."""
    num_failed, total = 0, Drafts()
    rounds = None if args.execute_bls_speculative_decoding else Rounds(servers, args)
    for number, prompt in enumerate(prompts, 1):
        if rounds is None:
            text, drafts = _by_bls(servers.target, args, prompt)
        else:
            text, drafts = rounds.text(prompt)
        total.add(drafts)
        if args.disable_output_comparison:
            print("Not checking output")
            num_failed += not text
        else:
            model, inputs = _CONTROL, _text_inputs(args, prompt)
            wanted, _ = _text(servers.control, model, inputs)
            num_failed += not _say(number, prompt, wanted, text)
        if args.verbose or args.prompt is not None:
            print(text)
    if total.num_drafted:
        print(total)
    return num_failed


def _say(number: int, prompt: Prompt, wanted: str, text: str) -> bool:
    """Print whether a text is the one wanted."""
    if text == wanted:
        print(f"{number}: Outputs match")
        return True
    print(f"{number}: Outputs don't match")
    print(f"Prompt:\n{prompt.text}\nOutput control:\n{wanted}\nOutput speculative:\n{text}")
    return False


def _by_bls(server: _Server, args: argparse.Namespace, prompt: Prompt) -> tuple[str, Drafts]:
    """The BLS model's text; its drafts if they were asked for."""
    inputs = {
        **_text_inputs(args, prompt),
        "num_draft_tokens": one_of(args.num_draft_tokens, np.int32),
    }
    for name in ("use_draft_logits", "return_generation_logits", "return_perf_metrics"):
        if getattr(args, name):
            inputs[name] = one_of(True, np.bool_)
    text, last = _text(server, args.bls_speculative_tensorrt_llm_model_name, inputs)
    drafted, accepted = (
        int(last[name].flat[0]) if name in last else 0
        for name in ("total_draft_tokens", "total_accepted_draft_tokens")
    )
    return text, Drafts(drafted, accepted)


def _text(
    server: _Server, model: str, inputs: Mapping[str, Array]
) -> tuple[str, dict[str, Array]]:
    texts = Texts(is_appended=False)
    for outputs in server.ask(model, inputs):
        texts.take(outputs)
    return texts.text(0), texts.last


def _text_inputs(args: argparse.Namespace, prompt: Prompt) -> dict[str, Array]:
    return {
        "text_input": text_of(prompt.text),
        "max_tokens": one_of(prompt.output_len, np.int32),
        "stream": one_of(False, np.bool_),
        **_sampling(args),
        **_words(args, "stop_words", "bad_words"),
    }


def _sampling(args: argparse.Namespace) -> dict[str, Array]:
    values = {name: getattr(args, name) for name in _SAMPLING}
    return {n: one_of(v, _SAMPLING[n]) for n, v in values.items() if v is not None}


def _words(args: argparse.Namespace, stop: str, bad: str) -> dict[str, Array]:
    lists = {stop: args.stop_words, bad: args.bad_words}
    return {
        name: np.array([[word.encode() for word in words]], dtype=np.object_)
        for name, words in lists.items()
        if words
    }


class Rounds:
    """Drafts and verifies of the models of two servers, in turn."""

    def __init__(self, servers: _Servers, args: argparse.Namespace) -> None:
        self._servers, self._args = servers, args
        self._draft, self._target = (
            args.draft_tensorrt_llm_model_name,
            args.target_tensorrt_llm_model_name,
        )

    def text(self, prompt: Prompt) -> tuple[str, Drafts]:
        """The text of a prompt with its answer."""
        (before,) = self._servers.draft.ask(
            self._args.preprocessor_model_name,
            {
                "QUERY": text_of(prompt.text),
                "REQUEST_OUTPUT_LEN": one_of(prompt.output_len, np.int32),
                **_words(self._args, "STOP_WORDS_DICT", "BAD_WORDS_DICT"),
            },
        )
        ids, drafts = self._ids(before, prompt.output_len)
        (after,) = self._servers.target.ask(
            self._args.postprocessor_model_name,
            {
                "TOKENS_BATCH": np.array([[ids]], dtype=np.int32),
                "SEQUENCE_LENGTH": one_of(len(ids), np.int32),
            },
        )
        text = bytes(after["OUTPUT"].reshape(-1)[0]).decode("utf-8", errors="replace")
        return text, drafts

    def _ids(self, before: Outputs, output_len: int) -> tuple[list[int], Drafts]:
        """The prompt's ids and the new ids, by rounds of a draft and a verify."""
        ids: list[int] = before["INPUT_ID"].reshape(-1).tolist()
        most = len(ids) + output_len
        found = Drafts()
        while True:
            draft: list[int] = []
            logits = None
            num_drafts = min(self._args.num_draft_tokens, most - len(ids) - 1)
            if num_drafts > 0:
                draft, logits = self._drafted(before, ids, num_drafts)
            new = self._verified(before, ids, draft, logits)
            if draft:
                found.num_verifies += 1
                found.num_drafted += len(draft)
                found.num_accepted += _num_equal(draft, new)
            if self._args.verbose:
                print(f"draft: {draft}, target: {new}")
            ids = ids + new
            # A draft without an answer of one more id: the target has ended.
            if len(ids) >= most or not new or new == draft or self._is_stopped(before, ids):
                return ids, found

    def _drafted(
        self, before: Outputs, ids: list[int], num_drafts: int
    ) -> tuple[list[int], Array | None]:
        asks_logits = self._args.return_draft_model_draft_logits
        inputs = self._inputs(before, ids, num_drafts)
        if asks_logits:
            inputs["return_generation_logits"] = one_of(True, np.bool_)
        outputs = self._servers.draft.ask(self._draft, inputs)
        draft = self._new_ids("draft", outputs, ids)
        logits = outputs[-1].get("generation_logits") if asks_logits else None
        return draft, None if logits is None else logits[0, 0, -len(draft) :]

    def _verified(
        self, before: Outputs, ids: list[int], draft: list[int], logits: Array | None
    ) -> list[int]:
        inputs = self._inputs(before, ids, len(draft) + 1)
        if draft:
            inputs["draft_input_ids"] = np.array([draft], dtype=np.int32)
        if draft and logits is not None:
            inputs["draft_logits"] = logits[None]
        if self._args.return_target_model_accepted_token_logits:
            inputs["return_generation_logits"] = one_of(True, np.bool_)
        return self._new_ids("target", self._servers.target.ask(self._target, inputs), ids)

    def _inputs(self, before: Outputs, ids: list[int], output_len: int) -> dict[str, Array]:
        inputs: dict[str, Any] = {
            "input_ids": np.array([ids], dtype=np.int32),
            "input_lengths": one_of(len(ids), np.int32),
            "request_output_len": one_of(output_len, np.int32),
            "end_id": before["OUT_END_ID"],
            "pad_id": before["OUT_PAD_ID"],
            "bad_words_list": before["BAD_WORDS_IDS"],
            "stop_words_list": before["STOP_WORDS_IDS"],
            "beam_width": one_of(1, np.int32),
            **_sampling(self._args),
        }
        return inputs

    def _new_ids(self, who: str, outputs: list[Outputs], ids: list[int]) -> list[int]:
        row = outputs[-1]["output_ids"][0, 0]
        found: list[int] = row[row >= 0].tolist()
        if found[: len(ids)] != ids:
            raise ConfigError(
                f"the {who} model's answer lacks the prompt, whose ids this client needs. Set "
                "exclude_input_in_output to false in its config.pbtxt."
            )
        return found[len(ids) :]

    def _is_stopped(self, before: Outputs, ids: list[int]) -> bool:
        """Whether the ids end with the end id, or with a stop word."""
        end_id = int(before["OUT_END_ID"].flat[0])
        words, ends = before["STOP_WORDS_IDS"].reshape(2, -1).tolist()
        starts = [0, *ends]
        stops = [words[starts[i] : end] for i, end in enumerate(ends) if end > 0]
        return ids[-1:] == [end_id] or any(ids[-len(stop) :] == stop for stop in stops)


def _num_equal(draft: list[int], new: list[int]) -> int:
    """Ids at the start that are equal in both."""
    equal = [a == b for a, b in zip(draft, new, strict=False)]
    return equal.index(False) if False in equal else len(equal)
