"""A server of two token-level models of different layouts, for tests of orchestrator mode."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
from served import Served, init_repo
from token_stream import TokenStream

PAIR, SINGLE = "pair", "single"
WORLD_SIZES = {PAIR: 2, SINGLE: 1}
PROMPTS = {PAIR: (12, 345, 678, 9), SINGLE: (9, 876, 543, 21, 5)}
NUM_TOKENS = 300


def write_models(
    folder: Path, engine: Callable[[int], Path], models: tuple[str, ...] = (PAIR, SINGLE)
) -> Path:
    """Token-level models of different layouts, and nothing else."""
    for model in models:
        world_size = WORLD_SIZES[model]
        scratch = folder / "filled" / model
        init_repo(
            str(scratch), "--models", "tensorrt_llm", "--defaults",
            "--fill", f"engine_dir:{engine(world_size)}",
        )  # fmt: skip
        (folder / "models" / model / "1").mkdir(parents=True)
        text = (scratch / "tensorrt_llm" / "config.pbtxt").read_text()
        text = text.replace('name: "tensorrt_llm"', f'name: "{model}"', 1)
        (folder / "models" / model / "config.pbtxt").write_text(text)
    return folder / "models"


class MultiModel(Served):
    """A server of both models, each with as many ranks as its engine was built for."""

    def stream(self, model: str) -> TokenStream:
        """A long greedy stream that is running."""
        return TokenStream(self, model, PROMPTS[model], NUM_TOKENS)

    def is_model_ready(self, model: str) -> bool:
        """The current answer of the readiness route of one model."""
        try:
            with urllib.request.urlopen(self.url(f"/v2/models/{model}/ready"), timeout=120):
                return True
        except urllib.error.HTTPError:
            return False

    def processes(self, group: str) -> dict[str, psutil.Process]:
        """The processes of one group: ``rank 0`` onwards, ``mpirun``; others by program."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            # Some of them end while they are looked at.
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.environ().get("TRIMARAN_GROUP") == group:
                    found[_name(process)] = process
        return found


def _name(process: psutil.Process) -> str:
    program = next(
        (Path(word).name for word in process.cmdline()[:2] if "trimaran-" in word),
        process.name(),
    )
    if program == "trimaran-rank":
        return f"rank {process.environ()['OMPI_COMM_WORLD_RANK']}"
    return "mpirun" if program == "prterun" else program
