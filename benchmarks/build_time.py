"""Time and memory of ``trimaran build`` on a checkpoint of random weights.

    python benchmarks/build_time.py --shape llama8b --folder /dev/shm/build --tp-size 4

The checkpoint has files of 5 GB with an index, like large published checkpoints, and stays in
FOLDER for the next run. Builds read the checkpoint from the page cache if the cache is large
enough. ``--limit`` exits with 1 if the fastest build takes longer.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trimaran.bench.limits.shapes import SHAPES, shape_config
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.linear import WeightShapeError
from trimaran.worker.models.interfaces import CausalLM, StageRange, WeightTarget
from trimaran.worker.models.registry import build_model, dtype_by_name
from trimaran.worker.parallel.tensor_parallel import ShardPosition

FILE_BYTES = 5_000_000_000
BLOCK = 1 << 25
POLL_S = 0.05


def main() -> int:
    """Make the checkpoint, build it and print the figures."""
    args = _arguments()
    checkpoint = args.folder / args.shape
    if not (checkpoint / "config.json").exists():
        write_checkpoint(shape_config(args.shape, args.dtype, 8192), checkpoint)
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    output = args.folder / f"{args.shape}-engine"
    times = []
    for _ in range(args.repeats):
        shutil.rmtree(output, ignore_errors=True)
        cpu = _cpu_seconds()
        seconds, private, mapped = timed_build(checkpoint, output, args.flags)
        cpu = _cpu_seconds() - cpu
        times.append(seconds)
        print(f"{args.shape}, {size / 2**30:.2f} GiB, {' '.join(args.flags) or 'one rank'}:")
        print(
            f"{seconds:.1f} s ({size / 2**30 / seconds:.2f} GiB/s), {cpu:.1f} CPU seconds; all "
            f"processes at most {private / 2**30:.2f} GiB of memory and {mapped / 2**30:.2f} "
            "GiB of mapped files",
            flush=True,
        )
    shutil.rmtree(output, ignore_errors=True)
    return 1 if args.limit and min(times) > args.limit else 0


def timed_build(checkpoint: Path, output: Path, flags: list[str]) -> tuple[float, int, int]:
    """Seconds of the whole command, and the most bytes of its processes, private and mapped."""
    words = ["build", "--checkpoint", str(checkpoint), "--output", str(output), *flags]
    code = "import sys; from trimaran.launcher.cli.main import main; sys.exit(main())"
    began = time.monotonic()
    private = mapped = 0
    with subprocess.Popen([sys.executable, "-c", code, *words]) as build:
        while build.poll() is None:
            anonymous, files = _memory_of(build.pid)
            private, mapped = max(private, anonymous), max(mapped, files)
            time.sleep(POLL_S)
    if build.returncode:
        raise SystemExit(build.returncode)
    return time.monotonic() - began, private, mapped


def _cpu_seconds() -> float:
    """Peak memory of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory_of(pid: int) -> tuple[int, int]:
    """Anonymous and file-backed bytes of a process and its descendants."""
    anonymous = files = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            continue
        values = dict(line.split(":", 1) for line in lines if ":" in line)
        anonymous += int(values.get("RssAnon", "0 kB").split()[0]) * 1024
        files += int(values.get("RssFile", "0 kB").split()[0]) * 1024
    return anonymous, files


def write_checkpoint(values: dict[str, object], folder: Path) -> None:
    """A Hugging Face folder of this configuration with random weights, in several files."""
    config = PretrainedConfig.from_huggingface(values, "the shape")
    dtype = dtype_by_name(config.dtype)
    model = build_model(
        config,
        StageRange.of(config.num_hidden_layers, 0, 1),
        ShardPosition(),
        dtype=dtype,
        device=torch.device("meta"),
    )
    folder.mkdir(parents=True)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(1)).mul_(0.02).to(dtype)
    files = _files_of(checkpoint_shapes(model), dtype.itemsize)
    weight_map = {}
    for number, shapes in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(shapes, name)
        tensors = {each: _random(shape, block) for each, shape in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(values))


def checkpoint_shapes(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's tensors by name, from the layers' own tables."""
    parameters = dict(model.named_parameters())
    shapes = {}
    for key, targets in model.checkpoint_weights().items():
        target = next(each for each in targets if each.parameter in parameters)
        name = key if key.startswith("lm_head") else model.name_prefix + key
        shapes[name] = _shape_of(model, parameters[target.parameter], target)
    return shapes


def _shape_of(
    model: CausalLM, parameter: nn.Parameter, target: WeightTarget
) -> tuple[int, ...]:
    module = model.get_submodule(target.parameter.rpartition(".")[0])
    nothing = torch.empty((0,) * min(parameter.dim(), 2), device="meta")
    try:
        module.weight_loader(parameter, nothing, target.shard)  # type: ignore[operator]
    except WeightShapeError as error:
        return error.expected[::-1] if target.is_transposed else error.expected
    raise RuntimeError(f"{target.parameter} takes a tensor without numbers")


def _files_of(
    shapes: dict[str, tuple[int, ...]], itemsize: int
) -> list[dict[str, tuple[int, ...]]]:
    files: list[dict[str, tuple[int, ...]]] = [{}]
    room = FILE_BYTES
    for name, shape in shapes.items():
        size = itemsize * torch.Size(shape).numel()
        if size > room and files[-1]:
            files.append({})
            room = FILE_BYTES
        files[-1][name] = shape
        room -= size
    return files


def _random(shape: tuple[int, ...], block: Tensor) -> Tensor:
    """Repeated copies of a block that is drawn once: a full draw takes minutes."""
    count = torch.Size(shape).numel()
    tensor = torch.empty(count, dtype=block.dtype)
    for start in range(0, count, BLOCK):
        piece = tensor[start : start + BLOCK]
        piece.copy_(block[: len(piece)])
    return tensor.view(shape)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, help="seconds")
    args, args.flags = parser.parse_known_args()
    return args


if __name__ == "__main__":
    sys.exit(main())
