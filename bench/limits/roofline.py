"""The upper limit of a machine: every operator of a step at its own roofline, in sequence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.config.pretrained_families import FAMILIES

_STEP_TOKENS = 8192
"""Approximate tokens of a prompt step."""

_WORKSPACE_BYTES = 3e9
"""Share of usable memory for activations, graphs and the context, beside weights and KV
cache.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The rates that one device sustains."""

    flops: float
    """Floating-point operations a second of matrix products in the weights' dtype."""

    bandwidth: float
    """Bytes a second of a device-to-device copy, read and written."""

    memory: float
    """Bytes available to weights, KV cache and workspace."""

    devices: int = 1
    """Number of devices; the other figures are their sums."""

    quantized_flops: float = 0.0
    """Operations a second of products with quantized weights; 0: ``flops``."""

    def __str__(self) -> str:
        quantized = (
            f"{self.quantized_flops / 1e12:.4g} quantized, " if self.quantized_flops else ""
        )
        return f"{self.flops / 1e12:.4g} TFLOP/s, {quantized}{self.bandwidth / 1e12:.3g} TB/s"


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and operations of an operator."""

    bytes: float
    flops: float
    is_quantized: bool = False
    """Whether the products are those with quantized weights."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of one step: equal sequences, and each sequence's position."""

    sequences: float
    new: float
    """Tokens of a sequence that the step computes."""

    past: float
    """Tokens of a sequence whose keys and values earlier steps computed."""

    @property
    def count(self) -> float:
        """New tokens of all sequences."""
        return self.sequences * self.new

    def read(self, window: int) -> float:
        """Past tokens that one layer reads; ``window`` counts the query too, 0: no window."""
        return self.sequences * (min(self.past, window - 1) if window else self.past)

    def pairs(self, window: int) -> float:
        """Queries times the keys that each query sees in one layer."""
        whole = min(self.new, max(0.0, window - self.past)) if window else self.new
        pairs = whole * (self.past + (whole + 1) / 2) + (self.new - whole) * window
        return self.sequences * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder with grouped queries, and an MLP or experts in each layer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    experts: int = 1
    """Experts of a layer, ``inner`` wide each; 1 for an MLP."""

    chosen: int = 1
    """Experts of a token."""

    shared: int = 0
    """Inner width of the shared expert; 0 without one."""

    dense_layers: int = 0
    """Layers with an MLP in place of experts."""

    dense_inner: int = 0
    mlp_matrices: int = 3
    """Matrices from the hidden size: 2 for a gated MLP or expert, else 1."""

    windows: tuple[int, ...] = ()
    """Window of each layer in tokens, 0: no window; empty if no layer has a window."""

    vectors: int = 0
    """Elements of all norms and biases."""

    is_tied: bool = False
    value_bytes: float = 2.0
    """Bytes of an element of weights and activations."""

    cached_bytes: float = 0.0
    """Bytes of an element of the KV cache; 0: ``value_bytes``."""

    quantized_bytes: float = 0.0
    """Bytes of an element of the layers' weights with its share of a scale; 0: ``value_bytes``.
    Embeddings and router are not quantized."""

    head_bytes: float = 0.0
    """Bytes of an element of the head of logits; 0: ``value_bytes``."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> ModelShape:
        """The sizes of a model; for latent attention see `latent_shape`."""
        return cls(kv_heads=config.num_key_value_heads, **common_sizes(config))

    @property
    def query_width(self) -> int:
        """Total width of the query heads."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Total width of the key heads, or of the value heads."""
        return self.kv_heads * self.head_size

    @property
    def mlp_width(self) -> int:
        """Inner values of one token, of all its experts and of the shared one."""
        return self.chosen * self.inner + self.shared

    @property
    def kv_token_bytes(self) -> float:
        """KV cache of one token over all layers."""
        return 2 * self.layers * self.kv_width * (self.cached_bytes or self.value_bytes)

    def kv_bytes(self, tokens: float) -> float:
        """KV cache of a sequence: a layer with a window keeps no more tokens than that."""
        held = [min(tokens, window or tokens) for window in self.windows]
        return self.kv_token_bytes * (sum(held) / self.layers if held else tokens)

    @property
    def expert_bytes(self) -> float:
        """The weights of all experts, which ranks may divide; 0 for a plain MLP."""
        if self.experts == 1:
            return 0.0
        mixed = self.layers - self.dense_layers
        weights = mixed * self.mlp_matrices * self.hidden * self.inner * self.experts
        return weights * self.layer_bytes

    @property
    def layer_bytes(self) -> float:
        """Bytes of an element of the layers' weights."""
        return self.quantized_bytes or self.value_bytes

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        mixed = self.layers - self.dense_layers
        mlp = (
            mixed * self.mlp_matrices * self.hidden * (self.inner * self.experts + self.shared)
        )
        dense = self.dense_layers * self.mlp_matrices * self.hidden * self.dense_inner
        products = mlp + dense + self.layers * self._attention_weights()
        others = self.vectors + mixed * router + self.vocab * self.hidden
        has_head = self.head_bytes > 0 or not self.is_tied
        head = self.vocab * self.hidden * (self.head_bytes or self.value_bytes) * has_head
        return products * self.layer_bytes + others * self.value_bytes + head

    def step_work(self, step: StepTokens, logits: float) -> list[tuple[int, Work]]:
        """(count, work) of each operator of one step that computes ``logits`` rows."""
        value, mixed, tokens = self.value_bytes, self.layers - self.dense_layers, step.count
        # Experts are drawn at random; an expert is read if some token has chosen it.
        read = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        windows = Counter(self.windows) if self.windows else {0: self.layers}
        work = [
            *((self.layers, self._product(tokens, *each)) for each in self._products()),
            *(
                (count, self._attention(tokens, step.read(window), step.pairs(window)))
                for window, count in windows.items()
            ),
            (mixed, self._mlp(tokens, self.inner, read, self.chosen)),
        ]
        if self.experts > 1:
            work.append((mixed, self._router(tokens)))
        if self.shared:
            work.append((mixed, self._mlp(tokens, self.shared, 1, 1)))
        if self.dense_layers:
            work.append((self.dense_layers, self._mlp(tokens, self.dense_inner, 1, 1)))
        moved = (self.hidden * (self.head_bytes or value) + logits * value) * self.vocab
        return [*work, (1, Work(moved, 2 * logits * self.hidden * self.vocab))]

    def _router(self, tokens: float) -> Work:
        """The experts' scores. Tokens are counted with the experts, which read the same."""
        moved = (self.hidden + tokens) * self.experts * self.value_bytes
        return Work(moved, 2 * tokens * self.hidden * self.experts)

    def _product(self, tokens: float, inputs: int, outputs: int) -> Work:
        moved = inputs * outputs * self.layer_bytes
        moved += tokens * (inputs + outputs) * self.value_bytes
        return Work(moved, 2 * tokens * inputs * outputs, self.quantized_bytes > 0)

    def _products(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the products of a layer's attention, except products of single
        heads.
        """
        queries, keys = self.query_width, self.kv_width
        return [(self.hidden, queries + 2 * keys), (queries, self.hidden)]

    def _attention_weights(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self._products())

    def _attention(self, tokens: float, read_tokens: float, pairs: float) -> Work:
        kv_moved = 2 * self.kv_width * (read_tokens + tokens)
        moved = kv_moved * (self.cached_bytes or self.value_bytes)
        moved += 2 * tokens * self.query_width * self.value_bytes
        return Work(moved, 4 * self.query_width * pairs)

    def _mlp(self, tokens: float, inner: float, read: float, chosen: float) -> Work:
        """MLPs of width ``inner``: ``read`` of them are read, and a token has ``chosen``.

        Inner values between the products can stay on the chip.
        """
        width, matrices = chosen * inner, self.mlp_matrices
        moved = matrices * read * self.hidden * inner * self.layer_bytes
        moved += 2 * tokens * (self.hidden + width) * self.value_bytes
        flops = 2 * matrices * tokens * self.hidden * width
        return Work(moved, flops, self.quantized_bytes > 0)


def common_sizes(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a `ModelShape` that do not depend on the cache's layout."""
    is_mixture = config.num_experts > 0
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "head_size": config.head_size,
        "inner": config.moe_intermediate_size if is_mixture else config.intermediate_size,
        "vocab": config.vocab_size,
        "experts": config.num_experts or 1,
        "chosen": config.num_experts_per_tok or 1,
        "shared": config.shared_expert_intermediate_size,
        "dense_layers": len(config.dense_layers) if is_mixture else 0,
        "dense_inner": config.intermediate_size,
        "mlp_matrices": _mlp_matrices(config),
        "windows": config.layer_windows,
        "vectors": _vectors(config),
        "is_tied": config.tie_word_embeddings,
        "value_bytes": 4.0 if config.dtype == "float32" else 2.0,
    }


def _mlp_matrices(config: PretrainedConfig) -> int:
    return 3 if FAMILIES[config.architecture].is_gated else 2


def _vectors(config: PretrainedConfig) -> int:
    """Elements of norms and biases: each is read, but no product multiplies by them."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    # Families without a gated MLP have norms with biases.
    norm = 1 if FAMILIES[config.architecture].is_gated else 2
    norms = 4 if config.architecture.startswith("Gemma") else config.num_input_norms
    layer = norms * norm * hidden + 2 * norm * config.head_size * config.qk_norm
    if config.attn_bias or config.qkv_bias:
        layer += (heads + 2 * config.num_key_value_heads) * config.head_size
    layer += config.attn_bias * hidden
    layer += config.kv_lora_rank + config.q_lora_rank
    mlp = (_mlp_matrices(config) - 1) * config.intermediate_size + hidden
    experts = config.num_experts * (config.topk_method == "noaux_tc")
    if config.shared_expert_intermediate_size and config.shared_expert_gate:
        experts += hidden
    mixed = (config.num_hidden_layers - len(config.dense_layers)) if config.num_experts else 0
    layers = config.num_hidden_layers * (layer + config.mlp_bias * mlp) + mixed * experts
    return layers + norm * hidden + config.lm_head_bias * config.vocab_size


def _seconds(work: list[tuple[int, Work]], at: Ceilings) -> float:
    rates = {False: at.flops, True: at.quantized_flops or at.flops}
    return sum(
        count * max(each.bytes / at.bandwidth, each.flops / rates[each.is_quantized])
        for count, each in work
    )


def decode_step_s(shape: ModelShape, at: Ceilings, batch: float, context: float) -> float:
    """Seconds of one decode step of ``batch`` sequences with ``context`` tokens each."""
    return _seconds(shape.step_work(StepTokens(batch, 1, context), batch), at)


def prompt_s(shape: ModelShape, at: Ceilings, length: int) -> float:
    """Seconds for one prompt, as its share of a step that several prompts fill."""
    prompts = max(length, _STEP_TOKENS) / length
    return _seconds(shape.step_work(StepTokens(prompts, length, 0), prompts), at) / prompts


def resident_sequences(shape: ModelShape, at: Ceilings, isl: int, osl: int, most: int) -> int:
    """Sequences that the memory holds at once, on average half way through their output."""
    room = at.memory - at.devices * _WORKSPACE_BYTES - shape.weight_bytes
    return max(1, min(most, int(room / shape.kv_bytes(isl + osl / 2))))


def output_tokens_per_s(
    shape: ModelShape, at: Ceilings, isl: int, osl: int, most: int
) -> float:
    """The limit of offline throughput: ``most`` requests at once, or as many as fit.

    Each request costs its prompt and its share of ``osl - 1`` decode steps.
    """
    batch = resident_sequences(shape, at, isl, osl, most)
    step = decode_step_s(shape, at, batch, isl + osl / 2)
    return osl / (prompt_s(shape, at, isl) + (osl - 1) * step / batch)
