"""Products of a few to some hundred rows by our Hopper kernel, plain or as SwiGLU."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import (
    READ_AGAIN,
    READ_ONCE,
    CudaModule,
    TensorMap,
    tensor_map,
)
from trimaran.kernels.quantized import ByteInputs
from trimaran.kernels.tables.product_table import INNER_STEP, Bytes, GemmShape, Kind

# Shapes: T tokens, D inner width, E outputs of the weight, F outputs of the product, G groups.


class Quantization(ctypes.Structure):
    """How results are quantized, and where their scales go; see ``quantized_rows.cuh``."""

    _fields_ = (
        ("scales", ctypes.c_void_p),
        ("fixed", ctypes.c_void_p),
        ("bound", ctypes.c_float),
        ("pitch", ctypes.c_int),
    )

    @classmethod
    def of(cls, scales_GP: Tensor, inputs: ByteInputs) -> Quantization:
        """Into these scales, for a product of such inputs."""
        fixed = None if inputs.scale is None else inputs.scale.data_ptr()
        return cls(scales_GP.data_ptr(), fixed, float(inputs.bound), scales_GP.stride(0))


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_uint64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("inner_steps", ctypes.c_int),
        ("row_groups", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("split", ctypes.c_int),
        ("sharing", ctypes.c_int),
        ("slice", ctypes.c_int),
        ("slice_w", ctypes.c_int),
        ("max_early", ctypes.c_int),
        ("hint_w", ctypes.c_uint64),
        ("scales_x", ctypes.c_void_p),
        ("scales_w", ctypes.c_void_p),
        ("scale_pitch", ctypes.c_int),
    )


class HopperGemm:
    """Products of one kind, with one tile shape on one device.

    bf16 or float16 with sums in float32; D a multiple of 8, the weight contiguous, at least one
    row. Safe under graph capture. A row's result depends on neither the other rows nor their
    number, and is equal for all shapes of equal ``split``.
    """

    def __init__(
        self,
        shape: GemmShape,
        dtype: torch.dtype,
        device: torch.device,
        kind: Kind = "plain",
        *,
        overlaps: bool = True,
        numbers: Bytes = "",
        has_groups: bool = False,
    ) -> None:
        shape.check(kind)
        self.shape = shape
        self._kind = kind
        self._dtype = dtype
        self._has_groups = has_groups
        cluster = shape.cluster(kind)
        self._kernel = CudaModule(compile_gemm(shape, dtype, kind, numbers, has_groups)).kernel(
            "gemm",
            device,
            num_threads=128 * (shape.warpgroups + 1),
            shared_bytes=_num_stages(shape, has_groups) * shape.stage_bytes + 1024,
            cluster=cluster,
            overlaps=overlaps,
        )
        count = torch.cuda.get_device_properties(device).multi_processor_count
        self._max_clusters = count if cluster == 1 else self._kernel.max_clusters(cluster)
        self._cluster = cluster
        self._adds_in_cluster = kind != "parts" and shape.split > 1

    def __call__(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """[T, E]; [T, E / 2] of ``silu(gate) * up``; or float32 [split, T, E] to add up."""
        return self._multiply(x_TD, weight_ED, x_TD.dtype)

    def multiply_bytes(
        self, x_TD: Tensor, scales_T: Tensor, weight_ED: Tensor, scales_E: Tensor
    ) -> Tensor:
        """The same of e4m3 or int8 values that are multiplied by float32 scales of rows, in the
        dtype of the kernel.

        D is a multiple of 16. Sums of e4m3 have 22 bits, sums of int8 are exact integers. For a
        kernel that was made with ``numbers``; with ``has_groups``, ``scales_T`` is [G, P] of
        `ByteRows`, and the sums of each group are added to float32.
        """
        pairs = x_TD.view(torch.bfloat16), weight_ED.view(torch.bfloat16)
        return self._multiply(*pairs, self._dtype, (scales_T, scales_E))

    def _multiply(
        self,
        x_TD: Tensor,
        weight_ED: Tensor,
        dtype: torch.dtype,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        shape = self.shape
        num_rows, inner = x_TD.shape
        inner_steps = -(-inner // INNER_STEP)
        if inner % 8 or inner_steps < shape.split:
            raise ValueError(
                f"an inner dimension of {inner} is not a multiple of 8 of at least "
                f"{INNER_STEP * (shape.split - 1) + 1}, which {shape} takes: let torch multiply"
            )
        if x_TD.stride(1) != 1 or x_TD.stride(0) % 8 or x_TD.data_ptr() % 16:
            x_TD = x_TD.clone(memory_format=torch.contiguous_format)
        halves = 2 if self._kind == "gated" else 1
        num_columns, tile_columns = weight_ED.shape[0] // halves, shape.columns // halves
        pitch = -(-num_columns // 8) * 8
        if self._kind == "parts":
            out = x_TD.new_empty((shape.split, num_rows, pitch), dtype=torch.float32)
        else:
            out = x_TD.new_empty((num_rows, pitch), dtype=dtype)
        # The tiles that blocks share: `sharing` times as wide, or as high.
        wide, high = (1, shape.sharing) if shape.shares_weights else (shape.sharing, 1)
        row_groups = -(-num_rows // (shape.rows * high))
        # The fewest slices that hold all rows; products of padding rows are not stored.
        slice_rows = -(-min(num_rows, shape.rows) // wide // 8) * 8
        slice_columns = tile_columns // high
        groups = row_groups * -(-num_columns // (tile_columns * wide))
        if self._kind == "parts":
            groups *= shape.split
        clusters = groups if self._adds_in_cluster else min(groups, self._max_clusters)
        arguments = _Arguments(
            out.data_ptr(), num_rows, num_columns, pitch, inner_steps, row_groups,
            groups, shape.split, shape.sharing, slice_rows, slice_columns, shape.early_tiles,
            READ_ONCE if row_groups == 1 else READ_AGAIN,
            *(each.data_ptr() for each in scales or ()),
        )  # fmt: skip
        if self._has_groups and scales is not None:
            arguments.scale_pitch = scales[0].stride(0)
        maps: tuple[TensorMap, TensorMap] = (
            weight_tiles(x_TD, slice_rows),
            weight_tiles(weight_ED, slice_columns),
        )
        stream = torch.cuda.current_stream(x_TD.device).cuda_stream
        self._kernel.launch(clusters * self._cluster, stream, *maps, arguments)
        return out if pitch == num_columns else out[..., :num_columns]


def can_multiply(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs on this device (compute capability 9.0) in this dtype."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.lru_cache(maxsize=256)
def compile_gemm(
    shape: GemmShape,
    dtype: torch.dtype,
    kind: Kind,
    numbers: Bytes = "",
    has_groups: bool = False,
) -> bytes:
    """The kernel for this shape; a split's number and ``max_early`` are launch arguments."""
    defines = [
        f"GEMM_MI={shape.rows // 64 // shape.warpgroups}",
        f"GEMM_WARPGROUPS={shape.warpgroups}",
        f"GEMM_CHUNKS={shape.columns // 16}",
        f"GEMM_STAGES={_num_stages(shape, has_groups)}",
        f"GEMM_SPLIT={int(kind != 'parts' and shape.split > 1)}",
        f"GEMM_PARTS={int(kind == 'parts')}",
        f"GEMM_SHARES_WEIGHTS={int(shape.shares_weights)}",
    ]
    if kind == "gated":
        defines.append("GEMM_GATED")
    if dtype == torch.float16:
        defines.append("GEMM_FLOAT16")
    if numbers:
        defines.append(f"GEMM_{numbers}")
    if has_groups:
        defines += ["GEMM_GROUPS", f"GEMM_PRODUCT_CHUNKS={_product_chunks(shape)}"]
    return load_cubin("gemm", "sm_90a", tuple(defines))


def _num_stages(shape: GemmShape, has_groups: bool) -> int:
    """Stages that fit, with the scales of the rows' groups."""
    if not has_groups:
        return shape.stages
    return min(shape.max_stages, shape.ring_bytes // (shape.stage_bytes + 4 * shape.rows))


def _product_chunks(shape: GemmShape) -> int:
    """Chunks of 16 columns that a product of FP8 groups multiplies at a time: the sums of a
    group must fit the registers beside those of all groups."""
    chunks = shape.columns // 16
    sums = shape.rows // 64 // shape.warpgroups * 8 * chunks
    is_wide = sums > (96 if shape.warpgroups < 3 else 48)
    return chunks // 2 if is_wide and chunks % 2 == 0 else chunks


_maps: dict[tuple[int, ...], TensorMap] = {}
_MAX_MAPS = 8192


def weight_tiles(matrix: Tensor, box_rows: int) -> TensorMap:
    """A tensor map of ``box_rows`` x 64 tiles of numbers of 2 bytes, cached: the allocator
    reuses addresses."""
    rows, columns = matrix.shape
    is_half = matrix.dtype == torch.float16
    key = (matrix.data_ptr(), rows, columns, matrix.stride(0), box_rows, is_half)
    found = _maps.get(key)
    if found is None:
        if len(_maps) == _MAX_MAPS:
            _maps.clear()
        found = _maps[key] = tensor_map(matrix, (1, 0), (INNER_STEP, box_rows))
    return found
