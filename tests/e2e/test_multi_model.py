"""Several models in one server: what happens to one of them does not touch the others."""

from __future__ import annotations

import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from served import Served, run_trimaran
from token_stream import TokenStream

PAIR, SINGLE = "pair", "single"
WORLD_SIZES = {PAIR: 2, SINGLE: 1}
PROMPTS = {PAIR: (12, 345, 678, 9), SINGLE: (9, 876, 543, 21, 5)}
NUM_TOKENS = 400
GONE_S = 10
FILL = (
    "triton_backend:tensorrtllm,triton_max_batch_size:64,decoupled_mode:True,"
    "batching_strategy:inflight_fused_batching,logits_datatype:TYPE_FP32,"
    "encoder_input_features_data_type:TYPE_FP16,max_queue_delay_microseconds:0,"
    "max_queue_size:0"
)
FLAGS = ("--multi-model", "--worker-launch", "mpirun", "--dtype", "float32")


@pytest.fixture(scope="module")
def repository(
    demo_engine: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Two token-level models of different layouts, and nothing else."""
    folder = tmp_path_factory.mktemp("repository")
    for model, world_size in WORLD_SIZES.items():
        scratch = folder / "filled" / model
        done = run_trimaran(
            "init-repo", str(scratch), "--models", "tensorrt_llm",
            "--fill", f"{FILL},engine_dir:{demo_engine(world_size)}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (folder / "models" / model / "1").mkdir(parents=True)
        text = (scratch / "tensorrt_llm" / "config.pbtxt").read_text()
        text = text.replace('name: "tensorrt_llm"', f'name: "{model}"', 1)
        (folder / "models" / model / "config.pbtxt").write_text(text)
    return folder / "models"


class MultiModel(Served):
    """A server of both models, each with as many ranks as its engine was built for."""

    def stream(self, model: str) -> TokenStream:
        """A long greedy stream that is under way."""
        return TokenStream(self, model, PROMPTS[model], NUM_TOKENS)

    def is_model_ready(self, model: str) -> bool:
        """What the readiness route of one model says now."""
        try:
            with urllib.request.urlopen(self.url(f"/v2/models/{model}/ready"), timeout=30):
                return True
        except urllib.error.HTTPError:
            return False

    def processes(self, group: str) -> dict[str, psutil.Process]:
        """The processes of one group: ``mpirun`` and ``rank 0`` onwards."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if process.environ().get("TRIMARAN_GROUP") != group:
                continue
            is_rank = any("trimaran-rank" in word for word in process.cmdline()[:2])
            environ = process.environ()
            name = f"rank {environ['OMPI_COMM_WORLD_RANK']}" if is_rank else "mpirun"
            found[name] = process
        return found

    def wait_log(self, text: str, count: int = 1, timeout_s: float = 60) -> None:
        """Wait until the log holds ``text`` so many times."""
        deadline = time.monotonic() + timeout_s
        while self.log().count(text) < count:
            assert time.monotonic() < deadline, f"{text!r} is not in the log:\n{self.log()}"
            time.sleep(0.05)


def serve(repository: Path, log: Path, *flags: str) -> MultiModel:
    """A server of both models, not yet started."""
    return MultiModel(repository, 1, (*FLAGS, *flags), log)


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MultiModel]:
    """One server that lives through the faults of several tests."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    # A short window: the pause before a restart does not grow from test to test.
    flags = ("--max-restarts", "9", "--restart-window", "5", "--hang-timeout", "4")
    with serve(repository, log, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(server: MultiModel) -> dict[str, list[int]]:
    """The tokens of both streams when nothing dies."""
    streams = {model: server.stream(model) for model in WORLD_SIZES}
    return {model: stream.finish() for model, stream in streams.items()}


def test_a_model_gives_the_tokens_that_it_gives_in_leader_mode(
    repository, tmp_path, undisturbed
):
    alone = tmp_path / "models"
    alone.mkdir()
    (alone / PAIR).symlink_to(repository / PAIR)
    flags = ("--dtype", "float32")
    with MultiModel(alone, WORLD_SIZES[PAIR], flags, tmp_path / "serve.log") as leader:
        assert leader.stream(PAIR).finish() == undisturbed[PAIR]
        assert leader.stop() == 0


@pytest.mark.parametrize(
    "victims", [("rank 0",), ("rank 1",), ("mpirun",), ("rank 0", "rank 1")], ids=" and ".join
)
def test_a_killed_process_ends_its_own_group_alone(server, undisturbed, victims):
    doomed, other = server.stream(PAIR), server.stream(SINGLE)
    others = server.processes(SINGLE)
    before = server.processes(PAIR)
    num_faults = server.log().count("group pair: ready")
    for name in victims:
        before[name].kill()
    while server.is_model_ready(PAIR):
        assert doomed.is_alive()
    assert server.is_model_ready(SINGLE)
    assert other.finish() == undisturbed[SINGLE]
    assert doomed.finish() == undisturbed[PAIR]
    assert server.processes(SINGLE) == others
    assert not any(process.is_running() for process in before.values())
    server.wait_log("group pair: ready", num_faults + 1)
    server.wait_ready()


def test_a_stopped_rank_is_noticed_and_its_group_alone_restarted(server, undisturbed):
    doomed, other = server.stream(PAIR), server.stream(SINGLE)
    others, before = server.processes(SINGLE), server.processes(PAIR)
    before["rank 1"].suspend()
    assert other.finish() == undisturbed[SINGLE]
    assert doomed.finish() == undisturbed[PAIR]
    assert server.processes(SINGLE) == others
    assert not any(process.is_running() for process in before.values())
    server.wait_ready()


def test_a_killed_front_end_finds_every_group_again(server, undisturbed):
    groups = {model: server.processes(model) for model in WORLD_SIZES}
    (frontend,) = server.processes(":frontend").values()
    frontend.kill()
    server.wait_log("front end: ready", 2)
    server.wait_ready()
    assert {model: server.processes(model) for model in WORLD_SIZES} == groups
    streams = {model: server.stream(model) for model in WORLD_SIZES}
    assert {m: stream.finish() for m, stream in streams.items()} == undisturbed


def test_a_signal_lets_the_streams_of_every_model_end(repository, tmp_path, undisturbed):
    with serve(repository, tmp_path / "serve.log") as draining:
        streams = {model: draining.stream(model) for model in WORLD_SIZES}
        draining.process.send_signal(signal.SIGTERM)
        draining.wait_log("draining")
        assert {m: stream.finish() for m, stream in streams.items()} == undisturbed
        assert draining.process.wait(40) == 0
        assert draining.wait_gone(GONE_S) == []


def test_a_used_up_budget_lets_other_models_finish_and_ends_with_code_1(
    repository, tmp_path, undisturbed
):
    with serve(repository, tmp_path / "serve.log", "--restart", "never") as ending:
        doomed, other = ending.stream(SINGLE), ending.stream(PAIR)
        ending.processes(SINGLE)["rank 0"].kill()
        assert other.finish() == undisturbed[PAIR]
        doomed.join(60)
        assert "the engine of model 'single' is gone" in doomed.error
        assert ending.process.wait(40) == 1
        assert "group single" in ending.log() and "not started again" in ending.log()
        assert ending.wait_gone(GONE_S) == []


def test_nothing_of_any_model_outlives_a_killed_supervisor(repository, tmp_path):
    with serve(repository, tmp_path / "serve.log") as doomed:
        doomed.stream(PAIR)
        assert len(doomed.remember_tree()) == 7
        doomed.process.kill()
        assert doomed.wait_gone(GONE_S) == []
