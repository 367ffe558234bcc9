"""The literals that families of models write around their reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The literals around the reasoning."""

    opening: str = "<think>"
    closing: str = "</think>"


REASONING_FORMATS: Mapping[str, Reasoning] = {
    "think": Reasoning(),
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "gemma4": Reasoning("<|channel>thought\n", "<channel|>"),
    "seed_oss": Reasoning("<seed:think>", "</seed:think>"),
    "kimi_k3": Reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax_m3": Reasoning("<mm:think>", "</mm:think>"),
    "cohere": Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    "longcat": Reasoning("<longcat_think>", "</longcat_think>"),
}
"""By the names that vLLM uses, but for ``think``, which has many there."""

OTHER_REASONING_NAMES: Mapping[str, str] = dict.fromkeys(
    ("deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "deepseek_v4", "qwen3",
     "qwen3-thinking", "glm45", "glm47", "kimi_k2", "minimax_m2", "minimax", "mimo",
     "nemotron_v3", "holo2", "olmo3", "step3", "step3p5"),
    "think",
)  # fmt: skip
"""Further names of vLLM's and SGLang's parsers, and the entries that read their forms."""


def reasoning_of_template(text: str) -> str:
    """The name of the form that a chat template shows; empty if the template shows none."""
    for name, reasoning in REASONING_FORMATS.items():
        if reasoning.closing in text:
            return name
    # Templates of Kimi K3 put literals together from these.
    return "kimi_k3" if all(part in text for part in _KIMI_K3) else ""


_KIMI_K3 = ("<|open|>", "<|close|>", "<|sep|>", "think")
