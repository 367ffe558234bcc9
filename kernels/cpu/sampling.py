"""Choosing token ids on a CPU with AVX-512 or AVX2, by our own C++ kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.kernels.build import has_avx512
from trimaran.kernels.cpu.kernel import Kernel

# Shapes: N rows, V vocabulary.


class CpuSampling:
    """One id for each row of logits, rows distributed over the kernels' threads.

    ``logits_NV`` is float32 and contiguous in its last dim. Its twins in torch are
    `trimaran.worker.sampling.candidates.argmax` and `trimaran.worker.sampling.draw.draw`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.name = "avx512" if has_avx512() else "avx2"
        """The name in logs and metrics."""
        self._argmax = Kernel(library, "trimaran_argmax", "5q")
        self._sample = Kernel(library, "trimaran_sample", "8q")
        self._store = Kernel(library, "trimaran_store_ids", "4q")

    def argmax(self, logits_NV: Tensor) -> Tensor:
        """The first of the likeliest ids of each row, int64 [N]."""
        rows, vocab_size = logits_NV.shape
        ids = torch.empty(rows, dtype=torch.int64)
        self._argmax(
            logits_NV.data_ptr(), ids.data_ptr(), rows, vocab_size, logits_NV.stride(0)
        )
        return ids

    def draw(
        self,
        logits_NV: Tensor,
        params_N3: npt.NDArray[np.float32],
        top_k_N: npt.NDArray[np.int64],
        keys_N2: npt.NDArray[np.int32],
    ) -> Tensor:
        """One random id a row, int64 [N].

        ``params_N3`` holds temperature (above 0), top-p (1: all) and min-p (0: all);
        ``top_k_N`` 0 keeps all; ``keys_N2`` holds the noise keys. Arrays are contiguous.
        """
        rows, vocab_size = logits_NV.shape
        ids = torch.empty(rows, dtype=torch.int64)
        self._sample(
            logits_NV.data_ptr(),
            ids.data_ptr(),
            params_N3.ctypes.data,
            top_k_N.ctypes.data,
            keys_N2.ctypes.data,
            rows,
            vocab_size,
            logits_NV.stride(0),
        )
        return ids

    def store(self, ids_N: Tensor, places_N: Tensor, table: Tensor) -> None:
        """``table[places] = ids``: int64, int64 and a flat int32 table, all contiguous."""
        count = ids_N.shape[0]
        self._store(ids_N.data_ptr(), places_N.data_ptr(), table.data_ptr(), count)
