"""The operators on a CPU with AVX-512 or AVX2, by our own C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.kernels import reference
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec, LatentHeads
from trimaran.kernels.build import cpu_features, has_avx512
from trimaran.kernels.cpu.decoder import CpuDecoder, Decoder, DecoderShape, LayerWeights
from trimaran.kernels.cpu.kernel import DTYPE_CODES, Kernel
from trimaran.kernels.routing import ExpertCounter, ExpertRouting, PlaceTable

# Shapes: T tokens, D and E widths, N query heads, K key-value heads, H head size.

_GELU_NAMES = ("gelu_new", "gelu_pytorch_tanh")


class CpuOps:
    """Operators for one dtype. A token's result never depends on the tokens beside it.

    Tensors are on the CPU and contiguous in their last dim. All instances share one pool of
    threads, and calls are made by one thread at a time.
    """

    is_deterministic = True

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._library = library
        self._dtype = dtype
        self._code = DTYPE_CODES[dtype]
        self._linear = Kernel(library, "trimaran_linear", "10q")
        self._norm = Kernel(library, "trimaran_norm", "10qd")
        self._activation = Kernel(library, "trimaran_activation", "6q")
        self._rotate = Kernel(library, "trimaran_rotate", "8q")
        self._write_kv = Kernel(library, "trimaran_write_kv", "11q")
        self._attention = Kernel(library, "trimaran_attention", "20q2d")
        library.trimaran_has_amx.restype = ctypes.c_long
        library.trimaran_set_num_threads.argtypes = [ctypes.c_long]
        library.trimaran_set_num_threads(num_threads)

    @property
    def backends(self) -> dict[str, str]:
        """Which instructions serve each operator."""
        usual = "avx512" if has_avx512() else "avx2"
        names = dict.fromkeys(reference.OPERATORS, usual)
        has_products = has_avx512() and "avx512_bf16" in cpu_features()
        if self._dtype is torch.bfloat16 and has_products:
            names["paged_attention"] = "avx512_bf16"
            product = "amx_bf16" if self._library.trimaran_has_amx() else "avx512_bf16"
            names.update(
                linear=product,
                head_linear=product,
                add_linear=product,
                gated_linear=product,
                logits=product,
                router_logits=product,
                expert_mlp=product,
            )
        names["activation"] = f"{usual} (gelu_new), torch (others)"
        names.update(gelu_and_mul="torch", embed="torch", choose_experts="torch")
        names["rope_and_cache_latent"] = "torch"
        return names

    def fuse_decoder(
        self, shape: DecoderShape, layers: Sequence[LayerWeights]
    ) -> Decoder | None:
        """These layers in one call, unless their activation is torch's."""
        if shape.activation not in ("silu", *_GELU_NAMES):
            return None
        return CpuDecoder(self._library, self._dtype, shape, layers)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``; sums in float32, rounded once."""
        return self._multiply(x, weight, bias, self._dtype)

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Each head's first dims times its own matrix, head by head, and its other dims."""
        width, outputs = weight.shape[2], weight.shape[1]
        tokens, heads, head_size = x.shape
        result = torch.empty((tokens, heads, outputs + head_size - width), dtype=self._dtype)
        result[..., outputs:] = x[..., width:]
        for head in range(heads):
            result[:, head, :outputs] = self.linear(x[:, head, :width], weight[head])
        return result

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """``silu(x @ gate.T) * (x @ up.T)``, with gate rows above up rows."""
        return self.silu_and_mul(self.linear(x, weight))

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T`` as float32, never rounded to the weights' dtype."""
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
        """The product: it is added with the next norm."""
        return self.linear(x, weight)

    def linear_parts(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product, in one."""
        return self.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square normalisation in float32."""
        return self._normalise(x, None, weight, None, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add ``x`` into ``residual``, which becomes the sum, and normalise it."""
        return self._normalise(x, residual, weight, None, eps)

    def norm_heads(
        self,
        heads: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        num_kv: int,
        eps: float,
    ) -> None:
        """Root-mean-square normalisation of each query and key head in place."""
        query, key = heads[:, : -2 * num_kv], heads[:, -2 * num_kv : -num_kv]
        for part, weight in ((query, query_weight), (key, key_weight)):
            rows = part.reshape(-1, part.shape[2])
            part.copy_(self.rms_norm(rows, weight, eps).view(part.shape))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Layer normalisation in float32."""
        return self._normalise(x, None, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        """Add ``x`` into ``residual``, which becomes the sum, and normalise it."""
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
        """``silu(gate) * up`` of the two halves of a contiguous input's last dim."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty((rows, width), dtype=self._dtype)
        self._activation(self._code, 0, gate_up.data_ptr(), y.data_ptr(), rows, width)
        return y

    def gelu_and_mul(self, gate_up: Tensor, name: str) -> Tensor:
        """``act(gate) * up`` by torch."""
        return reference.gelu_and_mul(gate_up, name)

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T`` as float32, never rounded to the weights' dtype."""
        return self.logits(x, weight)

    def choose_experts(
        self,
        logits: Tensor,
        routing: ExpertRouting,
        bias: Tensor | None = None,
        counter: ExpertCounter | None = None,
        table: PlaceTable | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Each token's experts by torch."""
        return reference.choose_experts(logits, routing, bias, counter, table)

    def expert_mlp(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Tensor,
        down: Tensor,
        first_expert: int = 0,
    ) -> Tensor:
        """The weighted sum of each token's experts: one pair of products an expert that some
        token has."""
        products = (self.gated_linear, self.linear)
        return reference.expert_mlp(x, weights, ids, gate_up, down, first_expert, products)

    def embed(self, ids: Tensor, table: Tensor, first_row: int | None = None) -> Tensor:
        """Rows of a table by torch."""
        return reference.embed(ids, table, first_row)

    def activation(self, x: Tensor, name: str) -> Tensor:
        """``gelu_new`` here, others by torch; ``x`` is contiguous."""
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
        """Rotation is an operator of its own."""

    def rope_and_cache(
        self,
        heads: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
        is_neox: bool = True,
    ) -> None:
        """Rotate query and key heads [T, N + 2 K, H] in place, then store keys and values.

        Parts of heads and pairs of neighbours are rotated by torch.
        """
        num_kv = kv_cache.shape[3]
        if is_neox and cos_sin.shape[1] == heads.shape[2]:
            self.rotate(heads[:, :-num_kv], cos_sin, positions)
        else:
            reference.rotate(heads[:, :-num_kv], cos_sin, positions, is_neox)
        self.write_kv(heads[:, -2 * num_kv : -num_kv], heads[:, -num_kv:], kv_cache, slots)

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
        """Rotation and cache by torch."""
        reference.rope_and_cache_latent(
            query, latent, key, cos_sin, positions, kv_cache, slots, is_neox
        )

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Store each token's key and value [T, K, H] at its slot."""
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
        """Causal attention over cached keys and values; reads nothing behind a query, and
        no block that its window hides. Rows of several sequences are torch's.
        """
        if metadata.rows is not None:
            return reference.paged_attention(query, kv_cache, metadata, spec)
        tokens, heads, head_size = query.shape
        value_size = spec.latent_size or head_size
        output = torch.empty((tokens, heads, value_size), dtype=self._dtype)
        tables, bias = metadata.block_tables, spec.position_bias
        self._attention(
            self._code, query.data_ptr(), kv_cache.data_ptr(), output.data_ptr(),
            metadata.query_start_loc.data_ptr(), metadata.seq_lens.data_ptr(),
            tables.data_ptr(), metadata.seq_lens.shape[0], heads, kv_cache.shape[3],
            head_size, kv_cache.shape[2], query.stride(0), kv_cache.stride(0),
            tables.stride(0), spec.window, spec.num_sinks if spec.window else 0,
            spec.latent_size, 0 if bias is None else bias.data_ptr(),
            0 if bias is None else bias.stride(0), spec.scale, spec.soft_cap,
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
        """Latent vectors are attended to as they are; see `reference.latent_attention`."""
        parts = self.head_linear, self.paged_attention
        return reference.latent_attention(
            query, latent, key, kv_cache, metadata, spec, heads, parts
        )
