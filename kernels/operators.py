"""The one declaration of each operator for all backends: signature, shapes, dtypes, effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from trimaran.kernels.attention import (
    AttentionMetadata,
    AttentionSpec,
    HeadNorms,
    LatentHeads,
    LatentRows,
    Rotation,
)
from trimaran.kernels.cpu.decoder import Decoder, DecoderShape, LayerWeights
from trimaran.kernels.integers import IntegerExperts, IntegerProduct, IntegerWeight
from trimaran.kernels.quantized import (
    BlockMap,
    ByteInputs,
    ByteProduct,
    ByteRows,
    ByteWeight,
    Fp8Experts,
)
from trimaran.kernels.routing import (
    ExpertCounter,
    ExpertForm,
    ExpertRouting,
    ExpertSlotTable,
    MixtureInput,
    MixtureWeights,
)


class Ops(Protocol):
    """The operators that layers are made of. Each backend implements all of them.

    Shapes: T tokens, D and E widths, B tokens of a cache block, N query heads, K key-value
    heads, H head size, P positions, R rotated dims, L latent size, V rows of an embedding
    table, X experts, C chosen experts of a token, F = E / 2.

    Activations and weights have the dtype of the model, unless a method states another one.
    Results have the dtype of ``x``. Positions and slots count tokens.
    """

    @property
    def backends(self) -> dict[str, str]:
        """Backend name by operator, for the log and the metrics."""
        ...

    @property
    def is_deterministic(self) -> bool:
        """Whether a token's result is independent of the other tokens in the batch."""
        ...

    def fuse_decoder(
        self, shape: DecoderShape, layers: Sequence[LayerWeights]
    ) -> Decoder | None:
        """These layers as one operator; None if the backend has no such operator."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` [T, E] for ``x`` [T, D] and ``weight`` [E, D]."""
        ...

    def fp8_product(self, weight: ByteWeight, inputs: ByteInputs) -> ByteProduct:
        """The product by an FP8 weight, whose inputs are quantized on the way.

        Call after the weight is loaded. The product keeps ``weight``'s tensors or copies.
        """
        ...

    def int8_product(self, weight: ByteWeight, inputs: ByteInputs) -> ByteProduct | None:
        """The product by an INT8 weight, whose inputs become INT8 on the way; None where
        `integer_product` alone takes such inputs.

        Call after the weight is loaded. The product keeps ``weight``'s tensors.
        """
        ...

    def integer_product(
        self, weight: IntegerWeight, *, has_byte_inputs: bool = False, is_gated: bool = False
    ) -> IntegerProduct:
        """The product by a weight of integers, whose inputs keep their dtype or become bytes.

        Call after the weight is loaded. The product keeps ``weight``'s tensors or copies. With
        ``is_gated`` the weight has gate rows above as many up rows.
        """
        ...

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """The first D dims of each head of ``x`` [T, N, H] times the head's matrix.

        ``weight`` is [N, E, D]. The other H - D dims of a head follow the product unchanged:
        the result is [T, N, E + H - D].
        """
        ...

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """``silu(x @ gate.T) * (x @ up.T)`` [T, E / 2]; gate rows stand above up rows."""
        ...

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T``, in float32 or in the dtype of ``x``, as the backend states."""
        ...

    def add_linear(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
        """Add ``x @ weight.T`` into ``residual`` [T, E], round once and return None.

        A backend without a fused addition leaves ``residual`` alone and returns the product,
        or float32 partial sums [parts, T, E] for `add_rms_norm`.
        """
        ...

    def linear_parts(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T`` [T, E], or float32 partial sums [parts, T, E] where these are
        faster. The caller adds the partial sums."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square normalisation of ``x`` [T, D] in float32, rounded once."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add ``x`` into ``residual`` [T, D] in place; return the `rms_norm` of the sum.

        ``x`` is [T, D], or the float32 partial sums [parts, T, D] of `add_linear`.
        """
        ...

    def norm_heads(
        self,
        heads: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        num_kv: int,
        eps: float,
    ) -> None:
        """`rms_norm` of each query and key head in place.

        ``heads`` [T, N + 2 K, H] holds the queries, then ``num_kv`` keys, then as many values.
        """
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Layer normalisation of ``x`` [T, D]."""
        ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        """Add ``x`` into ``residual`` [T, D] in place; return the `layer_norm` of the sum."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of the halves of ``gate_up`` [T, E], in float32, rounded once."""
        ...

    def gelu_and_mul(self, gate_up: Tensor, name: str) -> Tensor:
        """``act(gate) * up`` of the halves of ``gate_up`` [T, E], in float32, rounded once.

        ``name`` is a name that `activation` takes.
        """
        ...

    def activation(self, x: Tensor, name: str) -> Tensor:
        """``gelu_new`` or ``gelu_pytorch_tanh`` (tanh form), ``gelu`` (exact) or ``relu``."""
        ...

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T`` [T, X] as float32, never rounded to the dtype of the weights."""
        ...

    def choose_experts(
        self,
        logits: Tensor,
        routing: ExpertRouting,
        bias: Tensor | None = None,
        counter: ExpertCounter | None = None,
        table: ExpertSlotTable | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Each token's experts: weights [T, C] float32 and ids [T, C] int32, best first.

        An expert's score is the float32 softmax over all experts, or the sigmoid of the
        expert's logit. The chosen experts have the highest score plus ``bias`` (float32) in
        the groups that ``routing`` leaves. The weights are the scores without ``bias``,
        normalised and scaled as ``routing`` says. ``counter`` counts the chosen experts.

        With a ``table``, ids are the slots of the experts. A token draws a number from its
        first logit, and choice k takes copy ``drawn + k``, modulo the copies of the expert:
        the token's experts then lie on different ranks where the table allows.
        """
        ...

    def expert_mlp(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Tensor,
        down: Tensor,
        first_expert: int = 0,
        form: ExpertForm | None = None,
    ) -> Tensor:
        """The weighted sum [T, D] of the outputs of each token's experts, in float32, rounded
        once.

        ``gate_up`` [X, E, D] has gate rows above up rows; ``down`` is [X, D, F]. The matrices
        belong to the experts from ``first_expert`` on. A chosen expert of another rank adds
        nothing. Without a ``form`` experts compute SwiGLU and have no biases.
        """
        ...

    def mixture_parts(
        self,
        rows: MixtureInput,
        weights: MixtureWeights,
        routing: ExpertRouting,
        counter: ExpertCounter | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """`add_rms_norm`, `router_logits`, `choose_experts`, and the sum of `expert_mlp` and of
        the shared experts, as one operator. Returns float32 parts [parts, T, D] of the sum for
        the next `add_rms_norm`, and its residual [T, D], which may be a new tensor.

        A backend without such an operator for the step does nothing and returns None.
        """
        ...

    def fp8_expert_storage(self, values: Tensor, blocks: BlockMap | None) -> Tensor:
        """FP8 matrices [X, E, D] as `fp8_expert_mlp` takes them: the same, or a copy of the
        same shape.

        Raises:
            ConfigError: the device has no products of such matrices.
        """
        ...

    def fp8_expert_mlp(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Fp8Experts,
        down: Fp8Experts,
        first_expert: int = 0,
    ) -> Tensor:
        """`expert_mlp` by FP8 matrices, whose inputs are quantized on the way.

        SwiGLU is rounded to the dtype of ``x`` before it is quantized.
        """
        ...

    def integer_expert_storage(
        self, weights: Sequence[IntegerWeight], *, is_gated: bool
    ) -> IntegerExperts:
        """The matrices of a rank's experts, without minimums, as `integer_expert_mlp` takes
        them; with ``is_gated`` of gates above ups. Call after the weights are loaded."""
        ...

    def integer_expert_mlp(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: IntegerExperts,
        down: IntegerExperts,
        first_expert: int = 0,
        form: ExpertForm | None = None,
    ) -> Tensor:
        """`expert_mlp` by matrices of integers. SwiGLU is rounded to the dtype of ``x``."""
        ...

    def embed(self, ids: Tensor, table: Tensor, first_row: int | None = None) -> Tensor:
        """The rows ``ids`` [T] of ``table`` [V, D].

        With ``first_row``, the rows ``ids - first_row``, and zeros for rows outside ``table``.
        """
        ...

    def rope_and_cache(
        self,
        heads: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
        is_neox: bool = True,
        scales: Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> None:
        """Rotate query and key heads in place, then `write_kv` keys and values; with ``norms``
        `norm_heads` first.

        ``heads`` [T, N + 2 K, H] holds queries, then keys, then values. ``cos_sin`` [P, R] is
        float32: cosines in the first half of a row, sines in the second. Angle i turns dims i
        and i + R / 2 of a head, or dims 2 i and 2 i + 1 without ``is_neox``.
        """
        ...

    def rope_and_cache_latent(
        self,
        query: Tensor,
        latent: Tensor,
        key: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
        is_neox: bool = True,
    ) -> None:
        """Rotate and store for latent attention, with the angles of `rope_and_cache`.

        The last R dims of each head of ``query`` [T, N, H] and the shared ``key`` [T, R] turn
        in place. The latent vector [T, L] and the key behind it go to the token's slot of
        ``kv_cache`` [blocks, 1, B, 1, L + R].
        """
        ...

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
        scales: Tensor | None = None,
    ) -> None:
        """Store each token's key and value [T, K, H] at the token's slot of ``kv_cache``
        [blocks, 2, B, K, H].

        ``scales`` [4, K] quantizes them for a cache of one byte a number, see
        `kv_quantization.quantize_heads`.
        """
        ...

    def rotated_attention(
        self,
        heads: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        is_neox: bool = True,
        norms: HeadNorms | None = None,
    ) -> Tensor | None:
        """`rope_and_cache` at the slots of ``metadata``, then `paged_attention` of the queries
        in ``heads``, as one operator.

        A backend without such an operator for the step does nothing and returns None.
        """
        ...

    def quantized_attention(
        self,
        heads: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        inputs: ByteInputs,
        is_neox: bool = True,
        norms: HeadNorms | None = None,
    ) -> ByteRows | None:
        """`rotated_attention` whose results are the inputs of an FP8 product: each query head
        is a group of `ByteRows`.

        A backend without such an operator for the step does nothing and returns None.
        """
        ...

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor:
        """Causal attention of each sequence's last tokens over cached keys and values.

        ``query`` is [T, N, H] and ``kv_cache`` [blocks, 2, B, K, H], with any strides. The
        queries of sequence s are the last ``query_start_loc[s + 1] - query_start_loc[s]``
        tokens of s. Scores are float32. The result is [T, N, H]. With a ``latent_size`` L,
        ``kv_cache`` is [blocks, 1, B, 1, H] and the result [T, N, L]. With ``kv_scales``,
        ``kv_cache`` holds quantized numbers.
        """
        ...

    def latent_attention(
        self,
        query: Tensor,
        latent: Tensor,
        key: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        heads: LatentHeads,
    ) -> Tensor:
        """`paged_attention` of heads whose keys and values derive from cached latent vectors.

        The last R dims of a head's key are the rotated key that all heads share. A head's
        query times ``key_up`` is a query for the latent vectors. The weighted sum of the
        latent vectors times ``value_up`` is the head's result [T, N, V], V being the size of
        a value. ``latent`` and ``key`` belong to this step's tokens, for backends that expand
        keys and values.
        """
        ...

    def decoded_latents(
        self,
        rows: LatentRows,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        heads: LatentHeads,
    ) -> Tensor | None:
        """`rms_norm` of latent vectors, `rope_and_cache_latent` at ``metadata``'s slots and
        `latent_attention` [T, N, V] as one operator, for which ``rows`` are overwritten.

        A backend without such an operator for the step does nothing and returns None.
        """
        ...
