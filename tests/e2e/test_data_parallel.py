"""A server whose engine has data-parallel ranks that share experts: transformers' ids."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from greedy import wrong_answers
from served import DEMO_MODEL, DEMO_MOE, Served, run_trimaran

NUM_NEW = 20
PROMPTS = [list(range(10, 10 + length)) for length in (1, 2, 16, 17, 33, 90, 300, 41)]


@pytest.fixture(scope="module")
def sharing_experts(build_engine, make_repository, tmp_path_factory) -> Iterator[Served]:
    """Two dp ranks of the demo model with experts, which share these out, in float32."""
    engine = build_engine(
        DEMO_MOE, "--dp-size", "2", "--moe-ep-size", "2", "--dtype", "float32",
        "--max-num-tokens", "128", "--max-batch-size", "8", "--max-input-len", "400",
    )  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Served(make_repository(engine), world_size=2, log_path=log) as server:
        yield server


def ask_all(server: Served) -> list[list[int]]:
    """The ids that all prompts are answered with, side by side, as streams."""

    def ask(prompt: list[int]) -> list[int]:
        path = "/v2/models/tensorrt_llm/generate_stream"
        body = {
            "input_ids": prompt, "input_lengths": len(prompt), "streaming": True,
            "request_output_len": NUM_NEW, "exclude_input_in_output": True,
        }  # fmt: skip
        found: list[int] = []
        for event in server.events(path, body):
            ids = event["output_ids"]
            found += ids if isinstance(ids, list) else [ids]
        return found

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def test_dp_ranks_with_divided_experts_stream_the_ids_of_transformers(sharing_experts: Served):
    answers = ask_all(sharing_experts)

    assert wrong_answers(DEMO_MOE, PROMPTS, answers, NUM_NEW) == {}


def test_metrics_have_a_row_for_each_dp_rank(sharing_experts: Served):
    ((start, _),) = sharing_experts.samples("trimaran_start_method_info")
    transports = {
        labels["collective"]: labels["transport"]
        for labels, _ in sharing_experts.samples("trimaran_transport_info")
    }

    assert (start["world_size"], start["tp_size"], start["dp_size"]) == ("2", "1", "2")
    assert transports["expert_all_to_all"] == "shared_memory"


def test_a_world_size_that_contradicts_the_dp_ranks_is_refused_before_the_start(
    make_repository,
):
    repository = make_repository(DEMO_MODEL)

    done = run_trimaran(
        "serve", "--model-repo", str(repository), "--world-size", "3", "--dp-size", "2"
    )

    assert done.returncode != 0
    assert "a world size of 3 is no multiple of --pp-size (1) times --dp-size (2)" in (
        done.stderr + done.stdout
    )
