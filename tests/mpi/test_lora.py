"""Adapters over several ranks: each has its share, and together they give one rank's tokens."""

from __future__ import annotations

from tests.driver import Driver
from tests.mpi.test_engine import PROMPTS, engine_config, folder, ranks
from tests.unit.worker.lora_adapters import make_adapter, on_the_wire

__all__ = ["folder", "ranks"]
TASKS = (0, 5, 9)


def serve(driver, adapters):
    """Outputs of all prompts without an adapter and with each; the first brings it along."""
    requests = [
        driver.submit(
            prompt,
            max_tokens=12,
            adapter_id=task,
            adapter=on_the_wire(adapters[task]) if task and prompt is PROMPTS[0] else None,
        )
        for prompt in PROMPTS
        for task in TASKS
    ]
    driver.run()
    return [driver.output(request) for request in requests]


def test_all_ranks_together_give_the_tokens_of_one(world, ranks, folder):
    adapters = {}
    if world.rank == 0:
        adapters = {task: make_adapter(folder, seed=task) for task in TASKS[1:]}

    driver = Driver(engine_config(folder, 2), ties=ranks.ties)
    outputs = ranks.run(driver, lambda driver: serve(driver, adapters))

    if world.rank == 0:
        assert outputs == serve(Driver(engine_config(folder, 1)), adapters)
        assert len(set(map(tuple, outputs))) == len(outputs)
