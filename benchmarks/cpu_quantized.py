"""Output tokens a second in bf16, int8 and int4 on a CPU, beside OpenVINO GenAI and llama.cpp.

    .venv/bin/python benchmarks/cpu_quantized.py --threads 2 --output FILE
    .venv/bin/python benchmarks/cpu_quantized.py --peer openvino --peer llama-cpp \
        --peer-python OTHER_VENV/bin/python --output FILE

The model of `cpu_serving.py` gets random weights in bfloat16. Every engine generates 128 tokens
behind prompts of 128 random tokens, greedily, for one request and for 16 at once, in a process
of its own and without a front end. Engines take turns in each round, so that other work on the
machine disturbs all of them. Figures are medians of the rounds' medians.

Peers have weights of 8 bits: OpenVINO GenAI those of nncf by optimum-intel, llama.cpp Q8_0.
Their packages may lie in another environment, whose interpreter `--peer-python` names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cpu_serving import CONFIG, LENGTH

from trimaran.bench.results import results
from trimaran.comm.errors import ConfigError

PEERS = {
    "openvino": (("openvino_genai", "optimum.intel"), "openvino-genai optimum-intel[openvino]"),
    "llama-cpp": (("llama_cpp", "gguf"), "llama-cpp-python gguf"),
}
"""The modules of each peer, and the packages that have them."""

QUANTIZATIONS = {"bf16": "none", "int8": "int8", "int4": "int4"}
"""Our weights, and the value of ``--quantization`` that makes them."""

PEER_WEIGHTS = {"openvino": "int8", "llama-cpp": "Q8_0"}
REQUESTS = (1, 16)
_PROGRAM = "import sys; from trimaran.launcher.cli.main import main; sys.exit(main())"
"""The console script is not used: the package may be an uninstalled tree."""

Rates = dict[int, list[float]]
"""Output tokens a second of each run, by the number of requests at once."""


def write_model(folder: Path) -> None:
    """A checkpoint of `CONFIG` with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {k: v for k, v in CONFIG.items() if k not in ("architectures", "torch_dtype")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def check_peer(name: str, python: str) -> None:
    """Raises ConfigError if an interpreter lacks a peer's packages."""
    modules, packages = PEERS[name]
    for module in modules:
        done = subprocess.run(
            [python, "-c", f"import {module}"], capture_output=True, text=True
        )
        if done.returncode:
            reason = (done.stderr.splitlines() or ["no reason"])[-1]
            raise ConfigError(
                f"--peer {name}: {python} cannot import {module} ({reason}). Install it: "
                f"{python} -m pip install {packages}, or name another interpreter with "
                "--peer-python"
            )


def run_ours(model: Path, scheme: str, args: argparse.Namespace) -> Rates:
    """One round of our engine."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        loads = [f"--load={LENGTH}/{LENGTH}x{count}" for count in REQUESTS]
        run_child(
            [sys.executable, "-c", _PROGRAM, "bench", "throughput", "--model", str(model),
             "--device", "cpu", "--threads", str(args.threads), "--temperature", "0",
             "--quantization", QUANTIZATIONS[scheme], "--runs", str(args.runs),
             "--ceiling-seconds", "0", "--output", file.name, *loads]
        )  # fmt: skip
        return {line["requests"]: line["out_tok_s_runs"] for line in results.read([file.name])}


def run_peer(name: str, folder: Path, args: argparse.Namespace) -> Rates:
    """One round of a peer on its converted model."""
    job = {
        "folder": str(folder), "threads": args.threads, "length": LENGTH,
        "requests": REQUESTS, "runs": args.runs, "vocab_size": CONFIG["vocab_size"],
    }  # fmt: skip
    rates = peer_child(name, "run", job, args.peer_python)
    return {int(count): runs for count, runs in rates.items()}


def peer_child(name: str, action: str, job: dict[str, Any], python: str) -> dict[str, Any]:
    """The result of `cpu_peers.py`."""
    program = Path(__file__).with_name("cpu_peers.py")
    printed = run_child([python, str(program), name, action, json.dumps(job)])
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def run_child(command: Sequence[str]) -> str:
    """What a command printed.

    Raises:
        ConfigError: the command failed; the end of its messages is included.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = "\n".join(done.stderr.splitlines()[-30:])
        raise ConfigError(f"{command[:3]} ended with {done.returncode}: {words}")
    return done.stdout


def measure(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line of results for each engine and number of requests."""
    model = folder / "model"
    write_model(model)
    engines: dict[tuple[str, str], Callable[[], Rates]] = {}
    versions: dict[str, dict[str, str]] = {}
    for scheme in QUANTIZATIONS:
        engines["trimaran", scheme] = lambda scheme=scheme: run_ours(model, scheme, args)
    for name in args.peer:
        job = {"model": str(model), "folder": str(folder / name)}
        versions[name] = peer_child(name, "convert", job, args.peer_python)
        key = name, PEER_WEIGHTS[name]
        engines[key] = lambda name=name: run_peer(name, folder / name, args)
    rounds: dict[tuple[str, str, int], list[list[float]]] = {}
    for number in range(args.rounds):
        for (name, weights), run in engines.items():
            rates = run()
            print(f"round {number + 1}: {name} {weights} {said(rates)}", flush=True)
            for count, runs in rates.items():
                rounds.setdefault((name, weights, count), []).append(sorted(runs))
    return [
        {
            "benchmark": "cpu_quantized",
            "engine": name,
            "weights": weights,
            "requests": count,
            "isl": LENGTH,
            "osl": LENGTH,
            "threads": args.threads,
            "out_tok_s": round(statistics.median(map(statistics.median, runs)), 1),
            "out_tok_s_rounds": [[round(each, 1) for each in one] for one in runs],
            "peer_versions": versions.get(name),
        }
        for (name, weights, count), runs in rounds.items()
    ]


def said(rates: Rates) -> str:
    """The median of each number of requests, in words."""
    return ", ".join(
        f"x{count} {statistics.median(runs):,.0f} tokens/s" for count, runs in rates.items()
    )


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Tokens a second, and how many times those in bf16, of each engine."""
    base = {each["requests"]: each["out_tok_s"] for each in lines[: len(REQUESTS)]}
    rows = [f"{'engine':>12} {'weights':>8}" + "".join(f"{f'x{n}':>18}" for n in REQUESTS)]
    for at in range(0, len(lines), len(REQUESTS)):
        each = lines[at : at + len(REQUESTS)]
        cells = [
            f"{line['out_tok_s']:>10,.0f} ({line['out_tok_s'] / base[line['requests']]:.2f})"
            for line in each
        ]
        rows.append(
            f"{each[0]['engine']:>12} {each[0]['weights']:>8}"
            + "".join(f"{cell:>18}" for cell in cells)
        )
    return "\n".join(rows)


def main() -> int:
    """Measure, print a table and write the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--threads", type=int, default=2, help="of each engine (2)")
    add("--rounds", type=int, default=3, help="in which the engines take turns (3)")
    add("--runs", type=int, default=5, help="of each load in a round (5)")
    add("--peer", action="append", choices=sorted(PEERS), default=[], help="repeat for both")
    add("--peer-python", default=sys.executable, metavar="FILE", help="has the peers' packages")
    add("--output", metavar="FILE", help="append result lines (JSON)")
    args = parser.parse_args()
    try:
        for name in args.peer:
            check_peer(name, args.peer_python)
        before = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="trimaran-bench-") as name:
            lines = measure(Path(name), args)
    except ConfigError as error:
        print(f"cpu_quantized: {error}", file=sys.stderr)
        return 2
    print(table(lines))
    facts = results.machine_facts(None, None)
    print(f"load average before {before:.2f}, after {facts['load_average']:.2f}")
    for line in lines:
        if args.output:
            results.append(
                args.output, {**line, **facts, "load_average_before": round(before, 2)}
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
