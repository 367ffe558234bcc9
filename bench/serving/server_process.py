"""A `trimaran serve` process of a benchmark: its repository, its ports, its start and end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.bench.serving.free_ports import free_ports
from trimaran.comm.errors import TrimaranError

BIN = Path(sys.executable).parent
"""The path of `trimaran`."""
_TEMPLATE = {
    "triton_backend": "tensorrtllm",
    "triton_max_batch_size": 64,
    "decoupled_mode": True,
    "batching_strategy": "inflight_fused_batching",
    "logits_datatype": "TYPE_FP32",
    "encoder_input_features_data_type": "TYPE_FP16",
    "enable_kv_cache_reuse": False,
}
_END_S = 60.0


class ServerFailedError(TrimaranError):
    """A server that did not become ready. The message ends with the end of its log."""


@dataclass(frozen=True)
class ServerProcess:
    """A server that takes requests, with its ports."""

    process: subprocess.Popen[bytes]
    http: int
    grpc: int
    metrics: int
    log: Path
    ready_s: float
    """Seconds from the start until it took requests."""

    def address(self, protocol: str) -> str:
        """The address of ``http`` or ``grpc``."""
        return f"127.0.0.1:{self.grpc if protocol == 'grpc' else self.http}"


def write_repository(folder: Path, models: Sequence[str] = (), **values: object) -> None:
    """A repository of these models (all five), its templates filled with ``values`` too."""
    pairs = ",".join(f"{name}:{value}" for name, value in {**_TEMPLATE, **values}.items())
    # The console script is not used: the package may be an uninstalled tree.
    program = "import sys; from trimaran.launcher.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "init-repo", str(folder), "--fill", pairs]
    command += ["--models", *models] if models else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_random_model(folder: Path, config: Mapping[str, Any]) -> None:
    """A model with only a configuration on disk, for ``--load-format random``."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@contextlib.contextmanager
def serving(
    repository: Path,
    flags: Sequence[str],
    *,
    log: Path,
    longest_s: float = 300.0,
    env: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """A context manager with a ready server, which always ends the server.

    Raises:
        ServerFailedError: the server ended, or was not ready after ``longest_s``.
    """
    http, grpc, metrics = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="trimaran-ready-") as folder:
        ready = Path(folder, "ready")
        command = [
            str(BIN / "trimaran"), "serve", "--model-repo", str(repository),
            "--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics),
            "--ready-file", str(ready), *flags,
        ]  # fmt: skip
        begin = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        try:
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > begin + longest_s:
                    raise ServerFailedError(
                        f"the server was not ready after {time.monotonic() - begin:.0f} s; "
                        f"the end of its log:\n{log_end(log)}"
                    )
                time.sleep(0.02)
            yield ServerProcess(process, http, grpc, metrics, log, time.monotonic() - begin)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        print(f"the server did not end in {_END_S:.0f} s: killed", file=sys.stderr)
        process.kill()
        process.wait()


def log_end(log: Path, num_lines: int = 40) -> str:
    """The last lines of a log."""
    return "\n".join(
        log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
    )
