"""The heads as they are trained: an EAGLE-3 layer that is unrolled, and Medusa heads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

# Shapes: R rows of a batch, L places of a row, D hidden size, V ids of the head's vocabulary, N
# heads of attention, K heads of keys, H head size.


class EagleHead(nn.Module):
    """An EAGLE-3 head with a reduced vocabulary; names are those of its checkpoints."""

    def __init__(self, target: PretrainedConfig, taps: tuple[int, ...], ids: Tensor) -> None:
        """``ids`` [V]: the target's ids that the head can draft, in rising order."""
        super().__init__()
        self.target = target
        self.taps = taps
        self.register_buffer("ids", ids)
        width, inner = target.hidden_size, target.intermediate_size
        self.num_heads = target.num_attention_heads
        self.num_kv_heads = target.num_key_value_heads
        self.head_size = getattr(target, "head_dim", None) or width // self.num_heads
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        self.fc = nn.Linear(len(taps) * width, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width, eps=target.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(width, eps=target.rms_norm_eps)
        self.q_proj = nn.Linear(2 * width, queries, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=target.rms_norm_eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=target.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(ids), bias=False)

    def begin_as(self, norm: Tensor, lm_head: Tensor) -> None:
        """Take the target's last norm [D] and the rows of its output matrix [ids, D]."""
        with torch.no_grad():
            self.norm.weight.copy_(norm)
            self.lm_head.weight.copy_(lm_head[self.ids])

    def forward(self, embeddings: list[Tensor], states: Tensor) -> list[Tensor]:
        """Logits [R, L, V] of each step of a chain that begins at every place.

        ``embeddings[s]`` [R, L, D] is the token s + 1 places behind, ``states`` [R, L, taps *
        D] come from the target. Step s attends to the target's states up to its beginning, and
        to the head's own states of the steps since then, as drafting does.
        """
        # Sums stay in float32 where products are in bfloat16.
        state = self.fc(states).float()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for step, embedding in enumerate(embeddings):
            normed = self.input_layernorm(embedding.float())
            inputs = torch.cat((normed, self.hidden_norm(state)), -1)
            query, key, value = self._heads(inputs, step)
            keys.append(key)
            values.append(value)
            state = state + self.o_proj(_attend(query, keys, values))
            normed = self.post_attention_layernorm(state)
            inner = F.silu(self.gate_proj(normed)) * self.up_proj(normed)
            state = state + self.down_proj(inner)
            logits.append(self.lm_head(self.norm(state)))
        return logits

    def _heads(self, inputs: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [R, N, L, H]."""
        rows, length, _ = inputs.shape
        positions = torch.arange(step, step + length, device=inputs.device)
        angles = _angles(positions, self.head_size, self.target)
        query, key, value = (
            project(inputs).view(rows, length, -1, self.head_size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        count = self.num_heads // self.num_kv_heads
        key, value = key.repeat_interleave(count, 1), value.repeat_interleave(count, 1)
        return _rotate(query, angles), _rotate(key, angles), value

    def save(self, folder: Path) -> None:
        """Write the folder as SpecForge does, in bfloat16."""
        layer = {
            "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
            "mlp": ("gate_proj", "up_proj", "down_proj"),
        }
        place = {name: f"midlayer.{part}.{name}" for part in layer for name in layer[part]}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        place.update({name: f"midlayer.{name}" for name in norms})
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            module, _, kind = name.partition(".")
            tensors[f"{place.get(module, module)}.{kind}"] = parameter.detach().bfloat16()
        ids = self.ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
        _save(folder, tensors, "model.safetensors")
        _save_config(
            folder,
            architectures=["LlamaForCausalLMEagle3"],
            model_type="llama",
            torch_dtype="bfloat16",
            vocab_size=self.target.vocab_size,
            draft_vocab_size=len(ids),
            hidden_size=self.target.hidden_size,
            intermediate_size=self.target.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_size,
            max_position_embeddings=self.target.max_position_embeddings,
            rms_norm_eps=self.target.rms_norm_eps,
            rope_theta=rope_theta(self.target),
            hidden_act="silu",
            tie_word_embeddings=False,
            # Counted by outputs, as SpecForge does: the input of layer 2 is output 1.
            eagle_config={"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps]},
        )


class MedusaHeads(nn.Module):
    """Heads of residual blocks and a reduced vocabulary, whose output matrices begin as rows of
    the target's."""

    def __init__(
        self, target: PretrainedConfig, lm_head: Tensor, sizes: tuple[int, int], ids: Tensor
    ) -> None:
        """``sizes``: the numbers of heads and of blocks of a head. ``ids`` [V]: the target's
        ids that the heads can draft, in rising order."""
        super().__init__()
        num_heads, num_layers = sizes
        width = target.hidden_size
        self.target = target
        self.register_buffer("ids", ids)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
            for _ in range(num_heads)
        )
        self.heads = nn.ModuleList(
            nn.Linear(width, len(ids), bias=False) for _ in range(num_heads)
        )
        with torch.no_grad():
            for blocks, head in zip(self.blocks, self.heads, strict=True):
                for block in blocks:
                    block.weight.zero_()
                    block.bias.zero_()
                head.weight.copy_(lm_head[ids])

    def forward(self, states: Tensor) -> list[Tensor]:
        """Logits of each head from the target's last hidden states [R, L, D]."""
        logits = []
        for blocks, head in zip(self.blocks, self.heads, strict=True):
            own = states.float()
            for block in blocks:
                own = own + F.silu(block(own))
            logits.append(head(own))
        return logits

    def save(self, folder: Path, base: str) -> None:
        """Write the folder as Medusa's own training does, in bfloat16, with the reduced
        vocabulary as vLLM has one: ``truncated_vocab_size`` and the tensor ``token_map``."""
        tensors: dict[str, Tensor] = {}
        for number, (blocks, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
            for layer, block in enumerate(blocks):
                name = f"{number}.{layer}.linear"
                tensors[f"{name}.weight"] = block.weight.detach().bfloat16()
                tensors[f"{name}.bias"] = block.bias.detach().bfloat16()
            tensors[f"{number}.{len(blocks)}.weight"] = head.weight.detach().bfloat16()
        values = {}
        if len(self.ids) < self.target.vocab_size:
            tensors["token_map"] = self.ids.cpu()
            values["truncated_vocab_size"] = len(self.ids)
        _save(folder, tensors, "medusa_lm_head.safetensors")
        _save_config(
            folder,
            medusa_num_heads=len(self.heads),
            medusa_num_layers=len(self.blocks[0]),
            base_model_name_or_path=base,
            **values,
        )


def rope_theta(config: PretrainedConfig) -> float:
    """The rotary base, whose place differs between versions of transformers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", 10000.0))


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention [R, L, N * H] to the first keys causally, and to the others place by place."""
    length, size = query.shape[2], query.shape[3]
    scores = query @ keys[0].transpose(2, 3)
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    parts = [scores.masked_fill(later, float("-inf"))]
    parts += [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
    weights = (torch.cat(parts, -1) * size**-0.5).softmax(-1)
    output = weights[..., :length] @ values[0]
    for place, value in enumerate(values[1:], length):
        output = output + weights[..., place : place + 1] * value
    return output.transpose(1, 2).flatten(2)


def _angles(positions: Tensor, size: int, config: PretrainedConfig) -> Tensor:
    exponents = torch.arange(0, size, 2, device=positions.device).float() / size
    return torch.outer(positions.float(), 1.0 / rope_theta(config) ** exponents)


def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _save(folder: Path, tensors: dict[str, Tensor], name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    on_host = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
    save_file(on_host, folder / name, metadata={"format": "pt"})


def _save_config(folder: Path, **values: object) -> None:
    text = json.dumps(values, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
