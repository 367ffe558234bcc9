"""`trimaran client token`: one token-level request, its answer and its checks."""

from __future__ import annotations

import argparse
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from trimaran.client.prompt_files import read_ids
from trimaran.client.stream import (
    CancelledByClient,
    InferStream,
    Response,
    ServerError,
    open_client,
)
from trimaran.client.tensors import Array, print_extra
from trimaran.client.token_flags import add_arguments as add_arguments
from trimaran.client.token_request import Prompt, request_inputs, seed_name, stop_inputs
from trimaran.comm.errors import ConfigError

_MAX_STOP_MS = (1 << 31) - 1
"""Some weeks: the limit of the system's timers."""


@dataclass(slots=True)
class Answer:
    """The result of one request: ids by (sequence, beam), and the other outputs."""

    is_streaming: bool
    ids: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    last: dict[str, Array] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def take(self, response: Response) -> list[int]:
        """Add one response. Returns the ids of its first beam."""
        outputs = response.outputs
        self.names |= set(outputs)
        self.last |= {name: array for name, array in outputs.items() if array.size}
        if "output_ids" not in outputs or "sequence_length" not in outputs:
            return []
        sequence = int(outputs["sequence_index"].flat[0]) if "sequence_index" in outputs else 0
        rows = outputs["output_ids"].reshape(-1, outputs["output_ids"].shape[-1])
        lengths = outputs["sequence_length"].reshape(-1)
        fresh: list[int] = []
        for beam, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            ids = row[: int(length)].tolist()
            # With several beams every response has all ids of the beams, because beams may
            # change.
            if self.is_streaming and len(rows) == 1:
                self.ids[sequence, beam] += ids
            else:
                self.ids[sequence, beam] = ids
            fresh = fresh or ids
        return fresh


def run(args: argparse.Namespace) -> int:
    """Send the request. Returns 0 if all went as the flags expect."""
    if args.check_output and not args.output_tokens_csv:
        raise ConfigError("--check-output needs --output-tokens-csv FILE to compare with")
    if args.output_tokens_csv and not args.check_output:
        raise ConfigError("--output-tokens-csv has no effect without --check-output")
    if not 0 <= args.stop_after_ms <= _MAX_STOP_MS:
        raise ConfigError(
            f"--stop-after-ms is {args.stop_after_ms} but must be from 0 to {_MAX_STOP_MS}"
        )
    if args.stop_via_request_cancel and not args.stop_after_ms:
        raise ConfigError(
            "--stop-via-request-cancel has no effect without --stop-after-ms MS: say when"
        )
    if args.stop_after_ms and not args.request_id:
        # The server stops a request by its id.
        args.request_id = uuid.uuid4().hex
    prompt = Prompt.from_flags(args)
    answer = Answer(args.streaming)
    if prompt.vocabulary is not None:
        print("Using pad_id: ", prompt.pad_id)
        print("Using end_id: ", prompt.end_id)
    print("Input sequence: ", prompt.ids)
    with open_client(args) as client:
        try:
            _exchange(args, client, prompt, answer)
        except ServerError as error:
            print(f"Received an error from server:\n{error}")
            return 1
    beams = _generated(args, prompt, answer)
    _show(args, prompt, answer, beams)
    return _verdict(args, answer, beams)


def _exchange(args: argparse.Namespace, client: Any, prompt: Prompt, answer: Answer) -> None:
    """Run the request to its end, its stop or its cancellation."""
    inputs = request_inputs(args, prompt, seed_name(client, args.model_name, args.seed))
    compression = args.grpc_compression_algorithm
    with InferStream(client, args.stream_timeout, compression) as stream:
        stream.send(args.model_name, inputs, args.request_id, args.requested_outputs)
        num_finals = 1
        try:
            if args.stop_after_ms > 0:
                if not _receive_until_stop(args, stream, answer):
                    return
                if args.stop_via_request_cancel:
                    stream.cancel()
                else:
                    stream.send(args.model_name, stop_inputs(), args.request_id)
                    num_finals = 2
            _receive_all(args, stream, answer, num_finals)
        except CancelledByClient:
            print("Request is cancelled")


def _receive_until_stop(args: argparse.Namespace, stream: InferStream, answer: Answer) -> bool:
    """Receive until it is time to stop. False if the request ended earlier."""
    deadline = time.monotonic() + args.stop_after_ms / 1000
    while (left := deadline - time.monotonic()) > 0:
        response = stream.receive(left)
        if response is not None:
            _take(args, answer, response)
            if response.is_final:
                print("Got completed request")
                return False
    return True


def _receive_all(
    args: argparse.Namespace, stream: InferStream, answer: Answer, num_finals: int
) -> None:
    was_stopped = num_finals == 2
    while num_finals:
        response = stream.receive()
        if response is None:
            continue
        _take(args, answer, response)
        num_finals -= response.is_final
        if was_stopped and response.is_final and not response.outputs:
            # The stop request and the request that it ended both end without outputs.
            print("Got cancellation response from server")
            was_stopped = False
        elif response.is_final and not num_finals:
            print("Got completed request")


def _take(args: argparse.Namespace, answer: Answer, response: Response) -> None:
    fresh = answer.take(response)
    if args.streaming and fresh:
        print(fresh, flush=True)


def _generated(
    args: argparse.Namespace, prompt: Prompt, answer: Answer
) -> dict[tuple[int, int], list[int]]:
    """The generated ids of each (sequence, beam), without the prompt's echo."""
    if args.streaming or args.exclude_input_in_output:
        return dict(answer.ids)
    return {key: ids[len(prompt.ids) :] for key, ids in answer.ids.items()}


def _show(
    args: argparse.Namespace,
    prompt: Prompt,
    answer: Answer,
    beams: dict[tuple[int, int], list[int]],
) -> None:
    has_sequences = any(sequence for sequence, _ in beams)
    before = [] if args.exclude_input_in_output else prompt.ids
    if prompt.vocabulary is not None:
        text = prompt.vocabulary.decode(prompt.ids) if args.input_tokens_csv else args.text
        print(f"Input: {text}")
    for (sequence, beam), ids in sorted(beams.items()):
        which = f"sequence {sequence} beam {beam}" if has_sequences else f"beam {beam}"
        if prompt.vocabulary is not None:
            print(f"Output {which}: {prompt.vocabulary.decode(ids)}")
        print("Output sequence: ", before + ids)
    print("output_ids = ", [before + ids for _, ids in sorted(beams.items())])
    print_extra(args, answer.last)


def _verdict(
    args: argparse.Namespace, answer: Answer, beams: dict[tuple[int, int], list[int]]
) -> int:
    problems = []
    if args.stop_after_ms > 0:
        longest = max((len(ids) for ids in beams.values()), default=0)
        if longest >= args.request_output_len:
            problems.append(
                f"{longest} tokens came although the request for {args.request_output_len} "
                f"was stopped after {args.stop_after_ms} ms"
            )
    if args.requested_outputs and answer.names != set(args.requested_outputs):
        problems.append(
            f"outputs {sorted(answer.names)} came, but "
            f"{sorted(args.requested_outputs)} were requested"
        )
    if args.check_output:
        problems += _mismatch(args, next(iter(beams.values()), []))
        print("FAIL!" if problems else "PASS!")
    for problem in problems:
        print(f"Check failed: {problem}")
    return 1 if problems else 0


def _mismatch(args: argparse.Namespace, ids: list[int]) -> list[str]:
    expected = read_ids("--output-tokens-csv", args.output_tokens_csv)
    num_equal = sum(a == b for a, b in zip(ids, expected, strict=False))
    rate = num_equal / max(len(expected), len(ids))
    print(f"Output token matching rate: {rate}")
    if rate >= args.correctness_threshold:
        return []
    return [
        f"matching rate {rate} is below --correctness-threshold {args.correctness_threshold}"
    ]
