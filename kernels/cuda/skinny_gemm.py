"""Products of 1 to 64 rows on Hopper by blocks whose left operand is the weight."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import READ_ONCE, CudaModule
from trimaran.kernels.cuda.hopper_gemm import compile_gemm, weight_tiles
from trimaran.kernels.tables.product_table import (
    INNER_STEP,
    Bytes,
    GemmShape,
    Kind,
    SkinnyShape,
)

# Shapes: T tokens, D inner width, E outputs of the weight, G groups.

_THREADS = 192


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_uint64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("inner_steps", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("split", ctypes.c_int),
        ("max_early", ctypes.c_int),
        ("hint_w", ctypes.c_uint64),
        ("scales_x", ctypes.c_void_p),
        ("scales_w", ctypes.c_void_p),
        ("scale_pitch", ctypes.c_int),
        ("last_group", ctypes.c_int),
    )


class SkinnyGemm:
    """Products of one kind and tile shape on one device, for at most ``shape.tokens`` rows.

    bf16 or float16 with sums in float32, D a multiple of 8 and E of 32; or ``numbers`` of one
    byte with scales of rows and results in ``dtype``, D a multiple of 16. Safe under graph
    capture.
    """

    def __init__(
        self,
        shape: SkinnyShape,
        dtype: torch.dtype,
        device: torch.device,
        kind: Kind,
        *,
        numbers: Bytes = "",
        has_groups: bool = False,
    ) -> None:
        shape.check(kind)
        self.shape = shape
        self._kind, self._dtype, self._has_groups = kind, dtype, has_groups
        ring = shape.stages(kind) * shape.stage_bytes(kind)
        self._kernel = CudaModule(
            compile_skinny(shape, dtype, kind, numbers, has_groups)
        ).kernel(
            "skinny_gemm",
            device,
            num_threads=_THREADS,
            shared_bytes=ring + shape.spare_bytes,
            overlaps=True,
        )
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """[T, E]; [T, E / 2] of ``silu(gate) * up``; or float32 [split, T, E] to add up."""
        return self._multiply(x_TD, weight_ED, None)

    def multiply_bytes(
        self, x_TD: Tensor, scales_T: Tensor, weight_ED: Tensor, scales_E: Tensor
    ) -> Tensor:
        """The same of e4m3 or int8 values that are multiplied by float32 scales of rows. Sums
        of e4m3 are added to float32 after each 128 values, sums of int8 are exact integers. For
        a kernel that was made with ``numbers``; with ``has_groups``, ``scales_T`` is [G, P] of
        `ByteRows`."""
        pairs = x_TD.view(torch.bfloat16), weight_ED.view(torch.bfloat16)
        return self._multiply(*pairs, (scales_T, scales_E))

    def _multiply(
        self,
        x_TD: Tensor,
        weight_ED: Tensor,
        scales: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        shape, kind = self.shape, self._kind
        num_rows, inner = x_TD.shape
        columns = weight_ED.shape[0] // (2 if kind == "gated" else 1)
        size: tuple[int, ...] = (num_rows, columns)
        dtype = self._dtype
        if kind == "parts":
            size, dtype = (shape.split, *size), torch.float32
        out = torch.empty(size, dtype=dtype, device=x_TD.device)
        groups = -(-columns // shape.lines) * shape.split
        num_stages = -(-inner // (INNER_STEP * shape.panels(kind)))
        if inner % 8 or num_stages < shape.split:
            raise ValueError(
                f"an inner dimension of {inner} is not a multiple of 8 of {shape.split} stages "
                f"or more, which {shape} takes: take fewer parts"
            )
        arguments = _Arguments(
            out.data_ptr(), num_rows, columns, columns,
            num_stages, groups, shape.split, shape.early_stages(kind), READ_ONCE,
            *(each.data_ptr() for each in scales or ()),
        )  # fmt: skip
        if self._has_groups and scales is not None:
            arguments.scale_pitch = scales[0].stride(0)
            arguments.last_group = scales[0].shape[0] - 1
        maps = (
            weight_tiles(x_TD, shape.tokens),
            weight_tiles(weight_ED, shape.lines),
        )
        stream = torch.cuda.current_stream(x_TD.device).cuda_stream
        self._kernel.launch(min(groups, self._processors), stream, *maps, arguments)
        return out


@functools.lru_cache(maxsize=256)
def compile_skinny(
    shape: SkinnyShape,
    dtype: torch.dtype,
    kind: Kind,
    numbers: Bytes = "",
    has_groups: bool = False,
) -> bytes:
    """The kernel for this shape; a split's number is a launch argument."""
    defines = [
        f"SKINNY_TOKENS={shape.tokens}",
        f"GEMM_PRODUCT_CHUNKS={shape.tokens // 16}",
        f"SKINNY_LINES={shape.lines}",
        f"SKINNY_PANELS={shape.panels(kind)}",
        f"SKINNY_STAGES={shape.stages(kind)}",
        f"SKINNY_GATED={int(kind == 'gated')}",
        f"SKINNY_PARTS={int(kind == 'parts')}",
        f"SKINNY_GROUPS={int(has_groups)}",
    ]
    if dtype == torch.float16:
        defines.append("GEMM_FLOAT16")
    if numbers:
        defines.append(f"GEMM_{numbers}")
    return load_cubin("skinny_gemm", "sm_90a", tuple(defines))


def compile_choice(
    choice: GemmShape | SkinnyShape,
    dtype: torch.dtype,
    kind: Kind,
    numbers: Bytes = "",
    has_groups: bool = False,
) -> None:
    """Compile the kernel of a tile shape of either kernel, or find it in the cache."""
    if isinstance(choice, SkinnyShape):
        compile_skinny(choice, dtype, kind, numbers, has_groups)
    else:
        compile_gemm(choice, dtype, kind, numbers, has_groups)
