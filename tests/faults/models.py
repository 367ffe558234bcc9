"""The models of a fault test: engines, one repository of them, prompts and right answers."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from served import ROOT, Served, run_trimaran

DEMO_MODELS = ROOT / "examples" / "demo_models"
VOCAB_SIZE = 4096


@dataclass(frozen=True)
class Model:
    """One token-level model: a demo checkpoint, its ranks, and its data-parallel replicas."""

    name: str
    checkpoint: str
    tp_size: int = 1
    num_replicas: int = 1
    pp_size: int = 1
    num_dp_ranks: int = 1
    """Data-parallel ranks that share the experts out, of a model that has some."""
    num_nodes: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of all its groups."""
        return self.tp_size * self.pp_size * self.num_dp_ranks * self.num_replicas

    @property
    def layout(self) -> tuple[str, ...]:
        """The flags that build this layout."""
        flags = ("--tp-size", str(self.tp_size), "--pp-size", str(self.pp_size))
        if self.num_dp_ranks == 1:
            return flags
        dp_ranks = str(self.num_dp_ranks)
        experts = ("--moe-tp-size", str(self.tp_size), "--moe-ep-size", dp_ranks)
        return (*flags, "--dp-size", dp_ranks, *experts)


THREE_MODELS = (
    Model("pair", "base", tp_size=2),
    Model("single", "base"),
    Model("twins", "draft", num_replicas=2),
)

LAYOUTS = (Model("stages", "base", pp_size=2), Model("dp", "moe", num_dp_ranks=2))


TWO_GPUS = (Model("first", "base"), Model("second", "draft"))
FOUR_GPUS = (Model("pair", "base", tp_size=2), *TWO_GPUS)
GPU_IDS = {2: {"first": "0", "second": "1"}, 4: {"pair": "0,1", "first": "2", "second": "3"}}


@dataclass(frozen=True)
class Case:
    """One greedy request and its only right answer."""

    model: str
    prompt: tuple[int, ...]
    num_tokens: int
    answer: tuple[int, ...] = ()

    def body(self, *, streaming: bool) -> dict[str, object]:
        """The request of the generate extension."""
        return {
            "input_ids": list(self.prompt),
            "input_lengths": len(self.prompt),
            "request_output_len": self.num_tokens,
            "exclude_input_in_output": True,
            "end_id": -1,
            "streaming": streaming,
        }


def build_repository(
    folder: Path, models: tuple[Model, ...], gpus: dict[str, str] | None = None
) -> Path:
    """Build every engine and one repository with all models; ``gpus``: ids by model."""
    repository = folder / "models"
    for model in models:
        engine = folder / "engines" / model.name
        _run(
            "build", "--checkpoint", str(DEMO_MODELS / model.checkpoint), "--output",
            str(engine), *model.layout, "--max-batch-size", "64", "--max-num-tokens", "1024",
            "--max-input-len", "512",
        )  # fmt: skip
        scratch = folder / "filled" / model.name
        _run(
            "init-repo", str(scratch), "--models", "tensorrt_llm", "--defaults",
            "--fill", f"engine_dir:{engine}",
        )  # fmt: skip
        (repository / model.name / "1").mkdir(parents=True)
        text = (scratch / "tensorrt_llm" / "config.pbtxt").read_text()
        text = text.replace('name: "tensorrt_llm"', f'name: "{model.name}"', 1)
        if model.num_replicas > 1:
            text = _with_replicas(text, model.num_replicas)
        if model.num_nodes > 1:
            text = text.replace("${num_nodes}", str(model.num_nodes), 1)
        if gpus:
            text = text.replace("${gpu_device_ids}", gpus[model.name], 1)
        (repository / model.name / "config.pbtxt").write_text(text)
    return repository


def _with_replicas(text: str, count: int) -> str:
    changed, hits = re.subn(r"(instance_group[^]]*?count:\s*)\d+", rf"\g<1>{count}", text)
    assert hits == 1, "the template's instance_group has no count"
    return changed


def _run(*args: str) -> None:
    done = run_trimaran(*args)
    assert done.returncode == 0, done.stderr


def make_cases(
    models: tuple[Model, ...], count: int, longest: int, seed: int = 11
) -> list[Case]:
    """``count`` requests a model, of 16 to ``longest`` output tokens; answers not yet known."""
    rng = random.Random(seed)
    return [
        Case(
            model.name,
            tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(2, 200))),
            rng.randint(16, longest),
        )
        for model in models
        for _ in range(count)
    ]


def with_answers(cases: list[Case], server: Served) -> list[Case]:
    """The cases with what an undisturbed server answers, one request a model at a time."""
    names = sorted({case.model for case in cases})

    def ask(name: str) -> list[Case]:
        return [_answered(case, server) for case in cases if case.model == name]

    with ThreadPoolExecutor(len(names)) as pool:
        return [case for answered in pool.map(ask, names) for case in answered]


def _answered(case: Case, server: Served) -> Case:
    path = f"/v2/models/{case.model}/generate"
    status, reply = server.post(path, case.body(streaming=False), timeout_s=120)
    assert status == 200, reply
    answer = tuple(reply["output_ids"])
    assert len(answer) == case.num_tokens, reply
    return Case(case.model, case.prompt, case.num_tokens, answer)
