"""Other engines on the same loads, each in its own process, so that memory is freed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO, Any

from trimaran.bench.offline.load import Load
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.kv_cache_dtype import FLOATS

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], int]
"""Generates a number of tokens for each prompt; returns how many were generated in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """The work of a peer: the rules of our own runs."""

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
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    linear_backend: str = ""
    """The kernels of vLLM's products; empty: its own choice."""


def check_installed(name: str) -> None:
    """Raises ConfigError if this peer cannot be imported."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"--peer {name}: the package {name} is not installed beside Trimaran. Install it, "
            "or leave the flag out."
        )


def run_peer(name: str, work: PeerRun) -> list[list[float]]:
    """Output tokens a second, of each load and run.

    Raises:
        ConfigError: the peer failed; its own message is included.
    """
    check_installed(name)
    command = [sys.executable, "-m", "trimaran.bench.offline.peers", name]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        code = _run_group(command, json.dumps(asdict(work)), out, log)
        out.seek(0)
        log.seek(0)
        lines, said = out.read().splitlines(), log.read().splitlines()
    if code != 0 or not lines:
        # An engine with a process of its own reports the cause before its caller's error.
        words = "\n".join(said[-80:])
        raise ConfigError(f"--peer {name} ended with {code}: {words}")
    rates: list[list[float]] = json.loads(lines[-1])
    return rates


def _run_group(command: list[str], line: str, out: IO[str], log: IO[str]) -> int:
    """Run a command with one line of input, in a process group that is killed afterwards.

    The output goes to files: a pipe would stay open as long as any child of the command.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=out,
        stderr=log,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
            # Not reaped yet, so that the group's id is not reused.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    _wait_until_gone(process.pid)
    return process.returncode


def _wait_until_gone(group: int, timeout_s: float = 10.0) -> None:
    """Device memory is freed only as the processes end."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.01)


def main() -> None:
    """Read the work from stdin's first line; the last line of stdout is the result."""
    name, fields = sys.argv[1], json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Engines write to stdout, from their processes even after the result.
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loads = [Load(**load) for load in fields.pop("loads")]
    work = PeerRun(loads=loads, **fields)
    generate = _ENGINES[name](work)
    rates = []
    for load in work.loads:
        # The first run compiles and allocates, and is not counted.
        runs = [_rate(generate, load, work.vocab_size, turn) for turn in range(work.runs + 1)]
        rates.append(runs[1:])
    print(json.dumps(rates), file=result, flush=True)


def _end_with_parent() -> None:
    """The caller holds stdin open; when the caller is gone, the whole process group must
    end.
    """
    os.read(0, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


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
    """vLLM's offline engine with its defaults, except for the rules of our runs."""
    import vllm
    from vllm.platforms import current_platform

    if current_platform.device_type != work.device.partition(":")[0]:
        where = current_platform.device_type or "no device"
        raise RuntimeError(f"vLLM would run on {where}, not on {work.device}")
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
        kv_cache_dtype="auto" if work.kv_cache_dtype in FLOATS else work.kv_cache_dtype,
        **_vllm_quantization(work.quantization),
        **({"linear_backend": work.linear_backend} if work.linear_backend else {}),
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


_VLLM_BITS = {"int4": 4, "int8": 8}


def _vllm_quantization(name: str) -> dict[str, Any]:
    """Flags of vLLM for random weights in one of our formats.

    vLLM does not round floats to integers. The folder's configuration names a GPTQ checkpoint
    instead, with the groups of ours, and vLLM chooses its kernels for such weights.
    """
    if name == "none":
        return {}
    if name not in _VLLM_BITS:
        return {"quantization": name}
    checkpoint = {
        "quant_method": "gptq",
        "bits": _VLLM_BITS[name],
        "group_size": 128 if name == "int4" else -1,
        "desc_act": False,
        "sym": True,
    }
    return {"hf_overrides": {"quantization_config": checkpoint}}


def vllm_formats(*, is_random: bool) -> tuple[str, ...]:
    """The formats of ``--quantization`` in which vLLM holds a folder's float weights, or random
    ones."""
    return ("fp8", *_VLLM_BITS) if is_random else ("fp8",)


_ENGINES: dict[str, Callable[[PeerRun], Generate]] = {
    "transformers": _transformers,
    "vllm": _vllm,
}


if __name__ == "__main__":
    main()
