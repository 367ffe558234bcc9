"""Conversion of arrays to input tensors of a gRPC request, and of outputs to arrays."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from trimaran.comm.errors import ConfigError

Array = np.ndarray[Any, Any]


def tensor(name: str, values: Any, dtype: Any) -> Any:
    """An input tensor. ``dtype`` is numpy's, ``str`` for text, or ``"BF16"``.

    Raises:
        ConfigError: a value that such a tensor cannot hold.
    """
    if dtype is str:
        array = np.array(_as_bytes(name, values), dtype=object)
        datatype = "BYTES"
    elif dtype == "BF16":
        array = _as_numbers(name, values, np.dtype(triton_to_np_dtype("BF16")))
        datatype = "BF16"
    else:
        array = _as_numbers(name, values, np.dtype(dtype))
        datatype = np_to_triton_dtype(array.dtype)
    holder = grpcclient.InferInput(name, list(array.shape), datatype)
    holder.set_data_from_numpy(array)
    return holder


def row(name: str, value: Any, dtype: Any, num_rows: int = 1) -> Any:
    """A tensor that holds one value in each row of the batch, or nothing for None."""
    return None if value is None else tensor(name, [[value]] * num_rows, dtype)


def present(tensors: Sequence[Any]) -> list[Any]:
    """The tensors to send: those with a value."""
    return [each for each in tensors if each is not None]


def outputs_of(result: Any) -> dict[str, Array]:
    """The outputs of one response, by name."""
    return {
        output.name: result.as_numpy(output.name) for output in result.get_response().outputs
    }


def _as_numbers(name: str, values: Any, dtype: np.dtype[Any]) -> Array:
    try:
        # numpy casts between arrays truncate fractions and high bits, and overflow to infinity.
        with np.errstate(over="ignore", invalid="ignore"):
            array = np.asarray(values, dtype=dtype)
    except OverflowError:
        raise _refusal(name, values, dtype) from None
    is_held = True
    if dtype.kind in "iu":
        is_held = np.array_equal(array, values)
    elif dtype.kind not in "bO":
        is_held = np.array_equal(np.isinf(array), np.isinf(values))
    if not is_held:
        raise _refusal(name, values, dtype)
    return array


def _refusal(name: str, values: Any, dtype: np.dtype[Any]) -> ConfigError:
    """Names the first value outside of the range of ``dtype``."""
    given = np.asarray(values, dtype=object).flat
    least: float
    most: float
    if dtype.kind in "iu":
        what, least, most = "whole number", np.iinfo(dtype).min, np.iinfo(dtype).max
        outside = next(each for each in given if not least <= each <= most or each % 1)
    else:
        # numpy.finfo has no bfloat16.
        what, most = "number", float(np.nextafter(dtype.type(np.inf), dtype.type(0)))
        least = -most
        outside = next(each for each in given if most < abs(each) < np.inf)
    return ConfigError(
        f"{name}: {outside} cannot be sent as {dtype}. Name a {what} from {least} to {most}."
    )


def _as_bytes(name: str, values: Any) -> Any:
    if isinstance(values, str):
        try:
            return values.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{name}: {values!r} is not a text in UTF-8. Convert it first."
            ) from None
    if isinstance(values, Sequence) and not isinstance(values, bytes):
        return [_as_bytes(name, value) for value in values]
    return values


_LOG_PROBS = ("cum_log_probs", "output_log_probs")
_LOGITS = ("context_logits", "generation_logits")
_METRICS = (
    "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks",
    "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns",
    "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens",
)  # fmt: skip


def print_extra(args: argparse.Namespace, outputs: Mapping[str, Array]) -> None:
    """Print the outputs of `request_flags.add_outputs` that were requested and returned."""
    log_probs = _LOG_PROBS if args.return_log_probs else ()
    logits = [name for name in _LOGITS if getattr(args, f"return_{name}")]
    has_metrics = args.return_perf_metrics or args.return_kv_cache_reuse_stats
    metrics = _METRICS if has_metrics else ()
    for name in log_probs:
        if name in outputs:
            print(f"{name}: {outputs[name].tolist()}")
    for name in logits:
        if name in outputs:
            print(f"{name}.shape: {outputs[name].shape}")
            print(f"{name}: {outputs[name]}")
    for name in metrics:
        if name in outputs:
            print(f"{name}: {outputs[name].flat[0]}")
