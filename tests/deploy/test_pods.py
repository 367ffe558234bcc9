"""The commands of the manifests, run like under a kubelet: user, process 1, probes, drain."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pods import BIN, USER_ID, Pod, Pods
from served import DEMO_MODEL, run_trimaran
from tools import program

pytestmark = pytest.mark.timeout(600)

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
BODY = {"text_input": "It was", "max_tokens": 400, "stream": True}


@pytest.fixture
def pods() -> Iterator[Pods]:
    """A network of pods."""
    program("ip", "iproute2")
    program("ssh-keygen", "openssh-client")
    program("sshd", "openssh-server")
    with Pods() as network:
        yield network


def objects(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a manifest by their kinds."""
    documents = yaml.safe_load_all((KUBERNETES / name).read_text())
    return {document["kind"]: document for document in documents}


def fill_models(pods: Pods, engine: Path) -> Path:
    """The volume of engines and repository."""
    folder = pods.folder / "models"
    shutil.copytree(engine, folder / "engine")
    fill = (
        f"tokenizer_dir:{DEMO_MODEL},engine_dir:{folder / 'engine'},decoupled_mode:True,"
        "triton_max_batch_size:64,triton_backend:tensorrtllm,preprocessing_instance_count:1,"
        "batching_strategy:inflight_fused_batching,logits_datatype:TYPE_FP32,"
        "encoder_input_features_data_type:TYPE_FP16,postprocessing_instance_count:1,"
        "bls_instance_count:1,max_queue_delay_microseconds:0,max_queue_size:0"
    )
    done = run_trimaran("init-repo", str(folder / "repository"), "--fill", fill)
    assert done.returncode == 0, done.stderr
    return folder


def shared_memory(pod: dict[str, Any]) -> str:
    """The size of a pod's /dev/shm in the words of mount."""
    (volume,) = [v for v in pod["volumes"] if v["name"] == "shm"]
    return str(volume["emptyDir"]["sizeLimit"]).removesuffix("i")


def ports_of(container: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def open_stream(pod: Pod) -> Any:
    """A long answer, its first event read."""
    request = urllib.request.Request(
        f"http://{pod.address}:8000/v2/models/ensemble/generate_stream",
        data=json.dumps(BODY).encode(),
    )
    reply = urllib.request.urlopen(request, timeout=60)
    assert reply.readline().startswith(b"data: ")
    return reply


def terminate(pod: Pod, spec: dict[str, Any], container: dict[str, Any]) -> tuple[int, bytes]:
    """End a pod amid a stream as a kubelet does: its exit code, and the rest of the stream."""
    began = time.monotonic()
    with open_stream(pod) as reply:
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[0] == "sleep"
        os.kill(pod.pid, signal.SIGTERM)
        rest = reply.read()
    grace_s = spec["terminationGracePeriodSeconds"] - float(command[1])
    return pod.power.wait(grace_s - (time.monotonic() - began)), rest


def test_the_pod_of_the_stateful_set_serves_and_drains(
    pods: Pods, demo_engine: Callable[[int], Path]
):
    spec = objects("statefulset.yaml")["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    models = fill_models(pods, demo_engine(2))
    args = [arg.replace("/models", str(models)) for arg in container["args"]]
    pod = pods.start("trimaran-0", [str(BIN / "trimaran"), *args], {}, shared_memory(spec))
    ports = ports_of(container)
    pod.until_ready(container["startupProbe"], ports)
    pod.until_ready(container["readinessProbe"], ports)
    assert pod.probe(container["livenessProbe"], ports) == 200
    assert psutil.Process(pod.pid).uids().real == USER_ID

    # Process 1 inherits orphans: mpirun's killed ranks, which no other process reaps.
    next(p for p in pod.processes() if p.name() in ("mpirun", "prterun")).kill()
    wait_for(lambda: pod.probe(container["readinessProbe"], ports) != 200)
    assert pod.probe(container["livenessProbe"], ports) == 200
    pod.until_ready(container["readinessProbe"], ports)
    zombies = [p for p in pod.processes() if p.status() == psutil.STATUS_ZOMBIE]
    assert zombies == []

    code, rest = terminate(pod, spec, container)
    assert code == 0, pod.log()
    assert rest.count(b"data: ") > 1
    assert b"error" not in rest


def test_the_leader_worker_set_serves_a_stage_in_each_of_two_pods(
    pods: Pods, build_engine: Callable[..., Path]
):
    documents = objects("leaderworkerset.yaml")
    group = documents["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    sizes = ("--tp-size", "2", "--pp-size", "2", "--max-num-tokens", "1024")
    fill_models(pods, build_engine(DEMO_MODEL, *sizes, "--max-batch-size", "64"))
    write_volumes(pods, documents["ConfigMap"]["data"])
    name, domain = "trimaran-0", "trimaran.default"
    env = {"LWS_LEADER_ADDRESS": f"{name}.{domain}", "LWS_GROUP_SIZE": str(group["size"])}

    worker_spec = group["workerTemplate"]["spec"]
    worker = pods.start(
        f"{name}-1",
        words_of(pods, worker_spec["containers"][0]),
        env,
        shared_memory(worker_spec),
        domain,
    )
    spec = group["leaderTemplate"]["spec"]
    (container,) = spec["containers"]
    # The four ranks fill two pods; the flags are those of the manifest.
    env |= {each["name"]: each["value"] for each in container["env"]} | {"GPUS": "2"}
    leader = pods.start(name, words_of(pods, container), env, shared_memory(spec), domain)
    ports = ports_of(container)
    leader.until_ready(container["readinessProbe"], ports)
    assert [ranks_in(pod) for pod in (leader, worker)] == [[0, 1], [2, 3]]

    # A rank of the other pod dies: the group restarts without a new pod.
    next(p for p in worker.processes() if p.name() == "trimaran-rank").kill()
    wait_for(lambda: leader.probe(container["readinessProbe"], ports) != 200)
    leader.until_ready(container["readinessProbe"], ports)

    # A group is deleted: both pods get SIGTERM at the same time.
    (worker_container,) = worker_spec["containers"]
    hook = words_of(pods, worker_container["lifecycle"]["preStop"]["exec"])
    with ThreadPoolExecutor() as pool:
        grace_s = worker_spec["terminationGracePeriodSeconds"]
        drained = pool.submit(worker.run, hook, grace_s)
        code, rest = terminate(leader, spec, container)
        drained.result()
    assert ranks_in(worker) == []
    os.kill(worker.pid, signal.SIGTERM)
    worker.power.wait(10)
    assert code == 0, leader.log()
    assert rest.count(b"data: ") > 1
    assert b"error" not in rest


def write_volumes(pods: Pods, scripts: dict[str, str]) -> None:
    """The ConfigMap and the Secret as files, with the folders of this lab in them."""
    for name in ("multinode", "ssh", "tmp"):
        (pods.folder / name).mkdir()
    (pods.folder / "tmp").chmod(0o777)
    key = pods.folder / "ssh" / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    for path in (key, key.with_suffix(".pub")):
        shutil.chown(path, "root", USER_ID)
        path.chmod(0o440)
    for name, text in scripts.items():
        path = pods.folder / "multinode" / name
        path.write_text(
            re.sub(r"(?<!\w)/(?=(?:multinode|ssh|models|tmp)/)", f"{pods.folder}/", text)
        )
        path.chmod(0o755)
    # Process ids are small in every pod. A folder that a pod's MPI daemon left in the machine's
    # /tmp would collide with that of the next pod.
    with (pods.folder / "multinode" / "sshd_config").open("a") as config:
        config.write(f"SetEnv TMPDIR={pods.folder}/tmp\n")


def words_of(pods: Pods, runs: dict[str, Any]) -> list[str]:
    """The command of a container or hook, with the folders of this lab."""
    return [word.replace("/multinode", f"{pods.folder}/multinode") for word in runs["command"]]


def ranks_in(pod: Pod) -> list[int]:
    """The numbers of the ranks that run there."""
    ranks = [p for p in pod.processes() if p.name() == "trimaran-rank"]
    return sorted(int(process.environ()["OMPI_COMM_WORLD_RANK"]) for process in ranks)


def wait_for(is_so: Callable[[], bool], timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.1)
