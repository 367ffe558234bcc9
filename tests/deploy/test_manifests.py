"""The container, Kubernetes and Helm files, by the tools of their fields."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import latest_version, validate
from rules import PACKAGES, ROOT
from tools import program, python_tool

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm" / "trimaran"
MULTI_NODE = DEPLOY / "kubernetes" / "leaderworkerset.yaml"
CUSTOM = ("LeaderWorkerSet", "ServiceMonitor", "PrometheusRule")


def check(document: dict[str, Any]) -> None:
    """Validate one object of Kubernetes' own against its schema, unknown fields refused."""
    validate(document, latest_version(), strict=True)


def run(*words: str) -> str:
    done = subprocess.run(list(words), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def helm(*words: str) -> list[dict[str, Any]]:
    """The objects that the chart makes."""
    text = run(python_tool("helm"), "template", "demo", str(CHART), *words)
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def test_the_dockerfile_passes_hadolint():
    run(python_tool("hadolint"), str(DEPLOY / "Dockerfile"))


def test_the_dockerfile_copies_every_package():
    text = (DEPLOY / "Dockerfile").read_text()
    assert set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE)) == set(PACKAGES)


def test_files_named_in_the_compose_file_exist():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounts = [m for s in compose["services"].values() for m in s.get("volumes", ())]
    sources = [m.partition(":")[0] for m in mounts if m.startswith("./")]
    assert sources
    assert all((DEPLOY / source).exists() for source in sources)
    grace = compose["services"]["trimaran"]["stop_grace_period"]
    assert int(grace.rstrip("s")) > 30  # the default --exit-timeout


def test_docker_compose_accepts_its_file():
    words = [
        program("docker-compose", "docker-compose"),
        "-f",
        DEPLOY / "compose.yaml",
        "config",
    ]
    env = {**os.environ, "MODELS": "/models"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == {"trimaran", "prometheus", "grafana"}


def test_the_files_copied_by_the_dockerfile_build_the_whole_wheel(tmp_path):
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for name in line.split():
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tmp_path / name)
    run(
        sys.executable, "-P", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
        "--wheel-dir", str(tmp_path / "wheel"), str(tmp_path),
    )  # fmt: skip
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    tracked = run("git", "-C", str(ROOT), "ls-files", *(f"{p}/*.py" for p in PACKAGES)).split()
    assert {f"trimaran/{name}" for name in tracked} <= shipped


@pytest.mark.parametrize("name", ["statefulset.yaml", "leaderworkerset.yaml"])
def test_kubernetes_objects_fit_their_schemas(name):
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))
    own = [document for document in documents if document["kind"] not in CUSTOM]
    assert own
    for document in own:
        check(document)


def test_fields_of_the_leader_worker_set_match_its_schema():
    spec = of_kind(list(yaml.safe_load_all(MULTI_NODE.read_text())), "LeaderWorkerSet")["spec"]
    assert set(spec) <= {
        "replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig",
    }  # fmt: skip
    assert set(spec["leaderWorkerTemplate"]) <= {
        "size", "restartPolicy", "leaderTemplate", "workerTemplate", "subGroupPolicy",
        "resizePolicy", "volumeClaimTemplates", "persistentVolumeClaimRetentionPolicy",
    }  # fmt: skip
    restart = spec["leaderWorkerTemplate"]["restartPolicy"]
    assert restart in ("RecreateGroupOnPodRestart", "None", "RecreateGroupAfterStart")


def test_both_pod_templates_of_the_leader_worker_set_are_pods():
    documents = list(yaml.safe_load_all(MULTI_NODE.read_text()))
    templates = of_kind(documents, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "Pod", **templates[name]}
        pod["metadata"] = {"name": "pod", **pod["metadata"]}
        check(pod)


def test_the_scripts_of_the_leader_worker_set_are_shell():
    config = of_kind(list(yaml.safe_load_all(MULTI_NODE.read_text())), "ConfigMap")
    for name in ("rsh", "leader", "worker", "drained"):
        subprocess.run(["sh", "-n"], input=config["data"][name], text=True, check=True)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("--set", "gpus=0,replicas=3"),
        ("--set", "multiModel=true,gpuResource=nvidia.com/mig-1g.10gb"),
        ("--set", "extraArgs={--max-batch-size=64},resources.requests.cpu=4"),
        ("--set", "serviceMonitor.enabled=true,prometheusRule.enabled=true"),
    ],
)
def test_the_chart_makes_valid_objects(settings):
    documents = helm(*settings)
    for document in documents:
        if document["kind"] not in CUSTOM:
            check(document)
    pod = of_kind(documents, "StatefulSet")["spec"]["template"]["spec"]
    timeout = next(a for a in pod["containers"][0]["args"] if a.startswith("--exit-timeout="))
    assert pod["terminationGracePeriodSeconds"] > int(timeout.partition("=")[2]) + 5


def test_the_chart_passes_helm_lint():
    run(python_tool("helm"), "lint", "--strict", str(CHART))


def test_the_chart_refuses_values_of_the_wrong_kind():
    words = [python_tool("helm"), "template", "demo", str(CHART), "--set", "gpus=many"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode != 0
    assert "gpus" in done.stderr


def test_alerts_of_the_chart_equal_those_of_the_prometheus_rules():
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    documents = helm("--set", "prometheusRule.enabled=true")
    assert of_kind(documents, "PrometheusRule")["spec"] == rules


def test_flags_in_manifests_are_flags_of_serve():
    texts = [path.read_text() for path in DEPLOY.rglob("*.yaml")]
    texts.append((DEPLOY / "Dockerfile").read_text())
    help_text = run(str(Path(sys.executable).parent / "trimaran"), "serve", "--help-all")
    serve = [
        t for text in texts for t in re.findall(r"trimaran serve.*?(?=\n\S|\Z)", text, re.S)
    ]
    pods = [
        word for text in texts for word in re.findall(r'- (--[a-z-]+)(?:=|")', text)
        if "prometheus" not in text.split(word)[0][-200:]
    ]  # fmt: skip
    flags = {flag for part in serve for flag in re.findall(r"(--[a-z-]+)", part)} | set(pods)
    unknown = {
        f for f in flags if f not in help_text and not f.startswith(("--config.", "--storage"))
    }
    assert flags and unknown <= {"--config", "--storage", "--from-file"}
