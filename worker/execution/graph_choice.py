"""Which steps an engine captures as CUDA graphs: where that can be, unless it is told."""

from __future__ import annotations

import logging

import torch

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.execution.cuda_graphs import graph_sizes, prompt_graph_sizes
from trimaran.worker.parallel.lane_bound import MOST_TO_ALL
from trimaran.worker.steps.step_types import SchedulerOutput

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 1024
"""Steps with prompts are captured up to here unless told otherwise: of more tokens a GPU
takes longer than its host for the launches, with a model of 8B parameters."""

LONGEST_DECODE = 8192
"""Tokens of a sequence that may decode in a graph of a step with prompts. The kernel of
prompts reads a sequence by one block a key-value head, that of decodes by the whole GPU: at
this length a layer's attention takes some 60 us longer, which is less than launches cost."""


MOST_DECODES = 128
"""Sequences that may decode in a graph of a step with prompts. By the kernel of prompts 64 of
them take 10 us a layer longer, 256 take 31 and 768 take 83; with as many the device has more
work than its host in any case. On an H200 of 8B parameters, prompts of 128 and 1,000 tokens
beside 256 decodes lost 0.6 and 4 % in graphs, beside 768 6 %, and arrivals of 467 tokens
beside some 20 had their first token after two thirds of the time."""


def choose_graphs(
    config: EngineConfig, topology: ParallelLayout, device: torch.device
) -> tuple[list[int], list[int]]:
    """Sizes of the decodes to capture, and of the steps with prompts; none where graphs are
    off or have no place.

    Raises:
        ConfigError: something is to be captured that cannot be.
    """
    launched = _why_decodes_are_launched(config, topology, device)
    most = _most_prompt_tokens(config, launched)
    if config.lora.has_graphs and launched:
        raise ConfigError(
            f"adapter-graphs is set but {launched}: such steps are not captured then. Serve "
            "without it."
        )
    if launched:
        if device.type == "cuda":
            logger.info("no CUDA graphs, steps are launched: %s", launched)
        return [], []
    limits = config.scheduler
    sizes = graph_sizes(limits.max_num_seqs, config.max_cuda_graphs)
    if config.parallel.expert_lanes > 1:
        # Of more tokens the host has to know how many go to each rank.
        sizes = [size for size in sizes if size <= MOST_TO_ALL]
    return sizes, prompt_graph_sizes(min(most, limits.max_num_batched_tokens))


def suits_a_graph(decision: SchedulerOutput) -> bool:
    """Whether a step's decodes are few enough, and short enough, to be served as prompts."""
    computed = decision.num_computed_tokens[: decision.num_decodes]
    if not len(computed):
        return True
    return len(computed) <= MOST_DECODES and int(computed.max()) < LONGEST_DECODE


def _why_decodes_are_launched(
    config: EngineConfig, topology: ParallelLayout, device: torch.device
) -> str:
    """Empty where decodes are captured."""
    is_sharing = config.parallel.expert_lanes > 1
    if device.type != "cuda":
        return f"the device is {device.type}"
    if not config.cuda_graphs:
        return "cuda_graph_mode is false"
    if topology.tp_size == 1 and not is_sharing:
        return ""
    if config.collective_graphs is False:
        who = "lanes share experts" if is_sharing else f"tp_size is {topology.tp_size}"
        return f"{who}, with --no-collective-graphs"
    ranks = topology.stage_ranks if is_sharing else topology.tp_ranks
    num_hosts = len({topology.hosts[rank] for rank in ranks}) if topology.hosts else 1
    if num_hosts > 1 and not config.collective_graphs:
        # Sums over a network have not been tried from graphs: who wants them says so.
        who = "lanes that share experts" if is_sharing else "a tensor group"
        return f"{who} on {num_hosts} hosts, without --collective-graphs"
    return ""


def _most_prompt_tokens(config: EngineConfig, launched: str) -> int:
    """Up to how many tokens steps with prompts are captured, where decodes are launched for
    that reason."""
    reason = launched
    if not reason and config.deterministic:
        # Decodes beside prompts get the kernel of prompts, as those that stand alone do not.
        reason = "tokens shall be deterministic"
    if not reason and config.parallel.expert_lanes > 1:
        # All lanes' graphs must be of one size, and there are other sizes of decodes.
        reason = "lanes share experts"
    most = config.prompt_graph_tokens
    if most and reason:
        raise ConfigError(
            f"prompt-graph-tokens is {most} but {reason}: such steps are not captured then. "
            "Serve without it."
        )
    if most is None:
        # Somebody who counts graphs wants no more of another kind.
        return 0 if reason or config.max_cuda_graphs else PROMPT_TOKENS
    return most
