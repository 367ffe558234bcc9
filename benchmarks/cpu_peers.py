"""Other engines of `cpu_quantized.py`: a model's conversion, and timed generation.

    python benchmarks/cpu_peers.py PEER convert|run JSON

The interpreter needs the packages of the peer, and not Trimaran. The last line of the output is
the result, in JSON. Both engines have weights of 8 bits and choose the most likely tokens.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], int]
"""Generates a number of tokens for each prompt; returns how many were generated in all."""

_PACKAGES = {
    "openvino": ("openvino", "openvino-genai", "optimum-intel", "nncf"),
    "llama-cpp": ("llama-cpp-python", "gguf"),
}
"""The packages of each peer whose versions are part of the result."""

_GGUF = "model-q8_0.gguf"
_KEPT: list[object] = []
_CACHE_GIB = 1
_GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip
"""Names of a Llama's layers in GGUF files, by Hugging Face's."""


def main() -> None:
    """Convert, or run; see the module."""
    peer, action, job = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    convert, load = {
        "openvino": (convert_openvino, load_openvino),
        "llama-cpp": (convert_llama_cpp, load_llama_cpp),
    }[peer]
    if action == "convert":
        convert(Path(job["model"]), Path(job["folder"]))
        versions = {name: version(name) for name in _PACKAGES[peer]}
        print(json.dumps(versions), flush=True)
        return
    generate = load(Path(job["folder"]), job["threads"], job["length"], max(job["requests"]))
    rates = {
        # The first run allocates and compiles, and is not counted.
        count: [rate(generate, job, count, turn) for turn in range(job["runs"] + 1)][1:]
        for count in job["requests"]
    }
    print(json.dumps(rates), flush=True)


def rate(generate: Generate, job: dict[str, Any], count: int, turn: int) -> float:
    """Output tokens a second of ``count`` requests at once, with random prompts."""
    length = job["length"]
    random = np.random.default_rng([turn, count])
    prompts = random.integers(0, job["vocab_size"], (count, length)).tolist()
    start = time.perf_counter()
    made = generate(prompts, length)
    seconds = time.perf_counter() - start
    if made != count * length:
        raise RuntimeError(f"{made} tokens came, {count * length} were due")
    return made / seconds


def convert_openvino(model: Path, folder: Path) -> None:
    """Weights of 8 bits by nncf, as optimum-intel calls it: a scale and a zero point a row."""
    from optimum.intel import OVModelForCausalLM

    quantization = {"bits": 8, "sym": False}
    exported = OVModelForCausalLM.from_pretrained(
        model, export=True, compile=False, quantization_config=quantization
    )
    exported.save_pretrained(folder)


def load_openvino(folder: Path, threads: int, length: int, most: int) -> Generate:
    """The pipeline with continuous batching, which serves one request as well as many."""
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GIB
    scheduler.max_num_seqs = most
    scheduler.max_num_batched_tokens = most * length
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )

    def generate(prompts: Prompts, count: int) -> int:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False
        )
        ids = [openvino.Tensor(np.array([each], np.int64)) for each in prompts]
        made = pipeline.generate(ids, [config] * len(ids))
        return sum(len(each.m_generation_ids[0]) for each in made)

    return generate


def convert_llama_cpp(model: Path, folder: Path) -> None:
    """A GGUF file without a vocabulary, with matrices in Q8_0."""
    import gguf
    from gguf.quants import quantize

    config = json.loads((model / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / _GGUF, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q"])
    writer.add_head_count_kv(heads["k"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, values in tensors(model):
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            continue
        for part, count in heads.items():
            if f".{part}_proj." in name:
                values = rotated_side_by_side(values, count)
        writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """The name of a tensor in GGUF files."""
    layer = name.removesuffix(".weight")
    if not layer.startswith("model.layers."):
        return f"{_GGUF_NAMES[layer]}.weight"
    _, _, number, rest = layer.split(".", 3)
    return f"blk.{number}.{_GGUF_NAMES[rest]}.weight"


def rotated_side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads in the order of GGUF: those that rotate together are neighbours, and not
    half a head apart."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors(model: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a folder in bfloat16, as float32, without torch."""
    data = np.fromfile(model / "model.safetensors", np.uint8)
    size = int(data[:8].view(np.uint64)[0])
    entries = json.loads(data[8 : 8 + size].tobytes())
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        first, end = (8 + size + at for at in entry["data_offsets"])
        bits = np.frombuffer(data[first:end].tobytes(), np.uint16).astype(np.uint32) << 16
        yield name, bits.view(np.float32).reshape(entry["shape"])


def load_llama_cpp(folder: Path, threads: int, length: int, most: int) -> Generate:
    """One context for all sequences, a batch of which is decoded at once."""
    from llama_cpp import llama_cpp as lib

    lib.llama_backend_init()
    # The library calls the function as long as it runs.
    _KEPT.append(lib.llama_log_callback(lambda _level, _text, _data: None))
    lib.llama_log_set(_KEPT[-1], ctypes.c_void_p(0))
    model = lib.llama_model_load_from_file(
        str(folder / _GGUF).encode(), lib.llama_model_default_params()
    )
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    params = lib.llama_context_default_params()
    params.n_ctx = 2 * length * most
    params.n_batch = length * most
    params.n_seq_max = most
    params.n_threads = params.n_threads_batch = threads
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(length * most, 0, 1)
    place = 0

    def add(token: int, position: int, sequence: int, has_logits: bool) -> None:
        nonlocal place
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        batch.logits[place] = has_logits
        place += 1

    def decode() -> list[int]:
        """The most likely token behind each row that has logits."""
        nonlocal place
        batch.n_tokens, place = place, 0
        if lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        rows = [row for row in range(batch.n_tokens) if batch.logits[row]]
        logits = (lib.llama_get_logits_ith(context, row) for row in rows)
        return [int(np.ctypeslib.as_array(each, (vocab_size,)).argmax()) for each in logits]

    def generate(prompts: Prompts, count: int) -> int:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                add(token, position, sequence, position == len(prompt) - 1)
        tokens = decode()
        made = len(tokens)
        for step in range(count - 1):
            for sequence, token in enumerate(tokens):
                add(token, len(prompts[sequence]) + step, sequence, True)
            tokens = decode()
            made += len(tokens)
        return made

    return generate


if __name__ == "__main__":
    main()
