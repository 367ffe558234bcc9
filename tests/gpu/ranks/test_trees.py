"""Two stages on two GPUs verify trees of drafts as one rank on a CPU does."""

from __future__ import annotations

import pytest
import torch

from tests.driver import Driver, Ranks
from tests.mpi.test_draft_networks import DYNAMIC, LAYOUTS, ONE, TREE, run, write_llama
from trimaran.comm.mpi import MPI
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(MPI.COMM_WORLD.Get_size() != 2, reason="stages of two ranks"),
]


@pytest.fixture(scope="module")
def root(world, tmp_path_factory):
    """The folder of all networks, which rank 0 writes."""
    found = None
    if world.rank == 0:
        torch.manual_seed(4)
        found = tmp_path_factory.mktemp("networks")
        write_llama(found)
    return world.comm.bcast(found)


@pytest.mark.parametrize("has_graphs", [True, False], ids=["graphs", "launched"])
@pytest.mark.parametrize(
    ("kind", "drafts"), [("eagle", DYNAMIC), ("medusa", TREE), ("draft_model", TREE)]
)
@pytest.mark.parametrize("layout", ["tp 2", "pp 2"])
def test_two_gpus_verify_the_trees_of_a_cpu(world, root, kind, drafts, layout, has_graphs):
    def make_driver(device, parallel, ties=()):
        speculation = SpeculationConfig(
            drafter=kind, draft_dir=str(root / kind), is_adaptive=False,
            is_overlapped=layout == "tp 2", **drafts,
        )  # fmt: skip
        return Driver(
            EngineConfig(
                model="test", engine_dir=str(root / "llama"), dtype="float32", device=device,
                parallel=parallel, cuda_graphs=has_graphs,
                scheduler=SchedulerConfig(
                    max_num_batched_tokens=48, max_num_seqs=6, max_seq_len=120,
                    max_input_len=100, policy="max_utilization", depth=2,
                    speculation=speculation,
                ),
                cache=CacheConfig(tokens_per_block=8, max_tokens=768),
            ),
            ties=ties,
        )  # fmt: skip

    device = torch.device("cuda", world.local_rank)
    ranks = Ranks(world, LAYOUTS[layout], device, 60.0)
    told = ranks.run(make_driver("cuda", LAYOUTS[layout], ranks.ties), run)
    if world.rank == 0:
        outputs, counts = run(make_driver("cpu", ONE))
        assert told[0] == outputs
        # The weights of the heads are random.
        assert told[1][2] or kind != "draft_model"
        assert counts[1] and told[1][0] < told[1][1]
