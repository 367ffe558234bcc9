"""The number of responses of a token-level request, its error texts and its logits limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.server.inference.request import Tensor
from trimaran.server.models.sample_inputs import SampleInputs


@dataclass(frozen=True, slots=True)
class BackendTexts:
    """Error texts of one ``backend`` of ``config.pbtxt``."""

    not_decoupled: str
    """A streaming request to a model that is not decoupled."""

    no_stop_id: str
    """A stop request without an id."""


TENSORRT_LLM = BackendTexts(
    not_decoupled="Streaming is only supported if model is deployed using decoupled mode.",
    no_stop_id="Trying to stop a request but request ID is not provided",
)
_PYTHON = BackendTexts(
    not_decoupled="Streaming is only supported in decoupled mode.",
    no_stop_id="A request id must be provided for request cancellation",
)


def texts_of(backend: str) -> BackendTexts:
    """The texts of a backend by its name."""
    return _PYTHON if backend == "python" else TENSORRT_LLM


BATCH_NOT_DECOUPLED = (
    "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
)
MAX_SEQUENCES = 1024
"""Most sequences of a request with ``num_return_sequences`` above 1."""


def num_responses(inputs: SampleInputs) -> int:
    """Sequences of one sample that have responses of their own; beams share theirs."""
    count = inputs.scalar("num_return_sequences")
    if count is None or (count > 0 and (inputs.scalar("beam_width") or 1) > 1):
        return 1
    return int(count)


def check_equal(inputs: Mapping[str, Tensor], *names: str) -> None:
    """Check that request-wide inputs are equal in all samples.

    Raises:
        RequestError: names the input and two of its values.
    """
    for name in names:
        tensor = inputs.get(name)
        values = [] if tensor is None else tensor.data.reshape(-1).tolist()
        for value in values[1:]:
            if value != values[0]:
                raise RequestError(
                    f"{name} is {value} in one sample and {values[0]} in another of the same "
                    "request. Give all the same, or send two requests."
                )


def check_transaction(
    is_decoupled: bool,
    num_samples: int,
    num_sequences: int,
    is_streaming: bool,
    texts: BackendTexts = TENSORRT_LLM,
) -> None:
    """Check that the model may give as many responses as the request has.

    Raises:
        RequestError: several responses without decoupled policy, or more than the limit.
    """
    if num_sequences < 1:
        raise RequestError(f"num_return_sequences is {num_sequences} but must be at least 1")
    # Admission is first come, first served: later requests wait for all of these.
    if num_sequences > 1 and num_samples * num_sequences > MAX_SEQUENCES:
        raise RequestError(
            f"num_return_sequences is {num_sequences} for each of {num_samples} prompt(s) but "
            f"a request may have at most {MAX_SEQUENCES} sequences. Ask for fewer, or send "
            "several requests."
        )
    if is_decoupled:
        return
    if is_streaming:
        raise RequestError(texts.not_decoupled)
    if num_samples > 1:
        raise RequestError(BATCH_NOT_DECOUPLED)
    if num_sequences > 1:
        raise RequestError(
            f"num_return_sequences is {num_sequences}, which requires the decoupled "
            "transaction policy"
        )


MAX_ANSWER_BYTES = (2 << 30) - (16 << 20)
"""A gRPC message holds at most 2 GiB; the rest is for other outputs."""

_ITEM_BYTES = {"float32": 4, "float16": 2}


def check_logits(
    sampling: SamplingParams,
    num_prompt_tokens: int,
    vocab_size: int,
    max_seq_len: int,
    *,
    is_streaming: bool,
) -> None:
    """Check that one answer can hold the logits that a sample requests.

    Raises:
        RequestError: names the bytes, the limit and the remedy.
    """
    row_bytes = vocab_size * _ITEM_BYTES[sampling.logits_dtype]
    num_rows = 0
    if sampling.return_context_logits:
        num_rows += num_prompt_tokens
    if sampling.return_generation_logits:
        num_tokens = max(0, min(sampling.max_tokens, max_seq_len - num_prompt_tokens))
        num_rows += sampling.beam_width * (1 if is_streaming else num_tokens)
    if num_rows * row_bytes > MAX_ANSWER_BYTES:
        raise RequestError(
            f"the logits of {num_rows} tokens over {vocab_size} ids are {num_rows * row_bytes} "
            f"bytes, but an answer holds {MAX_ANSWER_BYTES}; ask for fewer tokens, stream "
            "generation logits, or set logits_datatype to TYPE_FP16"
        )
