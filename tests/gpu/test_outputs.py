"""Logits and prompt tables on a GPU: results of the CPU, without hidden synchronization."""

from __future__ import annotations

import numpy as np
import pytest

from tests.driver import Driver
from tests.gpu.hidden_waits import no_hidden_waits
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.execution.prompt_tables import PromptTable

pytestmark = pytest.mark.gpu

VOCAB, HIDDEN = 150, 64
LENGTHS = (1, 16, 40, 90)
_NAMES = ("context_logits", "generation_logits")


def make_driver(folder, device):
    return Driver(
        EngineConfig(
            model="test",
            engine_dir=folder,
            device=device,
            dtype="float32",
            scheduler=SchedulerConfig(
                max_num_batched_tokens=48,
                max_num_seqs=8,
                max_seq_len=128,
                max_input_len=127,
                policy="max_utilization",
                depth=2,
            ),
            cache=CacheConfig(tokens_per_block=16, max_tokens=512),
        )
    )


def serve(driver):
    """The ids of each request, and both kinds of logits."""
    table = np.random.default_rng(0).normal(0, 0.3, (3, HIDDEN)).astype(np.float32)
    wire = PromptTable("FP32", table.shape, table.tobytes()).to_wire()
    requests = [
        driver.submit(
            np.random.default_rng(length).integers(0, VOCAB + 3, length),
            max_tokens=8,
            top_k=5,
            seed=number,
            return_context_logits=True,
            return_generation_logits=number != 1,
            logits_dtype="float16" if number == 3 else "float32",
            embeddings=wire,
            cache_salt=b"table",
        )
        for number, length in enumerate(LENGTHS)
    ]
    driver.run()
    return [
        (driver.output(request), *(_array(number, driver.told(request, n)) for n in _NAMES))
        for number, request in enumerate(requests)
    ]


def _array(number, chunks):
    dtype = np.float16 if number == 3 else np.float32
    return np.frombuffer(b"".join(chunks), dtype).reshape(-1, VOCAB).astype(np.float32)


def test_logits_and_tables_are_those_of_the_cpu(folder):
    expected = serve(make_driver(folder, "cpu"))
    driver = make_driver(folder, "cuda")
    for _ in range(2):
        found = serve(driver)
        for number, (ids, context, generation) in enumerate(expected):
            assert found[number][0] == ids
            assert context.shape == (LENGTHS[number], VOCAB)
            atol = 2e-2 if number == 3 else 2e-4
            np.testing.assert_allclose(found[number][1], context, atol=atol)
            np.testing.assert_allclose(found[number][2], generation, atol=atol)


def test_returned_logits_cause_no_synchronization_with_the_device(folder):
    driver = make_driver(folder, "cuda")
    serve(driver)
    with no_hidden_waits():
        serve(driver)
