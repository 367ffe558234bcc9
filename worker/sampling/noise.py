"""Counter-based sampling noise that depends on its key alone, equal on every device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: UInt64Array) -> UInt64Array:
    """The finaliser of splitmix64: a bijection in which every input bit reaches all others."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64Array = x ^ (x >> np.uint64(31))
    return mixed


def noise_keys(
    seeds: UInt64Array, sequence_indices: UInt64Array, positions: UInt64Array
) -> npt.NDArray[np.int32]:
    """Two int32 words a row, [N, 2], from seed, sequence index and output position."""
    key = _mix(seeds + _GOLDEN)
    key = _mix(key ^ (sequence_indices * _GOLDEN))
    key = _mix(key + positions * _GOLDEN)
    return key.view(np.int32).reshape(-1, 2)


def _signed(value: int) -> int:
    """A 32-bit pattern as the int32 that torch's scalars need."""
    return value - (1 << 32) if value >= 1 << 31 else value


_ODD = _signed(0x9E3779B1)
_FIRST = _signed(0x7FEB352D)
_SECOND = _signed(0x846CA68B)


def _fold(x: Tensor, shift: int) -> Tensor:
    """``x ^ (x >>> shift)`` in place: int32's own shift would copy the sign bit in."""
    mask = (1 << (32 - shift)) - 1
    return x.bitwise_xor_((x >> shift).bitwise_and_(mask))


def hash_bits(keys_N2: Tensor, token_ids: Tensor) -> Tensor:
    """int32 [N, K]: 32 random bits for every row's key and token id ([N, K] or [1, K]).

    Wrapping integer operations only, so CPU and GPU agree in every bit.
    """
    x = (token_ids.to(torch.int32) * _ODD).bitwise_xor(keys_N2[:, :1])
    _fold(x, 16).mul_(_FIRST)
    _fold(x, 15).bitwise_xor_(keys_N2[:, 1:]).mul_(_SECOND)
    return _fold(x, 16)


def gumbel(keys_N2: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [N, K]: standard Gumbel noise, so that argmax(logits + noise) samples softmax.

    ``-log(E)`` with E exponential: small E decide the argmax, so E is made from a uniform
    number with a fine resolution near 0.
    """
    bits = hash_bits(keys_N2, token_ids).bitwise_and_(0x7FFFFFFF)
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
