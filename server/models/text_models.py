"""The two text models: the ensemble, wired by its config, and the BLS model."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import numpy as np

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.inference.request import InferRequest, InferResponse, Tensor
from trimaran.server.inference.text_limits import PromptBound, prompt_bound
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.models.draft_rounds import NUM_DRAFT_TOKENS
from trimaran.server.models.graph_model import GraphModel
from trimaran.server.models.sample_inputs import SampleInputs, batch_size
from trimaran.server.models.sampling_inputs import PERF_METRICS
from trimaran.server.models.text_pipeline import TextPipeline, asks_to_stop
from trimaran.server.models.text_request import TextRequest
from trimaran.server.models.text_run import (
    TOKEN_FROM_PREPROCESSING,
    PipelineOptions,
    Steps,
    TensorMaps,
)
from trimaran.server.models.transaction import check_transaction, num_responses
from trimaran.server.repository.model_repository import RepositoryModel, Role
from trimaran.server.repository.signatures import PASSED_ON

_SAME_NAMES = (
    "num_return_sequences", "exclude_input_in_output", "temperature", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "min_length", "min_tokens", "random_seed", "seed",
    "return_log_probs", "return_context_logits", "return_generation_logits",
    *PERF_METRICS, "return_finish_reason", "return_num_input_tokens",
    "return_num_output_tokens",
    "beam_width", "early_stopping", "beam_search_diversity_rate", "no_repeat_ngram_size",
    "prompt_embedding_table", "prompt_vocab_size", "lora_task_id",
    "lora_weights", "lora_config", "lora_name",
    "guided_decoding_guide_type", "guided_decoding_guide",
)  # fmt: skip
_SAME_OUTPUTS = (
    "cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "batch_index",
    "sequence_index", "finish_reason", "num_input_tokens", "num_output_tokens",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks", "arrival_time_ns",
    "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns", "acceptance_rate",
    "total_accepted_draft_tokens", "total_draft_tokens",
)  # fmt: skip
# The native pipeline needs each of these inputs to come from this output.
_NATIVE_WIRES = (
    (Role.TOKEN, "input_ids", Role.PREPROCESSING, "INPUT_ID"),
    (Role.TOKEN, "input_lengths", Role.PREPROCESSING, "REQUEST_INPUT_LEN"),
    (Role.POSTPROCESSING, "TOKENS_BATCH", Role.TOKEN, "output_ids"),
    (Role.POSTPROCESSING, "SEQUENCE_LENGTH", Role.TOKEN, "sequence_length"),
)
_LENGTH_PENALTY, _DOCUMENTED = "length_penalty", "len_penalty"
BLS_MAPS = TensorMaps(
    preprocessing={
        "QUERY": "text_input",
        "DECODER_QUERY": "decoder_text_input",
        "IMAGE_BYTES": "image_bytes_input",
        "IMAGE_URL": "image_url_input",
        "VIDEO_BYTES": "video_bytes_input",
        "REQUEST_OUTPUT_LEN": "max_tokens",
        "BAD_WORDS_DICT": "bad_words",
        "STOP_WORDS_DICT": "stop_words",
        "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
        "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
        "END_ID": "end_id",
        "PAD_ID": "pad_id",
        "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
    },
    token={
        "runtime_top_k": "top_k",
        "runtime_top_p": "top_p",
        "runtime_min_p": "min_p",
        "runtime_top_p_min": "top_p_min",
        "runtime_top_p_decay": "top_p_decay",
        "runtime_top_p_reset_ids": "top_p_reset_ids",
        "len_penalty": "length_penalty",
        "streaming": "stream",
        "stop": "stop",
        **{name: name for name in _SAME_NAMES},
    },
    token_from_preprocessing=TOKEN_FROM_PREPROCESSING,
    outputs={
        "OUTPUT": "text_output",
        **{name: name for name in _SAME_OUTPUTS},
    },
)


def ensemble_maps(model: RepositoryModel, step_names: dict[Role, str]) -> TensorMaps | None:
    """The maps of an ensemble of these three steps, connected as text in, ids, text out; None
    if they are connected otherwise. Preprocessing may be user code.
    """
    by_name = {step.model_name: step for step in model.config.ensemble_scheduling.step}
    steps = {role: by_name[name] for role, name in step_names.items()}
    if any(name == "output_log_probs" for name in steps[Role.TOKEN].input_map):
        # The repository ``gpt``: one response answers a batch, and no step streams.
        return None
    for reader, input_name, writer, output_name in _NATIVE_WIRES:
        tensor = dict(steps[reader].input_map).get(input_name)
        if tensor is None and input_name == "SEQUENCE_LENGTH":
            # Version 0.5 has none.
            continue
        if tensor is None or tensor != dict(steps[writer].output_map).get(output_name):
            return None
    pre, token = steps[Role.PREPROCESSING], steps[Role.TOKEN]
    inputs = {tensor.name for tensor in model.config.input}
    outputs = _outputs(token, steps[Role.POSTPROCESSING])
    if dict(pre.input_map).get("QUERY") not in inputs:
        return None
    if not {tensor.name for tensor in model.config.output} <= set(outputs.values()):
        return None
    written = {tensor: output for output, tensor in pre.output_map.items()}
    return TensorMaps(
        preprocessing={k: v for k, v in pre.input_map.items() if v in inputs},
        token={k: v for k, v in token.input_map.items() if v in inputs},
        token_from_preprocessing={
            k: written[v] for k, v in token.input_map.items() if v in written
        },
        outputs=outputs,
    )


def _outputs(token: Any, post: Any) -> dict[str, str]:
    """The ensemble's name of each output of the two steps (``ModelEnsembling.Step``)."""
    outputs = {**token.output_map, **post.output_map}
    written = {tensor: output for output, tensor in token.output_map.items()}
    for name, tensor in post.input_map.items():
        after = dict(post.output_map).get(f"OUT_{name}")
        if name in PASSED_ON and after is not None and tensor in written:
            outputs[written[tensor]] = after
    return outputs


def native_pipeline(model: object) -> TextPipeline | None:
    """The pipeline of a text model whose prompts no user code makes, counted or not."""
    if isinstance(model, MeasuredModel):
        model = model.plain
    if isinstance(model, (EnsembleModel, BlsModel)):
        return model.pipeline
    if isinstance(model, TextPipeline) and not model.steps.has_own_preprocessing:
        return model
    return None


class EnsembleModel:
    """An ensemble of the three roles. Decoupled if its token model is."""

    def __init__(
        self, model: RepositoryModel, version: int, steps: Steps, maps: TensorMaps
    ) -> None:
        self.name = model.name
        self.version = str(version)
        self.config = model.config
        self._token = steps.token
        options = PipelineOptions(
            name=self.name,
            version=self.version,
            config=model.config,
            is_batched=model.config.max_batch_size > 0,
            is_ensemble=True,
        )
        self._pipeline = TextPipeline(steps, maps, options)
        if steps.token.is_decoupled:
            self.config.model_transaction_policy.decoupled = True

    @property
    def is_ready(self) -> bool:
        """Whether every step could run now."""
        return self._pipeline.is_ready

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have other than one response."""
        return self._token.is_decoupled

    @property
    def prompt_bound(self) -> PromptBound | None:
        """See `PromptModel`."""
        return prompt_bound(self._pipeline)

    @property
    def pipeline(self) -> TextPipeline | None:
        """The native pipeline, which takes a `TextRequest`; None where user code makes
        prompts."""
        return native_pipeline(self._pipeline)

    def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request; see `inference.Model`."""
        return self._pipeline.infer(request)


class BlsModel:
    """The BLS role: the same pipeline, connected in code; requests run concurrently."""

    def __init__(self, model: RepositoryModel, version: int, steps: Steps | GraphModel) -> None:
        """``steps`` are native steps, or a graph that runs user code."""
        self.name = model.name
        self.version = str(version)
        self.config = model.config
        parameters = model.parameters
        if parameters.get_str("multimodal_encoders_name"):
            raise ConfigError(
                f"{model.config_path}: multimodal_encoders_name is set, but multimodal models "
                "are not served. Leave it unset."
            )
        self._is_batched = model.config.max_batch_size > 0
        self._accumulates = parameters.get_loose_bool("accumulate_tokens") or False
        options = PipelineOptions(
            name=self.name,
            version=self.version,
            config=model.config,
            is_batched=self._is_batched,
            accumulates=self._accumulates,
        )
        self._pipeline = (
            TextPipeline(steps, BLS_MAPS, options) if isinstance(steps, Steps) else steps
        )

    @property
    def is_ready(self) -> bool:
        """Whether every step could run now."""
        return self._pipeline.is_ready

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have other than one response."""
        return bool(self.config.model_transaction_policy.decoupled)

    @property
    def prompt_bound(self) -> PromptBound | None:
        """See `PromptModel`."""
        return prompt_bound(self._pipeline)

    @property
    def pipeline(self) -> TextPipeline | None:
        """The native pipeline, which takes a `TextRequest`; None where user code makes
        prompts."""
        return native_pipeline(self._pipeline)

    def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request; see `inference.Model`."""
        is_text_request = isinstance(request, TextRequest)
        if not is_text_request and not asks_to_stop(
            request, BLS_MAPS, is_batched=self._is_batched
        ):
            self._take_documented(request)
            self._check(request)
        return self._pipeline.infer(request)

    def _take_documented(self, request: InferRequest) -> None:
        """Give ``length_penalty`` the value under the name that documents have for that input.

        A generate request has the value as a parameter, because no configuration declares the
        name.

        Raises:
            RequestError: the value is no number, or both names are set.
        """
        value = request.parameters.get(_DOCUMENTED)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RequestError(f"'{_DOCUMENTED}' is {value!r} but must be a number")
        if _LENGTH_PENALTY in request.inputs:
            raise RequestError(
                f"'{_DOCUMENTED}' and '{_LENGTH_PENALTY}' are two names of one input; send one"
            )
        count = batch_size(request.inputs, "text_input", self._is_batched)
        data = np.full((count, 1) if self._is_batched else (1,), value, np.float32)
        request.inputs = {
            **request.inputs,
            _LENGTH_PENALTY: Tensor(_LENGTH_PENALTY, "FP32", data),
        }

    def _check(self, request: InferRequest) -> None:
        if "text_input" not in request.inputs:
            raise RequestError("text_input is required")
        if "image_input" in request.inputs:
            raise RequestError("input 'image_input' is set but images are not served")
        count = batch_size(request.inputs, "text_input", self._is_batched)
        samples = [SampleInputs(request.inputs, i, self._is_batched) for i in range(count)]
        for sample in samples:
            if (sample.scalar("max_tokens") or 0) <= 0:
                raise RequestError("max_tokens must be a single value > 0")
        if (samples[0].scalar(NUM_DRAFT_TOKENS) or 0) > 0:
            self._check_drafts(samples)
        first = samples[0]
        if self._accumulates and (first.scalar("beam_width") or 1) > 1:
            raise RequestError("Accumulation of tokens is only implemented for beam width = 1")
        if self._accumulates and count > 1:
            raise RequestError("Expected batch size of 1")
        check_transaction(self.is_decoupled, count, num_responses(first), first.flag("stream"))

    def _check_drafts(self, samples: list[SampleInputs]) -> None:
        """Refuse what a draft model cannot be used with; raises RequestError."""
        first = samples[0]
        if self.pipeline is None or self.pipeline.steps.draft is None:
            raise RequestError("cannot perform speculative decoding without draft model")
        if first.flag("stream"):
            raise RequestError("streaming is not supported with speculative decoding")
        if first.flag("return_context_logits"):
            raise RequestError("context logits are not supported with speculative decoding")
        if len(samples) > 1:
            raise RequestError("speculative decoding is not supported with batch size > 1")
        for name in ("beam_width", "num_return_sequences"):
            count = first.scalar(name) or 1
            if count > 1:
                raise RequestError(
                    f"{name} is {count} but must be 1 with speculative decoding, which drafts "
                    "one sequence. Leave one of the two out."
                )
        if first.array("prompt_embedding_table") is not None:
            raise RequestError(
                "prompt_embedding_table is not supported with speculative decoding: the draft "
                "model has vectors of its own. Leave one of the two out."
            )
