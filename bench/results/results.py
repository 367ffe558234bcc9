"""One line of a result file: the measurement, the machine, the versions, the command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.bench.limits.roofline import Ceilings
from trimaran.bench.results.machine import cpu_model
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json
from trimaran.comm.files.output_files import writing

if TYPE_CHECKING:
    import torch

COMMIT = "TRIMARAN_COMMIT"
"""Variable with the commit, for sources outside of their repository."""


CEILINGS = frozenset({"ceiling_tflops", "ceiling_tb_s", "ceiling_gb"})
"""The fields of the machine's limits in a line."""


def environment(device: torch.device, ceilings: Ceilings | None) -> dict[str, Any]:
    """The machine, the versions, the commit and the command."""
    # Imported only here: a client's machine may lack the server's packages.
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return machine_facts(name, ceilings)


def machine_facts(gpu: str | None, ceilings: Ceilings | None) -> dict[str, Any]:
    """The same for a GPU of this name, without using the GPU; without a name, for the CPU."""
    facts: dict[str, Any] = {
        "device": gpu or cpu_model(),
        "torch": _version("torch"),
        "triton": _version("triton") if gpu else None,
        "commit": commit(),
        "command": command(),
    }
    if not gpu:
        facts["load_average"] = round(os.getloadavg()[0], 2)
    if ceilings is not None:
        # Significant digits, not decimals: a CPU core has some thousandths of these units.
        facts["ceiling_tflops"] = float(f"{ceilings.flops / 1e12:.6g}")
        if ceilings.quantized_flops:
            facts["ceiling_quantized_tflops"] = float(f"{ceilings.quantized_flops / 1e12:.6g}")
        facts["ceiling_tb_s"] = float(f"{ceilings.bandwidth / 1e12:.5g}")
        facts["ceiling_gb"] = round(ceilings.memory / 1e9, 1)
    return facts


def ceilings_in(facts: Mapping[str, Any]) -> Ceilings:
    """The ceilings that `machine_facts` wrote."""
    return Ceilings(
        flops=1e12 * facts["ceiling_tflops"],
        bandwidth=1e12 * facts["ceiling_tb_s"],
        memory=1e9 * facts["ceiling_gb"],
        devices=max(facts.get("gpus") or 1, 1),
        quantized_flops=1e12 * facts.get("ceiling_quantized_tflops", 0.0),
    )


def command() -> str:
    """The command line of this process, with MPI's command before it on a rank."""
    script = Path(sys.argv[0])
    words = ["trimaran"]
    if script.parent.name == "benchmarks":
        words = ["python", f"benchmarks/{script.name}"]
    if num_ranks := os.environ.get("OMPI_COMM_WORLD_SIZE"):
        words = ["mpirun", "-n", num_ranks, *words]
    return shlex.join([*words, *sys.argv[1:]])


def commit() -> str:
    """The sources' commit, marked if files differ from it; ``unknown`` without git."""
    if os.environ.get(COMMIT):
        return os.environ[COMMIT]
    here = Path(__file__).parent
    head = _git(here, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    return f"{head}-modified" if _git(here, "status", "--porcelain") else head


def append(path: str, result: dict[str, Any]) -> None:
    """Append one JSON object to a file of such lines.

    Raises:
        ConfigError: the file cannot be written.
    """
    with writing("--output", path), open(path, "a", encoding="utf-8") as file:
        # Appended to a line cut short by a kill or a full disk, both lines would be unreadable.
        begin = "\n" if _is_cut_short(Path(path)) else ""
        file.write(begin + json.dumps(result) + "\n")


def _is_cut_short(path: Path) -> bool:
    """Whether a file's last line lacks its newline. Pipes have no last line."""
    if not path.is_file() or not path.stat().st_size or not os.access(path, os.R_OK):
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of result files.

    Raises:
        ConfigError: a file cannot be read or is malformed.
    """
    lines = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is not a file of JSON lines: {error}") from error
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                lines.append(_object_of(line, f"{path}: line {number}"))
    return lines


def _object_of(line: str, where: str) -> dict[str, Any]:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise ConfigError(
            f"{where} is not JSON, perhaps because its run was killed: {error}. Take it out."
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is not a JSON object. Take it out.")
    return found


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
