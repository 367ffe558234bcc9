"""Checks of the machine that fail before any process is started."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from trimaran.comm.errors import ConfigError
from trimaran.comm.tokenizers.end_ids import summary
from trimaran.comm.tokenizers.prepare import prepare, tokenizer_fault
from trimaran.launcher.config import GroupConfig, ServeConfig, TokenizerFolder
from trimaran.launcher.placement.hosts import check_host_names, is_this_host, num_visible_gpus
from trimaran.server.config import FrontendConfig
from trimaran.worker.config.host_limits import free_memory_bytes

SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_BYTES_PER_RANK = 32 << 20
"""Rings and reduction buffers of one rank, rounded up."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One port that the front end will open."""

    name: str
    address: str
    port: int
    is_tls: bool = False

    def __str__(self) -> str:
        return f"--{self.name}-port {self.port}"

    @property
    def scheme(self) -> str:
        """The begin of its URL; gRPC's clients take an address alone."""
        if self.name.endswith("grpc"):
            return ""
        return "https://" if self.is_tls else "http://"


def endpoints(frontend: FrontendConfig) -> list[Endpoint]:
    """The ports that are switched on."""
    access = frontend.access
    http_tls, grpc_tls = access.http_tls is not None, access.grpc_tls is not None
    every = (
        (frontend.allow_http, "http", frontend.http_address, frontend.http_port, http_tls),
        (frontend.allow_grpc, "grpc", frontend.grpc_address, frontend.grpc_port, grpc_tls),
        (frontend.allow_metrics, "metrics", frontend.metrics_address, frontend.metrics_port,
         False),
        (True, "openai", frontend.openai.address, frontend.openai.port, http_tls),
        (True, "admin", access.admin_address, access.admin_port, http_tls),
        (True, "admin-grpc", access.admin_address, access.admin_grpc_port, grpc_tls),
    )  # fmt: skip
    return [
        Endpoint(name, address, port, is_tls)
        for is_open, name, address, port, is_tls in every
        if is_open and port is not None
    ]


def check(config: ServeConfig) -> None:
    """Every check of this machine.

    Raises:
        ConfigError: serving cannot work; names the cause and the remedy.
    """
    check_ports(endpoints(config.frontend))
    check_host_names(config)
    check_groups(config.groups)
    for tokenizer in config.tokenizers:
        check_tokenizer(tokenizer)


def check_tokenizer(source: TokenizerFolder) -> str:
    """Convert a model's tokenizer if this machine has not seen its files before, so that a
    front end finds the result in the user's cache. Returns what `summary` says of the result.

    Raises:
        ConfigError: the tokenizer cannot be used; names the model and the remedy.
    """
    try:
        return summary(prepare(source.folder), source.folder)
    # A zero byte in the path, or a cycle of links.
    except (ConfigError, OSError, ValueError, RuntimeError) as error:
        raise tokenizer_fault(source.config_path, error) from error


def check_groups(groups: Sequence[GroupConfig]) -> None:
    """Refuse groups for which this machine has too few GPUs or too little memory."""
    # Ranks of other hosts check those hosts themselves.
    here = [group for group in groups if all(is_this_host(e.host) for e in group.hosts)]
    for group in here:
        if group.engine.device == "cuda":
            check_gpus(group.world_size, group.engine.gpu_device_ids)
    check_shared_memory(sum(group.world_size for group in here))
    check_host_memory(groups)


def check_ports(wanted: Iterable[Endpoint]) -> None:
    """Refuse a port that is named twice, in use, or not permitted for this user."""
    seen: dict[int, Endpoint] = {}
    for endpoint in wanted:
        earlier = seen.setdefault(endpoint.port, endpoint)
        if earlier is not endpoint and _overlap(earlier.address, endpoint.address):
            raise ConfigError(
                f"--{earlier.name}-port and --{endpoint.name}-port are both {endpoint.port}. "
                "Give each a port of its own."
            )
        _check_free(endpoint)


def check_gpus(world_size: int, gpu_ids: tuple[int, ...]) -> None:
    """Refuse more ranks than GPUs, or GPUs that do not exist."""
    present = num_visible_gpus()
    if any(gpu >= present for gpu in gpu_ids):
        raise ConfigError(
            f"gpu_device_ids names GPU {max(gpu_ids)} but {present} are visible here "
            "(CUDA_VISIBLE_DEVICES counts). Correct the list in config.pbtxt."
        )
    # In an allocation the ranks may go to other hosts, whose GPUs cannot be counted here.
    if world_size > present and int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) == 1:
        raise ConfigError(
            f"world size {world_size} needs {world_size} GPUs but {present} are visible here. "
            "Serve an engine built for fewer ranks, or on the CPU with --device cpu."
        )


def check_shared_memory(num_ranks: int, folder: str = SHARED_MEMORY) -> None:
    """Refuse a shared memory file system that is too small for the ranks' rings."""
    needed = num_ranks * SHARED_MEMORY_BYTES_PER_RANK
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; ranks need shared memory") from None
    if free < needed:
        raise ConfigError(
            f"{folder} has {free >> 20} MiB free but {num_ranks} ranks need "
            f"{needed >> 20} MiB. Enlarge it (docker: --shm-size=1g) or remove stale files."
        )


def check_host_memory(groups: Sequence[GroupConfig]) -> None:
    """Refuse more host memory for KV blocks than this machine has free."""
    # In an allocation of several hosts the ranks may be elsewhere.
    if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1:
        return
    bytes_of = {
        group.name: group.engine.cache.host_bytes * group.world_size
        for group in groups
        if group.launch != "job" and all(is_this_host(e.host) for e in group.hosts)
    }
    needed, free = sum(bytes_of.values()), free_memory_bytes()
    if needed > free:
        users = ", ".join(name for name, num_bytes in bytes_of.items() if num_bytes)
        raise ConfigError(
            f"kv_cache_host_memory_bytes, which is a rank's, adds up to {needed} bytes for all "
            f"ranks of {users}, but this host has {free} free. Lower it in config.pbtxt, or "
            "free memory."
        )


def _overlap(one: str, other: str) -> bool:
    wildcards = ("", "0.0.0.0", "::")
    return one == other or one in wildcards or other in wildcards


def _check_free(endpoint: Endpoint) -> None:
    try:
        infos = socket.getaddrinfo(
            endpoint.address or None, endpoint.port, type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )  # fmt: skip
    except (socket.gaierror, UnicodeError) as error:
        # A UnicodeError means that the text cannot be a host's name.
        reason = error.strerror if isinstance(error, OSError) else "this is no host's name"
        raise ConfigError(
            f"{_address_flag(endpoint)} {endpoint.address}: {reason}. Name an address "
            "of this host without brackets, or leave the flag out to listen on all of them."
        ) from None
    family, kind, protocol, _, where = infos[0]
    with socket.socket(family, kind, protocol) as sock:
        # Ports in TIME_WAIT count as free: the servers set this option too.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(where)
            # With this option on another socket, the bind succeeds and the listen fails.
            sock.listen(1)
        except OSError as error:
            raise ConfigError(_bind_failure(endpoint, error)) from None


def _bind_failure(endpoint: Endpoint, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{endpoint}: the port is in use{_holder(endpoint.port)}. Stop that program or "
            f"choose another --{endpoint.name}-port."
        )
    if error.errno == errno.EACCES:
        return f"{endpoint}: this user may not open it. Choose a port above 1023."
    return (
        f"{endpoint}: cannot listen on {endpoint.address}: {error.strerror}. Choose another "
        f"{_address_flag(endpoint)}."
    )


def _address_flag(endpoint: Endpoint) -> str:
    return f"--{endpoint.name.removesuffix('-grpc')}-address"


def _holder(port: int) -> str:
    """The program that listens on ``port``, if this user may see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port:
                if connection.pid is None:
                    return ""
                program = psutil.Process(connection.pid).name()
                return f" by pid {connection.pid} ({program})"
    except (psutil.Error, OSError):
        pass
    return ""
