"""Heads that draft, written out with plain tensors, and the loop of drafting and verifying.

The loop is the published one: draft a chain greedily, let the target compute all of it, accept
the drafts that equal the target's choice, go on behind them. Nothing is cached.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file


def random_eagle(folder, config, *, draft_vocab, seed=3, scale=0.3, prefix="midlayer", **more):
    """Write an EAGLE-3 head of random weights in SpecForge's format for a target."""
    generator = torch.Generator().manual_seed(seed)
    width, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    shapes = {
        "fc": (width, 3 * width), "lm_head": (draft_vocab, width), "norm": (width,),
        f"{prefix}.self_attn.q_proj": (queries, 2 * width),
        f"{prefix}.self_attn.k_proj": (keys, 2 * width),
        f"{prefix}.self_attn.v_proj": (keys, 2 * width),
        f"{prefix}.self_attn.o_proj": (width, queries),
        f"{prefix}.mlp.gate_proj": (inner, width), f"{prefix}.mlp.up_proj": (inner, width),
        f"{prefix}.mlp.down_proj": (width, inner), f"{prefix}.hidden_norm": (width,),
        f"{prefix}.input_layernorm": (width,), f"{prefix}.post_attention_layernorm": (width,),
    }  # fmt: skip
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * scale + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    ids = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab].sort().values
    tensors["d2t"] = ids - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
    tensors["t2d"][ids] = True
    save(folder, tensors, "model.safetensors", {**sizes_of(config, draft_vocab), **more})
    return folder


def sizes_of(config, draft_vocab):
    """The keys of a head's config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "vocab_size": config.vocab_size, "draft_vocab_size": draft_vocab,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu",
    }  # fmt: skip


def random_medusa(folder, config, *, num_heads, seed=4, draft_vocab=0):
    """Write Medusa heads of random weights, which draft ``draft_vocab`` ids, or all ids."""
    generator = torch.Generator().manual_seed(seed)
    width = config.hidden_size
    tensors = {}
    values = {"medusa_num_heads": num_heads, "medusa_num_layers": 1}
    if draft_vocab:
        ids = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab]
        tensors["token_map"] = ids.sort().values
        values["truncated_vocab_size"] = draft_vocab
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(width, width, generator=generator)
        tensors[f"{head}.0.linear.bias"] = torch.randn(width, generator=generator)
        shape = draft_vocab or config.vocab_size, width
        tensors[f"{head}.1.weight"] = torch.randn(shape, generator=generator)
    save(folder, tensors, "medusa_lm_head.safetensors", values)
    return folder


def random_redrafter(folder, config, *, exit_dim, is_recurrent, spelling="lm_head.", seed=4):
    """Write ReDrafter's head of random weights, with two residual blocks, in one of the three
    spellings of its names."""
    generator = torch.Generator().manual_seed(seed)
    width = config.hidden_size
    shapes = {
        f"{spelling}2.weight": (config.vocab_size, exit_dim),
        **{f"{spelling}{n}.linear.weight": (exit_dim, exit_dim) for n in (0, 1)},
        **{f"{spelling}{n}.linear.bias": (exit_dim,) for n in (0, 1)},
    }
    if exit_dim != 2 * width:
        name = "input_projs" if spelling == "lm_heads." else "input_proj"
        shapes |= {f"{name}.weight": (exit_dim, 2 * width), f"{name}.bias": (exit_dim,)}
    if is_recurrent:
        shapes |= {"rnn_u.weight": (width, width), "rnn_u.bias": (width,)}
        shapes["rnn_w.weight"] = width, width
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()
    }
    values = {
        "hidden_size": width, "exit_dim": exit_dim, "num_draft_layers": 2, "rnn": is_recurrent,
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    save(folder, tensors, "model.safetensors", values)
    return folder


def save(folder, tensors, name, values):
    """Write a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    (folder / "config.json").write_text(json.dumps(values))


class EagleReference:
    """An EAGLE-3 head: drafts behind known ids, from the target's states of these ids."""

    def __init__(self, folder, target, taps):
        tensors = load_file(folder / "model.safetensors")
        self.weights = tensors
        self.values = json.loads((folder / "config.json").read_text())
        self.target, self.taps = target, taps
        self.prefix = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"

    def draft(self, ids, states, last, count):
        """``count`` ids; ``ids`` [L + 1] are known, ``states`` those of the first L."""
        joined = torch.cat([states[tap] for tap in self.taps], -1)
        inputs = self._times(joined, "fc")
        outputs = self._layer(torch.tensor(ids[1:]), inputs)
        drafts, chain = [], inputs
        known = list(ids[1:])
        while True:
            normed = self._norm(outputs[-1:], "norm")
            own = int(self._times(normed, "lm_head").argmax())
            drafts.append(own + int(self.weights["d2t"][own]))
            if len(drafts) == count:
                return drafts
            chain = torch.cat((chain, outputs[-1:]))
            known.append(drafts[-1])
            outputs = self._layer(torch.tensor(known), chain)

    def _layer(self, ids, states):
        embedding = self.target.get_input_embeddings()(ids)
        normed = self._norm(states, "hidden_norm")
        x = torch.cat((self._norm(embedding, "input_layernorm"), normed), -1)
        residual = normed if self.values.get("norm_before_residual") else states
        residual = residual + self._attention(x)
        normed = self._norm(residual, "post_attention_layernorm")
        gate, up = (self._times(normed, f"mlp.{name}_proj") for name in ("gate", "up"))
        return residual + self._times(F.silu(gate) * up, "mlp.down_proj")

    def _attention(self, x):
        size = self.values["head_dim"]
        q, k, v = (
            self._times(x, f"self_attn.{name}_proj").view(len(x), -1, size).transpose(0, 1)
            for name in "qkv"
        )
        exponents = torch.arange(0, size, 2).float() / size
        angles = torch.outer(torch.arange(len(x)).float(), 10000.0**-exponents)
        q, k = self._rotated(q, angles), self._rotated(k, angles)
        count = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(count, 0), v.repeat_interleave(count, 0)
        output = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return self._times(output.transpose(0, 1).flatten(1), "self_attn.o_proj")

    @staticmethod
    def _rotated(heads, angles):
        first, second = heads.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _weight(self, name):
        own = f"{name}.weight"
        found = self.weights.get(own, self.weights.get(f"{self.prefix}.{own}"))
        return found.float()

    def _times(self, x, name):
        return x @ self._weight(name).T

    def _norm(self, x, name):
        eps = self.values["rms_norm_eps"]
        return F.rms_norm(x, x.shape[-1:], self._weight(name), eps)


def first_eagle(folder):
    """Turn an EAGLE-3 head's folder into one of EAGLE-1: no norms at the layer's inputs, no
    vocabulary and no head of its own, and half of the attention's inputs."""
    tensors = load_file(folder / "model.safetensors")
    gone = ("hidden_norm", "input_layernorm", "lm_head", "d2t", "t2d")
    kept = {
        name.replace("midlayer", "layers.0"): tensor
        for name, tensor in tensors.items()
        if name != "norm.weight" and not any(part in name for part in gone)
    }
    width = kept["fc.weight"].shape[0]
    kept["fc.weight"] = kept["fc.weight"][:, : 2 * width].contiguous()
    for name in "qkv":
        key = f"layers.0.self_attn.{name}_proj.weight"
        kept[key] = kept[key][:, :width].contiguous()
    values = json.loads((folder / "config.json").read_text())
    del values["draft_vocab_size"]
    save(folder, kept, "model.safetensors", values)


class FirstEagleReference(EagleReference):
    """An EAGLE-1 head, which drafts from the target's last states with the target's head."""

    def draft(self, ids, states, last, count):
        """``count`` ids; see `EagleReference.draft`."""
        known, chain, drafts = list(ids[1:]), last, []
        while len(drafts) < count:
            embedding = self.target.get_input_embeddings()(torch.tensor(known))
            x = self._times(torch.cat((embedding, chain), -1), "fc")
            x = x + self._attention(x)
            normed = self._norm(x, "post_attention_layernorm")
            gate, up = (self._times(normed, f"mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._times(F.silu(gate) * up, "mlp.down_proj")
            drafts.append(int(self.target.lm_head(x[-1]).argmax()))
            known.append(drafts[-1])
            chain = torch.cat((chain, x[-1:]))
        return drafts


class MedusaReference:
    """Medusa heads: the likeliest token of each, from the target's last state."""

    def __init__(self, folder):
        self.weights = load_file(folder / "medusa_lm_head.safetensors")

    def draft(self, ids, states, last, count):
        """The first ``count`` heads' ids."""
        drafts = []
        for head in range(count):
            block = f"{head}.0.linear"
            inner = last[-1] @ self._weight(f"{block}.weight").T + self._weight(f"{block}.bias")
            logits = (last[-1] + F.silu(inner)) @ self._weight(f"{head}.1.weight").T
            own = int(logits.argmax())
            ids = self.weights.get("token_map")
            drafts.append(own if ids is None else int(ids[own]))
        return drafts

    def _weight(self, name):
        return self.weights[name].float()


class RedrafterReference:
    """ReDrafter's head with one beam, from the target's last state and its own token."""

    def __init__(self, folder, target):
        self.values = json.loads((folder / "config.json").read_text())
        self._embed = target.get_input_embeddings()
        self._weights = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            for long in ("lm_heads.", "lm_head.", "input_projs."):
                short = "in." if "input" in long else "0."
                name = name.replace(long, short)
            self._weights[name.replace("input_proj.", "in.")] = tensor

    def draft(self, ids, states, last, count):
        """``count`` ids behind the last of ``ids``, which the target has sampled."""
        drafts, state, token = [], torch.zeros(self.values["hidden_size"]), ids[-1]
        for _ in range(count):
            state = self.next_state(state, token)
            token = int(self.logits(last[-1], state).argmax())
            drafts.append(token)
        return drafts

    def next_state(self, state, token):
        """The recurrent state behind one more token."""
        embedding = self._embed(torch.tensor(token))
        if not self.values["rnn"]:
            return state + embedding
        return F.silu(self._times(embedding, "rnn_w") + self._times(state, "rnn_u"))

    def logits(self, last, state):
        """Logits from the target's last state and the recurrent one."""
        x = torch.cat((last, state))
        x = self._times(x, "in") if "in.weight" in self._weights else x
        for block in range(self.values["num_draft_layers"]):
            x = x + F.silu(self._times(x, f"0.{block}.linear"))
        return self._times(x, f"0.{self.values['num_draft_layers']}")

    def _times(self, x, name):
        bias = self._weights.get(f"{name}.bias", torch.zeros(()))
        return self._weights[f"{name}.weight"] @ x + bias


@dataclass
class Counts:
    """Verifications and accepted drafts."""

    drafts: int = 0
    accepted: int = 0


@torch.no_grad()
def generate(target, head, prompt, num_tokens, count):
    """Greedy output with drafts, and the counts. ``target`` is transformers' model.

    The first step computes the prompt alone; each further step verifies ``count`` drafts, or
    as many as the output has room for before its last token.
    """
    ids, end, counts = list(prompt), len(prompt) + num_tokens, Counts()
    drafts: list[int] = []
    while len(ids) < end:
        result = target(torch.tensor([ids + drafts]), output_hidden_states=True)
        first = len(ids) - 1
        own = result.logits[0, first:].argmax(-1).tolist()
        same = next((n for n, draft in enumerate(drafts) if draft != own[n]), len(drafts))
        counts.drafts += bool(drafts)
        counts.accepted += same
        ids += own[: same + 1]
        known = len(ids) - 1
        states = [each[0, :known] for each in result.hidden_states]
        most = min(count, end - len(ids) - 1)
        drafts = head.draft(ids, states, states[-1], most) if most > 0 else []
    return ids[len(prompt) :], counts
