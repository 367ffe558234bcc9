"""Experts that dp ranks share: each dp rank's result is that of all experts on one rank."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.mpi import MPI
from trimaran.comm.topology import ParallelLayout
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.layers.experts import ExpertMLP
from trimaran.worker.layers.linear import LayerContext
from trimaran.worker.parallel.tensor_parallel import ShardPosition

_PATH = Path(__file__).parents[1] / "unit" / "worker" / "models" / "models.py"
_SPEC = importlib.util.spec_from_file_location("models", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
models = importlib.util.module_from_spec(_SPEC)
sys.modules["models"] = models
_SPEC.loader.exec_module(models)

CONFIGS = models.expert_configs()
CPU = torch.device("cpu")
NUM_RANKS = MPI.COMM_WORLD.Get_size()
# Tensor ranks of a dp rank, and parts of the experts' ranks.
LAYOUTS = [(1, 2)] if NUM_RANKS == 2 else [(1, NUM_RANKS), (1, 2), (2, NUM_RANKS), (2, 2)]


def make_layer(config, dtype, tp, num_parts=1, ranks=None) -> ExpertMLP:
    """One layer's experts with weights that depend on nothing but their names."""
    context = LayerContext(
        tp, CpuOps(load_library(), dtype, 1), dtype, CPU, 0, num_parts, ranks
    )
    layer = ExpertMLP(config, context)
    generator = torch.Generator().manual_seed(11)

    def whole(*shape):
        return (0.2 * torch.randn(shape, generator=generator)).to(dtype)

    hidden, inner = config.hidden_size, config.moe_intermediate_size
    layer.router.weight_loader(layer.router.weight, whole(config.num_experts, hidden))
    if layer.router.correction_bias is not None:
        layer.router.correction_bias.data.copy_(whole(config.num_experts).float())
    experts = layer.experts
    own = range(experts.first, experts.first + experts.gate_up.shape[0])
    for number in range(config.num_experts):
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)),
                            ("down", (hidden, inner))):  # fmt: skip
            matrix = whole(*shape)
            if number in own:
                parameter = experts.down if part == "down" else experts.gate_up
                experts.weight_loader(parameter, matrix, f"{number}.{part}")
    if layer.shared_expert is not None:
        wide = config.shared_expert_intermediate_size
        shared = layer.shared_expert
        for part in ("gate", "up"):
            linear = shared.gate_up_proj
            linear.weight_loader(linear.weight, whole(wide, hidden), part)
        shared.down_proj.weight_loader(shared.down_proj.weight, whole(hidden, wide))
        if shared.router is not None:
            shared.router.weight_loader(shared.router.weight, whole(1, hidden))
    return layer


def tell_bound(layer, most_tokens):
    """Set the largest number of tokens of any dp rank in the following steps; 0: unknown."""
    layer._dispatch._bound.most_tokens = most_tokens


@pytest.fixture(params=["one_host", "two_hosts"])
def groups_of(request, world, two_host_world):
    """Makes the tensor group and the ranks of all dp ranks, over shared memory or gloo."""
    chosen = world if request.param == "one_host" else two_host_world
    made = []

    def make(tp_size):
        dp_size = world.size // tp_size
        layout = ParallelLayout(rank=world.rank, tp_size=tp_size, dp_size=dp_size)
        for ranks in (layout.tp_ranks, layout.stage_ranks):
            made.append(connect_group(chosen.subgroup(ranks), CPU, timeout_s=30.0))
        return layout, made[0], made[1]

    yield make
    world.barrier(30.0, "end of a test")
    for group in made:
        group.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("groups_of", ["one_host"], indirect=True)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mixtral", torch.bfloat16), ("qwen2-moe", torch.float32), ("deepseek3", torch.float32)],
)
@pytest.mark.parametrize(("tp_size", "num_parts"), LAYOUTS)
def test_dp_ranks_with_divided_experts_get_the_results_of_one_rank_with_all_experts(
    name, dtype, tp_size, num_parts, groups_of, tmp_path
):
    (CONFIGS | models.latent_configs())[name].save_pretrained(tmp_path)
    models.edit_config(tmp_path, num_experts=8, num_local_experts=8, n_routed_experts=12)
    config = EngineFolder.load(tmp_path, check_weights=False).config
    layout, tp, ranks = groups_of(tp_size)
    layer = make_layer(config, dtype, tp, num_parts, ranks)
    whole = make_layer(config, dtype, ShardPosition())

    for step, counts in enumerate([(5, 1, 40, 3), (0, 2, 0, 0), (1, 0, 0, 1)]):
        generator = torch.Generator().manual_seed(100 * step + layout.dp_rank)
        x = torch.randn(counts[layout.dp_rank], config.hidden_size, generator=generator)
        x = x.to(dtype)
        if len(x):
            result = layer.forward(x, x)
            tell_bound(layer, max(counts[: layout.dp_size]))
            # All tokens to all ranks: the same bits.
            assert layer.forward(x, x).equal(result)
            tell_bound(layer, 0)
            limits = {"atol": 2e-5, "rtol": 1e-4} if dtype is torch.float32 else {
                "atol": 0.06, "rtol": 0.03}  # fmt: skip
            torch.testing.assert_close(result, whole.forward(x, x), **limits)
        else:
            for most in (0, max(counts[: layout.dp_size])):
                tell_bound(layer, most)
                layer.forward_without_tokens()
            tell_bound(layer, 0)


@pytest.mark.ranks(4)
def test_results_of_a_dp_rank_do_not_depend_on_other_dp_ranks(world, groups_of, tmp_path):
    CONFIGS["mixtral"].save_pretrained(tmp_path)
    models.edit_config(tmp_path, num_local_experts=8)
    config = EngineFolder.load(tmp_path, check_weights=False).config
    layout, tp, ranks = groups_of(1)
    layer = make_layer(config, torch.float32, tp, world.size, ranks)
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(1))

    beside_equals = layer.forward(x, x)
    if layout.dp_rank == 0:
        again = layer.forward(x, x)
        assert again.equal(beside_equals)
    else:
        layer.forward_without_tokens()
