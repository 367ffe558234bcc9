"""The keys of a token-level model's config.pbtxt that say what its KV cache does."""

from __future__ import annotations

import re

from trimaran.comm.errors import ConfigError
from trimaran.server.repository.model_repository import RepositoryModel
from trimaran.worker.config.engine_config import CacheConfig, SchedulerConfig

_WINDOWS = "max_attention_window_size"
_HOST_BYTES = "kv_cache_host_memory_bytes"
_ONBOARD = "kv_cache_onboard_blocks"
_OVERLAPS = {
    "enable_trt_overlap": True,
    "enable_overlap_scheduler": True,
    "disable_overlap_scheduler": False,
}
"""Old and newer names, and the value of each that asks for overlapped steps."""


def cache_config(
    model: RepositoryModel, tokens_per_block: int, scheduler: SchedulerConfig
) -> CacheConfig:
    """The KV cache of one model.

    Raises:
        ConfigError: a value means nothing, or two do not go together.
    """
    values = model.parameters
    fraction = values.get_float("kv_cache_free_gpu_mem_fraction")
    if fraction is not None and not 0 < fraction <= 1:
        raise ConfigError(
            f"{model.folder}/config.pbtxt: kv_cache_free_gpu_mem_fraction is {fraction} but "
            "must be above 0 and at most 1"
        )
    host_bytes = values.get_int(_HOST_BYTES) or 0
    if host_bytes and values.get_bool(_ONBOARD) is False:
        raise ConfigError(
            f"{model.folder}/config.pbtxt: {_ONBOARD} is False but blocks on the host "
            f"({_HOST_BYTES} {host_bytes}) can be used on the device only. Set it to True, or "
            f"{_HOST_BYTES} to 0."
        )
    reuse = values.get_bool("enable_kv_cache_reuse")
    windows = _windows(model)
    try:
        cache = CacheConfig(
            tokens_per_block=tokens_per_block,
            max_tokens=values.get_int("max_tokens_in_paged_kv_cache") or 0,
            free_memory_fraction=0.9 if fraction is None else fraction,
            enable_block_reuse=True if reuse is None else reuse,
            attention_windows=windows,
            num_sinks=values.get_int("sink_token_length") or 0,
            host_bytes=host_bytes,
        )
        cache.check_use_of_host(scheduler)
    except ConfigError as error:
        raise ConfigError(f"{model.folder}/config.pbtxt: {error}") from None
    return cache


def steps_in_flight(model: RepositoryModel, depth: int | None, num_stages: int) -> int:
    """``depth``, unless the model's keys ask for steps one after another; 0 where neither
    says any, for what suits the device.

    Raises:
        ConfigError: two keys contradict each other, or a pipeline gains nothing from so many.
    """
    most = num_stages + 1
    if depth is not None and depth > most:
        raise ConfigError(
            f"--depth is {depth} but with {num_stages} pipeline stage(s) at most {most} steps "
            f"are in flight. Lower it to 1 to {most}, or leave it out."
        )
    said = {
        key: value == is_on
        for key, is_on in _OVERLAPS.items()
        if (value := model.parameters.get_bool(key)) is not None
    }
    if len(set(said.values())) > 1:
        raise ConfigError(
            f"{model.folder}/config.pbtxt: {' and '.join(said)} contradict each other. Leave "
            "one of them."
        )
    if False in said.values():
        return 1
    return depth or (max(2, num_stages) if said else 0)


def _windows(model: RepositoryModel) -> tuple[int, ...]:
    text = model.parameters.get_str(_WINDOWS)
    if text is None:
        return ()
    parts = [part.strip() for part in text.strip("[] ").split(",")]
    if not all(re.fullmatch(r"\d+", part) for part in parts):
        raise ConfigError(
            f"{model.folder}/config.pbtxt: {_WINDOWS} is {text!r} but must be a number of "
            "tokens, or one a layer, as in 4096,8192"
        )
    return tuple(map(int, parts))
