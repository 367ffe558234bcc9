"""Adapters with large effects on the small Llama, and transformers with them merged in."""

from __future__ import annotations

import copy
import json

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from trimaran.worker.lora.formats import AdapterTensors, to_tensors
from trimaran.worker.lora.layout import MODULE_NAMES, Matrices

LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_dense": "self_attn.o_proj",
    "mlp_h_to_4h": "mlp.gate_proj",
    "mlp_gate": "mlp.up_proj",
    "mlp_4h_to_h": "mlp.down_proj",
}


def make_adapter(folder, seed, rank=4, modules=tuple(LINEARS)) -> list[Matrices]:
    """Random matrices for the model in ``folder``, different for each seed."""
    model = LlamaForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    return [
        Matrices(
            MODULE_NAMES.index(name),
            number,
            0.2 * torch.randn(rank, linear.in_features, generator=generator),
            0.2 * torch.randn(linear.out_features, rank, generator=generator),
        )
        for number, layer in enumerate(model.model.layers)
        for name in modules
        for linear in (layer.get_submodule(LINEARS[name]),)
    ]


def on_the_wire(adapter: list[Matrices]) -> dict:
    """The fields of a request that brings this adapter."""
    return tensors_on_the_wire(to_tensors(adapter))


def tensors_on_the_wire(tensors: AdapterTensors, digest: bytes = b"") -> dict:
    weights, config = tensors.weights_NK, tensors.config_N3
    return {
        "weights": {
            "datatype": "FP32",
            "shape": list(weights.shape),
            "data": weights.tobytes(),
        },
        "config": {"datatype": "INT32", "shape": list(config.shape), "data": config.tobytes()},
        "digest": digest or weights.tobytes()[:64],
    }


def merged(folder, adapter: list[Matrices]) -> LlamaForCausalLM:
    """The model with an adapter's products added to its weights."""
    model = copy.deepcopy(LlamaForCausalLM.from_pretrained(folder))
    for one in adapter:
        path = LINEARS[MODULE_NAMES[one.module]]
        model.model.layers[one.layer].get_submodule(path).weight.data += one.b @ one.a
    return model


def greedy(model: LlamaForCausalLM, prompt: list[int], length: int) -> list[int]:
    """The greedy output of transformers."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return output[0, len(prompt) :].tolist()


def write_peft(folder, adapter: list[Matrices], alpha: float) -> None:
    """A PEFT folder of the adapter, with unscaled second matrices."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = len(adapter[0].a)
    tensors = {}
    for one in adapter:
        path = LINEARS[MODULE_NAMES[one.module]]
        name = f"base_model.model.model.layers.{one.layer}.{path}"
        tensors[f"{name}.lora_A.weight"] = one.a.contiguous()
        tensors[f"{name}.lora_B.weight"] = (one.b * rank / alpha).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
