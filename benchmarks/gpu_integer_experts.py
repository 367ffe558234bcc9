"""Times experts of integers and FP4 numbers on a GPU against the time to read their weights.

    python3 benchmarks/gpu_integer_experts.py
    python3 benchmarks/gpu_integer_experts.py --models gpt_oss_120b --triton --output FILE

One layer of gpt-oss-120b, Qwen3 30B and Mixtral: each token draws its experts by chance. Their
sort, two products and sum are timed in a CUDA graph, over eight draws. The limit reads the
weights and scales of the experts that such draws choose, at the rate at which this GPU copies
memory. ``--triton`` times Triton's kernels too.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.bench.kernels.kernel_timing import seconds_a_call
from trimaran.bench.limits import ceilings
from trimaran.bench.limits.roofline import ModelShape
from trimaran.bench.limits.shapes import pretrained_config
from trimaran.bench.results import results
from trimaran.kernels.gpu import TritonOps
from trimaran.kernels.integer_products import IntegerProducts
from trimaran.kernels.integers import Groups, IntegerExperts, IntegerWeight
from trimaran.kernels.routing import ExpertForm

DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16
DRAWS = 8


class Layer(NamedTuple):
    """The experts of a layer."""

    kind: str
    """"mxfp4", or "int4" in groups of 128 with scales in bf16."""

    experts: int
    chosen: int
    hidden: int
    inner: int

    @property
    def bits(self) -> float:
        """Bits of a weight, with its share of a scale."""
        return 4 + (8 / 32 if self.kind == "mxfp4" else 16 / 128)

    def read_bytes(self, tokens: int) -> float:
        """Bytes of the experts that tokens choose, in the mean."""
        read = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        return read * 3 * self.hidden * self.inner * self.bits / 8


MODELS = {
    "gpt_oss_120b": Layer("mxfp4", 128, 4, 2880, 2880),
    "qwen3_30b": Layer("int4", 128, 8, 2048, 768),
    "mixtral": Layer("int4", 8, 2, 4096, 14336),
}


def weights_of(layer: Layer, outputs: int, inner: int) -> list[IntegerWeight]:
    """A random matrix of each expert."""
    is_fp4 = layer.kind == "mxfp4"
    group, scale = (32, 2.0**-7) if is_fp4 else (128, 2.0**-9)
    return [
        IntegerWeight(
            torch.randint(0, 256, (outputs, inner // 2), device=DEVICE, dtype=torch.uint8),
            torch.full((outputs, inner // group), scale, device=DEVICE),
            Groups(group),
            4,
            is_fp4=is_fp4,
        )
        for _ in range(layer.experts)
    ]


def form_of(layer: Layer) -> ExpertForm | None:
    """Biases and SwiGLU of gpt-oss for its experts."""
    if layer.kind != "mxfp4":
        return None
    widths = 2 * layer.inner, layer.hidden
    biases = [torch.randn((layer.experts, each), device=DEVICE, dtype=DTYPE) for each in widths]
    return ExpertForm(biases[0], biases[1], alpha=1.702, limit=7.0)


def draws_of(layer: Layer, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, and the weights and ids of their experts."""
    torch.manual_seed(tokens)
    found = []
    for _ in range(DRAWS):
        x = torch.randn((tokens, layer.hidden), device=DEVICE, dtype=DTYPE)
        odds = torch.rand((tokens, layer.experts), device=DEVICE)
        weights, ids = odds.topk(layer.chosen)
        found.append((x, weights, ids.int()))
    return found


def seconds_of(
    ops: TritonOps,
    draws: list[tuple[Tensor, Tensor, Tensor]],
    stacks: tuple[IntegerExperts, IntegerExperts],
    form: ExpertForm | None,
) -> float:
    """Median time of the experts of one draw."""
    calls = [
        lambda each=each: ops.integer_expert_mlp(*each, *stacks, 0, form) for each in draws
    ]
    return seconds_a_call(calls, DEVICE)


def main() -> None:
    """Print, and append to a file, the times of each model's layer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--triton", action="store_true", help="time Triton's kernels too")
    parser.add_argument("--output", help="append result lines to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: run this on a machine with one")
    limits = ceilings.measure(ModelShape.of(pretrained_config("llama8b")), DEVICE, DTYPE, 1.0)
    print(limits)
    kernels = {"cuda": TritonOps(integers=IntegerProducts(DTYPE))}
    if args.triton:
        kernels["triton"] = TritonOps()
    for name in args.models:
        layer = MODELS[name]
        gate_up = weights_of(layer, 2 * layer.inner, layer.hidden)
        down = weights_of(layer, layer.hidden, layer.inner)
        form = form_of(layer)
        for kernel, ops in kernels.items():
            stacks = (
                ops.integer_expert_storage(gate_up, is_gated=True),
                ops.integer_expert_storage(down, is_gated=False),
            )
            for tokens in args.tokens:
                seconds = seconds_of(ops, draws_of(layer, tokens), stacks, form)
                limit = layer.read_bytes(tokens) / limits.bandwidth
                line = {
                    "benchmark": "integer_experts",
                    "model": name,
                    "quantization": layer.kind,
                    "kernel": kernel,
                    "tokens": tokens,
                    "us": round(1e6 * seconds, 1),
                    "limit_us": round(1e6 * limit, 1),
                    "limit_pct": round(100 * limit / seconds, 1),
                }
                print(" ".join(f"{key} {value}" for key, value in line.items()), flush=True)
                if args.output:
                    results.append(args.output, {**line, **results.environment(DEVICE, limits)})
        del gate_up, down
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
