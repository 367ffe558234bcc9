"""The operators on a CPU with AVX-512 or AVX2, by C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.kernels import reference
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec, HeadNorms, LatentHeads
from trimaran.kernels.build import cpu_features, has_avx512
from trimaran.kernels.cpu import integer_experts
from trimaran.kernels.cpu.decoder import CpuDecoder, Decoder, DecoderShape, LayerWeights
from trimaran.kernels.cpu.fp8 import CpuFp8Product, pack
from trimaran.kernels.cpu.integers import CpuIntegerProduct
from trimaran.kernels.cpu.kernel import DTYPE_CODES, Kernel
from trimaran.kernels.integers import IntegerExperts, IntegerProduct, IntegerWeight
from trimaran.kernels.quantized import (
    BlockMap,
    ByteInputs,
    ByteProduct,
    ByteWeight,
    Fp8Experts,
)
from trimaran.kernels.routing import (
    ExpertCounter,
    ExpertForm,
    ExpertRouting,
    ExpertSlotTable,
)

# Shapes: T tokens, D and E widths, N query heads, K key-value heads, H head size.

_GELU_NAMES = ("gelu_new", "gelu_pytorch_tanh")
_CACHE_CODES = {torch.float8_e4m3fn: 1, torch.int8: 2}
"""The kernels' numbers of caches of one byte a number; 0: a cache in the queries' dtype."""


class CpuOps:
    """`Ops` for one dtype; methods without a docstring do exactly what `Ops` declares.

    A token's result is independent of the other tokens in the batch. Tensors are on the CPU and
    contiguous in their last dim. All instances share one thread pool, and only one thread at a
    time may call the operators.
    """

    is_deterministic = True

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._library = library
        self._dtype = dtype
        self._code = DTYPE_CODES[dtype]
        self._linear = Kernel(library, "trimaran_linear", "10q")
        self._integers = Kernel(library, "trimaran_integer_linear", "8q")
        self._norm = Kernel(library, "trimaran_norm", "10qd")
        self._activation = Kernel(library, "trimaran_activation", "6q")
        self._clamped = Kernel(library, "trimaran_clamped_swiglu", "5q2d")
        self._rotate = Kernel(library, "trimaran_rotate", "8q")
        self._write_kv = Kernel(library, "trimaran_write_kv", "11q")
        self._attention = Kernel(library, "trimaran_attention", "24q2d")
        library.trimaran_has_amx.restype = ctypes.c_long
        library.trimaran_has_integer_tiles.restype = ctypes.c_long
        library.trimaran_set_num_threads.argtypes = [ctypes.c_long]
        library.trimaran_set_num_threads(num_threads)

    @property
    def backends(self) -> dict[str, str]:
        """The instruction set that serves each operator."""
        usual = "avx512" if has_avx512() else "avx2"
        names = dict.fromkeys(reference.OPERATORS, usual)
        has_products = has_avx512() and "avx512_bf16" in cpu_features()
        if self._dtype is torch.bfloat16 and has_products:
            names["paged_attention"] = "avx512_bf16"
            product = "amx_bf16" if self._library.trimaran_has_amx() else "avx512_bf16"
            names.update(
                linear=product,
                fp8_product=product,
                head_linear=product,
                add_linear=product,
                gated_linear=product,
                logits=product,
                router_logits=product,
                expert_mlp=product,
                fp8_expert_mlp=product,
            )
        has_dots = has_avx512() and "avx512_vnni" in cpu_features()
        integers = "avx512_vnni" if has_dots else usual
        if self._library.trimaran_has_integer_tiles():
            integers = f"{integers} (few rows), amx_int8 (others)"
        names.update(integer_product=integers, integer_expert_mlp=integers)
        names["activation"] = f"{usual} (gelu_new), torch (others)"
        names.update(gelu_and_mul="torch", embed="torch", choose_experts="torch")
        names["rope_and_cache_latent"] = "torch"
        return names

    def fuse_decoder(
        self, shape: DecoderShape, layers: Sequence[LayerWeights]
    ) -> Decoder | None:
        """None for an activation that torch computes."""
        if shape.activation not in ("silu", *_GELU_NAMES):
            return None
        return CpuDecoder(self._library, self._dtype, shape, layers)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Sums are float32, rounded once."""
        return self._multiply(x, weight, bias, self._dtype)

    def fp8_product(self, weight: ByteWeight, inputs: ByteInputs) -> ByteProduct:
        packed = weight._replace(values=pack(weight.values, weight.blocks))
        return CpuFp8Product(self._linear, packed, inputs)

    def fp8_expert_storage(self, values: Tensor, blocks: BlockMap | None) -> Tensor:
        return torch.stack([pack(matrix, blocks) for matrix in values])

    def fp8_expert_mlp(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Fp8Experts,
        down: Fp8Experts,
        first_expert: int = 0,
    ) -> Tensor:
        """One pair of products for each expert that a token has chosen."""

        def run(expert: int, rows: Tensor) -> Tensor:
            inner = self.silu_and_mul(CpuFp8Product(self._linear, *gate_up.of(expert))(rows))
            return CpuFp8Product(self._linear, *down.of(expert))(inner)

        experts = range(first_expert, first_expert + len(gate_up.values))
        return reference.sum_experts(x, weights, ids, experts, run)

    def int8_product(self, weight: ByteWeight, inputs: ByteInputs) -> ByteProduct | None:
        return None

    def integer_product(
        self, weight: IntegerWeight, *, has_byte_inputs: bool = False, is_gated: bool = False
    ) -> IntegerProduct:
        return CpuIntegerProduct(self._integers, weight, has_byte_inputs=has_byte_inputs)

    def integer_expert_storage(
        self, weights: Sequence[IntegerWeight], *, is_gated: bool
    ) -> IntegerExperts:
        return integer_experts.expert_storage(weights)

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
        """One pair of products for each expert that a token has chosen."""

        def run(expert: int, rows: Tensor) -> Tensor:
            first_bias = None if form is None else form.gate_up_bias[expert]
            second_bias = None if form is None else form.down_bias[expert]
            both = integer_experts.multiply_row(
                self._integers, gate_up.values[expert], rows, first_bias
            )
            inner = self._activated(both, form)
            return integer_experts.multiply_row(
                self._integers, down.values[expert], inner, second_bias
            )

        experts = range(first_expert, first_expert + len(gate_up.values))
        return reference.sum_experts(x, weights, ids, experts, run)

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """One product for each head."""
        width, outputs = weight.shape[2], weight.shape[1]
        tokens, heads, head_size = x.shape
        result = torch.empty((tokens, heads, outputs + head_size - width), dtype=self._dtype)
        result[..., outputs:] = x[..., width:]
        for head in range(heads):
            result[:, head, :outputs] = self.linear(x[:, head, :width], weight[head])
        return result

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.silu_and_mul(self.linear(x, weight))

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product as float32, never rounded to the dtype of the weights."""
        return self._multiply(x, weight, None, torch.float32)

    def _multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        rows, width = x.shape
        outputs = weight.shape[0]
        y = torch.empty((rows, outputs), dtype=dtype)
        self._linear(
            self._code, dtype is torch.float32, x.data_ptr(), weight.data_ptr(),
            0 if bias is None else bias.data_ptr(), y.data_ptr(),
            rows, width, outputs, x.stride(0),
        )  # fmt: skip
        return y

    def add_linear(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
        """The product: the next norm adds it to the residual."""
        return self.linear(x, weight)

    def linear_parts(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product as one part."""
        return self.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normalise(x, None, weight, None, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normalise(x, residual, weight, None, eps)

    def norm_heads(
        self,
        heads: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        num_kv: int,
        eps: float,
    ) -> None:
        query, key = heads[:, : -2 * num_kv], heads[:, -2 * num_kv : -num_kv]
        for part, weight in ((query, query_weight), (key, key_weight)):
            rows = part.reshape(-1, part.shape[2])
            part.copy_(self.rms_norm(rows, weight, eps).view(part.shape))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Sums are float32."""
        return self._normalise(x, None, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        return self._normalise(x, residual, weight, bias, eps)

    def _normalise(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        rows, width = x.shape
        y = torch.empty((rows, width), dtype=self._dtype)
        residual_at, residual_stride = 0, 0
        if residual is not None:
            residual_at, residual_stride = residual.data_ptr(), residual.stride(0)
        self._norm(
            self._code, x.data_ptr(), weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            residual_at, y.data_ptr(),
            rows, width, x.stride(0), residual_stride, eps,
        )  # fmt: skip
        return y

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """``gate_up`` is contiguous."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty((rows, width), dtype=self._dtype)
        self._activation(self._code, 0, gate_up.data_ptr(), y.data_ptr(), rows, width)
        return y

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """See `ExpertForm`; ``gate_up`` is contiguous."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty((rows, width), dtype=self._dtype)
        self._clamped(self._code, gate_up.data_ptr(), y.data_ptr(), rows, width, alpha, limit)
        return y

    def _activated(self, gate_up: Tensor, form: ExpertForm | None) -> Tensor:
        if form is None:
            return self.silu_and_mul(gate_up)
        return self.clamped_swiglu(gate_up, form.alpha, form.limit)

    def gelu_and_mul(self, gate_up: Tensor, name: str) -> Tensor:
        """Torch computes the result."""
        return reference.gelu_and_mul(gate_up, name)

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.logits(x, weight)

    def choose_experts(
        self,
        logits: Tensor,
        routing: ExpertRouting,
        bias: Tensor | None = None,
        counter: ExpertCounter | None = None,
        table: ExpertSlotTable | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Torch computes the result."""
        return reference.choose_experts(logits, routing, bias, counter, table)

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
        """One pair of products for each expert that a token has chosen."""
        products = (self.gated_linear, self.linear, self.clamped_swiglu)
        return reference.expert_mlp(
            x, weights, ids, gate_up, down, first_expert, form, products
        )

    def embed(self, ids: Tensor, table: Tensor, first_row: int | None = None) -> Tensor:
        """Torch gathers the rows."""
        return reference.embed(ids, table, first_row)

    def activation(self, x: Tensor, name: str) -> Tensor:
        """The tanh form runs here, other activations in torch; ``x`` is contiguous."""
        if name not in _GELU_NAMES:
            return reference.activation(x, name)
        y = torch.empty_like(x)
        self._activation(self._code, 1, x.data_ptr(), y.data_ptr(), x.shape[0], x.shape[1])
        return y

    def rotate(self, x: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        """Rotate the halves of each head [T, N, H] by its position's angles, in place."""
        tokens, heads, head_size = x.shape
        self._rotate(
            self._code, x.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(),
            tokens, heads, head_size, x.stride(0),
        )  # fmt: skip

    def rotated_attention(self, *_arguments: object) -> None:
        """None: rotation is an operator of its own."""

    def mixture_parts(self, *_arguments: object) -> None:
        """None: norm, choice and products are operators of their own."""

    def decoded_latents(self, *_arguments: object) -> None:
        """None: norm, rotation and attention are operators of their own."""

    def quantized_attention(self, *_arguments: object) -> None:
        """None: the CPU multiplies floats."""

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
        """Torch rotates partial heads and pairs of neighbouring dims."""
        num_kv = kv_cache.shape[3]
        if norms is not None:
            self.norm_heads(heads, norms.query, norms.key, num_kv, norms.eps)
        if is_neox and cos_sin.shape[1] == heads.shape[2]:
            self.rotate(heads[:, :-num_kv], cos_sin, positions)
        else:
            reference.rotate(heads[:, :-num_kv], cos_sin, positions, is_neox)
        key, value = heads[:, -2 * num_kv : -num_kv], heads[:, -num_kv:]
        self.write_kv(key, value, kv_cache, slots, scales)

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
        """Torch rotates and stores."""
        reference.rope_and_cache_latent(
            query, latent, key, cos_sin, positions, kv_cache, slots, is_neox
        )

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
        scales: Tensor | None = None,
    ) -> None:
        """Torch quantizes."""
        if scales is not None:
            reference.write_kv(key, value, kv_cache, slots, scales)
            return
        tokens, heads, head_size = key.shape
        self._write_kv(
            self._code, key.data_ptr(), value.data_ptr(), kv_cache.data_ptr(),
            slots.data_ptr(), tokens, heads * head_size, key.stride(0), value.stride(0),
            kv_cache.shape[2], kv_cache.stride(0),
        )  # fmt: skip

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor:
        """Reads no token behind a query and no block outside the window.

        Torch serves rows of several sequences.
        """
        if metadata.rows is not None:
            return reference.paged_attention(query, kv_cache, metadata, spec)
        tokens, heads, head_size = query.shape
        value_size = spec.latent_size or head_size
        output = torch.empty((tokens, heads, value_size), dtype=self._dtype)
        tables, bias, scales = metadata.block_tables, spec.position_bias, spec.kv_scales
        masks = metadata.tree_masks
        self._attention(
            self._code, query.data_ptr(), kv_cache.data_ptr(), output.data_ptr(),
            metadata.query_start_loc.data_ptr(), metadata.seq_lens.data_ptr(),
            tables.data_ptr(), metadata.seq_lens.shape[0], heads, kv_cache.shape[3],
            head_size, kv_cache.shape[2], query.stride(0), kv_cache.stride(0),
            tables.stride(0), spec.window, spec.num_sinks if spec.window else 0,
            spec.latent_size, 0 if bias is None else bias.data_ptr(),
            0 if bias is None else bias.stride(0), _CACHE_CODES.get(kv_cache.dtype, 0),
            0 if scales is None else scales.data_ptr(),
            0 if spec.sink_logits is None else spec.sink_logits.data_ptr(),
            0 if masks is None else masks.data_ptr(),
            spec.scale, spec.soft_cap,
        )  # fmt: skip
        return output

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
        """All rows attend to latent vectors."""
        parts = self.head_linear, self.paged_attention
        return reference.latent_attention(
            query, latent, key, kv_cache, metadata, spec, heads, parts
        )
