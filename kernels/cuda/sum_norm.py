"""A sum over the GPUs of a tensor group, the residual's addition and the norm in one launch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import CudaKernel, CudaModule
from trimaran.kernels.triton.norm import norm_warps

# Shapes: T tokens, D width, S parts of a product.

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_ROWS = 256
"""Most rows of a launch: their blocks must run at once, because they wait for other ranks."""

_ROW_BYTES = 16 << 10
_ROW_WORDS = _ROW_BYTES // 4
_WORD_BYTES = 8
_MIN_PADDED = 256
_ALIGNMENT = 16
_MAX_THREADS = 512


class SumNorm:
    """Sums rows over the ranks, adds the sums to the residual and normalises the result.

    Sums equal those of `PeerSum` and norms those of `triton_norm.rms_norm`, bit by bit, so all
    ranks get equal results. Rows depend neither on each other nor on their number. Safe under
    graph capture: values that change from call to call lie in memory. Collective, on one
    stream.
    """

    def __init__(
        self,
        addresses: list[int],
        rank: int,
        max_rows: int,
        device: torch.device,
        memory: object = None,
    ) -> None:
        """For up to ``max_rows`` rows, at most `MAX_ROWS`.

        ``addresses`` are the addresses of each rank's region (see `region_bytes`) as mapped
        here, multiples of 16; regions are zero before any rank's first call. ``memory`` keeps
        the regions mapped.
        """
        if max_rows > MAX_ROWS:
            raise ValueError(f"max_rows is {max_rows} and may be {MAX_ROWS}: ask for fewer")
        self._memory = memory
        self._addresses = addresses
        self._rank = rank
        self._max_rows = max_rows
        self._launches = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._kernels: dict[tuple[torch.dtype, int], CudaKernel] = {}

    def takes(self, residual_TD: Tensor) -> bool:
        """Whether this object can add sums to this residual."""
        rows, width = residual_TD.shape
        size, padded = residual_TD.element_size(), _padded(width)
        return (
            residual_TD.dtype in DTYPES
            and 0 < rows <= self._max_rows
            and padded >= _MIN_PADDED
            and padded * size <= _ROW_BYTES
            and width * size % _ALIGNMENT == 0
            and _has_whole_rows(residual_TD)
        )

    def __call__(self, x: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Add the ranks' sum of ``x`` into ``residual`` and normalise the result.

        `takes` must allow ``residual``. ``x`` is this rank's addend [T, D] in the residual's
        dtype, or float32 parts [S, T, D] of the addend, which are added up and rounded first,
        like an addend without parts.
        """
        rows, width = residual_TD.shape
        if not _has_whole_rows(x):
            x = x.clone(memory_format=torch.contiguous_format)
        if x.dtype != (residual_TD.dtype if x.dim() == 2 else torch.float32):
            raise ValueError(
                f"an addend of {x.dim()} dims is {x.dtype}: round it, or pass float32 parts"
            )
        for tensor in (x, residual_TD, weight_D):
            if tensor.data_ptr() % _ALIGNMENT:
                raise ValueError(
                    f"a tensor begins at {tensor.data_ptr():#x}, which is no multiple of "
                    f"{_ALIGNMENT}: copy it first"
                )
        output = residual_TD.new_empty((rows, width))
        parts, part_stride = (0, 0) if x.dim() == 2 else (x.shape[0], x.stride(0))
        arguments = _arguments_of(len(self._addresses))(
            tuple(self._addresses), x.data_ptr(), residual_TD.data_ptr(),
            weight_D.data_ptr(), output.data_ptr(), self._launches.data_ptr(), part_stride,
            x.stride(-2), residual_TD.stride(0), parts, width, self._rank, self._max_rows,
            _ROW_WORDS, eps,
        )  # fmt: skip
        stream = torch.cuda.current_stream(x.device).cuda_stream
        self.load(residual_TD.dtype, width).launch(rows, stream, arguments)
        return output

    def load(self, dtype: torch.dtype, width: int) -> CudaKernel:
        """The kernel for such rows, compiled and loaded at its first use;
        `KernelsUnavailableError` with the cause if that fails.
        """
        key = dtype, _padded(width)
        kernel = self._kernels.get(key)
        if kernel is None:
            cubin = compile_sum_norm(len(self._addresses), *key)
            kernel = self._kernels[key] = CudaModule(cubin).kernel(
                "sum_norm",
                self._launches.device,
                num_threads=num_threads(*key),
                overlaps=True,
            )
        return kernel


def compile_sum_norm(num_ranks: int, dtype: torch.dtype, padded: int) -> bytes:
    """The kernel for rows of up to ``padded`` elements, a power of two."""
    return load_cubin("sum_norm", "sm_90a", macros(num_ranks, dtype, padded))


def macros(num_ranks: int, dtype: torch.dtype, padded: int) -> tuple[str, ...]:
    """The macros of the source for such rows."""
    chunks = padded * dtype.itemsize // (num_threads(dtype, padded) * _ALIGNMENT)
    # Threads of the norm alone: the order of its sums depends on them.
    values = padded // (32 * norm_warps(padded))
    defines = (
        f"ELEMENT_BYTES={dtype.itemsize}", f"ROW_CHUNKS={chunks}", f"NORM_VALUES={values}",
        f"RANKS={num_ranks}",
    )  # fmt: skip
    return (*defines, "ELEMENT_FLOAT16") if dtype == torch.float16 else defines


def num_threads(dtype: torch.dtype, padded: int) -> int:
    """A thread for every 16 bytes of a row, as long as two blocks fit on a multiprocessor."""
    return min(padded * dtype.itemsize // _ALIGNMENT, _MAX_THREADS)


def region_bytes(num_ranks: int, max_rows: int) -> int:
    """Bytes of one rank's region: two slots, each with rows of all ranks."""
    return 2 * num_ranks * max_rows * _ROW_WORDS * _WORD_BYTES


def _padded(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _has_whole_rows(x: Tensor) -> bool:
    *outer, last = (stride * x.element_size() for stride in x.stride())
    return last == x.element_size() and all(stride % _ALIGNMENT == 0 for stride in outer)


def _arguments_of(num_ranks: int) -> type[ctypes.Structure]:
    """The kernel's argument struct for a group of this many ranks."""
    found = _structures.get(num_ranks)
    if found is None:
        fields = (
            ("regions", ctypes.c_uint64 * num_ranks), ("x", ctypes.c_void_p),
            ("residual", ctypes.c_void_p), ("weight", ctypes.c_void_p),
            ("output", ctypes.c_void_p), ("launches", ctypes.c_void_p),
            ("part_stride", ctypes.c_longlong), ("x_stride", ctypes.c_longlong),
            ("residual_stride", ctypes.c_longlong), ("parts", ctypes.c_int),
            ("width", ctypes.c_int), ("rank", ctypes.c_int), ("max_rows", ctypes.c_int),
            ("row_words", ctypes.c_int), ("eps", ctypes.c_float),
        )  # fmt: skip
        found = type("_Arguments", (ctypes.Structure,), {"_fields_": fields})
        _structures[num_ranks] = found
    return found


_structures: dict[int, type[ctypes.Structure]] = {}
