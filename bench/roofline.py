"""What a machine could do at most: every operator of a step at its own roofline, in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_STEP_TOKENS = 8192
"""Prompts are computed in steps of about this size."""

_WORKSPACE_BYTES = 3e9
"""Of a device's usable memory, beside weights and KV cache: activations, graphs, the
context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What one device sustains."""

    flops: float
    """Floating-point operations a second of matrix products in the weights' dtype."""

    bandwidth: float
    """Bytes a second of a device-to-device copy, read and written."""

    memory: float
    """Bytes that weights, KV cache and workspace may take."""

    devices: int = 1
    """How many work together: the other figures are their sums."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an operator moves and computes."""

    bytes: float
    flops: float


def product(rows: float, inputs: int, outputs: int, value: float, weights: float) -> Work:
    """A product of ``rows`` by a matrix; ``weights`` is 1 where the matrix is read."""
    moved = weights * inputs * outputs + rows * (inputs + outputs)
    return Work(moved * value, 2 * rows * inputs * outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder with a gated MLP and grouped queries."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    experts: int = 1
    """Experts of a layer, ``inner`` wide each; 1 for a plain MLP."""

    chosen: int = 1
    """Experts of a token."""

    is_tied: bool = False
    value_bytes: float = 2.0
    """Of weights, activations and KV cache."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a Hugging Face configuration; of latent attention see `latent_shape`."""
        heads = config["num_attention_heads"]
        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            inner=config["intermediate_size"],
            vocab=config["vocab_size"],
            experts=config.get("num_local_experts", 1),
            chosen=config.get("num_experts_per_tok", 1),
            is_tied=bool(config.get("tie_word_embeddings")),
            value_bytes=4.0 if dtype == "float32" else 2.0,
        )

    @property
    def query_width(self) -> int:
        """Query heads side by side."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Key heads, or value heads, side by side."""
        return self.kv_heads * self.head_size

    @property
    def mlp_width(self) -> int:
        """Inner values of one token, of all its experts."""
        return self.chosen * self.inner

    @property
    def kv_token_bytes(self) -> float:
        """KV cache of one token over all layers."""
        return 2 * self.layers * self.kv_width * self.value_bytes

    @property
    def expert_bytes(self) -> float:
        """The weights of all experts, which ranks may share out; 0 for a plain MLP."""
        if self.experts == 1:
            return 0.0
        return self.layers * 3 * self.hidden * self.inner * self.experts * self.value_bytes

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        attention = self.hidden * 2 * (self.query_width + self.kv_width)
        router = self.hidden * self.experts if self.experts > 1 else 0
        mlp = 3 * self.hidden * self.inner * self.experts + router
        layer = attention + mlp + 2 * self.hidden
        matrices = 1 if self.is_tied else 2
        whole = self.layers * layer + self.hidden + matrices * self.vocab * self.hidden
        return whole * self.value_bytes

    def step_work(
        self, tokens: float, read_tokens: float, pairs: float, logits: float
    ) -> list[tuple[int, Work]]:
        """(how often, work) of each operator of one step over ``tokens`` new tokens.

        ``read_tokens`` are tokens whose KV is read, ``pairs`` queries times keys.
        """
        value, hidden = self.value_bytes, self.hidden
        qkv = self.query_width + 2 * self.kv_width
        kv_moved = 2 * self.kv_width * (read_tokens + tokens)
        attention = Work(
            (kv_moved + 2 * tokens * self.query_width) * value, 4 * self.query_width * pairs
        )
        # Between its two products the MLP's inner values need not leave the chip twice.
        # Of experts drawn at random, those that some token has are read.
        read = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        width = self.chosen * self.inner
        mlp = Work(
            (3 * read * hidden * self.inner + 2 * tokens * (hidden + width)) * value,
            6 * tokens * hidden * width,
        )
        return [
            (self.layers, product(tokens, hidden, qkv, value, 1)),
            (self.layers, attention),
            (self.layers, product(tokens, self.query_width, hidden, value, 1)),
            (self.layers, mlp),
            (1, Work((hidden + logits) * self.vocab * value, 2 * logits * hidden * self.vocab)),
        ]


def _seconds(work: list[tuple[int, Work]], at: Ceilings) -> float:
    return sum(
        count * max(each.bytes / at.bandwidth, each.flops / at.flops) for count, each in work
    )


def decode_step_s(shape: ModelShape, at: Ceilings, batch: float, context: float) -> float:
    """Seconds of one decode step of ``batch`` sequences with ``context`` tokens each."""
    work = shape.step_work(batch, batch * context, batch * (context + 1), batch)
    return _seconds(work, at)


def prompt_s(shape: ModelShape, at: Ceilings, length: int) -> float:
    """Seconds for one prompt, its share of a step that several prompts fill."""
    tokens = max(length, _STEP_TOKENS)
    pairs = tokens * (length / 2 + 0.5)
    return _seconds(shape.step_work(tokens, 0, pairs, tokens / length), at) * length / tokens


def resident_sequences(shape: ModelShape, at: Ceilings, isl: int, osl: int, most: int) -> int:
    """Sequences that the memory holds at once, on average half way through their output."""
    room = at.memory - at.devices * _WORKSPACE_BYTES - shape.weight_bytes
    return max(1, min(most, int(room / (shape.kv_token_bytes * (isl + osl / 2)))))


def output_tokens_per_s(
    shape: ModelShape, at: Ceilings, isl: int, osl: int, most: int
) -> float:
    """The limit of offline throughput: ``most`` requests at once, or as many as fit.

    Each request costs its prompt and its share of ``osl - 1`` decode steps.
    """
    batch = resident_sequences(shape, at, isl, osl, most)
    step = decode_step_s(shape, at, batch, isl + osl / 2)
    return osl / (prompt_s(shape, at, isl) + (osl - 1) * step / batch)
