"""Every template that can run here, as a batch job on a real Slurm."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from batch_job import OURS, BatchJob, LongRequest
from lab import SlurmLab
from served import DEMO_MODEL, DEMO_MOE

TEMPLATES = ("leader", "leader-multinode", "orchestrator", "replicas")
GONE_S = 30
FLOAT32 = ("--serve-flags", "--dtype float32 --device cpu")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def one_rank(demo_engine: Callable[[int], Path], make_repository: Callable[..., Path]) -> Path:
    """The demo model for one rank."""
    return make_repository(demo_engine(1))


@pytest.fixture(scope="session")
def two_ranks(demo_engine: Callable[[int], Path], make_repository: Callable[..., Path]) -> Path:
    """The demo model for two ranks."""
    return make_repository(demo_engine(2))


@pytest.fixture(scope="session")
def two_models(
    demo_engine: Callable[[int], Path],
    make_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Two token models, the second on two ranks, each with an ensemble."""
    first = make_repository(demo_engine(1))
    second = make_repository(demo_engine(2))
    folder = tmp_path_factory.mktemp("two") / "models"
    shutil.copytree(first, folder)
    for name in ("tensorrt_llm", "ensemble"):
        shutil.copytree(second / name, folder / f"{name}_2")
        path = folder / f"{name}_2" / "config.pbtxt"
        text = path.read_text().replace('"tensorrt_llm"', '"tensorrt_llm_2"')
        path.write_text(text.replace('name: "ensemble"', 'name: "ensemble_2"'))
    return folder


@pytest.mark.parametrize("template", TEMPLATES)
def test_slurm_accepts_every_template(lab: SlurmLab, template: str, tmp_path: Path):
    flags = ["--nodes", "2", "--world-size", "4"] if template == "leader-multinode" else []
    job = BatchJob(lab, tmp_path)
    script = job.trimaran(
        "slurm", "render", "--template", template, "--model-repo", "/data/models",
        "--gpus-per-node", "2", "--time", "10", *flags,
    )  # fmt: skip
    assert script.returncode == 0, script.stderr
    done = lab.run("sbatch", "--test-only", text=script.stdout)
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


def test_a_leader_job_serves_drains_and_completes(submit, one_rank: Path):
    job = submit("leader", one_rank, *FLOAT32)
    assert re.search(rf"http +http://n\d:{job.http_port}\n", job.output)
    assert job.rank_logs() == ["tensorrt_llm-rank0.log"]
    assert len(job.steps()) == 1
    undisturbed = job.ask(800)
    request = LongRequest(job)
    done = job.trimaran("slurm", "stop", job.job_id)
    assert done.returncode == 0, f"{done.stderr}\n{job.log()}"
    assert "COMPLETED" in done.stdout
    assert request.finish() == undisturbed
    assert job.lab.job(job.job_id)["ExitCode"] == "0:0"
    job.wait_gone(OURS)
    assert not list(job.log_dir.glob("*/ready.json"))


def test_a_plain_scancel_ends_every_process(submit, two_ranks: Path):
    job = submit("leader", two_ranks, "--world-size", "2", "--gpus-per-node", "2", *FLOAT32)
    assert job.ask()
    ranks = job.processes("trimaran-rank")
    assert len(ranks) == 2
    assert {rank.environ()["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"0,1"}
    assert job.cancel()["JobState"] == "CANCELLED"


def test_a_killed_rank_is_replaced_inside_the_job(submit, two_ranks: Path):
    job = submit("leader", two_ranks, "--world-size", "2", *FLOAT32)
    undisturbed = job.ask(800)
    request = LongRequest(job)
    victim = job.processes("trimaran-rank")[1]
    victim.kill()
    assert request.finish() == undisturbed
    assert "restart in" in job.log()
    assert job.lab.job(job.job_id)["JobState"] == "RUNNING"


def test_one_model_serves_over_two_nodes(submit, two_ranks: Path):
    job = submit("leader-multinode", two_ranks, "--nodes", "2", "--world-size", "2", *FLOAT32)
    assert job.ask()
    hosts = {process.environ()["SLURMD_NODENAME"] for process in job.processes("trimaran-rank")}
    assert len(hosts) == 2
    assert job.rank_logs() == ["tensorrt_llm-rank0.log", "tensorrt_llm-rank1.log"]
    done = job.trimaran("slurm", "stop", job.job_id)
    assert "COMPLETED" in done.stdout, f"{done.stderr}\n{job.log()}"
    job.wait_gone(OURS)


def nodes_of(job: BatchJob) -> dict[int, str]:
    """The node of each rank."""
    ranks = [process.environ() for process in job.processes("trimaran-rank")]
    return {int(rank["SLURM_PROCID"]): rank["SLURMD_NODENAME"] for rank in ranks}


def test_a_pipeline_serves_over_two_nodes(
    submit, one_rank: Path, build_engine: Callable[..., Path], make_repository
):
    engine = build_engine(
        DEMO_MODEL, "--tp-size", "2", "--pp-size", "2", "--max-num-tokens", "1024"
    )
    flags = ("--nodes", "2", "--world-size", "4", "--cpus-per-task", "1", *FLOAT32)
    job = submit("leader-multinode", make_repository(engine), *flags)
    nodes = nodes_of(job)
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    answer = job.ask(200)
    request = LongRequest(job, 200)
    done = job.trimaran("slurm", "stop", job.job_id)
    assert "COMPLETED" in done.stdout, f"{done.stderr}\n{job.log()}"
    assert request.finish() == answer
    alone = submit("leader", one_rank, *FLOAT32)
    assert alone.ask(200) == answer


def test_dp_ranks_over_two_nodes_come_back_after_a_death(
    submit, build_engine: Callable[..., Path], make_repository
):
    sizes = ("--dp-size", "2", "--moe-ep-size", "2", "--max-num-tokens", "1024")
    repository = make_repository(build_engine(DEMO_MOE, *sizes), DEMO_MOE, num_nodes="2")
    job = submit("orchestrator", repository, "--nodes", "2", "--world-size", "2", *FLOAT32)
    nodes = nodes_of(job)
    assert nodes[0] != nodes[1]
    answer = job.ask(400)
    requests = [LongRequest(job, 400) for _ in range(2)]
    (victim,) = [
        p for p in job.processes("trimaran-rank") if p.environ()["SLURM_PROCID"] == "1"
    ]
    victim.kill()
    assert [request.finish() for request in requests] == [answer] * 2
    assert nodes_of(job) == nodes
    assert "restart in" in job.log()


def test_several_models_serve_in_one_allocation(submit, two_models: Path):
    flags = ("--world-size", "3", *FLOAT32)
    job = submit("orchestrator", two_models, *flags)
    assert job.ask(model="ensemble") == job.ask(model="ensemble_2")
    assert len(job.processes("trimaran-rank")) == 3
    assert len(job.steps()) == 2
    victim = next(
        p for p in job.processes("trimaran-rank")
        if p.environ()["TRIMARAN_GROUP"] == "tensorrt_llm_2"
    )  # fmt: skip
    victim.kill()
    assert job.ask(model="ensemble")
    # The server is ready until the death is noticed.
    job.wait_log("Group 'tensorrt_llm_2' of model 'tensorrt_llm_2' is gone")
    job.wait_ready()
    assert job.ask(model="ensemble_2") == job.ask(model="ensemble")
    assert job.cancel()["JobState"] == "CANCELLED"


def test_a_step_ends_whole_when_a_rank_stops_or_its_srun_is_killed(submit, two_models: Path):
    flags = ("--world-size", "3", "--serve-flags")
    job = submit("orchestrator", two_models, *flags, f"{FLOAT32[1]} --hang-timeout 3")
    answer = job.ask(800, model="ensemble")
    others = job.processes_of("tensorrt_llm_2", "trimaran-rank")
    (stopped,) = job.processes_of("tensorrt_llm", "trimaran-rank")
    request = LongRequest(job)
    stopped.suspend()
    assert request.finish() == answer
    _, alive = psutil.wait_procs([stopped], GONE_S)
    assert not alive
    job.wait_ready()
    srun = job.processes_of("tensorrt_llm", "srun")[0]  # its helper is younger
    (left,) = job.processes_of("tensorrt_llm", "trimaran-rank")
    request = LongRequest(job)
    left.suspend()
    srun.kill()
    assert request.finish() == answer
    _, alive = psutil.wait_procs([left], GONE_S)
    assert not alive
    job.wait_ready()
    assert job.processes_of("tensorrt_llm_2", "trimaran-rank") == others
    assert len(job.steps()) == 2


def test_models_run_on_the_nodes_of_the_allocation_and_drain(submit, two_models: Path):
    flags = ("--nodes", "2", "--world-size", "4", "--cpus-per-task", "1", *FLOAT32)
    job = submit("orchestrator", two_models, *flags)
    undisturbed = job.ask(800, model="ensemble_2")
    hosts = {
        group: {
            p.environ()["SLURMD_NODENAME"] for p in job.processes_of(group, "trimaran-rank")
        }
        for group in ("tensorrt_llm", "tensorrt_llm_2")
    }
    assert [len(names) for names in hosts.values()] == [1, 1]
    assert hosts["tensorrt_llm"] != hosts["tensorrt_llm_2"]
    request = LongRequest(job, model="ensemble_2")
    (victim, _) = job.processes_of("tensorrt_llm_2", "trimaran-rank")
    victim.kill()
    assert request.finish() == undisturbed
    last = LongRequest(job)
    done = job.trimaran("slurm", "stop", job.job_id)
    assert "COMPLETED" in done.stdout, f"{done.stderr}\n{job.log()}"
    assert last.finish() == undisturbed


@pytest.mark.parametrize("template", ["leader", "leader-multinode", "orchestrator"])
def test_the_step_of_a_container_serves_and_drains(
    lab: SlurmLab, tmp_path: Path, two_ranks: Path, template: str
):
    job = BatchJob(lab, tmp_path / "logs")
    nodes = ("--nodes", "2") if template == "leader-multinode" else ()
    num_tokens = 200 if nodes else 800
    size = ("--world-size", "2")
    job.submit_without_container(template, two_ranks, *nodes, *size, *FLOAT32)
    try:
        assert len(job.steps()) == 1
        undisturbed = job.ask(num_tokens)
        request = LongRequest(job, num_tokens)
        done = job.trimaran("slurm", "stop", job.job_id)
        assert "COMPLETED" in done.stdout, f"{done.stderr}\n{job.log()}"
        assert request.finish() == undisturbed
    finally:
        job.cancel()
        job.show()


def test_a_job_at_its_time_limit_finishes_running_requests(submit, one_rank: Path):
    job = submit("leader", one_rank, "--time", "3", *FLOAT32)
    first = job.ask(200)
    answers = []
    with pytest.raises(AssertionError, match=r"503|Failed to connect|Couldn't connect"):
        while True:
            answers.append(job.ask(200))
    assert set(answers) == {first}
    job.lab.wait_state(job.job_id, "COMPLETED")
    assert "DUE TO TIME LIMIT" not in job.log()


def test_a_preempted_job_finishes_running_requests_and_is_requeued(
    lab: SlurmLab, submit, one_rank: Path
):
    job = submit("leader", one_rank, *FLOAT32)
    undisturbed = job.ask(800)
    request = LongRequest(job)
    words = ("--partition", "urgent", "--nodes", str(len(lab.nodes)), "--exclusive")
    urgent = lab.run("sbatch", "--parsable", "--output=/dev/null", *words, "--wrap", "sleep 1")
    assert request.finish() == undisturbed
    lab.wait_state(job.job_id, "PENDING", timeout_s=90)
    assert "trimaran was preempted: requeueing job" in job.log()
    lab.wait_state(urgent.stdout.strip(), "COMPLETED", timeout_s=90)


def test_an_array_job_serves_replicas(submit, one_rank: Path):
    job = submit("replicas", one_rank, "--replicas", "2", *FLOAT32)
    assert job.output.count("Ready: ") == 2
    ports = [int(port) for port in re.findall(r"http +http://n\d:(\d+)", job.output)]
    assert ports == [job.http_port, job.http_port + 10]
    answers = {job.ask(port=port) for port in ports}
    assert len(answers) == 1
    done = job.trimaran("slurm", "stop", job.job_id)
    assert "COMPLETED" in done.stdout, f"{done.stderr}\n{job.log()}"


def test_a_failed_server_is_requeued_and_serves_again(submit, one_rank: Path):
    job = submit("leader", one_rank, *FLOAT32)
    (supervisor,) = job.processes("trimaran")
    supervisor.kill()
    state = job.lab.wait_state(job.job_id, "PENDING", "CONFIGURING", timeout_s=60)
    assert int(state["Restarts"]) == 1
    assert "ended with code 137: requeueing job" in job.log()
    # Slurm holds a requeued job back for about two minutes.
    job.lab.wait_state(job.job_id, "RUNNING", timeout_s=200)
    job.wait_ready()
    assert job.ask()


def test_a_configuration_error_is_not_requeued(submit, two_ranks: Path):
    job = submit("leader", two_ranks, "--world-size", "3", wait=False)
    state = job.lab.wait_state(job.job_id, "FAILED")
    assert state["ExitCode"] == "2:0"
    assert state["Restarts"] == "0"


def test_the_job_of_a_lost_node_starts_again_elsewhere(lab: SlurmLab, submit, two_ranks: Path):
    job = submit("leader-multinode", two_ranks, "--nodes", "2", "--world-size", "2", *FLOAT32)
    hosts = {p.environ()["SLURMD_NODENAME"] for p in job.processes("trimaran-rank")}
    assert job.ask()
    lost = max(hosts)
    lab.fail_node(lost)
    try:
        lab.wait_state(job.job_id, "PENDING", "CONFIGURING", timeout_s=90)
        lab.wait_state(job.job_id, "RUNNING", timeout_s=200)
        job.wait_ready()
        assert job.ask()
        again = {p.environ()["SLURMD_NODENAME"] for p in job.processes("trimaran-rank")}
        assert lost not in again
    finally:
        job.cancel()
        lab.start_node(lost)
        lab.wait_idle(90)
