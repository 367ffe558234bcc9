"""Adapters over several ranks: each has its share, and together they give one rank's tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.driver import Driver
from tests.mpi.test_engine import PROMPTS, engine_config, folder, ranks
from tests.unit.worker.lora_adapters import make_adapter, on_the_wire, write_peft
from trimaran.worker.config.engine_config import LoraConfig
from trimaran.worker.lora import adapter_messages as sent
from trimaran.worker.lora import manager

__all__ = ["folder", "ranks"]
TASKS = (0, 5, 9)


def serve(driver, adapters):
    """Outputs of all prompts without an adapter and with each adapter; the first request
    sends the weights."""
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


@pytest.mark.ranks(4)
def test_all_ranks_together_give_the_tokens_of_one_rank(world, ranks, folder):
    adapters = {}
    if world.rank == 0:
        adapters = {task: make_adapter(folder, seed=task) for task in TASKS[1:]}

    driver = Driver(engine_config(folder, 2), ties=ranks.ties)
    outputs = ranks.run(driver, lambda driver: serve(driver, adapters))

    if world.rank == 0:
        assert outputs == serve(Driver(engine_config(folder, 1)), adapters)
        assert len(set(map(tuple, outputs))) == len(outputs)


@pytest.mark.ranks(2)
def test_all_ranks_hold_the_adapter_that_rank_0_read_from_a_folder(
    world, ranks, folder, tmp_path, monkeypatch
):
    """Other ranks have no such folder, and late writes to the folder have no effect."""
    for module in (sent, manager):
        monkeypatch.setattr(module, "CHUNK_BYTES", 20_000)
    old, new, names = {}, {}, ("early", "late")
    config = replace(engine_config(folder, 2), lora=LoraConfig(prefetch_dir=str(tmp_path)))
    if world.rank == 0:
        old = {name: make_adapter(folder, seed=n) for n, name in enumerate(names)}
        new = {name: make_adapter(folder, seed=7 + n, rank=2) for n, name in enumerate(names)}
        write_peft(tmp_path / "early", old["early"], alpha=4.0)

    def drive(driver):
        write_peft(tmp_path / "late", old["late"], alpha=4.0)
        given = [{"adapter": {"name": name}} for name in names]
        requests = [driver.submit(p, max_tokens=12, **one) for one in given for p in PROMPTS]
        for name in names:
            write_peft(tmp_path / name, new[name], alpha=4.0)
        driver.run()
        requests += [driver.submit(p, max_tokens=12, **one) for one in given for p in PROMPTS]
        driver.run()
        return [driver.output(request) for request in requests]

    driver = Driver(config, ties=ranks.ties)
    outputs = ranks.run(driver, drive)

    if world.rank == 0:
        alone = Driver(engine_config(folder, 1))
        requests = [
            alone.submit(p, max_tokens=12, adapter_id=n + 1, adapter=on_the_wire(one))
            for n, one in enumerate([old["early"], old["late"], new["early"], new["late"]])
            for p in PROMPTS
        ]
        alone.run()
        assert outputs == [alone.output(request) for request in requests]
        assert len(set(map(tuple, outputs))) == len(outputs)
