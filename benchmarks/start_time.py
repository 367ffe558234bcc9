"""The start time of `trimaran serve`, the first time on a machine and after that.

    python benchmarks/start_time.py --shape llama8b --json benchmarks/results/start.jsonl

Writes a checkpoint of random weights, so that its files are in the page cache, and starts a
server on it several times. Compiled kernels go to a cache that is empty at the first start.
After each start one request is answered.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trimaran.bench.limits.shapes import SHAPES, shape_config
from trimaran.bench.results import results
from trimaran.bench.serving.server_process import serving, write_repository

TOKENIZER = Path(__file__).resolve().parents[1] / "examples" / "demo_models" / "base"
_TEMPLATE = {
    "preprocessing_instance_count": 1,
    "postprocessing_instance_count": 1,
    "bls_instance_count": 1,
    "max_queue_delay_microseconds": 0,
    "max_queue_size": 0,
}
_REQUEST = {"text_input": "It was", "max_tokens": 16, "bad_words": "", "stop_words": ""}


def write_checkpoint(folder: Path, shape: str) -> int:
    """A Hugging Face folder with random weights, a file for each quarter of the layers.

    Returns the bytes of the files.
    """
    config = shape_config(shape, "bfloat16", 8192)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names: dict[str, str] = {}
    num_layers = config["num_hidden_layers"]
    for quarter in range(4):
        tensors = {
            f"model.layers.{layer}.{name}.weight": _random(shape_of)
            for layer in range(quarter * num_layers // 4, (quarter + 1) * num_layers // 4)
            for name, shape_of in shapes.items()
        }
        if quarter == 3:
            tensors["model.norm.weight"] = _random((hidden,))
            tensors["model.embed_tokens.weight"] = _random((config["vocab_size"], hidden))
            if not config.get("tie_word_embeddings"):
                tensors["lm_head.weight"] = _random((config["vocab_size"], hidden))
        file = f"model-{quarter + 1:05d}-of-00004.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        names.update(dict.fromkeys(tensors, file))
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return (values.fill_(1.0) if len(shape) == 1 else values.normal_(0.0, 0.02)).cpu()


class Start:
    """One start of a server, and its end."""

    def __init__(self, work: Path, flags: list[str]) -> None:
        self._caches = [work / "triton", work / "cache"]
        self._log = work / "serve.log"
        env = {
            "TRITON_CACHE_DIR": str(self._caches[0]),
            "XDG_CACHE_HOME": str(self._caches[1]),
        }
        before = self._num_compiled()
        with serving(work / "repository", flags, log=self._log, env=env) as server:
            self.seconds = server.ready_s
            self.first_answer_s = self._ask(server.http)
        self.num_compiled = self._num_compiled() - before

    def _num_compiled(self) -> int:
        """Machine code files in the caches."""
        files = [file for cache in self._caches for file in cache.rglob("*")]
        return sum(file.suffix in (".cubin", ".so") for file in files)

    @staticmethod
    def _ask(port: int) -> float:
        begin = time.monotonic()
        url = f"http://127.0.0.1:{port}/v2/models/ensemble/generate"
        request = urllib.request.Request(url, data=json.dumps(_REQUEST).encode())
        with urllib.request.urlopen(request, timeout=60) as reply:
            reply.read()
        return time.monotonic() - begin

    def lines(self) -> list[str]:
        """The times of the start's stages, from the log."""
        words = (
            r"(ready after .* s \(.*|weights ready: .*|KV cache on the host: .*|captured .*"
            r"|kernel .* compiled .*)"
        )
        return re.findall(words, self._log.read_text())

    def facts(self) -> dict[str, Any]:
        """For the result line."""
        return {
            "ready_s": round(self.seconds, 2),
            "first_answer_s": round(self.first_answer_s, 3),
            "kernels_compiled": self.num_compiled,
            "stages": self.lines(),
        }


def main() -> None:
    """Start, ask, stop; print each start, and append one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder of the checkpoint (a temporary one)")
    parser.add_argument("--kv-host-gib", type=float, default=0, help="of a rank, for KV blocks")
    parser.add_argument("--json", default="", help="append the result to this file")
    args, flags = parser.parse_known_args()
    work = Path(tempfile.mkdtemp(prefix="trimaran-start-", dir=args.work))
    try:
        size = write_checkpoint(work / "model", args.shape)
        write_repository(
            work / "repository",
            **_TEMPLATE,
            engine_dir=work / "model",
            tokenizer_dir=TOKENIZER,
            kv_cache_host_memory_bytes=int(args.kv_host_gib * 2**30),
            enable_kv_cache_reuse=bool(args.kv_host_gib),
        )
        starts = []
        for number in range(args.starts):
            start = Start(work, flags)
            starts.append(start.facts())
            print(f"start {number + 1}: {json.dumps(starts[-1], indent=1)}", flush=True)
    finally:
        shutil.rmtree(work)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"benchmark": "start", "shape": args.shape, "weight_bytes": size, "starts": starts}
    facts["kv_host_gib"] = args.kv_host_gib
    facts.update(results.environment(device, None))
    if args.json:
        results.append(args.json, facts)


if __name__ == "__main__":
    main()
