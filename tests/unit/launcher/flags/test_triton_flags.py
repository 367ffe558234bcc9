"""Each of tritonserver's flags is served, changes nothing with a reason, or is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from launcher_repository import parse, resolve, write_engine, write_model

from trimaran.comm.errors import ConfigError
from trimaran.launcher.flags.triton_flags import _IDLE, _OTHERS
from trimaran.server.settings import LogSettings, level_name

ALL = """
id exit-timeout-secs log-verbose log-info log-warning log-error log-format log-file
model-repository model-store exit-on-error disable-auto-complete-config strict-readiness
model-control-mode repository-poll-secs load-model model-config-name model-load-thread-count
model-load-retry-count model-namespacing enable-peer-access allow-http http-address http-port
reuse-http-port http-header-forward-pattern http-thread-count http-max-input-size
http-restricted-api allow-grpc grpc-address grpc-port reuse-grpc-port
grpc-header-forward-pattern grpc-infer-thread-count grpc-infer-allocation-pool-size
grpc-max-response-pool-size grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert grpc-server-key
grpc-root-cert grpc-infer-response-compression-level grpc-keepalive-time
grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes
grpc-max-connection-age grpc-max-connection-age-grace grpc-restricted-protocol allow-metrics
allow-gpu-metrics allow-cpu-metrics metrics-address metrics-port metrics-interval-ms
metrics-config trace-config trace-file trace-level trace-rate trace-count trace-log-frequency
backend-directory backend-config repoagent-directory cache-config cache-directory
response-cache-byte-size strict-model-config rate-limit rate-limit-resource
pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size
min-supported-compute-capability buffer-manager-thread-count host-policy model-load-gpu-limit
allow-client-shm allow-sagemaker sagemaker-port sagemaker-safe-port-range
sagemaker-thread-count allow-vertex-ai vertex-ai-port vertex-ai-thread-count
vertex-ai-default-model
""".split()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    engine = write_engine(tmp_path / "engine", tp_size=1)
    write_model(tmp_path / "repo" / "m", gpt_model_path=str(engine))
    return tmp_path / "repo"


def test_every_flag_of_tritonserver_is_known():
    dests = vars(parse())
    aliases = {"model_repository": "model_repo", "model_store": "model_repo",
               "exit_timeout_secs": "exit_timeout"}  # fmt: skip
    names = [name.replace("-", "_") for name in ALL]
    assert [name for name in names if aliases.get(name, name) not in dests] == []


@pytest.mark.parametrize("name", list(_OTHERS))
def test_tritonserver_flags_that_cannot_take_effect_are_refused_with_a_remedy(repository, name):
    with pytest.raises(ConfigError) as caught:
        resolve(repository, f"--{name}=something")
    assert str(caught.value) == f"--{name} something: {_OTHERS[name][0]}."


@pytest.mark.parametrize("name", [name for name, (_, neutral) in _OTHERS.items() if neutral])
def test_tritonserver_flags_that_ask_for_the_only_behaviour_are_accepted(repository, name):
    for value in _OTHERS[name][1]:
        resolve(repository, f"--{name}={value.upper()}")


def test_repeatable_flags_collect_all_values(repository):
    flags = ("--trace-config", "level=TIMESTAMPS", "--trace-config=mode=triton")
    with pytest.raises(ConfigError, match="--trace-config level=TIMESTAMPS mode=triton: "):
        resolve(repository, *flags)


def test_a_second_model_repository_is_refused(tmp_path):
    both = ("--model-repository=/a", "--model_store", "/b")
    with pytest.raises(ConfigError, match="--model-repo has the values /a, /b, but takes one"):
        parse(*both)
    assert parse("--model-repo", "/a", "--model-repository=/a").model_repo == "/a"
    run_file = tmp_path / "run.yaml"
    run_file.write_text("model_repo: /a")
    assert parse("--config", str(run_file), "--model-repo=/b").model_repo == "/b"


@pytest.mark.parametrize("name", list(_IDLE))
def test_tritonserver_flags_without_effect_are_noted_with_the_reason(repository, name):
    notes = resolve(repository, f"--{name}", "8").notes
    assert f"--{name} has no effect: {_IDLE[name]}" in notes


def test_flags_of_grpc_and_of_metrics_reach_the_front_end(repository):
    frontend = resolve(
        repository, "--grpc-keepalive-time", "10000", "--grpc_max_connection_age=60000",
        "--grpc-keepalive-permit-without-calls=true", "--metrics-interval-ms=500",
        "--allow-gpu-metrics=false",
    ).frontend  # fmt: skip
    assert frontend.grpc_options == {
        "grpc.keepalive_time_ms": 10000,
        "grpc.max_connection_age_ms": 60000,
        "grpc.keepalive_permit_without_calls": 1,
    }
    assert frontend.metrics_interval_s == 0.5
    assert (frontend.allow_cpu_metrics, frontend.allow_gpu_metrics) == (True, False)
    assert type(frontend).from_wire(frontend.to_wire()) == frontend


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ((), "INFO"),
        (("--log-info=false",), "WARNING"),
        (("--log-info=false", "--log-warning=0"), "ERROR"),
        (("--log-info=0", "--log-warning=0", "--log-error=0"), "CRITICAL"),
        (("--log-info=false", "--log-verbose=1"), "DEBUG"),
        (("--log-warning=false",), "INFO"),
    ],
)
def test_disabled_log_levels_are_not_logged(repository, flags, level):
    config = resolve(repository, *flags)
    kinds, is_verbose = config.frontend.log_kinds, config.frontend.log_verbose_level > 0
    assert config.log.level == level == level_name(kinds, is_verbose=is_verbose)


def test_a_client_that_changes_the_verbosity_changes_no_other_setting():
    settings = LogSettings(kinds={"log_info": False})
    root = logging.getLogger()
    before = root.level
    try:
        settings.update({"log_verbose_level": 1})
        assert root.level == logging.DEBUG
        settings.update({"log_verbose_level": 0})
        assert root.level == logging.WARNING
        assert settings.values()["log_info"] is False
    finally:
        root.setLevel(before)
