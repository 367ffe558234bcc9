"""A server whose engine has pipeline stages: streamed ids of transformers, and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from greedy import wrong_answers
from served import DEMO_MODEL, Served

NUM_NEW = 24
PROMPTS = [list(range(10, 10 + length)) for length in (1, 2, 16, 17, 33, 90, 300)]


@pytest.fixture(scope="module")
def pipeline(build_engine, make_repository, tmp_path_factory) -> Iterator[Served]:
    """Two stages of the demo model, in float32, with prompts in chunks."""
    engine = build_engine(
        DEMO_MODEL, "--pp-size", "2", "--dtype", "float32", "--max-num-tokens", "128",
        "--max-batch-size", "8", "--max-input-len", "400", "--max-beam-width", "2",
    )  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Served(make_repository(engine), world_size=2, log_path=log) as server:
        yield server


def body(prompt: list[int], **fields: object) -> dict[str, object]:
    return {
        "input_ids": prompt, "input_lengths": len(prompt), "request_output_len": NUM_NEW,
        "exclude_input_in_output": True, **fields,
    }  # fmt: skip


def test_stages_stream_the_ids_of_transformers(pipeline: Served):
    def ask(prompt: list[int]) -> list[int]:
        path = "/v2/models/tensorrt_llm/generate_stream"
        events = pipeline.events(path, body(prompt, streaming=True))
        assert len(events) > 1
        found: list[int] = []
        for event in events:
            ids = event["output_ids"]
            found += ids if isinstance(ids, list) else [ids]
        return found

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(ask, PROMPTS))

    assert wrong_answers(DEMO_MODEL, PROMPTS, answers, NUM_NEW) == {}


def test_metrics_have_a_row_for_each_stage(pipeline: Served):
    ((start, _),) = pipeline.samples("trimaran_start_method_info")
    transports = {
        labels["collective"]: labels["transport"]
        for labels, _ in pipeline.samples("trimaran_transport_info")
    }

    assert (start["tp_size"], start["pp_size"], start["stages"]) == ("1", "2", "4+4")
    assert transports["stages"] == "shared_memory"
    assert transports["results"] == "shm_ring"
