"""Adapters end to end: PEFT's files converted, sent by the client, and cached by two ranks."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from served import run_trimaran

PROMPT = "Once upon a time"
MODULES = {
    "self_attn.q_proj": (256, 256),
    "self_attn.v_proj": (128, 256),
    "mlp.up_proj": (512, 256),
}
"""Outputs and inputs of the demo model's linear layers."""


def write_peft(folder, seed):
    """An adapter of size 4 for some modules of every layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(8):
        for path, (outputs, inputs) in MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{path}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) / 16
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) / 4
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4.0}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Folders with the files that requests carry, by seed."""
    root = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2):
        write_peft(root / f"peft{seed}", seed)
        done = run_trimaran("convert-lora", "-i", f"{root}/peft{seed}", "-o", f"{root}/{seed}")
        assert done.returncode == 0, done.stderr
    return root


def text(server, *flags):
    """What the text client prints for the prompt."""
    url = ("-u", f"localhost:{server.grpc_port}")
    return run_trimaran("client", "text", *url, "-p", PROMPT, "-o", "12", *map(str, flags))


def test_weights_come_once_and_then_the_id_serves_over_both_protocols(
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
