"""Two servers, set up and started by documented commands of Triton's TensorRT-LLM backend."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS / "clients"), str(_TESTS / "e2e")]

from adapters import write_peft  # noqa: E402
from packages import fetch_perf_analyzer, pip  # noqa: E402
from served import BIN, DEMO_MODEL, Served, command_env, free_ports  # noqa: E402

TRITON_WHEEL = "nvidia-pytriton==0.7.0"
"""Its Triton server is the reference of the protocol."""

BUILD = (
    "trimaran convert --model_dir model --output_dir {engine}_checkpoint --dtype bfloat16 "
    "{layout}",
    "trimaran build --checkpoint_dir {engine}_checkpoint --output_dir {engine} "
    "--max_batch_size 64 --max_input_len 896 --max_num_tokens 1024 --max_beam_width 4 "
    "--gemm_plugin auto --gather_context_logits --gather_generation_logits --workers 1 "
    "--kv_cache_type paged --use_paged_context_fmha enable --remove_input_padding enable "
    "--speculative_decoding_mode draft_tokens_external --max_draft_len 5",
)
FILL = (
    "python3 tools/fill_template.py -i {repo}/ensemble/config.pbtxt "
    "triton_max_batch_size:64,logits_datatype:TYPE_FP32",
    "python3 tools/fill_template.py -i {repo}/preprocessing/config.pbtxt "
    "tokenizer_dir:model,triton_max_batch_size:64,preprocessing_instance_count:1",
    "python3 tools/fill_template.py -i {repo}/postprocessing/config.pbtxt "
    "tokenizer_dir:model,triton_max_batch_size:64,postprocessing_instance_count:1",
    "python3 tools/fill_template.py -i {repo}/tensorrt_llm_bls/config.pbtxt "
    "triton_max_batch_size:64,decoupled_mode:{decoupled},bls_instance_count:1,"
    "logits_datatype:TYPE_FP32",
    "python3 tools/fill_template.py -i {repo}/tensorrt_llm/config.pbtxt "
    "triton_backend:tensorrtllm,triton_max_batch_size:64,decoupled_mode:{decoupled},"
    "engine_dir:{engine},max_beam_width:4,kv_cache_free_gpu_mem_fraction:0.5,"
    "batching_strategy:inflight_fused_batching,max_queue_delay_microseconds:0,"
    "encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32,{besides}",
)
DECOUPLED = (
    "enable_kv_cache_reuse:True,tokenizer_dir:model,guided_decoding_backend:xgrammar,"
    "lora_prefetch_dir:peft"
)
PLAIN = (
    "max_tokens_in_paged_kv_cache:2560,max_attention_window_size:2560,"
    "exclude_input_in_output:True,enable_kv_cache_reuse:False"
)
LAUNCH = (
    "python3 scripts/launch_triton_server.py --world_size=2 --model_repo={repo} "
    "--http_port={http} --grpc_port={grpc} --metrics_port={metrics}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the report of docs/compatibility.md."""
    parser.addoption(
        "--compatibility-report",
        type=Path,
        metavar="FILE",
        help="write what became of each row of docs/compatibility.md, as JSON",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Report only on request."""
    path = config.getoption("--compatibility-report")
    if path is not None:
        config.pluginmanager.register(_Report(path), "compatibility-report")


class _Report:
    """What became of each row by version: ``passed``, ``failed`` or an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, list[object]] = {}
        self._outcomes: dict[str, str] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        mark = item.get_closest_marker("compatibility")
        if mark is not None:
            self._rows[item.nodeid] = list(mark.args)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        ran = [
            [*row, self._outcomes[test]]
            for test, row in self._rows.items()
            if test in self._outcomes
        ]
        self._path.write_text(json.dumps(ran))


@dataclass
class Bench:
    """A shell in a folder with the documented scripts."""

    folder: Path

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end."""
        return subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            timeout=120,
            env=self.env(),
            cwd=self.folder,
        )

    def succeed(self, command: str) -> None:
        """Run a command line that must succeed."""
        done = self.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    def env(self) -> dict[str, str]:
        """The PATH of a shell with an activated virtual environment."""
        env = command_env()
        return {**env, "PATH": f"{BIN}:{env['PATH']}"}


class Launched(Served):
    """A server that the documented launch line started."""

    def start(self) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        bench = Bench(self.repository.parent)
        command = "exec " + LAUNCH.format(
            repo=self.repository.name,
            http=self.http_port,
            grpc=self.grpc_port,
            metrics=self.metrics_port,
        )
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", command],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=bench.env(),
                cwd=bench.folder,
            )


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The model, an adapter, the scripts and an unfilled repository, in a folder."""
    bench = Bench(tmp_path_factory.mktemp("documented"))
    os.symlink(DEMO_MODEL, bench.folder / "model")
    (bench.folder / "peft").mkdir()
    write_peft(bench.folder / "peft" / "north", seed=3)
    bench.succeed("trimaran convert-lora -i peft/north -o lora --storage-type float16")
    bench.succeed("trimaran init-repo all_models --scripts .")
    return bench


def _launched(bench: Bench, name: str, layout: str, **filled: str) -> Launched:
    engine = f"{name}_engine"
    for command in (*BUILD, "cp -r all_models {repo}", *FILL):
        bench.succeed(command.format(repo=name, engine=engine, layout=layout, **filled))
    return Launched(bench.folder / name, world_size=2, log_path=bench.folder / f"{name}.log")


@pytest.fixture(scope="session")
def decoupled(bench: Bench) -> Iterator[Served]:
    """Two tensor ranks, which stream, with guides and a folder of adapters."""
    filled = {"decoupled": "True", "besides": DECOUPLED}
    with _launched(bench, "streams", "--tp_size 2", **filled) as server:
        yield server


@pytest.fixture(scope="session")
def plain(bench: Bench) -> Iterator[Served]:
    """Two pipeline stages, with one response a request, without the prompt."""
    filled = {"decoupled": "False", "besides": PLAIN}
    with _launched(bench, "plain", "--pp_size 2", **filled) as server:
        yield server


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real Triton server, with the Python that its models run in."""
    folder = tmp_path_factory.mktemp("triton")
    pip("download", "--no-deps", "--dest", str(folder), TRITON_WHEEL)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    server = folder / "pytriton" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = "triton_python_backend_stub"
    shutil.copy(
        server / "python_backend_stubs" / version / stub, server / "backends" / "python"
    )
    (server / "bin" / "tritonserver").chmod(0o755)
    (server / "backends" / "python" / stub).chmod(0o755)
    # Its Python backend reads strings wrongly with the numpy that Trimaran needs.
    python = folder / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python)], check=True)
    packages = python / "lib" / f"python{version}" / "site-packages"
    pip("install", "--no-deps", "--target", str(packages), "numpy<2")
    return folder


@pytest.fixture(scope="session")
def perf_analyzer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """NVIDIA's perf_analyzer and the folder of its libraries."""
    return fetch_perf_analyzer(tmp_path_factory.mktemp("perf_analyzer"))
