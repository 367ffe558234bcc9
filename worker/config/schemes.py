"""How the numbers of one linear layer are quantized: FP8 or integers; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, ClassVar

from trimaran.comm.errors import ConfigError


class NotServedError(Exception):
    """A format contains a feature that is not served; the text names the feature."""


class Activations(Enum):
    """Which inputs of a product share a scale."""

    STATIC = "static"
    """All inputs: the checkpoint holds the scale."""

    TOKEN = "token"
    """The inputs of a token, whose largest value makes the scale."""

    GROUP = "group"
    """Consecutive inputs of a token, as many as a block of the weight has columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scheme:
    """Weights and inputs of a product in FP8 (e4m3), with float32 scales."""

    kind: ClassVar[str] = "fp8"

    block: tuple[int, int] | None = None
    """Rows and columns of the weight that share a scale; None: each row, or all of the matrix,
    has one."""

    activations: Activations = Activations.TOKEN
    activation_bound: float = 0.0
    """Largest magnitude that makes a token's scale; larger values are clamped. 0: none."""

    has_power_scales: bool = False
    """Whether scales of inputs are rounded up to powers of two."""

    def __post_init__(self) -> None:
        if (self.block is None) == (self.activations is Activations.GROUP):
            raise ConfigError(
                f"weights with {'a scale a block' if self.block else 'a scale a row'} and "
                f"inputs with a scale by {self.activations.value} are not served together: "
                "blocks go with groups, rows and matrices with token or static. Name a "
                "checkpoint in another format"
            )

    @property
    def shared(self) -> tuple[int, int]:
        """Rows and columns of a block, which ranks do not cut across inputs; (1, 1): none."""
        return self.block or (1, 1)

    @property
    def algorithm(self) -> str:
        """TensorRT-LLM's name."""
        if self.block is not None:
            return "FP8_BLOCK_SCALES"
        is_static = self.activations is Activations.STATIC
        return "FP8" if is_static else "FP8_PER_CHANNEL_PER_TOKEN"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``config.json``."""
        block = None if self.block is None else list(self.block)
        numbers = {**asdict(self), "block": block, "activations": self.activations.value}
        return {"kind": self.kind, **numbers}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fp8Scheme:
        """The inverse of `to_dict`; raises KeyError, TypeError or ValueError."""
        known = {each.name: values[each.name] for each in fields(cls)}
        block = known.pop("block")
        if block is not None:
            rows, columns = (int(size) for size in block)
            block = (rows, columns)
        return cls(block=block, activations=Activations(known.pop("activations")), **known)


class Layout(Enum):
    """The tensors in which a checkpoint holds integers."""

    NATIVE = "native"
    """Trimaran's format: unsigned integers, the inputs of an output side by side."""

    GPTQ = "gptq"
    """``qweight`` packs inputs, ``qzeros`` holds zero points less one."""

    GPTQ_V2 = "gptq_v2"
    """GPTQ with zero points as they are."""

    AWQ = "awq"
    """``qweight`` and ``qzeros`` pack outputs, interleaved."""

    PACKED = "pack-quantized"
    """``weight_packed`` packs inputs."""

    PLAIN = "int-quantized"
    """``weight`` holds signed bytes."""

    GGUF = "gguf"
    """Blocks of a GGUF file."""

    MXFP4 = "mxfp4"
    """``x_blocks`` and ``x_scales`` of the matrices of all experts: FP4 (E2M1) numbers, and a
    power of two (E8M0) for each group of 32."""

    NVFP4 = "nvfp4"
    """``weight`` packs FP4 (E2M1) numbers of inputs, ``weight_scale`` holds an FP8 scale for
    each group of 16, and ``weight_scale_2`` is a factor of all scales."""

    NVFP4_PACKED = "nvfp4-pack-quantized"
    """``weight_packed`` packs them, and ``weight_global_scale`` divides all scales."""


class Zeros(Enum):
    """The weight that an integer of zero represents."""

    NONE = "none"
    """Half of the range stands for zero."""

    POINT = "point"
    """Each group has an integer that stands for zero."""

    MINIMUM = "minimum"
    """Each group has a float that is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerScheme:
    """Weights of 4 or 8 bits, a scale for each output and group of inputs.

    A weight is ``(integer - zero) * scale``, or ``integer * scale + minimum``; or the integer
    is the code of an FP4 number, times ``scale``. Inputs keep the model's dtype, or are signed
    bytes with a scale a token, or a static one.
    """

    kind: ClassVar[str] = "integer"

    bits: int = 4
    group_size: int | None = 128
    """Inputs that share a scale; None: all of an output."""

    zeros: Zeros = Zeros.NONE
    has_order: bool = False
    """Whether the checkpoint stores the group of each input (``g_idx``)."""

    activations: Activations | None = None
    """How inputs are quantized; None: not at all."""

    layout: Layout = Layout.NATIVE

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ConfigError(
                f"weights of {self.bits} bits are not served: integers have 4 or 8. Name a "
                "checkpoint in another format"
            )
        if self.group_size is not None and self.group_size < 2:
            raise ConfigError(
                f"groups of {self.group_size} inputs are not served: 2 is the least. Name a "
                "checkpoint in another format"
            )
        if self.activations is Activations.GROUP:
            raise ConfigError(
                f"inputs with a scale by {self.activations.value} are not served beside "
                "integer weights. Name a checkpoint whose inputs have a scale a token or a "
                "static one, or none"
            )

    @property
    def has_input_scale(self) -> bool:
        """Whether the checkpoint holds the scale of inputs."""
        return self.activations is Activations.STATIC

    @property
    def is_fp4(self) -> bool:
        """Whether integers are codes of FP4 numbers (E2M1)."""
        return self.layout is Layout.MXFP4 or self.has_global_scale

    @property
    def has_global_scale(self) -> bool:
        """Whether all scales of a matrix have a common factor."""
        return self.layout in (Layout.NVFP4, Layout.NVFP4_PACKED)

    @property
    def has_power_scales(self) -> bool:
        """Whether scales are powers of two, held as their exponents."""
        return self.layout is Layout.MXFP4

    @property
    def label(self) -> str:
        """The numbers by name, in logs and results."""
        if self.has_global_scale:
            return Layout.NVFP4.value
        return self.layout.value if self.is_fp4 else f"int{self.bits}"

    @property
    def shared(self) -> tuple[int, int]:
        """A row, and the columns that ranks do not cut: a group, or the inputs of a byte."""
        return 1, self.group_size or 8 // self.bits

    @property
    def algorithm(self) -> str:
        """TensorRT-LLM's name."""
        if self.activations is not None:
            is_static = self.activations is Activations.STATIC
            return f"W8A8_SQ_PER_CHANNEL_PER_{'TENSOR' if is_static else 'TOKEN'}_PLUGIN"
        endings = {
            Layout.AWQ: "_AWQ", Layout.GPTQ: "_GPTQ", Layout.GPTQ_V2: "_GPTQ",
            Layout.MXFP4: "_MXFP4", Layout.NVFP4: "_NVFP4", Layout.NVFP4_PACKED: "_NVFP4",
        }  # fmt: skip
        return f"W{self.bits}A16{endings.get(self.layout, '')}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``config.json``."""
        activations = None if self.activations is None else self.activations.value
        words = {"zeros": self.zeros.value, "layout": self.layout.value}
        return {"kind": self.kind, **asdict(self), **words, "activations": activations}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> IntegerScheme:
        """The inverse of `to_dict`; raises KeyError, TypeError or ValueError."""
        known = {each.name: values[each.name] for each in fields(cls)}
        activations = known.pop("activations")
        return cls(
            zeros=Zeros(known.pop("zeros")),
            layout=Layout(known.pop("layout")),
            activations=None if activations is None else Activations(activations),
            **known,
        )


Scheme = Fp8Scheme | IntegerScheme


def scheme_from_dict(values: Mapping[str, Any]) -> Scheme:
    """The inverse of a scheme's ``to_dict``; raises KeyError, TypeError or ValueError."""
    # Folders of earlier versions hold FP8 alone, without a kind.
    kind = values.get("kind", Fp8Scheme.kind)
    if kind == Fp8Scheme.kind:
        return Fp8Scheme.from_dict(values)
    if kind == IntegerScheme.kind:
        return IntegerScheme.from_dict(values)
    raise ValueError(f"the kind {kind!r} of a scheme is not known")
