"""Adapters combined with other features: beams, sequences, logits."""

import pytest
import torch

from tests.unit.worker.lora_adapters import make_adapter, merged, on_the_wire
from tests.unit.worker.sampling.test_beams import beams_of, generate

TASKS = (0, 5, 9)


@pytest.fixture(scope="module")
def adapters(model_folder):
    return {task: make_adapter(model_folder, seed=task) for task in TASKS[1:]}


@pytest.fixture(scope="module")
def references(model_folder, adapters):
    return {task: merged(model_folder, adapters.get(task, [])) for task in TASKS}


def submit(driver, adapters, prompt, task, **fields):
    adapter = on_the_wire(adapters[task]) if task else None
    return driver.submit(prompt, adapter_id=task, adapter=adapter, **fields)


@pytest.mark.parametrize("max_tokens", [2048, 288])
def test_beams_of_each_adapter_are_those_of_its_merged_weights(
    make_engine, adapters, references, prompt_of, max_tokens
):
    driver = make_engine(max_beam_width=3, max_tokens=max_tokens)
    asked = [(prompt_of(length, length), task) for length in (12, 37) for task in TASKS]

    requests = [
        submit(
            driver, adapters, prompt, task, beam_width=3, num_return_sequences=3, max_tokens=10
        )
        for prompt, task in asked
    ]  # fmt: skip
    driver.run()

    for (prompt, task), request in zip(asked, requests, strict=True):
        expected, scores = generate(references[task], prompt, 3, 10, length_penalty=0.0)
        outputs, beams = beams_of(driver, request)
        assert outputs == expected
        assert beams["cum_log_probs"] == pytest.approx(scores, abs=1e-3)
    driver.check_idle()


def test_seeded_sequences_do_not_depend_on_the_adapters_beside_them(
    make_engine, adapters, prompt_of
):
    fields = {"top_k": 20, "seed": 4, "num_return_sequences": 3, "max_tokens": 12}
    prompt = prompt_of(30)

    def outputs(driver, request):
        return [driver.output(request, index) for index in range(3)]

    alone = {}
    for task in TASKS:
        driver = make_engine()
        request = submit(driver, adapters, prompt, task, **fields)
        driver.run()
        alone[task] = outputs(driver, request)
    driver = make_engine(max_num_batched_tokens=24, depth=2)
    requests = {task: submit(driver, adapters, prompt, task, **fields) for task in TASKS}
    driver.run()

    assert {task: outputs(driver, requests[task]) for task in TASKS} == alone
    assert len({str(found) for found in alone.values()}) == len(TASKS)


def test_log_probs_are_those_of_the_merged_weights(
    make_engine, adapters, references, prompt_of
):
    driver, prompt = make_engine(), prompt_of(20)

    requests = {
        task: submit(driver, adapters, prompt, task, max_tokens=6, return_log_probs=True)
        for task in TASKS
    }
    driver.run()

    for task, request in requests.items():
        ids = driver.output(request)
        with torch.inference_mode():
            logits = references[task](torch.tensor([prompt + ids])).logits[0]
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        found = [p for extra in driver.extras[request, 0] for p in extra["log_probs"]]
        assert found == pytest.approx(expected, abs=1e-3)
