"""Output tokens a second of a served random-weight Llama on the CPU, beside transformers.

    .venv/bin/python benchmarks/cpu_serving.py --json benchmarks/results/cpu_serving.json

The model (hidden 512, 8 layers, 8/4 heads of 64, ffn 1408, vocabulary 32000, bfloat16) is
served by `trimaran serve` on one rank with two threads. `trimaran bench --no-streaming` sends
requests through gRPC on the same machine. transformers generates with the same sizes and
threads in the same run. Other work on the machine disturbs every figure: the load average is
written beside the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimaran.bench.results.machine import cpu_model
from trimaran.bench.serving.server_process import (
    BIN,
    serving,
    write_random_model,
    write_repository,
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1408,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LENGTH = 128


@contextlib.contextmanager
def served(folder: Path, threads: int, quantization: str) -> Iterator[int]:
    """Serve the model; yields the gRPC port."""
    write_random_model(folder / "model", CONFIG)
    write_repository(folder / "repository", ["tensorrt_llm"], engine_dir=folder / "model")
    flags = [
        "--world-size", "1", "--num-threads", str(threads), "--load-format", "random",
        "--device", "cpu", "--max-batch-size", "32", "--max-num-tokens", "2048",
        "--quantization", quantization,
    ]  # fmt: skip
    with serving(folder / "repository", flags, log=folder / "serve.log") as server:
        yield server.grpc


def bench(port: int, concurrency: int, folder: Path) -> float:
    """Output tokens a second of one run of `trimaran bench`."""
    result = folder / "bench.json"
    subprocess.run(
        [BIN / "trimaran", "bench", "-i", "grpc", "-u", f"127.0.0.1:{port}",
         "--concurrency", str(concurrency), "--num-requests", str(max(4, 3 * concurrency)),
         "--input-len", str(LENGTH), "--output-len", str(LENGTH), "--vocab-size", "32000",
         "--no-streaming", "--json", result],
        check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return float(find(json.loads(result.read_text()), "output_tokens_per_s"))


def find(report: Any, key: str) -> Any:
    """The value of a key anywhere in a nested report."""
    if isinstance(report, dict):
        if key in report:
            return report[key]
        for value in report.values():
            with contextlib.suppress(KeyError):
                return find(value, key)
    raise KeyError(key)


def transformers_rate(batch: int, threads: int) -> float:
    """Output tokens a second of transformers on the same sizes, in a child of its own."""
    code = (
        "import json, sys, time, torch, transformers\n"
        "sizes, batch, length, threads = json.loads(sys.argv[1])\n"
        "torch.set_num_threads(threads)\n"
        "config = transformers.LlamaConfig(**sizes)\n"
        "model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)\n"
        "ids = torch.randint(3, config.vocab_size, (batch, length))\n"
        "def run():\n"
        "    start = time.perf_counter()\n"
        "    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,\n"
        "                   max_new_tokens=length, min_new_tokens=length, pad_token_id=0)\n"
        "    return batch * length / (time.perf_counter() - start)\n"
        "run(); print(max(run() for _ in range(3)))\n"
    )
    sizes = {k: v for k, v in CONFIG.items() if k not in ("architectures", "torch_dtype")}
    arguments = json.dumps([sizes, batch, LENGTH, threads])
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", code, arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quantization", default="none", help="of Trimaran's weights (none)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    before = os.getloadavg()
    rows = []
    with tempfile.TemporaryDirectory(prefix="trimaran-bench-") as name:
        folder = Path(name)
        with served(folder, args.threads, args.quantization) as port:
            for concurrency in (1, 16):
                bench(port, concurrency, folder)
                rates = [bench(port, concurrency, folder) for _ in range(args.repeats)]
                rows.append({"concurrency": concurrency, "trimaran_runs": rates})
    for row in rows:
        row["trimaran_best"] = max(row["trimaran_runs"])
        row["trimaran_median"] = statistics.median(row["trimaran_runs"])
        row["transformers_best"] = transformers_rate(row["concurrency"], args.threads)
    print(f"{'concurrent':>10} {'trimaran':>9} {'(median)':>9} {'transformers':>13}  tokens/s")
    for row in rows:
        print(
            f"{row['concurrency']:>10} {row['trimaran_best']:>9.0f} "
            f"{row['trimaran_median']:>9.0f} {row['transformers_best']:>13.0f}"
        )
    print(f"load average before {before[0]:.2f}, after {os.getloadavg()[0]:.2f}")
    if args.json:
        import torch
        import transformers

        report = {
            "command": "benchmarks/cpu_serving.py",
            "device": f"{cpu_model()}, {args.threads} threads",
            "quantization": args.quantization,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "load_average_before": before,
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
