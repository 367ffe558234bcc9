"""Products of few to some hundred rows by our own Hopper kernel, plain or as SwiGLU."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.kernels.cuda_build import load_cubin
from trimaran.kernels.cuda_driver import CudaModule, TensorMap, tensor_map

# Shapes: T tokens, D inner width, E outputs of the weight, F outputs of the product.

_INNER = 64
_SHARED_BYTES = 230_400
"""Dynamic shared memory that a block can have beside its barriers."""

_READ_ONCE = 0x12F0000000000000
_READ_AGAIN = 0x1000000000000000
"""Cache policies of the copy engine: evict first, evict normally."""


@dataclass(frozen=True, slots=True)
class GemmShape:
    """How one launch cuts a product; see ``cuda/gemm.cu``.

    ``rows`` x ``columns`` of the product fall to a block at a time: 64, 128, 192 or 256, and
    a multiple of 16 up to 256. ``split`` blocks share the inner dimension, ``sharing`` blocks
    rows of x; at most 8 blocks in all make a cluster.
    """

    rows: int
    columns: int
    split: int = 1
    sharing: int = 1

    def __post_init__(self) -> None:
        ring = self.stages * self.stage_bytes
        if self.split > 1 and self._inbox_bytes > ring:
            raise ValueError(
                f"{self} needs {self._inbox_bytes} bytes of shared memory for partial sums but "
                f"has {ring}: take fewer columns or a smaller split"
            )

    @property
    def _inbox_bytes(self) -> int:
        """Shared memory for the partial sums of the columns that a block adds up."""
        owned = 8 * -(-self.columns // 8 // self.split)
        return self.split * self.rows * 4 * (owned + 8)

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return {64: 1, 128: 2, 192: 3, 256: 2}[self.rows]

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of the ring."""
        return 2 * _INNER * (self.rows + self.columns)

    @property
    def stages(self) -> int:
        """As many as fit."""
        return min(8, _SHARED_BYTES // self.stage_bytes)


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_uint64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("inner_steps", ctypes.c_int),
        ("row_tiles", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("split", ctypes.c_int),
        ("sharing", ctypes.c_int),
        ("hint_w", ctypes.c_uint64),
    )


class HopperGemm:
    """``x @ weight.T``, or SwiGLU of it, cut in one way on one device.

    bf16 or float16 with sums in float32; D and the strides of rows multiples of 8, operands
    aligned to 16 bytes. Safe under graph capture. A row's result depends on neither the other
    rows nor their number, and is the same for all shapes of equal ``split``.
    """

    def __init__(
        self,
        shape: GemmShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_gated: bool = False,
        overlaps: bool = True,
    ) -> None:
        self.shape = shape
        self._is_gated = is_gated
        cluster = shape.split * shape.sharing
        self._kernel = CudaModule(compile_gemm(shape, dtype, is_gated=is_gated)).kernel(
            "gemm",
            device,
            num_threads=128 * (shape.warpgroups + 1),
            shared_bytes=shape.stages * shape.stage_bytes + 1024,
            cluster=cluster,
            overlaps=overlaps,
        )
        count = torch.cuda.get_device_properties(device).multi_processor_count
        self._max_clusters = count if cluster == 1 else self._kernel.max_clusters(cluster)
        self._split, self._sharing = shape.split, shape.sharing
        self._cluster = cluster

    def __call__(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """[T, E], or [T, E / 2] of ``silu(gate) * up`` with gate rows above up rows."""
        shape = self.shape
        num_rows, inner = x_TD.shape
        num_columns = weight_ED.shape[0] // 2 if self._is_gated else weight_ED.shape[0]
        tile_columns = shape.columns // 2 if self._is_gated else shape.columns
        pitch = -(-num_columns // 8) * 8
        out_TF = x_TD.new_empty((num_rows, pitch))
        row_tiles = -(-num_rows // shape.rows)
        column_tiles = -(-num_columns // tile_columns)
        groups = row_tiles * -(-column_tiles // self._sharing)
        clusters = groups if self._split > 1 else min(groups, self._max_clusters)
        arguments = _Arguments(
            out_TF.data_ptr(), num_rows, num_columns, pitch, -(-inner // _INNER), row_tiles,
            groups, self._split, self._sharing, _READ_ONCE if row_tiles == 1 else _READ_AGAIN,
        )  # fmt: skip
        maps: tuple[TensorMap, TensorMap] = (
            _tiles(x_TD, shape.rows // self._sharing),
            _tiles(weight_ED, tile_columns),
        )
        stream = torch.cuda.current_stream(x_TD.device).cuda_stream
        self._kernel.launch(clusters * self._cluster, stream, *maps, arguments)
        return out_TF if pitch == num_columns else out_TF[:, :num_columns]


def can_multiply(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs on this device (compute capability 9.0) in this dtype."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.lru_cache(maxsize=256)
def compile_gemm(shape: GemmShape, dtype: torch.dtype, *, is_gated: bool) -> bytes:
    """The kernel for this shape; all shapes with and without a split share theirs."""
    defines = [
        f"GEMM_MI={shape.rows // 64 // shape.warpgroups}",
        f"GEMM_WARPGROUPS={shape.warpgroups}",
        f"GEMM_CHUNKS={shape.columns // 16}",
        f"GEMM_STAGES={shape.stages}",
        f"GEMM_SPLIT={int(shape.split > 1)}",
    ]
    if is_gated:
        defines.append("GEMM_GATED")
    if dtype == torch.float16:
        defines.append("GEMM_FLOAT16")
    return load_cubin("gemm", "sm_90a", tuple(defines))


_maps: dict[tuple[int, ...], TensorMap] = {}
_MAX_MAPS = 8192


def _tiles(matrix: Tensor, box_rows: int) -> TensorMap:
    """A map of ``box_rows`` x 64 tiles, kept: the allocator hands out addresses again."""
    rows, columns = matrix.shape
    is_half = matrix.dtype == torch.float16
    key = (matrix.data_ptr(), rows, columns, matrix.stride(0), box_rows, is_half)
    found = _maps.get(key)
    if found is None:
        if len(_maps) == _MAX_MAPS:
            _maps.clear()
        found = _maps[key] = tensor_map(matrix, (1, 0), (_INNER, box_rows))
    return found
