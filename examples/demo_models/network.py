"""The demo models as they are trained: a small decoder with dropout, dense or of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from corpus import BOS_ID, EOS_ID, MAX_LENGTH, PAD_ID, VOCAB_SIZE
from torch import Tensor, nn

ROPE_BASE = 10000.0
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of one model; ``num_experts`` 0 means a dense feed-forward layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    num_experts: int = 0
    experts_per_token: int = 2

    def to_huggingface(self) -> dict[str, object]:
        """The ``config.json`` of a Llama or a Mixtral of this shape."""
        values: dict[str, object] = {
            "architectures": ["MixtralForCausalLM" if self.num_experts else "LlamaForCausalLM"],
            "model_type": "mixtral" if self.num_experts else "llama",
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "max_position_embeddings": MAX_LENGTH,
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_BASE,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
        }
        if self.num_experts:
            values["num_local_experts"] = self.num_experts
            values["num_experts_per_tok"] = self.experts_per_token
        else:
            values["attention_bias"] = False
            values["mlp_bias"] = False
        return values


# Shapes: B rows, L positions, D hidden size, N heads, H head size, E experts.
class Attention(nn.Module):
    """Causal attention with rotary positions and shared key and value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
        rows, length, _ = x_BLD.shape
        size = self.shape.head_size
        query = self.q_proj(x_BLD).view(rows, length, -1, size).transpose(1, 2)
        key = self.k_proj(x_BLD).view(rows, length, -1, size).transpose(1, 2)
        value = self.v_proj(x_BLD).view(rows, length, -1, size).transpose(1, 2)
        query, key = _rotate(query, cos_LH, sin_LH), _rotate(key, cos_LH, sin_LH)
        groups = self.shape.heads // self.shape.kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


def _rotate(x: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos_LH + torch.cat((-second, first), dim=-1) * sin_LH).to(x.dtype)


class FeedForward(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        out = self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))
        return out, x_BLD.new_zeros(())


class Experts(nn.Module):
    """Small experts side by side in wide matrices; a token's gate is 0 for all but its top k.

    Computing every expert costs less here than sorting tokens by expert would.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.num_experts * shape.intermediate
        self.router = nn.Linear(shape.hidden, shape.num_experts, bias=False)
        self.w1 = nn.Linear(shape.hidden, width, bias=False)
        self.w3 = nn.Linear(shape.hidden, width, bias=False)
        self.w2 = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output and the load-balancing loss of its router."""
        num_experts = self.shape.num_experts
        odds_BLE = self.router(x_BLD).float().softmax(dim=-1)
        top, chosen = odds_BLE.topk(self.shape.experts_per_token, dim=-1)
        gates_BLE = torch.zeros_like(odds_BLE).scatter(
            -1, chosen, top / top.sum(dim=-1, keepdim=True)
        )
        inner = F.silu(self.w1(x_BLD)) * self.w3(x_BLD)
        inner = inner.unflatten(-1, (num_experts, -1)) * gates_BLE.unsqueeze(-1).to(inner.dtype)
        load = (gates_BLE > 0).float().flatten(0, 1).mean(0)
        balance = num_experts * (load * odds_BLE.flatten(0, 1).mean(0)).sum()
        return self.w2(inner.flatten(-2)), balance


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and before a dropout."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.mlp: nn.Module = Experts(shape) if shape.num_experts else FeedForward(shape)
        self.dropout = dropout

    def forward(self, x_BLD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.self_attn(self.input_layernorm(x_BLD), cos, sin)
        x_BLD = x_BLD + F.dropout(attended, self.dropout, self.training)
        out, balance = self.mlp(self.post_attention_layernorm(x_BLD))
        return x_BLD + F.dropout(out, self.dropout, self.training), balance


class Decoder(nn.Module):
    """Embedding, layers, norm; the output matrix is the embedding."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        steps = torch.arange(0, shape.head_size, 2).float() / shape.head_size
        angles = torch.outer(torch.arange(MAX_LENGTH).float(), ROPE_BASE**-steps)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_last = name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight"))
                scale = 1 / math.sqrt(2 * self.shape.layers) if is_last else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of every position and the mean balance loss of the layers."""
        length = ids_BL.shape[1]
        x_BLD = F.dropout(self.embed_tokens(ids_BL), self.dropout, self.training)
        balance = torch.zeros((), device=x_BLD.device)
        for layer in self.layers:
            x_BLD, layer_balance = layer(x_BLD, self.cos[:length], self.sin[:length])
            balance = balance + layer_balance / self.shape.layers
        return F.linear(self.norm(x_BLD), self.embed_tokens.weight), balance

    def to_huggingface(self) -> dict[str, Tensor]:
        """The weights in bfloat16 under the names of a Hugging Face checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            if self.shape.num_experts and ".mlp." in name:
                tensors.update(self._expert_tensors(name, tensor))
            else:
                tensors[f"model.{name}"] = tensor
        return {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}

    def _expert_tensors(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        prefix, _, part = name.partition(".mlp.")
        prefix = f"model.{prefix}.block_sparse_moe"
        if part == "router.weight":
            return {f"{prefix}.gate.weight": tensor}
        shards = tensor.chunk(self.shape.num_experts, dim=1 if part == "w2.weight" else 0)
        return {
            f"{prefix}.experts.{number}.{part}": shard for number, shard in enumerate(shards)
        }
