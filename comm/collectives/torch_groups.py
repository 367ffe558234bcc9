"""Tensor groups over torch.distributed (gloo, NCCL), and memory that their GPUs map."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.errors import ConfigError, PeerLostError
from trimaran.comm.mpi import World
from trimaran.comm.transport.sockets import LOOPBACK, dial, listen_address

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
# torch exports the name, but its type hints do not.
_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def prepare_nccl(world: World) -> None:
    """Set NCCL's variables that the operator has not set, before its first communicator.

    Where all ranks of ``world`` are on one host, NCCL listens on loopback alone.
    """
    for name, value in MULTICAST_OFF.items():
        os.environ.setdefault(name, value)
    if len(set(world.hosts)) == 1:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


class ProcessGroup(TensorParallelGroup):
    """A tensor group as a process group of torch.distributed.

    A process may be in several such groups. They are subgroups of a default group of all ranks
    of the root world. The first group creates the default group, the last one destroys it, and
    no data is sent over it.
    """

    transport = ""

    def __init__(self, world: World, backend: str, timeout_s: float, connect_s: float) -> None:
        self.rank = world.rank
        self.size = world.size
        self._ranks = world.root_ranks
        self.timeout_s = timeout_s
        limit = timedelta(seconds=timeout_s)
        _join_default_group(world.root, backend, limit, connect_s)
        # Only members make this call: other groups of the same world connect at the same time.
        self.handle: Any = dist.new_group(
            list(world.root_ranks), limit, backend, use_local_synchronization=True
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place; returns ``tensor``."""
        if not tensor.is_contiguous():
            return tensor.copy_(self.all_reduce(tensor.contiguous()))
        self._run(dist.all_reduce, tensor, group=self.handle)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The tensors of all ranks joined along ``dim`` in rank order, new memory."""
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._run(dist.all_gather, parts, own, group=self.handle)
        return torch.cat(parts, dim)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite ``tensor`` with that of group rank ``src``; returns ``tensor``."""
        own = tensor.contiguous()
        self._run(dist.broadcast, own, group=self.handle, group_src=src)
        return tensor if own is tensor else tensor.copy_(own)

    def all_to_all(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Send different rows to each rank; returns the received rows in rank order."""
        own = rows.contiguous()
        receive = [row[self.rank] for row in counts]
        received = own.new_empty((sum(receive), *own.shape[1:]))
        self._run(
            dist.all_to_all_single,
            received,
            own,
            receive,
            list(counts[self.rank]),
            group=self.handle,
        )
        return received

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        self._run(dist.barrier, group=self.handle)

    def transport_of(self, num_bytes: int) -> str:
        """One transport for all sizes."""
        return self.transport

    def close(self) -> None:
        """Leave the group; the last one also leaves torch.distributed. Collective.

        All connections close with the last group. Torch names a group by its ranks and the
        number of groups, so a group made after the end of another would get the same name, and
        find the old addresses, or NCCL's old key, in the store.
        """
        _leave_default_group()

    def _run(self, call: Callable[..., object], *arguments: object, **options: object) -> None:
        try:
            call(*arguments, **options)
        except RuntimeError as error:
            raise PeerLostError(
                f"{self.transport} failed on rank {self.rank} of {self.size}: {error}"
            ) from error


class GlooGroup(ProcessGroup):
    """CPU ranks on several hosts, over TCP. 16-bit floats travel as float32.

    gloo's own limit is fixed when connecting, so each wait is given the current ``timeout_s``.
    """

    transport = "gloo"

    def __init__(self, world: World, timeout_s: float, connect_timeout_s: float) -> None:
        super().__init__(world, "gloo", timeout_s, connect_timeout_s)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place; returns ``tensor``."""
        if tensor.dtype in (torch.float16, torch.bfloat16):
            return tensor.copy_(super().all_reduce(tensor.float()))
        return super().all_reduce(tensor)

    def _run(self, call: Callable[..., Any], *arguments: object, **options: object) -> None:
        limit = timedelta(seconds=self.timeout_s)
        try:
            call(*arguments, **options, async_op=True).wait(limit)
        except RuntimeError as error:
            others = [rank for rank in self._ranks if rank != self._ranks[self.rank]]
            raise PeerLostError(
                f"no sum or exchange with rank(s) {others}, over the network, within "
                f"{self.timeout_s:.3g} s: {error}"
            ) from error


class SumInPlace(Protocol):
    """Another all-reduce, for supported tensors."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the all-reduce supports a tensor; the same on all ranks."""
        ...

    def way_of(self, num_bytes: int) -> str:
        """Name of the kernel for a tensor of that size, for the log; empty for unsupported
        sizes."""
        ...

    def __call__(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor with the sum, on the current stream."""
        ...


class NcclGroup(ProcessGroup):
    """One GPU a rank. Calls are enqueued on the current stream."""

    transport = "nccl"

    peer_sum: SumInPlace | None = None
    """The peer-memory all-reduce for the sizes that it serves; set on all ranks alike."""

    def __init__(
        self, world: World, device: torch.device, timeout_s: float, connect_timeout_s: float
    ) -> None:
        prepare_nccl(world.root)
        torch.cuda.set_device(device)
        self.device = device
        self.num_hosts = len(set(world.hosts))
        super().__init__(world, "nccl", timeout_s, connect_timeout_s)
        # Connect the GPUs now, because a graph cannot capture that.
        self.barrier()

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The tensors of all ranks joined along ``dim`` in rank order, new memory."""
        own = tensor.contiguous()
        joined = torch.empty((self.size, *own.shape), dtype=own.dtype, device=own.device)
        self._run(dist.all_gather_into_tensor, joined, own, group=self.handle)
        return joined.flatten(0, 1) if dim == 0 else torch.cat(joined.unbind(0), dim)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place; returns ``tensor``."""
        peer = self.peer_sum
        if peer is not None and tensor.is_contiguous() and peer.takes(tensor):
            peer(tensor)
            return tensor
        return super().all_reduce(tensor)

    def transport_of(self, num_bytes: int) -> str:
        """NCCL, except for sizes of the peer-memory all-reduce."""
        way = "" if self.peer_sum is None else self.peer_sum.way_of(num_bytes)
        return f"peer {way}" if way else self.transport

    def transports(self) -> dict[str, str]:
        """The transport of every collective, and of the fused all-reduce and norm if in use."""
        with_norms = {} if self.sum_norm is None else {"sum_norm": "peer push"}
        return {**super().transports(), **with_norms}

    def barrier(self) -> None:
        """Wait until every rank of the group is here and its GPU is idle."""
        self.all_reduce(torch.zeros(1, device=self.device))
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the group. Collective. All graphs with its collectives must be freed before."""
        memory = [way for way in (self.peer_sum, self.sum_norm) if way is not None]
        self.peer_sum = self.sum_norm = None
        if memory:
            # The barrier runs over NCCL: a rank that arrives here no longer reads peer memory.
            self.barrier()
        del memory
        super().close()


_num_groups = 0
"""Process groups of this process besides the default group."""


def _join_default_group(root: World, backend: str, limit: timedelta, connect_s: float) -> None:
    """Create the default group if absent. Collective over ``root``."""
    global _num_groups
    if not _num_groups:
        # Without a device no GPUs are connected.
        dist.init_process_group(
            backend,
            store=connect_store(root, connect_s),
            rank=root.rank,
            world_size=root.size,
            timeout=limit,
        )
    _num_groups += 1


def _leave_default_group() -> None:
    global _num_groups
    _num_groups -= 1
    if not _num_groups:
        dist.destroy_process_group()


def connect_store(world: World, timeout_s: float) -> Any:
    """A key-value store on group rank 0 that all ranks reach. Collective.

    On one host the store listens on loopback, between hosts on `listen_address` alone. Rank 0
    binds a free port and hands over the bound socket, so that no other process can take the
    port in between.
    """
    limit = timedelta(seconds=timeout_s)
    is_one_host = len(set(world.hosts)) == 1
    if world.rank == 0:
        host = LOOPBACK if is_one_host else listen_address()
        listener = socket.create_server((host, 0), backlog=128)
        port = listener.getsockname()[1]
        store = _TCPStore(
            host,
            port,
            world.size,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        world.comm.bcast((host, port))
        return store
    host, port = world.comm.bcast(None)
    dial(host, port).close()  # its error says what to do
    return _TCPStore(
        host, port, world.size, is_master=False, timeout=limit, wait_for_workers=False
    )


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Regions of equal size, one a rank; freed with this object, on all ranks at once."""

    own: torch.Tensor
    """The region of this rank as bytes."""

    addresses: list[int]
    """The address of every rank's region in this process, its own included."""

    handle: Any
    """torch's handle, which keeps the regions of the other ranks mapped."""


def map_peer_memory(group: NcclGroup, num_bytes: int) -> PeerMemory:
    """A zeroed region on each GPU of ``group``. Collective.

    Raises:
        ConfigError: these GPUs cannot map each other's memory.
    """
    # Imported late: the import takes a second, and only GPUs need the module.
    from torch.distributed import _symmetric_memory

    symmetric: Any = _symmetric_memory
    try:
        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=group.device)
        own.zero_()
        handle = symmetric.rendezvous(own, group.handle.group_name)
    except RuntimeError as error:
        # The other ranks wait in this barrier before the error can reach them.
        group.barrier()
        raise ConfigError(
            f"the GPUs of this tensor group cannot map each other's memory ({error})"
        ) from error
    bases = [int(address) for address in handle.buffer_ptrs]
    # Regions of one size begin at the same offset of torch's allocations.
    offset = own.data_ptr() - bases[group.rank]
    # No rank may read before all regions are zero.
    group.barrier()
    return PeerMemory(own, [base + offset for base in bases], handle)


def why_memory_is_apart(group: NcclGroup) -> str:
    """The driver's reason against mapping the memory of the GPUs of ``group``; empty if this
    rank sees no obstacle. Collective.

    Peer access alone is not enough: between cards on PCI Express the driver may report peer
    access that does not work, and a kernel that waits for a flag there never ends. Native
    atomics on peer memory exist over NVLink only.
    """
    own = torch.cuda.current_device()
    devices = group.all_gather(torch.tensor([own], device=group.device), 0).tolist()
    if len(set(devices)) < group.size or max(devices) >= torch.cuda.device_count():
        return "its ranks do not see each other's GPUs"
    for device in devices:
        if device != own and not _reaches(own, device):
            return f"GPU {own} has no atomic access to the memory of GPU {device}"
    return ""


def _reaches(own: int, peer: int) -> bool:
    if not torch.cuda.can_device_access_peer(own, peer):
        return False
    value = ctypes.c_int()
    ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
    return ask(ctypes.byref(value), _NATIVE_ATOMICS, own, peer) == 0 and value.value == 1
