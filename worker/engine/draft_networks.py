"""Loads the network that an engine drafts with, if the engine has one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.comm.stages.world_group import WorldGroup
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.draft_network import DRAFT_MODEL, EAGLE, MTP, REDRAFTER
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.config.speculation_config import SpeculationConfig
from trimaran.worker.models.drafting.eagle import EagleHead
from trimaran.worker.models.drafting.interfaces import (
    BeamHeads,
    CachelessHeads,
    DraftNetwork,
    RankedHeads,
    RankedNetwork,
)
from trimaran.worker.models.drafting.loading import load_head, random_head
from trimaran.worker.models.drafting.mtp import load_mtp
from trimaran.worker.models.drafting.small_model import SmallModel
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.models.registry import load_model
from trimaran.worker.parallel.tensor_parallel import TensorGroup

_WITH_EMBEDDING = (EAGLE, REDRAFTER, MTP)
"""Networks that read the target's embedding."""

_SENT_BYTES = 1 << 26
"""Most bytes of a message between stages while loading."""


def load_network(
    config: EngineConfig,
    topology: ParallelLayout,
    tp: TensorGroup,
    target: CausalLM,
    group: WorldGroup,
) -> tuple[DraftNetwork | None, tuple[int, ...]]:
    """The network that drafts for ``target`` on this rank, and the target's layers whose inputs
    it reads; None if the engine has no network, or in an earlier stage of a pipeline.
    Collective over the world.

    Raises:
        ConfigError: the folder cannot draft for the target, or the engine's layout is not
            served together with such a network.
    """
    speculation = config.scheduler.speculation
    if not speculation.is_network:
        return None, ()
    _check_layout(speculation, config, topology, target)
    if topology.pp_size > 1 and speculation.drafter in _WITH_EMBEDDING:
        _lend_embedding(target, topology, group)
    network = _network(config, topology, tp, target) if target.stage.is_last else None
    taps: list[tuple[int, ...]] = group.all_gather(() if network is None else network.taps)
    return network, max(taps)


def _network(
    config: EngineConfig, topology: ParallelLayout, tp: TensorGroup, target: CausalLM
) -> DraftNetwork:
    """The network, in a rank of the last stage."""
    speculation = config.scheduler.speculation
    folder = Path(speculation.draft_dir)
    network: DraftNetwork
    if speculation.drafter == DRAFT_MODEL:
        network = SmallModel(_small_model(config, folder, topology, tp, target))
    elif speculation.drafter == MTP:
        network = load_mtp(folder, target, is_random=config.load_format == "random")
    elif config.load_format == "random":
        network = random_head(speculation.drafter, folder, target)
    else:
        network = load_head(speculation.drafter, folder, target)
    tree = speculation.draft_tree
    if speculation.has_trees:
        _check_trees(network, config, target)
    most = speculation.max_draft_tokens if tree is None else tree.depth
    most = speculation.tree_depth or most
    if isinstance(network, CachelessHeads) and most > network.num_heads:
        what = "--max-draft-tokens is" if tree is None else "the tree of drafts has paths of"
        raise ConfigError(
            f"{what} {most}, but {folder} has {network.num_heads} heads, of which each drafts "
            "one token. Lower it."
        )
    for layer in network.taps:
        if not 0 <= layer < target.config.num_hidden_layers:
            raise ConfigError(
                f"{folder}: takes the input of layer {layer} of the target, which has "
                f"{target.config.num_hidden_layers} layers: the head belongs to another model."
            )
    return network


def _lend_embedding(target: CausalLM, topology: ParallelLayout, group: WorldGroup) -> None:
    """Give the last stage a copy of the first stage's embedding. Collective over the world."""
    assert group.world is not None, "a pipeline has several ranks"
    group.world.barrier(group.timeout_s, "the embedding for a network that drafts")
    comm = group.world.subgroup(topology.pp_ranks).comm
    try:
        if target.stage.is_first:
            weight_VD: Tensor = target.embed_tokens.weight
        elif target.stage.is_last:
            weight_VD = target.add_embedding()
        else:
            return
        num_rows = max(1, _SENT_BYTES // weight_VD[0].nbytes)
        for first in range(0, len(weight_VD), num_rows):
            rows = weight_VD[first : first + num_rows]
            host = torch.empty(rows.shape, dtype=rows.dtype)
            if target.stage.is_first:
                host.copy_(rows)
                comm.Send(host.view(torch.uint8).numpy(), topology.pp_size - 1)
            else:
                comm.Recv(host.view(torch.uint8).numpy(), 0)
                rows.copy_(host)
    finally:
        comm.Free()


def _check_layout(
    speculation: SpeculationConfig,
    config: EngineConfig,
    topology: ParallelLayout,
    target: CausalLM,
) -> None:
    """Refuse what networks that draft are not served with."""
    problem = ""
    if config.parallel.expert_dp_size > 1:
        problem = "experts that dp ranks share"
    elif target.switch_at:
        problem = (
            "a target whose rotation changes with the length of a sequence. Choose a "
            f"--max-seq-len of at most {target.switch_at}"
        )
    if problem:
        raise ConfigError(
            f"--speculative-decoding {speculation.drafter} is not served with {problem}, or "
            "draft by ngram."
        )


def _check_trees(network: DraftNetwork, config: EngineConfig, target: CausalLM) -> None:
    """Refuse what trees of drafts are not served with."""
    speculation = config.scheduler.speculation
    tree, num_nodes = speculation.draft_tree, speculation.max_draft_tokens
    served = RankedHeads | RankedNetwork if tree is not None else BeamHeads | RankedNetwork
    if not isinstance(network, served):
        raise ConfigError(
            f"--speculative-decoding {speculation.drafter} drafts no trees, but a tree of "
            f"{num_nodes} nodes is set. Leave the tree out."
        )
    models = [target]
    if isinstance(network, SmallModel):
        models.append(network.model)
    problem = ""
    for model in models:
        if any(model.config.layer_windows) or config.cache.attention_windows:
            problem = "attention windows"
        elif model.config.position_embedding_type.startswith("alibi"):
            problem = "ALiBi, whose bias goes by a key's slot"
    if problem:
        raise ConfigError(
            f"a tree of drafts ({num_nodes} nodes) is not served with {problem}. Draft "
            "chains: leave the choices out and build with a --max_draft_len of at most the "
            "network's steps."
        )
    widest, num_ids = speculation.tree_width, target.config.vocab_size
    if tree is not None:
        widest = 1 + max(tree.ranks)
    if isinstance(network, EagleHead):
        num_ids = network.num_draft_ids
    if widest > num_ids:
        raise ConfigError(
            f"the tree of drafts has rank {widest - 1}, but the network's vocabulary has "
            f"{num_ids} ids. Lower the rank."
        )


def _small_model(
    config: EngineConfig,
    folder: Path,
    topology: ParallelLayout,
    tp: TensorGroup,
    target: CausalLM,
) -> CausalLM:
    # The last stage holds all of the small model.
    parallel = dataclasses.replace(config.parallel, pp_size=1, pp_partition=())
    if topology.pp_size > 1:
        rank = topology.dp_rank * topology.tp_size + topology.tp_rank
        topology = dataclasses.replace(topology, rank=rank, pp_size=1, hosts=())
    own = dataclasses.replace(
        config,
        engine_dir=str(folder),
        quantization="none",
        parallel=parallel,
        cache=dataclasses.replace(config.cache, dtype="auto", attention_windows=()),
    )
    model = load_model(own, topology, tp, target.device)
    if model.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"{folder}: has a vocabulary of {model.config.vocab_size} ids, but the target has "
            f"{target.config.vocab_size}. A draft model needs the target's tokenizer."
        )
    longest = model.config.max_position_embeddings
    wanted = min(config.scheduler.max_seq_len, target.config.max_position_embeddings)
    if longest < wanted:
        raise ConfigError(
            f"{folder}: has {longest} positions, but sequences have up to {wanted} tokens. "
            "Lower --max-seq-len, or name another draft model."
        )
    if model.switch_at:
        raise ConfigError(
            f"{folder}: its rotation changes with the length of a sequence, which is not "
            "served for a draft model. Name another one."
        )
    return model
