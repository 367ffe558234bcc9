"""`trimaran bench throughput` and `latency`: one engine in this process, against the limit."""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimaran.bench.limits import ceilings
from trimaran.bench.limits.latent_shape import shape_of
from trimaran.bench.limits.ranks import Ranks, connected, memory_of
from trimaran.bench.limits.roofline import Ceilings, ModelShape, output_tokens_per_s
from trimaran.bench.limits.shapes import pretrained_config, shape_config
from trimaran.bench.offline.engine_run import (
    OfflineDriver,
    OfflineRun,
    load_engine,
    random_checkpoint,
)
from trimaran.bench.offline.flags import (
    engine_config,
    loads_of,
    parallel_config,
    profile_config,
    shape_name,
)
from trimaran.bench.offline.load import Load
from trimaran.bench.offline.peers import PeerRun, check_installed, run_peer, vllm_formats
from trimaran.bench.results import results
from trimaran.comm.errors import ConfigError
from trimaran.kernels.tables.product_table import Bytes
from trimaran.worker.config.engine_config import ParallelConfig
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.kv_cache_dtype import (
    ALGORITHMS,
    FLOATS,
    SYNONYMS,
    resolve_kv_cache_dtype,
)
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.engine.engine import Engine
from trimaran.worker.models.registry import dtype_by_name

_MIN_STEPS = 3
"""Steps of a request up to the first decode-only step that follows another one."""

Facts = dict[str, Any]


def run_throughput(args: argparse.Namespace) -> int:
    """Median of the runs of each load, and the percentage of the machine's limit."""
    loads = loads_of(args, ["128/128x64"])
    with _subject(args, loads) as subject:
        for load in loads:
            if subject is not None:
                _throughput(args, subject, load)
    return 0


def run_latency(args: argparse.Namespace) -> int:
    """Time to the first token, and between tokens, of one request or of a few at once."""
    loads = loads_of(args, ["128/128x1"])
    for load in loads:
        if load.osl < _MIN_STEPS:
            raise ConfigError(
                f"--load {load}: {load.osl} new tokens have no time between them that can be "
                f"measured. Ask for {_MIN_STEPS} or more."
            )
    with _subject(args, loads) as subject:
        for load in loads:
            if subject is not None:
                _latency(args, subject, load)
    return 0


def _throughput(args: argparse.Namespace, subject: _Subject, load: Load) -> None:
    runs = _runs(subject.driver, load, args.runs)
    _tell(args, subject, load, runs, subject.facts(load, runs))
    for name, rates in subject.peers.items():
        _tell_peer(args, subject, load, name, rates[subject.loads.index(load)])


def _latency(args: argparse.Namespace, subject: _Subject, load: Load) -> None:
    runs = _runs(subject.driver, load, args.runs)
    times = token_times(runs)
    print("  ".join(f"{name} {value}" for name, value in times.items()))
    facts = {**subject.facts(load, runs), "benchmark": "latency", **times}
    _tell(args, subject, load, runs, facts)


def token_times(runs: list[OfflineRun]) -> dict[str, float]:
    """Milliseconds to the first token, the median of all requests, and between tokens."""
    first = np.concatenate([run.first_token_s for run in runs])
    between = np.concatenate([run.steps_s[_MIN_STEPS - 1 :] for run in runs])
    return {
        "first_token_ms": round(1e3 * float(np.median(first)), 3),
        "token_ms_p50": round(1e3 * float(np.percentile(between, 50)), 3),
        "token_ms_p99": round(1e3 * float(np.percentile(between, 99)), 3),
    }


class _Subject:
    """The measured engine, its shape, and the rates of its device."""

    def __init__(
        self, args: argparse.Namespace, loads: list[Load], engine: Engine, ranks: Ranks
    ) -> None:
        facts = engine.facts()
        self.loads = loads
        self.name = Path(args.model).name if args.model else shape_name(args)
        self.shape: ModelShape
        self.limits: Ceilings | None = None
        self.peers: dict[str, list[list[float]]] = {}
        self.memory: list[dict[str, float]] = []
        """The parts of each rank's memory, in GB."""
        self.dtype = facts["dtype"]
        self.kv_cache_dtype = facts["kv_cache_dtype"]
        self.engine = engine
        self.driver = OfflineDriver(engine, ranks.control, facts["vocab_size"])
        self.device = engine.device
        self.quantization: str = args.quantization
        self.parallel = parallel_config(args)
        self._max_num_seqs = facts["max_batch_size"]
        is_gpu = self.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(self.device) if is_gpu else "the CPU"

    def __str__(self) -> str:
        count = self.parallel.world_size
        ranks = f" over {count} ranks" if count > 1 else ""
        return f"{self.name} in {self.dtype} on {self.device_name}{ranks}"

    def facts(self, load: Load, runs: list[OfflineRun]) -> Facts:
        """The results of one load on our engine."""
        steps_s = np.concatenate([run.steps_s for run in runs])
        return {
            **self.figures(load, [run.out_tok_s for run in runs]),
            "memory_gb": self.memory,
            "seconds": round(statistics.median(run.seconds for run in runs), 3),
            "step_ms_p50": round(1e3 * float(np.median(steps_s)), 3),
            "paused_sequences": int(statistics.median(run.num_paused for run in runs)),
            "recomputed_tokens": int(statistics.median(run.num_recomputed for run in runs)),
        }

    def figures(self, load: Load, rates: list[float], engine: str = "trimaran") -> Facts:
        """The summary of any engine's runs, with the share of the limit."""
        median = statistics.median(rates)
        facts: dict[str, Any] = {
            "benchmark": "throughput",
            "engine": engine,
            "shape": self.name,
            "gpus": self.parallel.world_size if self.device.type == "cuda" else 0,
            "tp_size": self.parallel.tp_size,
            "pp_size": self.parallel.pp_size,
            "dp_size": self.parallel.dp_size,
            "moe_ep_size": self.parallel.expert_parts,
            "isl": load.isl,
            "osl": load.osl,
            "requests": load.requests,
            "out_tok_s": round(median, 1),
            "out_tok_s_runs": [round(rate, 1) for rate in sorted(rates)],
            "dtype": self.dtype,
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "temperature": load.temperature,
        }
        if self.limits is not None:
            most = min(load.requests, self._max_num_seqs)
            limit = output_tokens_per_s(self.shape, self.limits, load.isl, load.osl, most)
            facts["limit_tok_s"] = round(limit, 1)
            facts["limit_pct"] = round(100 * median / limit, 1)
        return facts


@contextlib.contextmanager
def _subject(args: argparse.Namespace, loads: list[Load]) -> Iterator[_Subject | None]:
    """The measured engine, on the measuring rank; other ranks run the engine's steps and get
    None.
    """
    profile = profile_config(args)
    for name in _peer_names(args):
        check_installed(name)
        formats = vllm_formats(is_random=not args.model) if name == "vllm" else ()
        if args.quantization not in ("none", *formats):
            raise ConfigError(
                f"--peer {name} does not quantize float weights as --quantization "
                f"{args.quantization} does: leave one of them out"
            )
        kinds = ("auto", *FLOATS, *(["fp8"] if name == "vllm" else []))
        if SYNONYMS.get(args.kv_cache_dtype, args.kv_cache_dtype) not in kinds:
            raise ConfigError(
                f"--peer {name} has no KV cache as --kv-cache-dtype {args.kv_cache_dtype} asks "
                "for: leave one of them out"
            )
    with _folder(args, loads) as (folder, model):
        _check_peers(args, model)
        config = engine_config(args, folder, loads)
        if config.parallel.world_size > 1 and _peer_names(args):
            raise ConfigError("--peer compares engines on one device: leave it out, or ranks")
        with connected(config) as ranks:
            shape = _shape(args, folder, model, is_gpu=ranks.device.type == "cuda")
            share = _memory_fraction(args, shape, ranks)
            limits = _limits(args, ranks, shape, model)
            peers = _peers(args, folder, model, loads)
            cache = replace(config.cache, free_memory_fraction=share)
            engine = load_engine(replace(config, cache=cache), ranks, profile)
            memory = ranks.of_all(memory_of(engine))
            try:
                if ranks.is_leader:
                    subject = _Subject(args, loads, engine, ranks)
                    subject.shape, subject.limits, subject.peers = shape, limits, peers
                    subject.memory = memory
                    print(subject, flush=True)
                    yield subject
                else:
                    ranks.follow(engine)
                    yield None
            finally:
                engine.shutdown()


_GROUP_SCALE_BYTES = 2.0
_WEIGHT_BYTES = {
    "fp8": 1.0,
    "fp8_block": 1.0,
    "int8": 1.0,
    "w8a8_int8": 1.0,
    "int4": 0.5 + _GROUP_SCALE_BYTES / 128,
    "int4_g64": 0.5 + _GROUP_SCALE_BYTES / 64,
    "int4_g32": 0.5 + _GROUP_SCALE_BYTES / 32,
}
"""Bytes of an element of a layer's weights by ``--quantization``, with a group's scale."""

_INPUTS: dict[str, Bytes] = {"fp8": "FP8", "fp8_block": "FP8", "w8a8_int8": "INT8"}
"""The numbers that are multiplied, where inputs are quantized too."""


def _shape(
    args: argparse.Namespace, folder: str, model: PretrainedConfig, *, is_gpu: bool
) -> ModelShape:
    """The model's sizes, with the bytes of weights and KV cache that the flags ask for."""
    kind = resolve_kv_cache_dtype(args.kv_cache_dtype, model, Path(folder), model.dtype)
    shape = shape_of(model)
    quantized = _WEIGHT_BYTES.get(args.quantization, 0.0)
    if args.quantization.startswith("fp8") and not is_gpu:
        # The CPU keeps FP8 weights in bf16.
        quantized = 0.0
    cached = 1.0 if kind in ALGORITHMS else 0.0
    # The head beside integer weights has 8 bits.
    head = 1.0 if args.quantization.startswith("int") else 0.0
    return replace(shape, cached_bytes=cached, quantized_bytes=quantized, head_bytes=head)


def _has_limit(args: argparse.Namespace, model: PretrainedConfig) -> bool:
    """Whether the limit counts the model's weights: not those that the folder quantizes in a
    way of its own, nor quantized weights of latent attention."""
    if args.ceiling_seconds <= 0 or model.quantization is not None:
        return False
    return args.quantization == "none" or not model.kv_lora_rank


def _limits(
    args: argparse.Namespace, ranks: Ranks, shape: ModelShape, model: PretrainedConfig
) -> Ceilings | None:
    """The rates that all devices sustain at the same time; None without a limit.
    Collective."""
    if not _has_limit(args, model):
        return None
    limits = ceilings.measure_all(
        shape,
        ranks,
        dtype_by_name(model.dtype),
        args.ceiling_seconds,
        numbers=_INPUTS.get(args.quantization, ""),
    )
    if ranks.is_leader:
        print(f"ceilings: {limits}")
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(ranks.device)
    return limits


def _peer_names(args: argparse.Namespace) -> list[str]:
    return getattr(args, "peer", None) or []


def _linear_backend(args: argparse.Namespace) -> str:
    return getattr(args, "vllm_linear_backend", None) or ""


def _check_peers(args: argparse.Namespace, model: PretrainedConfig) -> None:
    """Refuse vLLM's own random weights for a model with experts, and its flag without vLLM.

    Raises:
        ConfigError: vLLM would draw them: all tokens would choose the same experts; or vLLM
            does not run.
    """
    if _linear_backend(args) and "vllm" not in _peer_names(args):
        raise ConfigError(
            f"--vllm-linear-backend {_linear_backend(args)} has no effect without --peer vllm: "
            "add that flag, or leave this one out"
        )
    if "vllm" in _peer_names(args) and model.num_experts and not args.model:
        raise ConfigError(
            f"--peer vllm draws weights with which all tokens choose the same few of "
            f"{model.num_experts} experts, and reads no others: name a folder of weights with "
            "--model in place of --shape"
        )


def _peers(
    args: argparse.Namespace, folder: str, config: PretrainedConfig, loads: list[Load]
) -> dict[str, list[list[float]]]:
    """The rates of each peer, measured before our own engine takes the device's memory."""
    found = {}
    for name in _peer_names(args):
        print(f"{name} is measured first", flush=True)
        most = max(load.requests for load in loads)
        work = PeerRun(
            model=folder,
            is_random=not args.model,
            dtype=config.dtype,
            device=_device_of(args),
            vocab_size=config.vocab_size,
            loads=loads,
            runs=args.runs,
            max_num_seqs=min(args.max_num_seqs, most),
            max_num_tokens=args.max_num_tokens,
            gpu_memory=args.gpu_memory,
            threads=args.threads,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            linear_backend=_linear_backend(args) if name == "vllm" else "",
        )
        found[name] = run_peer(name, work)
    return found


def _device_of(args: argparse.Namespace) -> str:
    if args.device != "auto":
        return str(args.device)
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def _folder(
    args: argparse.Namespace, loads: list[Load]
) -> Iterator[tuple[str, PretrainedConfig]]:
    """The folder that the engine loads, and its configuration."""
    if args.model:
        if args.layers:
            raise ConfigError(
                f"--layers {args.layers} cuts a --shape, not --model: leave it out"
            )
        config = EngineFolder.load(args.model).config
        yield args.model, config if args.dtype == "auto" else replace(config, dtype=args.dtype)
        return
    dtype = "bfloat16" if args.dtype == "auto" else args.dtype
    longest = max(load.isl + load.osl for load in loads)
    sizes = args.shape, dtype, longest, args.layers
    with random_checkpoint(shape_config(*sizes)) as folder:
        yield folder, pretrained_config(*sizes)


def _memory_fraction(args: argparse.Namespace, shape: ModelShape, ranks: Ranks) -> float:
    """The share of the memory beside the weights with which ``--gpu-memory`` of the card is
    in use.
    """
    if not 0 < args.gpu_memory <= 1:
        raise ConfigError(f"--gpu-memory is {args.gpu_memory} but must be above 0, at most 1")
    if ranks.device.type != "cuda":
        return float(args.gpu_memory)
    total = float(torch.cuda.get_device_properties(ranks.device).total_memory)
    weight_bytes = rank_weight_bytes(shape, parallel_config(args))
    fraction = 1 - (1 - args.gpu_memory) * total / max(total - weight_bytes, 1.0)
    if fraction <= 0:
        raise ConfigError(
            f"--gpu-memory {args.gpu_memory} of {total / 1e9:.0f} GB leaves no KV cache beside "
            f"{weight_bytes / 1e9:.0f} GB of weights: raise it"
        )
    return float(fraction)


def rank_weight_bytes(shape: ModelShape, parallel: ParallelConfig) -> float:
    """A rank's part of the weights: data-parallel ranks hold all weights except the experts
    that they divide.
    """
    num_ranks = parallel.tp_size * parallel.pp_size
    common = shape.weight_bytes - shape.expert_bytes
    return (common + shape.expert_bytes / parallel.expert_dp_size) / num_ranks


def _runs(driver: OfflineDriver, load: Load, count: int) -> list[OfflineRun]:
    # First use compiles and allocates, which is not measured.
    short = Load(
        isl=load.isl,
        osl=min(load.osl, 16),
        # Some steps full of prompts, then decodes.
        requests=min(load.requests, max(1, 65536 // load.isl)),
        temperature=load.temperature,
    )
    driver.run(short)
    return [driver.run(load) for _ in range(count)]


def _tell_peer(
    args: argparse.Namespace, subject: _Subject, load: Load, name: str, rates: list[float]
) -> None:
    facts = subject.figures(load, rates, name)
    facts[f"{name}_version"] = version(name)
    if name == "vllm" and _linear_backend(args):
        facts["linear_backend"] = _linear_backend(args)
    share = f", {facts['limit_pct']:.1f} %" if "limit_pct" in facts else ""
    print(f"{'':>14}  {facts['out_tok_s']:10,.0f} tokens/s by {name}{share}", flush=True)
    if args.output:
        results.append(
            args.output, {**facts, **results.environment(subject.device, subject.limits)}
        )


def _tell(
    args: argparse.Namespace,
    subject: _Subject,
    load: Load,
    runs: list[OfflineRun],
    facts: dict[str, Any],
) -> None:
    limit = (
        f"{facts['limit_pct']:5.1f} % of {facts['limit_tok_s']:,.0f}"
        if "limit_pct" in facts
        else ""
    )
    spread = " to ".join(
        f"{rate:,.0f}" for rate in (facts["out_tok_s_runs"][0], facts["out_tok_s_runs"][-1])
    )
    print(
        f"{load!s:>14}: {facts['out_tok_s']:10,.0f} tokens/s ({spread})  {limit}  "
        f"median step {facts['step_ms_p50']:.2f} ms",
        flush=True,
    )
    if args.output:
        results.append(
            args.output, {**facts, **results.environment(subject.device, subject.limits)}
        )
