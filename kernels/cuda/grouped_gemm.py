"""Products of rows with the matrices of their experts, by our Hopper kernel."""

from __future__ import annotations

import ctypes
import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import READ_AGAIN, READ_ONCE, CudaModule, MapCache
from trimaran.kernels.tables.grouped_table import GroupedKind, GroupedShape, expert_limit
from trimaran.kernels.tables.product_table import INNER_STEP

# Shapes: N rows in the order of their experts, X experts, D inner width, E outputs of the
# weights, F outputs of the product.

_NARROW, _WIDE = 16, 64
"""Rows of x in a copy."""

Scaling = Literal["rows", "blocks"]

_EIGHT = 8
"""Gate rows are copied next to as many up rows; outputs are stored in groups of eight."""


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_uint64),
        ("totals", ctypes.c_uint64),
        ("experts", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("inner_steps", ctypes.c_int),
        ("sharing", ctypes.c_int),
        ("hint_w", ctypes.c_uint64),
        ("scales_w", ctypes.c_uint64),
        ("scale_row_of", ctypes.c_uint64),
        ("scales_x", ctypes.c_uint64),
        ("scale_rows", ctypes.c_int),
    )


class GroupedScales(NamedTuple):
    """The scales of an FP8 product."""

    weights: Tensor
    """float32 [X, E]; with blocks [X, R, G] of rows of blocks and groups of 128 inputs."""

    rows: Tensor
    """float32 [N]; with blocks [N, G]."""

    row_of: Tensor | None = None
    """int32 [E]: the row of blocks of each output; None: no blocks."""


class GroupedGemm:
    """Grouped products of one kind, with one tile shape on one device.

    bf16 or float16 with sums in float32; D and F multiples of 8. With ``scaling`` the numbers
    are FP8, D is a multiple of 16, and results are bf16: "rows" have scales of outputs and
    rows, "blocks" those of blocks and of groups of 128 inputs. Safe under graph capture: the
    launch depends on the number of rows alone, and the device reads the rows of each expert. A
    row's result does not depend on the other rows.
    """

    def __init__(
        self,
        shape: GroupedShape,
        dtype: torch.dtype,
        device: torch.device,
        kind: GroupedKind,
        num_experts: int,
        scaling: Scaling | None = None,
    ) -> None:
        shape.check(num_experts)
        self._shape = shape
        self._kind = kind
        self._scaling = scaling
        limit = expert_limit(num_experts)
        self._kernel = CudaModule(compile_grouped(shape, dtype, kind, limit, scaling)).kernel(
            "grouped_gemm",
            device,
            num_threads=128 * (shape.warpgroups + 1),
            shared_bytes=shape.stages(num_experts) * shape.stage_bytes,
            cluster=shape.sharing,
            overlaps=True,
        )
        count = torch.cuda.get_device_properties(device).multi_processor_count
        sharing = shape.sharing
        self._max_clusters = count if sharing == 1 else self._kernel.max_clusters(sharing)
        self._maps = MapCache()

    def __call__(
        self,
        x_ND: Tensor,
        weights_XED: Tensor,
        totals_X: Tensor,
        scales: GroupedScales | None = None,
    ) -> Tensor:
        """[N, E]; or [N, E / 2] of ``silu(gate) * up``, with gate rows above up rows.

        ``x`` and the weights are contiguous, with at least one row; ``totals`` are int32, the
        rows of each expert. Rows beyond their sum are left unchanged.
        """
        assert (scales is None) == (self._scaling is None)
        if scales is not None:
            # Copied as pairs, in words of two bytes.
            x_ND, weights_XED = x_ND.view(torch.bfloat16), weights_XED.view(torch.bfloat16)
        shape, (num_experts, outputs, inner) = self._shape, weights_XED.shape
        num_rows, is_gated = x_ND.shape[0], self._kind == "gated"
        columns = outputs // 2 if is_gated else outputs
        if inner % _EIGHT or columns % _EIGHT:
            raise ValueError(
                "grouped products take outputs and an inner dimension that are multiples of "
                f"{_EIGHT}, not {columns} and {inner}: let Triton multiply"
            )
        out = x_ND.new_empty((num_rows, columns))
        column_tiles = -(-outputs // shape.weights)
        # Each expert with rows has at most one group of runs that is not full.
        most = num_rows // (shape.rows * shape.sharing) + min(num_experts, num_rows)
        clusters = min(most * column_tiles, self._max_clusters)
        is_read_once = num_rows <= shape.rows * shape.sharing * num_experts
        arguments = _Arguments(
            out.data_ptr(), totals_X.data_ptr(), num_experts, columns, column_tiles,
            -(-inner // INNER_STEP), shape.sharing,
            READ_ONCE if is_read_once else READ_AGAIN, *_addresses(scales),
        )  # fmt: skip
        slice_rows = shape.weights // shape.sharing
        if is_gated:
            eights = weights_XED.view(num_experts, 2, columns // _EIGHT, _EIGHT, inner)
            box = (INNER_STEP, _EIGHT, 2, slice_rows // (2 * _EIGHT), 1)
            map_w = self._maps.get(eights, (4, 3, 1, 2, 0), box)
        else:
            map_w = self._maps.get(weights_XED, (2, 1, 0), (INNER_STEP, slice_rows, 1))
        maps_x = [self._maps.get(x_ND, (1, 0), (INNER_STEP, box)) for box in (_NARROW, _WIDE)]
        stream = torch.cuda.current_stream(x_ND.device).cuda_stream
        self._kernel.launch(clusters * shape.sharing, stream, map_w, *maps_x, arguments)
        return out


def _addresses(scales: GroupedScales | None) -> tuple[int, int, int, int]:
    """The fields of the arguments behind the policy."""
    if scales is None:
        return 0, 0, 0, 0
    weights, rows, row_of = scales
    if row_of is None:
        return weights.data_ptr(), 0, rows.data_ptr(), 0
    return weights.data_ptr(), row_of.data_ptr(), rows.data_ptr(), weights.shape[1]


@functools.lru_cache(maxsize=256)
def compile_grouped(
    shape: GroupedShape,
    dtype: torch.dtype,
    kind: GroupedKind,
    limit: int,
    scaling: Scaling | None = None,
) -> bytes:
    """The kernel for this shape and up to ``limit`` experts."""
    defines = [
        f"GROUPED_MI={shape.weights // 64 // shape.warpgroups}",
        f"GROUPED_WARPGROUPS={shape.warpgroups}",
        f"GROUPED_EXPERTS={limit}",
        f"GEMM_CHUNKS={shape.rows // 16}",
        f"GEMM_STAGES={shape.stages(limit)}",
    ]
    if kind == "gated":
        defines.append("GEMM_GATED")
    if dtype == torch.float16:
        defines.append("GEMM_FLOAT16")
    if scaling is not None:
        defines.append("GEMM_FP8")
    if scaling == "blocks":
        defines.append("GEMM_GROUPS")
    return load_cubin("grouped_gemm", "sm_90a", tuple(defines))
