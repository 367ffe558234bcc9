"""The model that verifies: a Llama of transformers, from its folder or from a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

# Shapes: R rows of a batch, L places of a row, D hidden size, V vocabulary.


class Target:
    """The model, which is not trained, and its tokenizer."""

    def __init__(self, path: Path, converted: Path, device: torch.device) -> None:
        """``path``: a Hugging Face folder, or a GGUF file that is written to the folder
        ``converted`` first. A GPU computes in bfloat16, a CPU in float32."""
        folder = path if path.is_dir() else huggingface_folder(path, converted)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.to(device).eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.config = model.config
        self.device = device
        count = self.config.num_hidden_layers
        self.taps = (2, count // 2, count - 3)

    @property
    def end_ids(self) -> list[int]:
        """The ids that end an output."""
        ids = self.config.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    @torch.no_grad()
    def run(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tapped states [R, L, taps * D], last states [R, L, D], and logits [R, L, V]."""
        result = self.model(ids, output_hidden_states=True, use_cache=False)
        states = result.hidden_states
        tapped = torch.cat([states[tap] for tap in self.taps], -1)
        return tapped, states[-1], result.logits


def huggingface_folder(path: Path, folder: Path) -> Path:
    """Write a GGUF file's model and tokenizer as a Hugging Face folder, unless it is there."""
    from trimaran.builder.gguf_tokenizer import tokenizer_files, write_files
    from trimaran.worker.config.gguf_file import huggingface_values, load_gguf, open_gguf
    from trimaran.worker.models.weights.gguf_tensors import gguf_entries, gguf_reader

    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    read = gguf_reader(path)
    tensors = {name: read(name).bfloat16().contiguous() for name in gguf_entries(path)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_files(folder, tokenizer_files(load_gguf(path)))
    text = json.dumps(huggingface_values(open_gguf(path)), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder
