"""How the weights of a model are quantized, by the checkpoint's own names; free of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.schemes import (
    Activations,
    Fp8Scheme,
    IntegerScheme,
    Scheme,
    scheme_from_dict,
)

ANY_LINEAR = "Linear"
"""A target that every linear layer matches."""

_REGULAR = "re:"
_SCHEMES: dict[str, Scheme] = {
    "fp8": Fp8Scheme(),
    "fp8_block": Fp8Scheme(block=(128, 128), activations=Activations.GROUP),
    "int8": IntegerScheme(bits=8, group_size=None),
    "w8a8_int8": IntegerScheme(bits=8, group_size=None, activations=Activations.TOKEN),
    "int4": IntegerScheme(bits=4, group_size=128),
    "int4_g64": IntegerScheme(bits=4, group_size=64),
    "int4_g32": IntegerScheme(bits=4, group_size=32),
}
LOAD_METHODS = tuple(_SCHEMES)
"""Schemes by which float weights are quantized as they are loaded or built: ``fp8`` has a scale
for each row and token, ``fp8_block`` for 128x128 blocks and groups of 128 inputs, ``int8`` for
each row, ``w8a8_int8`` for each row and token, ``int4`` for groups of 128 inputs or as many as
its ending says."""

_HEAD_BITS = 8
"""Bits of the head beside integer weights alone: the head is a large part of a small model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRule:
    """The linear layers that ``targets`` name, and their scheme."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """Which linear layers are quantized, and how.

    Names are those of the checkpoint's modules. A pattern is a name, a prefix or suffix of a
    name at a dot, a name with ``*``, or ``re:`` and a regular expression that matches the
    beginning of a name.
    """

    method: str
    """The format's ``quant_method``; ``trimaran`` if weights are quantized here."""

    rules: tuple[SchemeRule, ...]
    """The first rule counts whose targets match: names before `ANY_LINEAR`."""

    ignored: tuple[str, ...] = ()
    """Patterns of modules that keep the model's dtype."""

    quantizes_at_load: bool = False
    """Whether the weights come as floats and are quantized as they are read."""

    head_bits: int = 0
    """Bits of the integers that replace the output head's floats once these are loaded; 0: the
    head keeps its floats."""

    def scheme_of(self, names: tuple[str, ...]) -> Scheme | None:
        """The scheme of the linear layer with these names; None for a layer without
        quantization.
        """
        if any(_matches(pattern, name) for pattern in self.ignored for name in names):
            return None
        for rule in self.rules:
            for target in rule.targets:
                if target == ANY_LINEAR or any(_matches(target, name) for name in names):
                    return rule.scheme
        return None

    @property
    def block_sizes(self) -> tuple[int, int]:
        """The largest rows and columns that share a scale or a byte; (1, 1) if none do."""
        blocks = [rule.scheme.shared for rule in self.rules] or [(1, 1)]
        return max(rows for rows, _ in blocks), max(columns for _, columns in blocks)

    @property
    def has_integers(self) -> bool:
        """Whether weights of some layers are integers."""
        return any(isinstance(rule.scheme, IntegerScheme) for rule in self.rules)

    def describe(self) -> str:
        """A short description for the log."""
        names = sorted({rule.scheme.algorithm for rule in self.rules})
        return f"{self.method}: {', '.join(names)}"

    def to_dict(self) -> dict[str, Any]:
        """The ``quantization`` section of an engine folder's ``config.json``."""
        names = {rule.scheme.algorithm for rule in self.rules}
        return {
            "quant_algo": names.pop() if len(names) == 1 else "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "exclude_modules": list(self.ignored),
            "method": self.method,
            "head_bits": self.head_bits,
            "rules": [
                {"targets": list(rule.targets), "scheme": rule.scheme.to_dict()}
                for rule in self.rules
            ],
        }

    @classmethod
    def from_dict(cls, values: Any, source: str) -> QuantizationConfig | None:
        """The inverse of `to_dict`; None if nothing is quantized.

        Raises:
            ConfigError: a section of another program.
        """
        again = "Build the folder again with `trimaran build`."
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{source}: quantization is {values!r} but must be an object. {again}"
            )
        algorithm = values.get("quant_algo")
        if algorithm is None:
            return None
        if "rules" not in values:
            raise ConfigError(
                f"{source}: quantization.quant_algo is {algorithm!r} without our rules for its "
                f"layers, which is not served. {again}"
            )
        try:
            rules = tuple(
                SchemeRule(
                    targets=tuple(str(target) for target in rule["targets"]),
                    scheme=scheme_from_dict(rule["scheme"]),
                )
                for rule in values["rules"]
            )
            ignored = tuple(str(pattern) for pattern in values.get("exclude_modules") or ())
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{source}: quantization is damaged ({error}). {again}") from None
        # Folders of earlier versions have no such key.
        bits = values.get("head_bits", 0)
        if bits not in (0, _HEAD_BITS):
            raise ConfigError(f"{source}: quantization.head_bits is {bits!r}. {again}")
        method = str(values.get("method"))
        return cls(method=method, rules=rules, ignored=ignored, head_bits=bits)


def load_time_quantization(name: str) -> QuantizationConfig:
    """The configuration of weights that are quantized as they are read.

    Raises:
        ConfigError: no such scheme.
    """
    if name not in _SCHEMES:
        raise ConfigError(f"quantization is {name!r} but must be one of {', '.join(_SCHEMES)}")
    scheme = _SCHEMES[name]
    has_floats = isinstance(scheme, Fp8Scheme) or scheme.activations is not None
    rule = SchemeRule(targets=(ANY_LINEAR,), scheme=scheme)
    return QuantizationConfig(
        method="trimaran",
        rules=(rule,),
        quantizes_at_load=True,
        head_bits=0 if has_floats else _HEAD_BITS,
    )


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(_REGULAR):
        return re.match(pattern.removeprefix(_REGULAR), name) is not None
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")
