"""Which matrices of a GGUF file stay the file's integers; free of torch."""

from __future__ import annotations

from dataclasses import replace

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.gguf_file import GgufFile, huggingface_name, is_gguf, open_gguf
from trimaran.worker.config.quantization import QuantizationConfig, SchemeRule
from trimaran.worker.config.schemes import IntegerScheme, Layout, Zeros

KEEP_INTEGERS = "gguf"
"""The name of ``--quantization`` that keeps a file's integers."""

_GROUP = 32
_SCHEMES = {
    kind: IntegerScheme(bits=bits, group_size=_GROUP, zeros=zeros, layout=Layout.GGUF)
    for kind, bits, zeros in (
        ("Q4_0", 4, Zeros.NONE),
        ("Q4_1", 4, Zeros.MINIMUM),
        ("Q8_0", 8, Zeros.NONE),
    )
}
"""Types whose blocks of 32 inputs have a scale, and those with a minimum too."""

_STACKED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("self_attn.o_proj",),
    ("mlp.down_proj",),
)
"""Matrices that are multiplied as one."""


def with_integers(source: EngineFolder) -> EngineFolder:
    """A GGUF file's model with the matrices of Q4_0, Q4_1 and Q8_0 as they are stored.

    Other matrices are dequantized as they are read. Matrices that are multiplied as one, but
    are stored in several types, are dequantized too.

    Raises:
        ConfigError: ``source`` is no GGUF file, or has no matrix of these types.
    """
    if not is_gguf(source.path):
        raise ConfigError(
            f"--quantization {KEEP_INTEGERS} keeps the integers of a GGUF file, and "
            f"{source.path} is none. Leave the flag out, or name another scheme."
        )
    names = _names_by_type(open_gguf(source.path))
    if not names:
        raise ConfigError(
            f"--quantization {KEEP_INTEGERS}: no matrices of {source.path} can stay integers, "
            f"which {', '.join(_SCHEMES)} can. Leave the flag out, or name another scheme."
        )
    rules = [SchemeRule(targets=tuple(of), scheme=_SCHEMES[kind]) for kind, of in names.items()]
    quantization = QuantizationConfig(method=KEEP_INTEGERS, rules=tuple(rules))
    return replace(source, config=replace(source.config, quantization=quantization))


def _names_by_type(file: GgufFile) -> dict[str, list[str]]:
    """The modules that stay integers, by the types of their tensors."""
    kinds: dict[str, str] = {}
    for name, tensor in file.tensors.items():
        module, _, ending = (huggingface_name(name) or "").rpartition(".")
        if ending == "weight":
            kinds[module] = tensor.tensor_type.name
    found: dict[str, list[str]] = {}
    for number in range(file.model_value("block_count")):
        for stacked in _STACKED:
            modules = [f"model.layers.{number}.{each}" for each in stacked]
            of_modules = {kinds.get(module, "") for module in modules}
            if len(of_modules) == 1 and of_modules <= _SCHEMES.keys():
                found.setdefault(of_modules.pop(), []).extend(modules)
    return found
