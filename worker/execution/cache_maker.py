"""Makes a rank's KV cache: its memory on device and host, and its managers."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import ParallelLayout
from trimaran.kernels.cuda import l2_partitions
from trimaran.worker.config.engine_config import CacheConfig, SchedulerConfig
from trimaran.worker.execution.model_runner import ModelRunner
from trimaran.worker.kv_cache.host_copies import HostCopies
from trimaran.worker.kv_cache.kv_group import KVGroup, group_layers
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.models.drafting.interfaces import DraftNetwork
from trimaran.worker.models.interfaces import CausalLM

logger = logging.getLogger(__name__)

USUAL_BLOCK_SIZE = 32
"""Tokens of a block unless the configuration or the device asks for another number."""


class CacheMaker:
    """The properties of a model's KV cache, from its layers and the configuration."""

    def __init__(
        self,
        config: CacheConfig,
        limits: SchedulerConfig,
        model: CausalLM,
        topology: ParallelLayout,
        network: DraftNetwork | None = None,
        taps: tuple[int, ...] = (),
    ) -> None:
        """``network`` drafts, and has entries in blocks of the same numbers. The last stage's
        network reads the inputs of the layers ``taps``."""
        self._taps = taps
        self._limits = limits
        self._model = model
        # Partitions differ between GPUs, but the blocks of a sequence are equal on all ranks.
        is_alone = topology.world_size == 1
        self._partition_mask = l2_partitions.mask_of(model.device) if is_alone else 0
        self.groups = _groups_of(model, self._partition_mask)
        self.block_size = config.tokens_per_block or self._usual_block_size()
        """Tokens of a block."""
        self.config = replace(config, tokens_per_block=self.block_size)
        self._network = network
        specs = [] if network is None else network.kv_cache_specs()
        self.draft_groups = group_layers(specs)
        """The cache of the network that drafts."""
        every = self.groups + self.draft_groups
        self.block_bytes = sum(group.block_bytes(self.block_size) for group in every)
        """The bytes of one block, over all groups."""

    def _usual_block_size(self) -> int:
        """The block size with which attention reads from the near L2 partition, if there is
        one."""
        return self.groups[0].partitioned_block_size or USUAL_BLOCK_SIZE

    def find_partitions(self) -> None:
        """Find the partition of each allocated block, if partitions are used. Before graphs are
        captured."""
        for group in self.groups if self._partition_mask else ():
            group.find_partitions()

    def prepare_drafts(self, runner: ModelRunner) -> None:
        """Let a runner verify drafts and compute output again by decodes, if the limits ask for
        that, and draft with the network. Before graphs are captured."""
        limits = self._limits
        runner.recomputes_rows = limits.max_recompute_rows > 0
        runner.shares_rows = limits.speculation.is_on
        if self._network is not None:
            runner.use_network(self._network, self.draft_groups, limits)
        elif self._taps:
            runner.use_taps(self._taps, limits)
        if limits.speculation.has_trees:
            runner.use_trees(limits)

    @property
    def staged_bytes(self) -> int:
        """Device memory for staging blocks on their way to the host."""
        return self._num_staged * self.block_bytes

    @property
    def _num_staged(self) -> int:
        """Blocks that are staged at once: as many as a step's tokens overwrite."""
        if not self.config.host_bytes:
            return 0
        return -(-self._limits.max_num_batched_tokens // self.block_size)

    def host_slots(self) -> int:
        """Blocks in this rank's host memory."""
        num_bytes = self.config.host_bytes
        if 0 < num_bytes < self.block_bytes:
            raise ConfigError(
                f"kv_cache_host_memory_bytes is {num_bytes} but a block of "
                f"{self.block_size} tokens takes {self.block_bytes} on each "
                "rank. Raise it to a multiple of that, or set it to 0."
            )
        return num_bytes // self.block_bytes

    def make(
        self, runner: ModelRunner, num_blocks: int, num_slots: int, topology: ParallelLayout
    ) -> list[KVCacheManager]:
        """For each dp rank that this rank schedules, a manager of so many blocks and host
        slots; also the host memory of this rank's own dp rank."""
        if num_slots:
            self._keep_on_host(runner, num_slots)
        logger.info(
            "KV cache ready: %d blocks of %d tokens, %.2f GiB, %s",
            num_blocks,
            self.block_size,
            num_blocks * self.block_bytes / 2**30,
            self._model.kv_cache_dtype,
        )
        num_dp_ranks = topology.dp_size if topology.is_leader else 1
        managers = [self._manager(num_blocks, num_slots) for _ in range(num_dp_ranks)]
        for manager in managers:
            manager.set_partitions([group.partitions for group in self.groups])
            manager.separates_output = self._limits.max_recompute_rows > 0
        return managers

    def _keep_on_host(self, runner: ModelRunner, num_slots: int) -> None:
        """Give each group of a runner its host memory for evicted blocks."""
        groups = [(group, runner.hosts) for group in self.groups]
        groups += [(group, runner.draft_hosts) for group in self.draft_groups]
        for group, hosts in groups:
            assert group.memory is not None
            begin = time.monotonic()
            host = HostCopies(group.memory, num_slots, self._num_staged)
            hosts.append(host)
            logger.info(
                "KV cache on the host: %d blocks, %.2f GiB a rank, mapped in %.1f s",
                num_slots,
                host.num_bytes / 2**30,
                time.monotonic() - begin,
            )

    def _manager(self, num_blocks: int, num_slots: int) -> KVCacheManager:
        config, limits, model = self.config, self._limits, self._model.config
        windows = config.windows_of(
            model.layer_windows, limits.max_seq_len, model.num_hidden_layers
        )
        if all(windows) and num_slots and not config.enable_block_reuse:
            raise ConfigError(
                f"kv_cache_host_memory_bytes is {config.host_bytes} but blocks are not reused, "
                f"and all layers have windows, of {max(windows)} tokens at most: sequences "
                "that make room are computed again. Set enable_kv_cache_reuse to True, or the "
                "bytes to 0."
            )
        return KVCacheManager(
            [num_blocks] * len(self.groups),
            self.block_size,
            enable_reuse=config.enable_block_reuse,
            window=max(windows) if all(windows) else 0,
            num_sinks=config.num_sinks,
            host_slots=num_slots,
            is_reserving=not limits.can_preempt,
            switch_at=self._model.switch_at,
        )


def _groups_of(model: CausalLM, partition_mask: int) -> list[KVGroup]:
    groups = group_layers(model.kv_cache_specs(), partition_mask)
    if len(groups) != 1:
        raise ConfigError(
            f"the model's layers need {len(groups)} kinds of KV cache but one is served. "
            "Serve a model whose layers all attend alike."
        )
    return groups
