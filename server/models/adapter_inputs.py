"""The LoRA adapters that token-level requests name or bring along."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.server.inference.request import Tensor
from trimaran.server.models.sample_inputs import SampleInputs, to_text

_WEIGHTS, _CONFIG = "lora_weights", "lora_config"


def read_adapter(
    inputs: SampleInputs, tensors: Mapping[str, Tensor]
) -> tuple[int, dict[str, Any] | None]:
    """A sample's task id and the field ``adapter`` of `Submit`; 0 and None without LoRA.

    ``tensors`` are the whole batch's.

    Raises:
        RequestError: weights without an id or a config, or both an id and a name.
    """
    task, name = inputs.scalar("lora_task_id"), inputs.scalar("lora_name")
    given = [other for other in (_WEIGHTS, _CONFIG) if inputs.array(other) is not None]
    if name is not None:
        if task is not None or given:
            raise RequestError(
                "lora_name is set beside lora_task_id, lora_weights or lora_config; send the "
                "name alone"
            )
        if not name:
            raise RequestError(
                "lora_name is empty; leave it out, or name a folder of lora_prefetch_dir"
            )
        return 0, {"name": to_text("lora_name", name)}
    if task is None:
        if given:
            raise RequestError(f"{given[0]} is set without lora_task_id; send both")
        return 0, None
    if len(given) == 1:
        raise RequestError(
            f"{given[0]} is set alone; lora_weights and lora_config must come together"
        )
    return task, {
        other.removeprefix("lora_"): _on_the_wire(inputs.array(other), tensors[other].datatype)
        for other in given
    }


def _on_the_wire(array: np.ndarray[Any, Any] | None, datatype: str) -> dict[str, Any]:
    assert array is not None
    data = np.ascontiguousarray(array).tobytes()
    return {"datatype": datatype, "shape": list(array.shape), "data": data}


async def add_digests(adapters: Sequence[dict[str, Any] | None]) -> None:
    """Say what adapters consist of, by which engines know those that they have already."""
    for adapter in adapters:
        if adapter is not None and "weights" in adapter:
            # Of tens of megabytes, so in a thread.
            adapter["digest"] = await asyncio.to_thread(_digest, adapter)


def _digest(adapter: dict[str, Any]) -> bytes:
    digest = blake2b(digest_size=16)
    for part in ("weights", "config"):
        tensor = adapter[part]
        digest.update(repr((tensor["datatype"], tensor["shape"])).encode())
        digest.update(tensor["data"])
    return digest.digest()
