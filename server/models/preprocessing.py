"""The preprocessing model: text to the tensors of the token-level model."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import numpy as np

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.inference.request import InferRequest, InferResponse, Tensor
from trimaran.server.models.sample_inputs import SampleInputs, batch_size
from trimaran.server.models.sampling_inputs import pack_words, refuse_many
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.repository.model_repository import RepositoryModel

_REFUSED = ("IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES")


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
        self.add_special_tokens = True if add_special is None else add_special
        if parameters.get_str("multimodal_model_path"):
            raise ConfigError(
                f"{model.config_path}: multimodal_model_path is set, but multimodal models "
                "are not served. Leave it unset."
            )
        self._is_batched = model.config.max_batch_size > 0

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Tokenize every sample; see `inference.Model`."""
        for name in _REFUSED:
            if name in request.inputs:
                raise RequestError(f"input '{name}' is set but images are not served")
        count = batch_size(request.inputs, "QUERY", self._is_batched)
        samples = [SampleInputs(request.inputs, i, self._is_batched) for i in range(count)]
        has_extra = "PROMPT_TABLE_EXTRA_ID" in request.inputs
        outputs = await self.tokenizer.run(
            lambda: self._outputs_of(samples, has_extra=has_extra), _num_bytes(request)
        )
        if not self._is_batched:
            for tensor in outputs:
                tensor.data = tensor.data[0]
        yield InferResponse(
            model_name=self.name,
            model_version=self.version,
            id=request.id,
            outputs=[o for o in outputs if not request.outputs or o.name in request.outputs],
            is_final=True,
        )

    def _outputs_of(self, samples: list[SampleInputs], *, has_extra: bool) -> list[Tensor]:
        texts = [_one_text(sample, "QUERY") for sample in samples]
        prompts = self.tokenizer.encode_each(texts, self.add_special_tokens)
        outputs = self._id_outputs(samples, prompts)
        outputs += [
            self._words("BAD_WORDS_IDS", "BAD_WORDS_DICT", samples),
            self._words("STOP_WORDS_IDS", "STOP_WORDS_DICT", samples),
            self._bias(samples),
        ]
        if has_extra:
            outputs.append(self._extra_ids(samples, prompts))
        return outputs

    def _id_outputs(
        self, samples: list[SampleInputs], prompts: list[list[int]]
    ) -> list[Tensor]:
        pad = -1 if self.tokenizer.pad_id is None else self.tokenizer.pad_id
        end = -1 if self.tokenizer.end_id is None else self.tokenizer.end_id
        ends = [_or(s.scalar("END_ID"), end) for s in samples]
        pads = [_or(s.scalar("PAD_ID"), pad) for s in samples]
        decoder = [
            self.tokenizer.encode_now(s.texts("DECODER_QUERY")[0], self.add_special_tokens)
            if s.texts("DECODER_QUERY")
            else [pads[i]]
            for i, s in enumerate(samples)
        ]
        lengths = [_or(s.scalar("REQUEST_OUTPUT_LEN"), 0) for s in samples]
        return [
            _padded("INPUT_ID", prompts, pads),
            _column("REQUEST_INPUT_LEN", [len(p) for p in prompts]),
            _padded("DECODER_INPUT_ID", decoder, pads),
            _column("REQUEST_DECODER_INPUT_LEN", [len(d) for d in decoder]),
            _column("REQUEST_OUTPUT_LEN", lengths),
            _column("OUT_END_ID", ends),
            _column("OUT_PAD_ID", pads),
        ]

    def _words(self, output: str, name: str, samples: list[SampleInputs]) -> Tensor:
        """The ids of words, without special tokens; a word without ids is omitted."""
        lists = []
        for sample in samples:
            array = sample.array(name)
            refuse_many(name, 0 if array is None else array.size, "words")
            encoded = self.tokenizer.encode_each(sample.texts(name), False)
            lists.append(pack_words([ids for ids in encoded if ids]))
        width = max(len(ids) for ids, _ in lists)
        rows = [
            [ids + [0] * (width - len(ids)), ends + [-1] * (width - len(ends))]
            for ids, ends in lists
        ]
        data = np.array(rows, dtype=np.int32).reshape(len(samples), 2, width)
        return Tensor(output, "INT32", data)

    def _bias(self, samples: list[SampleInputs]) -> Tensor:
        vectors = []
        for sample in samples:
            words = sample.texts("EMBEDDING_BIAS_WORDS")
            array = sample.array("EMBEDDING_BIAS_WEIGHTS")
            weights = [] if array is None else array.reshape(-1).tolist()
            if len(words) != len(weights):
                raise RequestError(
                    f"embedding bias: {len(words)} words but {len(weights)} weights; give one "
                    "weight a word"
                )
            vector = np.zeros(self.tokenizer.num_ids if words else 0, dtype=np.float32)
            encoded = self.tokenizer.encode_each(words, self.add_special_tokens)
            for tokens, weight in zip(encoded, weights, strict=True):
                for token in tokens:
                    vector[token] += weight
            vectors.append(vector)
        width = max(v.size for v in vectors)
        data = np.array([np.pad(v, (0, width - v.size)) for v in vectors], dtype=np.float32)
        return Tensor("EMBEDDING_BIAS", "FP32", data.reshape(len(samples), width))

    def _extra_ids(self, samples: list[SampleInputs], prompts: list[list[int]]) -> Tensor:
        width = max(len(p) for p in prompts)
        data = np.zeros((len(samples), width), dtype=np.uint64)
        for row, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
            extra = _or(sample.scalar("PROMPT_TABLE_EXTRA_ID"), 0)
            for column, token in enumerate(prompt):
                data[row, column] = extra if token >= self.tokenizer.num_ids else 0
        return Tensor("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", data)


def _num_bytes(request: InferRequest) -> int:
    """The approximate number of bytes of all texts of a request."""
    texts = (t.data for t in request.inputs.values() if t.datatype == "BYTES")
    return sum(len(text) for array in texts for text in array.flat)


def _one_text(sample: SampleInputs, name: str) -> str:
    texts = sample.texts(name)
    if len(texts) != 1:
        raise RequestError(f"input '{name}' must hold one text a sample, not {len(texts)}")
    return texts[0]


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _column(name: str, values: list[int]) -> Tensor:
    return Tensor(name, "INT32", np.array(values, dtype=np.int32).reshape(-1, 1))


def _padded(name: str, rows: list[list[int]], pads: list[int]) -> Tensor:
    width = max(len(row) for row in rows)
    padded = [row + [pad] * (width - len(row)) for row, pad in zip(rows, pads, strict=True)]
    return Tensor(name, "INT32", np.array(padded, dtype=np.int32).reshape(len(rows), width))
