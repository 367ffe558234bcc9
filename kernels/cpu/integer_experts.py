"""Experts with integer weights on a CPU: all of an expert's matrix in one row of bytes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.kernels.cpu.integers import DESCRIPTION, CpuIntegerWeight, multiply
from trimaran.kernels.cpu.kernel import Kernel
from trimaran.kernels.integers import IntegerExperts, IntegerWeight

# Shapes: X slots of experts, B bytes of an expert, T tokens, D inputs, E outputs.

_ALIGNMENT = 64
_NOWHERE = -1
"""The place of a tensor that is not there."""

_NUM_TENSORS = 5
_OUTPUTS = 9
"""The place of the number of outputs in a description."""

_NUM_NUMBERS = struct.calcsize(DESCRIPTION) // 8


def expert_storage(weights: Sequence[IntegerWeight]) -> IntegerExperts:
    """See `Ops.integer_expert_storage`: uint8 [X, B].

    A row begins with the kernel's description of the weight, places within the row in place of
    addresses: rows may be copied and moved.
    """
    rows = [_row_of(CpuIntegerWeight.of(each)) for each in weights]
    values = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.uint8)
    for target, row in zip(values, rows, strict=True):
        target[: len(row)] = row
    return IntegerExperts(values, None, None, None, None, weights[0].bits)


def multiply_row(
    linear: Kernel, row_B: Tensor, x_TD: Tensor, bias_E: Tensor | None = None
) -> Tensor:
    """``x @ weight.T + bias`` [T, E] by the matrix of one expert."""
    numbers = row_B[: 8 * _NUM_NUMBERS].view(torch.int64).tolist()
    base = row_B.data_ptr()
    addresses = [0 if at == _NOWHERE else base + at for at in numbers[:_NUM_TENSORS]]
    description = ctypes.create_string_buffer(
        struct.pack(DESCRIPTION, *addresses, *numbers[_NUM_TENSORS:])
    )
    y_TE = torch.empty((x_TD.shape[0], numbers[_OUTPUTS]), dtype=x_TD.dtype)
    multiply(linear, x_TD, ctypes.addressof(description), bias_E, y_TE)
    return y_TE


def _row_of(weight: CpuIntegerWeight) -> Tensor:
    """uint8 [B]: the description, and the tensors behind it."""
    places, parts, end = [], [], _padded(8 * _NUM_NUMBERS)
    for tensor in weight.tensors:
        if tensor is None:
            places.append(_NOWHERE)
            continue
        places.append(end)
        parts.append((end, tensor.reshape(-1).view(torch.uint8)))
        end = _padded(end + tensor.nbytes)
    row = torch.zeros(end, dtype=torch.uint8)
    head = torch.tensor([*places, *weight.numbers, 0, 0], dtype=torch.int64)
    row[: head.nbytes] = head.view(torch.uint8)
    for place, each in parts:
        row[place : place + len(each)] = each
    return row


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
