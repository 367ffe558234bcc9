"""A DeepSeek V3 with a layer for multi-token prediction, and that layer in transformers."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

_SIZES = {
    "vocab_size": 150, "hidden_size": 96, "intermediate_size": 104, "num_attention_heads": 12,
    "num_key_value_heads": 12, "qk_nope_head_dim": 20, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "kv_lora_rank": 36, "q_lora_rank": 40, "max_position_embeddings": 256,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None,
    "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "n_routed_experts": 12, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip


def write_deepseek(folder, num_layers=3, seed=5, **changes):
    """Write a DeepSeek V3 whose layer after the last one predicts. The prediction is good: the
    model's embeddings are large, so that the next token follows mostly from the last one."""
    torch.manual_seed(seed)
    sizes = {**_SIZES, **changes}
    # The additional layer is saved as an ordinary one.
    whole = DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**sizes, "num_hidden_layers": num_layers + 1})
    )
    whole.model.embed_tokens.weight.data *= 20
    for name, weight in whole.model.layers[num_layers].named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.data *= 0.2
    for layer in whole.model.layers[:num_layers]:
        for name, bias in layer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.normal_(0, 0.1)
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    width, prefix = sizes["hidden_size"], f"model.layers.{num_layers}."
    joined = torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
    own = {
        "enorm": 1 + 0.1 * torch.randn(width), "hnorm": 1 + 0.1 * torch.randn(width),
        "eh_proj": 6 * joined + 0.02 * torch.randn(width, 2 * width),
        "shared_head.norm": 1 + 0.1 * torch.randn(width),
        "shared_head.head": tensors["lm_head.weight"].clone(),
        "embed_tokens": tensors["model.embed_tokens.weight"].clone(),
    }  # fmt: skip
    for name, tensor in own.items():
        tensors[f"{prefix}{name}.weight"] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values.update(num_hidden_layers=num_layers, num_nextn_predict_layers=1)
    path.write_text(json.dumps(values))
    return folder


class MtpReference:
    """The layer, in transformers: drafts behind known ids, from the target's last states."""

    def __init__(self, folder):
        values = json.loads((folder / "config.json").read_text())
        number = values["num_hidden_layers"]
        config = DeepseekV3Config.from_pretrained(folder, num_hidden_layers=number + 1)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32
        ).eval()
        self._model, self._layer = model.model, model.model.layers[number]
        self._head = model.lm_head
        self._eps = config.rms_norm_eps
        prefix = f"model.layers.{number}."
        self._own = {
            name.removeprefix(prefix).removesuffix(".weight"): tensor.float()
            for name, tensor in load_file(folder / "model.safetensors").items()
            if name.startswith(prefix)
        }

    def draft(self, ids, states, last, count):
        """``count`` ids; ``ids`` [L + 1] are known, ``last`` the target's states of L."""
        known, chain, drafts = list(ids[1:]), last, []
        while len(drafts) < count:
            embedding = self._model.embed_tokens(torch.tensor(known))
            parts = self._norm(embedding, "enorm"), self._norm(chain, "hnorm")
            x = torch.cat(parts, -1) @ self._own["eh_proj"].T
            x = self._norm(self._run(x[None])[0], "shared_head.norm")
            drafts.append(int(self._head(x[-1]).argmax()))
            known.append(drafts[-1])
            chain = torch.cat((chain, x[-1:]))
        return drafts

    def _run(self, x):
        length = x.shape[1]
        places = torch.arange(length)[None]
        mask = torch.full((1, 1, length, length), float("-inf")).triu(1)
        output = self._layer(
            x,
            attention_mask=mask,
            position_ids=places,
            position_embeddings=self._model.rotary_emb(x, places),
        )
        return output[0] if isinstance(output, tuple) else output

    def _norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self._own[name], self._eps)
