"""Other engines on the same loads, each in a process of its own, so that memory comes back."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from trimaran.bench.load import Load
from trimaran.comm.errors import ConfigError

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], int]
"""Generates that many tokens for each prompt; returns how many came in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """What a peer is to do: the rules of our own runs."""

    model: str
    """A folder with ``config.json``, and weights unless they are random."""

    is_random: bool
    dtype: str
    device: str
    vocab_size: int
    loads: list[Load]
    runs: int
    max_num_seqs: int
    max_num_tokens: int
    gpu_memory: float
    threads: int


def check_installed(name: str) -> None:
    """Raises ConfigError where this peer cannot be imported."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"--peer {name}: the package {name} is not installed beside Trimaran. Install it, "
            "or leave the flag out."
        )


def run_peer(name: str, work: PeerRun) -> list[list[float]]:
    """Output tokens a second, of each load and run.

    Raises:
        ConfigError: the peer failed; its own words are included.
    """
    check_installed(name)
    done = subprocess.run(
        [sys.executable, "-m", "trimaran.bench.peers", name],
        input=json.dumps(asdict(work)),
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        said = "\n".join(done.stderr.splitlines()[-15:])
        raise ConfigError(f"--peer {name} ended with {done.returncode}: {said}")
    rates: list[list[float]] = json.loads(lines[-1])
    return rates


def main() -> None:
    """Read the work from stdin; the last line of stdout is the result."""
    name, fields = sys.argv[1], json.load(sys.stdin)
    loads = [Load(**load) for load in fields.pop("loads")]
    work = PeerRun(loads=loads, **fields)
    generate = _ENGINES[name](work)
    rates = []
    for load in work.loads:
        # The first run compiles and allocates, and is not counted.
        runs = [_rate(generate, load, work.vocab_size, turn) for turn in range(work.runs + 1)]
        rates.append(runs[1:])
    print()
    print(json.dumps(rates), flush=True)


def _rate(generate: Generate, load: Load, vocab_size: int, turn: int) -> float:
    import numpy as np

    random = np.random.default_rng([turn, load.isl, load.requests])
    prompts = random.integers(0, vocab_size, (load.requests, load.isl)).tolist()
    start = time.perf_counter()
    count = generate(prompts, load.osl)
    seconds = time.perf_counter() - start
    if count != load.requests * load.osl:
        raise RuntimeError(f"{count} tokens came, {load.requests * load.osl} were due")
    return count / seconds


def _transformers(work: PeerRun) -> Generate:
    """Static batches, as large as memory allows."""
    import torch
    import transformers

    torch.set_num_threads(work.threads)
    dtype, device = getattr(torch, work.dtype), torch.device(work.device)
    auto: Any = transformers.AutoModelForCausalLM
    if work.is_random:
        config = transformers.AutoConfig.from_pretrained(work.model)
        with torch.device(device):
            model = auto.from_config(config, dtype=dtype)
    else:
        model = auto.from_pretrained(work.model, dtype=dtype).to(device)
    model.eval()
    model.generation_config.eos_token_id = None
    temperature = work.loads[0].temperature
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    size = work.max_num_seqs

    def one_batch(prompts: Prompts, count: int) -> int:
        ids = torch.tensor(prompts, device=device)
        mask = torch.ones_like(ids)
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, pad_token_id=0, **sampling
        )
        return int(made.cpu().shape[1] - ids.shape[1]) * len(prompts)

    def generate(prompts: Prompts, count: int) -> int:
        nonlocal size
        done = total = 0
        while done < len(prompts):
            try:
                total += one_batch(prompts[done : done + size], count)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                size //= 2
                torch.cuda.empty_cache()
                continue
            done += size
        return total

    return generate


def _vllm(work: PeerRun) -> Generate:
    """Its offline engine with its defaults, but for the rules of ours."""
    import vllm

    engine = vllm.LLM(
        model=work.model,
        skip_tokenizer_init=True,
        load_format="dummy" if work.is_random else "auto",
        dtype=work.dtype,
        enable_prefix_caching=False,
        max_num_seqs=work.max_num_seqs,
        max_num_batched_tokens=work.max_num_tokens,
        max_model_len=max(load.isl + load.osl for load in work.loads),
        gpu_memory_utilization=work.gpu_memory,
    )

    def generate(prompts: Prompts, count: int) -> int:
        sampling = vllm.SamplingParams(
            temperature=work.loads[0].temperature,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
        )
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        made = engine.generate(inputs, sampling, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in made)

    return generate


_ENGINES: dict[str, Callable[[PeerRun], Generate]] = {
    "transformers": _transformers,
    "vllm": _vllm,
}


if __name__ == "__main__":
    main()
