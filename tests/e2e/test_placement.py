"""Where the groups of several models run: refusals, replicas, and ranks of one job."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from multi_model import PAIR, PROMPTS, SINGLE
from served import InJob, Served, init_repo, run_trimaran

NUM_TOKENS = 60
EXACT = ("--dtype", "float32")


@pytest.fixture(scope="module")
def make_models(
    demo_engine: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """A repository of ``pair`` on two ranks and ``single`` on one, with these values."""

    def make(
        pair: dict[str, str] | None = None,
        single: dict[str, str] | None = None,
        instances: int = 1,
    ) -> Path:
        root = tmp_path_factory.mktemp("repository")
        for model, world_size, values in ((PAIR, 2, pair), (SINGLE, 1, single)):
            if values is None:
                continue
            scratch = root / "filled" / model
            more = "".join(f",{key}:{value}" for key, value in values.items())
            init_repo(
                str(scratch), "--models", "tensorrt_llm", "--defaults",
                "--fill", f"decoupled_mode:False,engine_dir:{demo_engine(world_size)}{more}",
            )  # fmt: skip
            text = (scratch / "tensorrt_llm" / "config.pbtxt").read_text()
            text = text.replace('name: "tensorrt_llm"', f'name: "{model}"', 1)
            text = text.replace("count: 1", f"count: {instances}")
            (root / "models" / model / "1").mkdir(parents=True)
            (root / "models" / model / "config.pbtxt").write_text(text)
        return root / "models"

    return make


def tokens(server: Served, model: str, num_tokens: int = NUM_TOKENS) -> list[int]:
    """The greedy tokens of one request."""
    body = {
        "input_ids": PROMPTS[PAIR], "input_lengths": len(PROMPTS[PAIR]), "end_id": -1,
        "request_output_len": num_tokens, "exclude_input_in_output": True,
    }  # fmt: skip
    status, reply = server.post(f"/v2/models/{model}/generate", body)
    assert status == 200, reply
    return list(reply["output_ids"])


def test_overlapping_gpus_are_refused_before_anything_starts(make_models):
    repository = make_models({"gpu_device_ids": r"0\,1"}, {"gpu_device_ids": "1"})
    done = run_trimaran("serve", "--multi-model", "--model-repo", str(repository))
    assert done.returncode == 2
    assert done.stdout == ""
    head, *picture = done.stderr.splitlines()
    assert head.startswith("trimaran: error: group 'single' asks for GPU 1, which group 'pair'")
    assert picture == [
        "Placement:",
        "  localhost",
        "    GPU 0    pair rank 0",
        "    GPU 1    pair rank 1",
        "  not placed: single (1 rank(s), GPUs 1)",
    ]


@pytest.fixture(scope="module")
def participants(make_models) -> Path:
    """Both models on the ranks of one job."""
    return make_models({"participant_ids": r"3\,1"}, {"participant_ids": "2"})


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("kind", [Served, InJob], ids=["own mpirun", "foreign mpirun"])
def test_groups_within_one_mpi_job_give_the_tokens_of_leader_mode(
    participants, leader_tokens, tmp_path, kind
):
    flags = (*EXACT, "--multi-model", "--disable-spawn-processes")
    with kind(participants, 4, flags, tmp_path / "serve.log") as server:
        assert tokens(server, PAIR) == leader_tokens[:NUM_TOKENS]
        assert len(tokens(server, SINGLE)) == NUM_TOKENS
        assert "rank 3   pair rank 0" in server.log()


def test_a_model_stays_ready_while_one_instance_runs(make_models, tmp_path):
    repository = make_models(single={}, instances=2)
    flags = ("--multi-model", *EXACT, "--worker-launch", "mpirun")
    with Served(repository, 1, flags, tmp_path / "serve.log") as server:
        expected = tokens(server, SINGLE, 400)
        found: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda: found.append(tokens(server, SINGLE, 400)))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for process in psutil.Process(server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.environ().get("TRIMARAN_GROUP") == f"{SINGLE}#1":
                    process.kill()
        assert server.is_ready()
        for thread in threads:
            thread.join(60)
        assert found == [expected] * 6
