"""Connects a tensor group over the transport that fits its devices and hosts."""

from __future__ import annotations

import torch

from trimaran.comm.collectives.shared_memory import SharedMemoryGroup
from trimaran.comm.collectives.tensor_group import SingleRankGroup, TensorParallelGroup
from trimaran.comm.collectives.torch_groups import GlooGroup, NcclGroup
from trimaran.comm.mpi import MPI, World


def connect_group(
    world: World, device: torch.device, timeout_s: float, connect_timeout_s: float = 300.0
) -> TensorParallelGroup:
    """The tensor group of all ranks of ``world``. Collective over ``world.root``.

    GPUs use NCCL; CPU ranks of one host shared memory, and gloo where some group spans
    several hosts. ``timeout_s`` bounds every later collective, ``connect_timeout_s`` the
    connecting.
    """
    is_gpu = device.type == "cuda"
    # torch makes a process group collectively over all ranks of the root world.
    needs = is_gpu or len(set(world.hosts)) > 1
    if world.root.size > 1 and world.root.comm.allreduce(needs and world.size > 1, MPI.LOR):
        if is_gpu:
            return NcclGroup(world, device, timeout_s, connect_timeout_s)
        return GlooGroup(world, timeout_s, connect_timeout_s)
    if world.size == 1:
        return SingleRankGroup()
    return SharedMemoryGroup.connect(world, timeout_s)
