"""A text request made in this process: plain values in, plain chunks of text out."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trimaran.server.inference.request import InferRequest, InferResponse, Tensor
from trimaran.server.inference.tensor_bytes import object_array
from trimaran.server.models.encoded_texts import Ids
from trimaran.server.models.stop_text import TextAnswer
from trimaran.server.models.text_run import TextRun
from trimaran.server.models.token_job import ChunkResponse

Value = bool | int | float | str | npt.NDArray[Any]

_PAIR = np.dtype([("id", np.int32), ("log_prob", np.float32)])


@dataclass(frozen=True, slots=True)
class Likeliest:
    """Ids with their log-probabilities, the likeliest first. A long answer has millions of
    these, of which each takes the bytes of a `_PAIR`."""

    pairs: bytes = b""

    def __len__(self) -> int:
        return len(self.pairs) // _PAIR.itemsize

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return cast("Iterator[tuple[int, float]]", struct.iter_unpack("=if", self.pairs))


_LOGITS = "generation_logits"
_NUM_ROWS = 16
"""Rows of logits that are read together: copies of all rows would take too much memory."""


@dataclass(slots=True, kw_only=True)
class TextRequest(InferRequest):
    """A request of an interface whose form is not the model's tensors.

    A text model counts the request like any other but answers with `TextChunk`. Stop words are
    not part of the text.
    """

    prompts: list[str] = field(default_factory=list)
    """The prompt of each sample; texts are ignored where `prompt_ids` has ids."""

    prompt_ids: list[Ids] | None = None
    add_special_tokens: bool | None = None
    """Whether prompts get special tokens; None: as the model is configured."""

    skip_special_tokens: bool | None = None
    """Whether texts lack special tokens; None: as the model is configured."""

    max_tokens: int = 16
    stop_words: tuple[str, ...] = ()
    ignores_end: bool = False
    is_streaming: bool = False
    num_sequences: int = 1
    """Sequences of each prompt."""

    num_top: int = 0
    """Likeliest ids of each position that answers tell; needs the logits in `sampling`."""

    sampling: Mapping[str, Value] = field(default_factory=dict)
    """Inputs of the token model by its names, the same for each prompt."""

    def prompt_tensors(self, text_name: str, *, is_batched: bool) -> dict[str, Tensor]:
        """The text model's input ``text_name`` with the prompts."""
        texts = [text.encode("utf-8", "surrogateescape") for text in self.prompts]
        shape = (len(texts), 1) if is_batched else (1,)
        return {text_name: Tensor(text_name, "BYTES", object_array(texts, shape))}

    def preprocessing_inputs(self, *, is_batched: bool) -> dict[str, Tensor]:
        """The inputs of the preprocessing model."""
        count = len(self.prompts)
        inputs = self.prompt_tensors("QUERY", is_batched=is_batched)
        values: dict[str, Value] = {"REQUEST_OUTPUT_LEN": self.max_tokens}
        if self.stop_words:
            values["STOP_WORDS_DICT"] = object_array(
                [word.encode("utf-8", "surrogateescape") for word in self.stop_words]
            )
        if self.ignores_end:
            values["END_ID"] = -1
        for name, value in values.items():
            inputs[name] = _tensor(name, value, count, is_batched=is_batched)
        return inputs

    def token_inputs(self, *, is_batched: bool) -> dict[str, Tensor]:
        """The token model's inputs that preprocessing does not make."""
        values: dict[str, Value] = {
            "streaming": self.is_streaming,
            "num_return_sequences": self.num_sequences,
            # The last response comes although its text may be empty.
            "return_finish_reason": True,
            **self.sampling,
        }
        count = len(self.prompts)
        return {
            name: _tensor(name, value, count, is_batched=is_batched)
            for name, value in values.items()
        }


@dataclass(slots=True, kw_only=True)
class TextChunk(InferResponse):
    """New text of one sequence: the next part in a stream, or all of it."""

    sample: int = 0
    sequence: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """The ids of the text, those of hidden stop words among them."""

    log_probs: list[float] = field(default_factory=list)
    """One for each of the ids, if asked for."""

    tops: list[Likeliest] = field(default_factory=list)
    """The likeliest ids of the first positions, whose logits were read already."""

    logits: npt.NDArray[Any] | None = None
    """[ids, vocabulary] of the other positions, if asked for."""

    finish_reason: str = ""
    """``stop``, ``length`` or ``cancelled`` with the sequence's last part; else empty."""

    num_input: int = 0
    num_output: int = 0
    """Tokens of the prompt, and of the sequence so far."""

    figures: Mapping[str, int] = field(default_factory=dict)
    """The engine's figures, with the last part, if asked for."""


@dataclass(slots=True)
class _TextRequestAnswer(TextAnswer):
    """A text whose ids since the last response are known."""

    new_ids: list[int] = field(default_factory=list)
    tops: list[Likeliest] = field(default_factory=list)

    def push(self, ids: list[int]) -> str:
        """See `TextAnswer`."""
        self.new_ids += ids
        # `super()` does not work in a class with slots that dataclass makes anew.
        return TextAnswer.push(self, ids)


class TextRequestRun(TextRun):
    """The answers of a `TextRequest`."""

    hides_stop_words = True

    @property
    def is_incremental(self) -> bool:
        """See `TextRun`. Logits are read as they come: those of a whole answer would not fit
        into memory."""
        return super().is_incremental or self._num_top > 0

    def takes_at_once(self, response: InferResponse) -> bool:
        """See `TextRun`. Logits are read in a thread."""
        return not self._num_top and TextRun.takes_at_once(self, response)

    async def take(self, response: InferResponse) -> InferResponse | None:
        """See `TextRun`."""
        taken = await TextRun.take(self, response)
        if taken is None and self._num_top:
            assert isinstance(response, ChunkResponse)
            answer = self._answer((response.sample, response.sequence))
            assert isinstance(answer, _TextRequestAnswer)
            logits = answer.progress.take_logits(_LOGITS)
            if logits is not None:
                answer.tops += await asyncio.to_thread(likeliest, logits, self._num_top)
        return taken

    @property
    def _num_top(self) -> int:
        assert isinstance(self._request, TextRequest)
        return self._request.num_top

    @property
    def _keeps_logits(self) -> bool:
        """See `TextRun`. The likeliest ids of each chunk are kept in place of its logits."""
        return not self._num_top and super()._keeps_logits

    def _skips_special_tokens(self) -> bool:
        assert isinstance(self._request, TextRequest)
        asked = self._request.skip_special_tokens
        return TextRun._skips_special_tokens(self) if asked is None else asked

    def _new_answer(self, sample: int) -> TextAnswer:
        plain = TextRun._new_answer(self, sample)
        return _TextRequestAnswer(plain.detokenizer, plain.stop, plain.progress)

    async def _last(self, answer: TextAnswer, ids: list[int]) -> str:
        assert isinstance(answer, _TextRequestAnswer)
        answer.new_ids += ids
        return await TextRun._last(self, answer, ids)

    def _response(
        self,
        key: tuple[int, int],
        answer: TextAnswer,
        texts: list[str],
        *,
        is_last: bool = False,
    ) -> InferResponse:
        assert isinstance(answer, _TextRequestAnswer)
        ids, answer.new_ids = answer.new_ids, []
        tops, answer.tops = answer.tops, []
        progress = answer.progress
        return TextChunk(
            model_name=self._options.name,
            model_version=self._options.version,
            id=self._request.id,
            is_final=self._num_open == 0,
            sample=key[0],
            sequence=key[1],
            text=texts[0],
            token_ids=ids,
            log_probs=progress.take_log_probs(),
            tops=tops,
            logits=progress.take_logits(_LOGITS),
            finish_reason=progress.finish_reason if is_last else "",
            num_input=progress.num_input,
            num_output=progress.num_output,
            figures=progress.figures if is_last else {},
        )


def likeliest(logits_TV: npt.NDArray[Any], count: int) -> list[Likeliest]:
    """The ids of highest logit of each row, with their log-probabilities. Takes time in
    proportion to the vocabulary."""
    count = min(count, logits_TV.shape[1])
    found: list[Likeliest] = []
    for start in range(0, len(logits_TV), _NUM_ROWS):
        rows = logits_TV[start : start + _NUM_ROWS].astype(np.float32, copy=False)
        highest = rows.max(axis=1, keepdims=True)
        totals = highest + np.log(np.exp(rows - highest).sum(axis=1, keepdims=True))
        columns = np.argpartition(rows, -count, axis=1)[:, -count:]
        log_probs = np.take_along_axis(rows, columns, axis=1) - totals
        order = np.argsort(-log_probs, axis=1, kind="stable")
        pairs = np.empty(order.shape, _PAIR)
        pairs["id"] = np.take_along_axis(columns, order, axis=1)
        pairs["log_prob"] = np.take_along_axis(log_probs, order, axis=1)
        found += [Likeliest(row.tobytes()) for row in pairs]
    return found


def _tensor(name: str, value: Value, count: int, *, is_batched: bool) -> Tensor:
    """A value that is the same for each of ``count`` samples."""
    if isinstance(value, np.ndarray):
        data = value.reshape(1, -1)
        datatype = "BYTES" if data.dtype == object else "FP32"
    elif isinstance(value, str):
        data, datatype = object_array([value.encode()], (1, 1)), "BYTES"
    else:
        dtype, datatype = _TYPES[type(value)]
        data = np.array([[value]], dtype)
    if not is_batched:
        return Tensor(name, datatype, data[0])
    return Tensor(name, datatype, data if count == 1 else np.repeat(data, count, axis=0))


_TYPES: Mapping[type, tuple[type[np.generic], str]] = {
    bool: (np.bool_, "BOOL"),
    int: (np.int64, "INT64"),
    float: (np.float32, "FP32"),
}
