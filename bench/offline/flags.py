"""The flags of offline benchmarks, and the engine that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from trimaran.bench.limits.shapes import SHAPES
from trimaran.bench.offline.load import Load
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import amount, count, positive, seconds, workers
from trimaran.comm.files.output_files import make_writable_folder
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    ProfileConfig,
    SchedulerConfig,
)
from trimaran.worker.config.experts_config import ExpertsConfig
from trimaran.worker.config.kv_cache_dtype import KV_CACHE_DTYPES
from trimaran.worker.config.parallel_sizes import expert_sizes
from trimaran.worker.config.quantization import LOAD_METHODS


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Model, engine, rules of the measurement and destinations of results."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--shape", choices=sorted(SHAPES), default="tiny", help="random weights (default tiny)"
    )
    model.add_argument("--model", metavar="DIR", help="an engine folder or a checkpoint")
    add = parser.add_argument
    first = "only the first N layers of --shape"
    add("--layers", type=positive, metavar="N", help=first)
    add("--load", action="append", metavar="ISL/OSLxN", help="N requests at once; repeat")
    add("--runs", type=positive, default=3, metavar="N", help="the median of N is reported (3)")
    # A value before the sub-command applies unless the flag is repeated.
    default = argparse.SUPPRESS
    add("--temperature", type=amount, default=default, metavar="T", help="0: greedy (1)")
    _add_engine(parser)
    ceiling = "how long ceilings are measured; 0: no limit is reported (12)"
    add("--ceiling-seconds", type=seconds, default=12.0, metavar="S", help=ceiling)
    add("--output", metavar="FILE", help="append results as JSON lines")
    add("--profile", default="", metavar="steps=A:B", help="trace these steps of the engine")
    add("--profile-dir", default="", metavar="DIR", help="with --profile: the trace goes there")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    dtypes = ("auto", "float32", "float16", "bfloat16")
    own = "auto: bfloat16, or that of --model"
    add("--dtype", choices=dtypes, default="auto", help=own)
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a GPU if there is one",
    )
    quantized = "of float weights; no limit is reported then of latent attention (none)"
    add("--quantization", choices=("none", *LOAD_METHODS), default="none", help=quantized)
    stored = "of keys and values: fp8, int8 or the model's (auto: as the folder says)"
    add(
        "--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", metavar="TYPE", help=stored
    )
    add("--threads", type=workers, default=1, metavar="N", help="of a rank on the CPU (1)")
    add(
        "--tp-size",
        type=positive,
        default=1,
        metavar="N",
        help="above 1: start it by mpirun (1)",
    )
    add("--pp-size", type=positive, default=1, metavar="N", help="likewise (1)")
    add("--dp-size", type=positive, default=1, metavar="N", help="likewise (1)")
    parts = "parts that share experts out (1)"
    add("--moe-ep-size", type=positive, default=1, metavar="N", help=parts)
    add("--moe-rebalance-steps", type=count, default=0, metavar="N", help="see `serve` (0)")
    add("--moe-redundant-experts", type=count, default=0, metavar="N", help="see `serve` (0)")
    add(
        "--max-num-seqs",
        type=positive,
        default=1024,
        metavar="N",
        help="running at once (1024)",
    )
    add("--max-num-tokens", type=positive, default=8192, metavar="N", help="of one step (8192)")
    share = "of all of the card's (0.9)"
    add("--gpu-memory", type=float, default=0.9, metavar="SHARE", help=share)
    add("--depth", type=int, default=0, metavar="N", help="steps in flight (by device)")
    add("--no-cuda-graphs", action="store_true", help="launch kernels one by one")
    add("--prompt-graph-tokens", type=int, metavar="N", help="see `serve`")
    add("--collective-graphs", action=argparse.BooleanOptionalAction, help="see `serve`")
    add("--first-layer-table", action=argparse.BooleanOptionalAction, help="see `serve`")
    ways = ("auto", "nccl", "peer", "fused")
    add("--all-reduce", choices=ways, default="auto", help="see `serve`")
    add(
        "--kv-host-gib",
        type=amount,
        default=0.0,
        metavar="GIB",
        help="a rank's host memory for the KV cache of preempted sequences (0)",
    )
    add(
        "--deterministic",
        action="store_true",
        help="kernels whose results do not depend on the batch",
    )


def add_peer(parser: argparse.ArgumentParser) -> None:
    """Flags for other engines on the same work."""
    parser.add_argument(
        "--peer", action="append", choices=("transformers", "vllm"), metavar="NAME",
        help="run it on the same loads too, before ours: transformers, vllm",
    )  # fmt: skip
    backend = "of --peer vllm: the kernels of its products, such as marlin (vLLM's choice)"
    parser.add_argument("--vllm-linear-backend", metavar="NAME", help=backend)


def shape_name(args: argparse.Namespace) -> str:
    """The name of the random model in results: a cut shape's ends with its layers."""
    return f"{args.shape}_{args.layers}l" if args.layers else str(args.shape)


def loads_of(args: argparse.Namespace, default: Sequence[str]) -> list[Load]:
    """The loads to run; raises ConfigError."""
    temperature = 1.0 if args.temperature is None else args.temperature
    return [Load.parse(text, temperature) for text in args.load or default]


def parallel_config(args: argparse.Namespace) -> ParallelConfig:
    """The ranks' layout; raises ConfigError."""
    parts = args.moe_ep_size if args.moe_ep_size > 1 else -1
    moe_tp_size, moe_ep_size = expert_sizes(-1, parts, args.tp_size, args.dp_size)
    return ParallelConfig(
        tp_size=args.tp_size,
        pp_size=args.pp_size,
        dp_size=args.dp_size,
        moe_tp_size=moe_tp_size,
        moe_ep_size=moe_ep_size,
    )


def profile_config(args: argparse.Namespace) -> ProfileConfig | None:
    """The steps to trace; raises ConfigError."""
    folder: str = args.profile_dir
    if not args.profile:
        if folder:
            raise ConfigError(
                f"--profile-dir {folder} has no effect: name the steps with --profile steps=A:B"
            )
        return None
    config = ProfileConfig.parse(args.profile, folder, "--profile-dir")
    return replace(config, folder=make_writable_folder("--profile-dir", folder))


def engine_config(args: argparse.Namespace, folder: str, loads: list[Load]) -> EngineConfig:
    """An engine for these loads: no prefix reuse, no reserve, and only as many rows as
    needed.
    """
    longest = max(load.isl + load.osl for load in loads)
    num_seqs = min(args.max_num_seqs, max(load.requests for load in loads))
    return EngineConfig(
        model="bench",
        engine_dir=folder,
        dtype=args.dtype,
        quantization=args.quantization,
        load_format="auto" if args.model else "random",
        device=args.device,
        num_threads=args.threads,
        deterministic=args.deterministic,
        cuda_graphs=not args.no_cuda_graphs,
        prompt_graph_tokens=args.prompt_graph_tokens,
        collective_graphs=args.collective_graphs,
        first_layer_table=args.first_layer_table,
        all_reduce=args.all_reduce,
        parallel=parallel_config(args),
        experts=ExpertsConfig(
            rebalance_steps=args.moe_rebalance_steps,
            num_redundant=args.moe_redundant_experts,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max(args.max_num_tokens, num_seqs),
            max_num_seqs=num_seqs,
            max_seq_len=longest,
            max_input_len=longest - 1,
            policy="max_utilization",
            depth=args.depth,
        ),
        cache=CacheConfig(
            enable_block_reuse=False,
            host_bytes=int(args.kv_host_gib * 2**30),
            dtype=args.kv_cache_dtype,
        ),
    )
