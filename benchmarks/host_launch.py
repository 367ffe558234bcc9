"""The host's time of whole decode steps on a GPU, with CUDA graphs that launch nothing."""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time

import torch

from trimaran.bench.limits.ranks import connected
from trimaran.bench.limits.shapes import SHAPES, shape_config
from trimaran.bench.offline.engine_run import OfflineDriver, load_engine, random_checkpoint
from trimaran.bench.offline.load import Load
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig

PROMPT = 128


def config_of(folder: str, num_rows: int, longest: int) -> EngineConfig:
    """An engine for so many requests at once."""
    return EngineConfig(
        model="bench",
        engine_dir=folder,
        load_format="random",
        scheduler=SchedulerConfig(
            max_num_batched_tokens=8192,
            max_num_seqs=num_rows,
            max_seq_len=longest,
            max_input_len=longest - 1,
            policy="max_utilization",
        ),
        cache=CacheConfig(enable_block_reuse=False),
    )


def main() -> None:
    """Print milliseconds a step, median and slowest tenth, for each number of requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama1b", choices=sorted(SHAPES))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--top", type=int, default=0, help="print so many functions by time")
    args = parser.parse_args()
    longest = PROMPT + args.steps
    shape = shape_config(args.shape, "bfloat16", longest)
    with random_checkpoint(shape) as folder:
        config = config_of(folder, max(args.requests), longest)
        with connected(config) as ranks:
            engine = load_engine(config, ranks)
            driver = OfflineDriver(engine, ranks.control, engine.facts()["vocab_size"])
            replay = torch.cuda.CUDAGraph.replay
            torch.cuda.CUDAGraph.replay = lambda self: None  # type: ignore[method-assign]
            for count in args.requests:
                load = Load(isl=PROMPT, osl=args.steps, requests=count)
                times = sorted(1e3 * each for each in driver.run(load).steps_s[8:])
                print(
                    f"{count:5d} requests: {statistics.median(times):.3f} "
                    f"({times[-len(times) // 10]:.3f})",
                    flush=True,
                )
                if args.top:
                    profile = cProfile.Profile()
                    profile.runcall(driver.run, load)
                    pstats.Stats(profile).sort_stats("tottime").print_stats(args.top)
            torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
            print(f"one launch of a graph: {launch_ms(engine.runner):.3f}")
            engine.shutdown()


def launch_ms(runner: object) -> float:
    """Milliseconds of the host for the launch of a step's graph of one sequence."""
    graphs = runner._graphs._graphs  # type: ignore[attr-defined]
    graph = graphs[min(graphs)]
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


if __name__ == "__main__":
    main()
