"""The interface of a model for the engine, the weight loader and the builder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from trimaran.kernels.kv_quantization import KV_DTYPES
from trimaran.worker.attention.backend import ForwardContext, KVCacheSpec
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.config.stages import stage_sizes
from trimaran.worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from trimaran.worker.layers.experts import Experts
from trimaran.worker.layers.linear import LayerContext, ParallelLinear
from trimaran.worker.layers.methods import AdapterState
from trimaran.worker.layers.norm import LayerNorm, RMSNorm, add_residual
from trimaran.worker.models.fused_decoder import FusedLayers, fuse_layers
from trimaran.worker.parallel.partition import partition_heads

# Shapes: T tokens of the step, D hidden size, N rows whose logits are wanted, V vocabulary.

AdapterModules = Mapping[str, tuple[str, str]]
"""See `CausalLM.adapter_modules`."""

FirstProjection = Callable[[Tensor], Tensor]
"""See `CausalLM.first_projection`."""

ATTENTION_ADAPTERS: AdapterModules = {
    "attn_qkv": ("attention.qkv_proj", "*"),
    "attn_q": ("attention.qkv_proj", "q"),
    "attn_k": ("attention.qkv_proj", "k"),
    "attn_v": ("attention.qkv_proj", "v"),
    "attn_dense": ("attention.o_proj", ""),
}
"""Adapter modules of an attention with a fused query, key and value projection."""

PLAIN_MLP_ADAPTERS: AdapterModules = {
    "mlp_h_to_4h": ("mlp.up_proj", ""),
    "mlp_4h_to_h": ("mlp.down_proj", ""),
}
"""Adapter modules of an MLP without a gate."""


@dataclass(frozen=True, slots=True)
class StageRange:
    """The layers ``first`` to ``end - 1`` of one pipeline stage."""

    first: int
    end: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        """Whether this stage computes the embeddings of token ids."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes logits."""
        return self.end == self.num_layers

    @property
    def layers(self) -> range:
        """Numbers of the stage's layers."""
        return range(self.first, self.end)

    @classmethod
    def of(
        cls, num_layers: int, pp_rank: int, pp_size: int, partition: Sequence[int] = ()
    ) -> StageRange:
        """The layers of stage ``pp_rank``; see `stage_sizes` for the split."""
        sizes = stage_sizes(num_layers, pp_size, partition)
        first = sum(sizes[:pp_rank])
        return cls(first, first + sizes[pp_rank], num_layers)


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """A matrix, or some of its outputs, of a tensor [matrices, ...] of several."""

    number: int
    """The matrix."""

    first: int = 0
    """The first output; outputs of other matrices may lie between."""

    step: int = 1

    def of(self, tensor: Tensor, is_transposed: bool) -> Tensor:
        """The outputs, which are the last dim of a matrix if it ``is_transposed``, else the
        first."""
        matrix = tensor[self.number]
        outputs = slice(self.first, None, self.step)
        return matrix[..., outputs] if is_transposed else matrix[outputs]


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The parameter that a whole tensor of a Hugging Face checkpoint fills."""

    parameter: str
    """Name in the state dict of the stage that holds it."""

    shard: str = ""
    """Part of a fused parameter: ``q``, ``gate`` and the like; ``*`` for all parts, in
    order."""

    is_transposed: bool = False
    """Whether the checkpoint holds the matrix as [in, out]."""

    slice: OutputSlice | None = None
    """Which matrix of several in one tensor fills the parameter; None: the tensor is one."""

    def of(self, tensor: Tensor) -> Tensor:
        """The whole matrix, or what belongs to it, in a checkpoint's tensor: a view."""
        return tensor if self.slice is None else self.slice.of(tensor, self.is_transposed)


class LoadsWeight(Protocol):
    """A module that copies its rank's shard of a whole tensor."""

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's shard of ``loaded``; raises `WeightShapeError`."""
        ...


class CausalLM(nn.Module):
    """One rank's part of a decoder: embedding, a range of layers, and head.

    Parameter names are those of the engine folder's shards; layers have their number in the
    whole model.
    """

    ignored_weights: tuple[str, ...] = ()
    """Suffixes of checkpoint names that hold no weights of the model; tables and masks of older
    versions are left out for every family."""

    name_prefix: str = ""
    """An optional prefix of the names of `checkpoint_weights`."""

    outer_prefix: str = ""
    """Further optional prefixes, for a decoder inside a larger model."""

    adapter_modules: ClassVar[AdapterModules] = {}
    """The modules that adapters can change, by their names in `lora.layout`: the path of a
    linear layer in a decoder layer, and a part of its output, or ``*`` for all parts in
    order."""

    embed_tokens: VocabParallelEmbedding
    norm: RMSNorm | LayerNorm
    lm_head: ParallelLMHead
    layers: nn.ModuleDict

    def __init__(
        self, config: PretrainedConfig, stage: StageRange, context: LayerContext
    ) -> None:
        super().__init__()
        self.config = config
        self.stage = stage
        self.context = context
        self.adapters = AdapterState()
        self._fused: FusedLayers | None = None
        self.cache_dtype = context.dtype
        """The dtype of keys and values in the cache."""
        self.first_layer_table: Tensor | None = None
        """[V, E] of `first_projection`, if the first layer's table is used."""
        vocabulary = (
            config.vocab_size,
            config.padded_vocab_size(context.tp.size),
            config.hidden_size,
        )
        self.make_shared()
        self._vocabulary = vocabulary
        embedding = self.make_embedding(vocabulary) if stage.is_first else None
        if embedding is not None:
            self.embed_tokens = embedding
        self.layers = nn.ModuleDict(
            {str(number): self.make_layer(number) for number in self.layer_numbers()}
        )
        # A list, because steps would spend time in the dictionary's lookups.
        self._stack: list[tuple[int, Any]] = list(enumerate(self.layers.values()))
        if stage.is_last:
            self.norm = self.make_norm()
            tied_to = embedding if config.tie_word_embeddings else None
            self.lm_head = self.make_head(vocabulary, tied_to)

    # ---- defined by each family ----------------------------------------------------------

    def make_shared(self) -> None:
        """Make modules that all layers share, such as the angles of rotary positions."""

    def make_embedding(self, vocabulary: tuple[int, int, int]) -> VocabParallelEmbedding:
        """The token embedding of (real, padded) vocabulary size and hidden size."""
        return VocabParallelEmbedding(self.context, *vocabulary)

    def add_embedding(self) -> Tensor:
        """Make the embedding in a stage that has none, for a network that drafts. Returns this
        rank's rows [rows, D], which the caller fills."""
        self.embed_tokens = self.make_embedding(self._vocabulary)
        return self.embed_tokens.weight

    def make_layer(self, number: int) -> nn.Module:
        """The decoder layer ``number`` of the whole model.

        Its ``forward(hidden, residual, positions, kv_cache, context)`` returns the output and
        the residual, not added yet and both narrowed (see `ForwardContext.narrow`).
        """
        raise NotImplementedError

    def make_norm(self) -> RMSNorm | LayerNorm:
        """The norm after the last layer."""
        raise NotImplementedError

    def make_head(
        self, vocabulary: tuple[int, int, int], tied_to: VocabParallelEmbedding | None
    ) -> ParallelLMHead:
        """The output matrix, of the embedding's sizes; or ``tied_to`` as the output matrix."""
        return ParallelLMHead(self.context, *vocabulary, tied_to=tied_to)

    def embed(
        self, token_ids_T: Tensor, positions_T: Tensor, vectors_TD: Tensor | None
    ) -> Tensor:
        """The first layer's input [T, D]; ``vectors`` are the tokens' embeddings, if known."""
        return self.embed_tokens.forward(token_ids_T) if vectors_TD is None else vectors_TD

    def first_projection(self) -> FirstProjection | None:
        """A function from token ids [T] to the first layer's query, key and value product [T,
        E].

        None if the product depends on more than token ids, or if the attention cannot take it
        as `ForwardContext.known_product`. Collective over the tensor group.
        """
        return None

    # ---- running -------------------------------------------------------------------------

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        context: ForwardContext,
        hidden_TD: Tensor | None = None,
    ) -> Tensor:
        """Run this stage. Returns hidden states [T, D], or [N, D] of the wanted tokens,
        normalised after the last layer.

        ``hidden_TD`` is the previous stage's result, and may be overwritten. In the first stage
        it holds the tokens' embeddings, or is None to compute them from ``token_ids_T``.
        """
        known_TE: Tensor | None = None
        if self.stage.is_first:
            is_by_id = hidden_TD is None and not self.adapters.is_active
            hidden_TD = self.embed(token_ids_T, positions_T, hidden_TD)
            if is_by_id and self.first_layer_table is not None:
                known_TE = self.context.ops.embed(token_ids_T, self.first_layer_table)
        assert hidden_TD is not None, "a later stage needs the previous stage's result"
        hidden: Any = hidden_TD
        residual: Tensor | None = None
        fused = self.fused
        if fused is not None:
            hidden, residual = fused.forward(hidden_TD, positions_T, context)
        else:
            for index, layer in self._stack:
                context.known_product = known_TE if index == 0 else None
                context.is_in_last_layer = index == len(context.kv_caches) - 1
                if context.taps is not None:
                    context.taps.take(index, hidden, residual)
                hidden, residual = layer.forward(
                    hidden, residual, positions_T, context.kv_caches[index], context
                )
        if self.stage.is_last:
            return self.norm.forward(hidden, residual)[0]
        return add_residual(hidden, residual)

    @contextmanager
    def one_layer_per_shape(self) -> Iterator[None]:
        """A context in which few layers run: one of each set of weight shapes, schemes of
        quantization and windows, and the last.

        The first layer of each set runs, except that layer 0 runs only if no other layer has
        its kind, because its product may be known. The last layer may run otherwise than the
        others (see `ForwardContext.narrow`).
        """
        stack = self._stack
        kinds = {_kind_of(each[1]): each for each in (stack[0], *reversed(stack[1:]))}
        last = stack[-1]
        self._stack = sorted({*kinds.values(), last}, key=lambda each: each[0])
        try:
            yield
        finally:
            self._stack = stack

    @contextmanager
    def unfused(self) -> Iterator[None]:
        """A context in which each layer's products run one by one."""
        fused, self._fused = self._fused, None
        try:
            yield
        finally:
            self._fused = fused

    def compute_logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V], whole on every rank, float32 or on a GPU the model's dtype.

        Collective over the tensor group.
        """
        logits: Tensor = self.lm_head(hidden_ND)
        return logits

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One entry a layer of this stage, in order."""
        heads = self.config.num_attention_heads, self.config.num_key_value_heads
        spec = KVCacheSpec(
            num_kv_heads=partition_heads(*heads, num_ranks=self.context.tp.size).keys.size,
            head_size=self.config.head_size,
            dtype=self.cache_dtype,
        )
        return [spec] * (self.stage.end - self.stage.first)

    def checkpoint_weights(self) -> dict[str, tuple[WeightTarget, ...]]:
        """Each weight of the whole model by its Hugging Face name, and its parameter here."""
        raise NotImplementedError

    def process_weights_after_loading(self) -> None:
        """Let every layer's quantization method finish, once all weights are loaded."""
        for module in self.modules():
            if isinstance(module, (ParallelLinear, Experts)):
                module.method.process_weights_after_loading(module)
        rotary = getattr(self, "rotary", None)
        self._fused = fuse_layers(self.config, self.context, list(self.layers.values()), rotary)

    @property
    def fused(self) -> FusedLayers | None:
        """The layers as one operator; None if there is no such operator or adapters are
        used."""
        return None if self.adapters.is_active else self._fused

    def is_unused(self, name: str) -> bool:
        """Whether a checkpoint's tensor, named without prefixes, is no weight of the model."""
        return name.endswith(self.ignored_weights)

    @property
    def vocab_size_padded(self) -> int:
        """Rows of the output matrix over all ranks, padding included."""
        return self.config.padded_vocab_size(self.context.tp.size)

    @property
    def switch_at(self) -> int:
        """Tokens from which a sequence has other angles (`RotaryEmbedding`); 0 if none do."""
        rotary = getattr(self, "rotary", None)
        return 0 if rotary is None else int(rotary.switch_at)

    @property
    def num_weight_bytes(self) -> int:
        """Memory of the weights; integers are in the storage of their products."""
        products = [getattr(module, "integer_product", None) for module in self.modules()]
        stored = [*self.parameters(), *(each for each in products if each is not None)]
        return sum(each.nbytes for each in stored)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.context.dtype

    @property
    def kv_cache_dtype(self) -> str:
        """The dtype of keys and values by its name in logs and metrics."""
        names = {dtype: name for name, dtype in KV_DTYPES.items()}
        return names.get(self.cache_dtype, str(self.cache_dtype).removeprefix("torch."))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.context.device

    def backends(self) -> dict[str, str]:
        """Backend name by operator, for the log and the metrics."""
        names = dict(self.context.ops.backends)
        names["decoder"] = "one by one" if self._fused is None else "fused"
        names["kv_cache"] = self.kv_cache_dtype
        names["first_product"] = "computed" if self.first_layer_table is None else "looked up"
        return names

    def layer_numbers(self) -> Iterator[int]:
        """Numbers of this stage's layers in the whole model."""
        return iter(range(self.stage.first, self.stage.end))


def _kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """The shapes of a layer's weights, the schemes of its quantized products, and the windows
    of its attention."""
    methods = [getattr(module, "method", None) for module in layer.modules()]
    backends = [getattr(module, "backend", None) for module in layer.modules()]
    specs = [each.spec for each in backends if each is not None]
    windows = tuple((spec.window, spec.num_sinks) for spec in specs)
    # The storage of an integer product has no shape among the parameters.
    schemes = tuple(getattr(method, "scheme", None) for method in methods)
    return (*(weight.shape for weight in layer.parameters()), *schemes, windows)
