"""The preprocessing model: text to the tensors of the token-level model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, pairwise

import numpy as np
import numpy.typing as npt

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.inference.request import InferRequest, InferResponse, Tensor
from trimaran.server.inference.tensor_bytes import NUMPY_TYPES, from_config
from trimaran.server.inference.text_limits import PromptBound
from trimaran.server.models.encoded_texts import NOTHING, EncodedTexts, Ids, WordForms
from trimaran.server.models.sample_inputs import SampleInputs, batch_size
from trimaran.server.models.sampling_inputs import check_words
from trimaran.server.models.stop_text import MANY_WORDS
from trimaran.server.models.text_limits import check_prompt_length
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.repository.model_repository import RepositoryModel
from trimaran.server.repository.signatures import adds_special_tokens, pads_with_end

PROMPTS = ("QUERY", "DECODER_QUERY")
"""The inputs whose texts may be as long as a prompt."""

_REFUSED = ("IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES")
WORDS = ("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")
"""The inputs that hold many short texts."""

_WORD_INPUTS = frozenset((*WORDS, "EMBEDDING_BIAS_WEIGHTS"))


_ANSWERED = (
    "INPUT_ID", "DECODER_INPUT_ID", "BAD_WORDS_IDS", "STOP_WORDS_IDS", "REQUEST_INPUT_LEN",
    "REQUEST_DECODER_INPUT_LEN", "REQUEST_OUTPUT_LEN", "EMBEDDING_BIAS", "OUT_END_ID",
    "OUT_PAD_ID", "OUT_PROMPT_TABLE_EXTRA_IDS",
)  # fmt: skip
"""All outputs, in the order in which Triton's TensorRT-LLM backend answers a client."""

_FEW_WORDS = 1 << 8
"""The forms of more words than these are compared in a thread."""


@dataclass(slots=True, kw_only=True)
class PromptJob(InferRequest):
    """A request of a text model in this process, with the destination of the prompt's ids."""

    max_input_len: int | None = None
    """The longest prompt of the engine; None as long as no engine was up."""

    add_special_tokens: bool | None = None
    """Whether prompts get special tokens; None: as the model is configured."""

    prompt_ids: list[Ids] | None = None
    """The ids of each sample's prompt, where the client sent ids and no text."""


class PreprocessingModel:
    """A model of the preprocessing role; always native, even with a ``model.py``."""

    is_decoupled = False
    is_ready = True

    def __init__(self, model: RepositoryModel, version: int, tokenizer: Tokenizer) -> None:
        self.name = model.name
        self.version = str(version)
        self.config = model.config
        self.tokenizer = tokenizer
        parameters = model.parameters
        add_special = parameters.get_loose_bool("add_special_tokens")
        default = adds_special_tokens(model.config)
        self.add_special_tokens = default if add_special is None else add_special
        if parameters.get_str("multimodal_model_path"):
            raise ConfigError(
                f"{model.config_path}: multimodal_model_path is set, but multimodal models "
                "are not served. Leave it unset."
            )
        self._is_batched = model.config.max_batch_size > 0
        self.pad_id = tokenizer.end_id if pads_with_end(model.config) else tokenizer.pad_id
        self._types = {t.name: from_config(t.data_type) for t in model.config.output}

    @property
    def prompt_bound(self) -> PromptBound:
        """See `PromptModel`."""
        return PromptBound(self.tokenizer.limits, PROMPTS, words=WORDS)

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Tokenize every sample; see `inference.Model`."""
        yield await self.respond(request)

    async def respond(self, request: InferRequest) -> InferResponse:
        """Tokenize every sample; see `inference.OneResponseModel`."""
        for name in _REFUSED:
            if name in request.inputs:
                raise RequestError(f"input '{name}' is set but images are not served")
        count = batch_size(request.inputs, "QUERY", self._is_batched)
        samples = [SampleInputs(request.inputs, i, self._is_batched) for i in range(count)]
        limit = request.max_input_len if isinstance(request, PromptJob) else None
        num_words = sum(
            check_words(request.inputs, name) for name in request.inputs if name in WORDS
        )
        read = partial(self._texts, samples, limit)
        texts = read() if num_words <= MANY_WORDS else await asyncio.to_thread(read)
        job = request if isinstance(request, PromptJob) else None
        outputs = await self._outputs_of(samples, texts, job)
        if "PROMPT_TABLE_EXTRA_ID" in request.inputs:
            outputs.append(self._extra_ids(samples, outputs[0].data, outputs[1].data))
        for tensor in outputs:
            self._as_declared(tensor)
        return InferResponse(
            model_name=self.name,
            model_version=self.version,
            id=request.id,
            outputs=outputs if job is not None else self._answered(outputs, request.outputs),
            is_final=True,
        )

    def _answered(self, outputs: list[Tensor], wanted: Collection[str]) -> list[Tensor]:
        """The declared outputs that a client asked for: all of them if it named none."""
        found = {output.name: output for output in outputs}
        names = [name for name in _ANSWERED if name in found and name in self._types]
        return [found[name] for name in names if not wanted or name in wanted]

    def _as_declared(self, tensor: Tensor) -> None:
        """Give an output the declared sign, and no batch dimension where the model has none."""
        if not self._is_batched:
            tensor.data = tensor.data[0]
        datatype = self._types.get(tensor.name, tensor.datatype)
        if datatype != tensor.datatype:
            tensor.data = tensor.data.astype(NUMPY_TYPES[datatype])
            tensor.datatype = datatype

    def _texts(self, samples: list[SampleInputs], max_input_len: int | None) -> list[_Texts]:
        return [self._texts_of(sample, max_input_len) for sample in samples]

    def _texts_of(self, sample: SampleInputs, max_input_len: int | None) -> _Texts:
        """The texts of a sample, none of which is too long.

        Raises:
            RequestError: names the input, the value, the limit and the remedy.
        """
        limits = self.tokenizer.limits
        for name in PROMPTS:
            prompt = sample.scalar(name)
            if prompt is not None:
                limits.check_prompt(name, len(prompt), max_input_len)
        texts = _Texts(_one_text(sample, "QUERY"), sample.texts("DECODER_QUERY")[:1])
        if not sample.has_any(_WORD_INPUTS):
            return texts
        bias_words = sample.texts("EMBEDDING_BIAS_WORDS")
        weights = sample.array("EMBEDDING_BIAS_WEIGHTS")
        num_weights = 0 if weights is None else weights.size
        if len(bias_words) != num_weights:
            raise RequestError(
                f"embedding bias: {len(bias_words)} words but {num_weights} weights; give one "
                "weight a word"
            )
        texts.bad_words = sample.texts("BAD_WORDS_DICT")
        texts.stop_words = sample.texts("STOP_WORDS_DICT")
        texts.bias_words = bias_words
        if weights is not None:
            texts.bias_weights = weights.reshape(-1)
        return texts

    async def _outputs_of(
        self,
        samples: list[SampleInputs],
        texts: list[_Texts],
        job: PromptJob | None,
    ) -> list[Tensor]:
        """Every output. For a ``job`` those that say nothing are left out: empty lists of
        words, and a decoder's prompt that the client did not send.
        """
        has_empty, max_input_len = job is None, job.max_input_len if job is not None else None
        end = -1 if self.tokenizer.end_id is None else self.tokenizer.end_id
        pad = -1 if self.pad_id is None else self.pad_id
        pads = [_or(s.scalar("PAD_ID"), pad) for s in samples]
        prompts = await self._prompts(texts, job)
        if max_input_len is not None:
            # Padding would make all prompts as long.
            check_prompt_length(max(map(len, prompts)), max_input_len)
        outputs = [
            _padded("INPUT_ID", prompts, pads),
            _column("REQUEST_INPUT_LEN", [len(ids) for ids in prompts]),
        ]
        if has_empty or any(t.decoder_prompt for t in texts):
            outputs += await self._decoder_prompts(texts, pads)
        outputs += [
            _column(
                "REQUEST_OUTPUT_LEN", [_or(s.scalar("REQUEST_OUTPUT_LEN"), 0) for s in samples]
            ),
            _column("OUT_END_ID", [_or(s.scalar("END_ID"), end) for s in samples]),
            _column("OUT_PAD_ID", pads),
        ]
        if has_empty or any(t.bad_words or t.stop_words or t.bias_words for t in texts):
            outputs += [
                await self._words("BAD_WORDS_IDS", [t.bad_words for t in texts]),
                await self._words("STOP_WORDS_IDS", [t.stop_words for t in texts]),
                await self._bias(texts),
            ]
        return outputs

    async def _prompts(self, texts: list[_Texts], job: PromptJob | None) -> list[Ids]:
        """The ids of each sample's prompt."""
        if job is not None and job.prompt_ids is not None:
            return job.prompt_ids
        add_special = None if job is None else job.add_special_tokens
        found = await self._encode(
            [[t.prompt] for t in texts],
            self.add_special_tokens if add_special is None else add_special,
        )
        return [each.ids for each in found]

    async def _decoder_prompts(self, texts: list[_Texts], pads: list[int]) -> list[Tensor]:
        decoder = await self._encode([t.decoder_prompt for t in texts], self.add_special_tokens)
        ids = [
            found.ids if len(found) else np.array([pads[i]], np.int32)
            for i, found in enumerate(decoder)
        ]
        return [
            _padded("DECODER_INPUT_ID", ids, pads),
            _column("REQUEST_DECODER_INPUT_LEN", [len(each) for each in ids]),
        ]

    async def _encode(
        self, lists: list[list[str]], add_special_tokens: bool
    ) -> list[EncodedTexts]:
        """The ids of each sample's texts."""
        texts = list(chain.from_iterable(lists))
        if not texts:
            return [NOTHING] * len(lists)
        found = await self.tokenizer.encode(texts, add_special_tokens)
        if len(lists) == 1:
            return [found]
        ends = list(accumulate(map(len, lists), initial=0))
        return [found.part(*place) for place in pairwise(ends)]

    async def _words(self, output: str, lists: list[list[str]]) -> Tensor:
        """The ids of words, without special tokens; a word without ids is omitted. A word that
        has other ids inside a text than at its begin is there with both. Words of which none
        has ids make a column of padding, as in Triton's TensorRT-LLM backend.
        """
        if not any(lists):
            return Tensor(output, "INT32", np.empty((len(lists), 2, 0), np.int32))
        forms = self.tokenizer.word_forms
        if forms is None:
            encoded = await self._encode(lists, False)
        else:
            encoded = await self._encode([forms.texts(words) for words in lists], False)
            is_short = sum(map(len, lists)) <= _FEW_WORDS
            work = partial(_all_forms, forms, encoded)
            encoded = work() if is_short else await self.tokenizer.in_thread(work)
        width = max(1, *(len(found.ids) for found in encoded))
        data = np.zeros((len(lists), 2, width), np.int32)
        data[:, 1] = -1
        for row, found in zip(data, encoded, strict=True):
            row[:, : len(found.ids)] = found.word_list()
        return Tensor(output, "INT32", data)

    async def _bias(self, texts: list[_Texts]) -> Tensor:
        if not any(t.bias_words for t in texts):
            return Tensor("EMBEDDING_BIAS", "FP32", np.empty((len(texts), 0), np.float32))
        data = np.zeros((len(texts), self.tokenizer.num_ids), dtype=np.float32)
        encoded = await self._encode([t.bias_words for t in texts], self.add_special_tokens)
        for row, each, found in zip(data, texts, encoded, strict=True):
            weights = np.repeat(each.bias_weights.astype(np.float32), found.lengths)
            np.add.at(row, found.ids, weights)
        return Tensor("EMBEDDING_BIAS", "FP32", data)

    def _extra_ids(
        self, samples: list[SampleInputs], ids: Ids, lengths: npt.NDArray[np.int32]
    ) -> Tensor:
        """The extra id of each token of a prompt table, 0 of all others."""
        extra = [_or(sample.scalar("PROMPT_TABLE_EXTRA_ID"), 0) for sample in samples]
        is_own = (np.arange(ids.shape[1]) < lengths) & (ids >= self.tokenizer.num_ids)
        data = np.where(is_own, np.array(extra, np.uint64)[:, np.newaxis], np.uint64(0))
        return Tensor("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", data)


@dataclass(slots=True)
class _Texts:
    """The texts of one sample."""

    prompt: str
    decoder_prompt: list[str]
    """One text or none."""

    bad_words: list[str] = field(default_factory=list)
    stop_words: list[str] = field(default_factory=list)
    bias_words: list[str] = field(default_factory=list)
    bias_weights: npt.NDArray[np.float64] = field(default_factory=partial(np.empty, 0))
    """One for each of the words."""


def _one_text(sample: SampleInputs, name: str) -> str:
    array = sample.array(name)
    count = 0 if array is None else array.size
    if count != 1:
        raise RequestError(f"input '{name}' must hold one text a sample, not {count}")
    return sample.texts(name)[0]


def _all_forms(forms: WordForms, lists: list[EncodedTexts]) -> list[EncodedTexts]:
    return [forms.forms(each) for each in lists]


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _column(name: str, values: list[int]) -> Tensor:
    return Tensor(name, "INT32", np.array([values], dtype=np.int32).T)


def _padded(name: str, rows: list[Ids], pads: list[int]) -> Tensor:
    if len(rows) == 1:
        return Tensor(name, "INT32", rows[0].reshape(1, -1))
    width = max(len(row) for row in rows)
    data = np.empty((len(rows), width), np.int32)
    for line, row, pad in zip(data, rows, pads, strict=True):
        line[: len(row)] = row
        line[len(row) :] = pad
    return Tensor(name, "INT32", data)
