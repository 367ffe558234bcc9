"""Times a decode step's forward pass on the CPU, beside its memory limit and plain torch.

    .venv/bin/python benchmarks/cpu_forward.py --threads 2 --rows 1 16

Weights are random, by default a bf16 Llama of 40 M multiplied parameters. Figures are the
minimum of many runs. The load average shows how much other processes disturbed the runs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch

from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.kernels.dispatch import select_ops
from trimaran.kernels.operators import Ops
from trimaran.kernels.torch_ops import TorchOps
from trimaran.worker.attention.backend import AttentionMetadata, ForwardContext
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.models.interfaces import CausalLM, StageRange
from trimaran.worker.models.registry import DTYPES, build_model
from trimaran.worker.models.weights.weight_loader import fill_random

BLOCK = 32


def make_model(args: argparse.Namespace, ops: Ops) -> CausalLM:
    """A random Llama of the requested sizes."""
    config = PretrainedConfig(
        architecture="LlamaForCausalLM",
        dtype=args.dtype,
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_size=args.hidden // args.heads,
        max_position_embeddings=4096,
        norm_epsilon=1e-5,
        hidden_act="silu",
        position_embedding_type="rope_gpt_neox",
    )
    model = build_model(
        config,
        StageRange.of(args.layers, 0, 1),
        SingleRankGroup(),
        dtype=DTYPES[args.dtype],
        device=torch.device("cpu"),
        ops=ops,
    )
    fill_random(model)
    model.process_weights_after_loading()
    return model


def make_step(model: CausalLM, rows: int, queries: int, length: int) -> Callable[[], object]:
    """One step of ``rows`` sequences that bring ``queries`` tokens to a length each."""
    spec = model.kv_cache_specs()[0]
    each = -(-length // BLOCK)
    shape = (rows * each, len(model.kv_cache_specs()), 2, BLOCK)
    pool = torch.zeros((*shape, spec.num_kv_heads, spec.head_size), dtype=spec.dtype)
    tables = torch.arange(rows * each, dtype=torch.int32).view(rows, each)
    positions = torch.arange(length - queries, length).repeat(rows)
    blocks = tables[:, (positions[:queries] // BLOCK)].long()
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(0, rows * queries + 1, queries, dtype=torch.int32),
        seq_lens=torch.full((rows,), length, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=(blocks * BLOCK + positions[:queries] % BLOCK).view(-1),
        max_query_len=queries,
        max_seq_len=length,
        num_decodes=rows if queries == 1 else 0,
    )
    caches = [pool[:, layer] for layer in range(shape[1])]
    context = ForwardContext(attention=metadata, kv_caches=caches)
    token_ids = torch.randint(model.config.vocab_size, (rows * queries,))
    last = torch.arange(queries - 1, rows * queries, queries)

    def step() -> torch.Tensor:
        hidden = model.forward(token_ids, positions, context)
        return model.compute_logits(hidden if queries == 1 else hidden[last])

    return step


def min_ms(step: Callable[[], object], seconds: float) -> float:
    """Least wall time of one call over about ``seconds`` of calls, in milliseconds."""
    step()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def read_gb_s(num_bytes: int, threads: int) -> float:
    """Best rate at which torch sums memory of this size: the practical limit of a machine."""
    torch.set_num_threads(threads)
    memory = torch.ones(num_bytes // 4)
    return num_bytes / min_ms(memory.sum, 0.5) / 1e6


def main() -> None:
    """Print one line per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {
        "layers": 8, "hidden": 512, "inner": 1408, "heads": 8, "kv-heads": 4, "vocab": 32000,
        "threads": 2, "length": 192, "prompt": 128,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=1.5, help="for each figure")
    args = parser.parse_args()
    dtype = DTYPES[args.dtype]
    ops = select_ops(torch.device("cpu"), dtype, args.threads)
    model, plain = make_model(args, ops), make_model(args, TorchOps())
    embedding = args.vocab * args.hidden
    num_bytes = (sum(p.numel() for p in model.parameters()) - embedding) * dtype.itemsize
    rate = read_gb_s(num_bytes, args.threads)
    print(f"backends: {model.backends()['linear']} against torch {torch.__version__}")
    print(f"weights read a step: {num_bytes / 1e6:.0f} MB; memory reads {rate:.0f} GB/s")
    print(f"memory limit of a step: {num_bytes / rate / 1e6:.2f} ms")
    cases = [(rows, 1, args.length) for rows in args.rows]
    cases += [(1, args.prompt, args.prompt), (4, args.prompt, args.prompt)]
    with torch.inference_mode():
        for rows, queries, length in cases:
            ours = min_ms(make_step(model, rows, queries, length), args.seconds)
            theirs = min_ms(make_step(plain, rows, queries, length), args.seconds)
            what = "decode" if queries == 1 else f"prompt of {queries}"
            load = os.getloadavg()[0]
            print(
                f"{rows:3d} x {what:14s} {ours:7.2f} ms ({rows * queries / ours * 1e3:7.0f} "
                f"tokens/s), torch {theirs:7.2f} ms, load average {load:.2f}"
            )


if __name__ == "__main__":
    main()
