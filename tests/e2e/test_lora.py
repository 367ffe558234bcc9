"""Adapters end to end: PEFT's files converted, sent by the client, and cached by two ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from adapters import write_peft
from served import run_trimaran

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Folders with the files that requests carry, by seed."""
    root = tmp_path_factory.mktemp("adapters")

    def convert(seed):
        write_peft(root / f"peft{seed}", seed)
        return run_trimaran("convert-lora", "-i", f"{root}/peft{seed}", "-o", f"{root}/{seed}")

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(convert, (1, 2)):
            assert done.returncode == 0, done.stderr
    return root


def text(server, *flags):
    """The output of the text client for the prompt."""
    url = ("-u", f"localhost:{server.grpc_port}")
    return run_trimaran("client", "text", *url, "-p", PROMPT, "-o", "12", *map(str, flags))


def test_adapter_weights_are_sent_once_and_then_served_by_id_over_both_protocols(
    decoupled_server, converted
):
    unknown = text(decoupled_server, "--lora-task-id", 71)
    assert unknown.returncode != 0
    expected = "LoRA task 71 not found in cache. Please send LoRA weights with request"
    assert expected in unknown.stdout + unknown.stderr

    plain = text(decoupled_server).stdout
    first = text(decoupled_server, "--lora-task-id", 71, "--lora-path", converted / "1")
    second = text(
        decoupled_server, "--lora-task-id", 72, "--lora-path", converted / "2",
        "--model-name", "tensorrt_llm_bls",
    )  # fmt: skip
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert len({plain, first.stdout, second.stdout}) == 3

    for task, told in ((71, first.stdout), (72, second.stdout)):
        assert text(decoupled_server, "--lora-task-id", task).stdout == told
        body = {"text_input": PROMPT, "max_tokens": 12, "lora_task_id": task}
        status, reply = decoupled_server.post("/v2/models/ensemble/generate", body)
        assert status == 200, reply
        assert reply["text_output"] == told.rstrip("\n")


def test_adapters_of_a_folder_are_served_by_name_or_task_id(decoupled_server):
    texts = [text(decoupled_server).stdout.rstrip("\n")]
    for chosen in ({"lora_name": "north"}, {"lora_task_id": 81}, {"lora_name": "81"}):
        body = {"text_input": PROMPT, "max_tokens": 12, **chosen}
        status, reply = decoupled_server.post("/v2/models/tensorrt_llm_bls/generate", body)
        assert status == 200, reply
        texts.append(reply["text_output"])
    plain, north, numbered, named = texts
    assert len({plain, north, numbered}) == 3
    assert named == numbered
