"""Which parts of a model's linear layers adapters can change, and how adapters are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimaran.worker.layers.linear import ParallelLinear, copy_partition
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.parallel.partition import DimPartition

MODULE_NAMES = (
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h",
    "mlp_gate", "cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v",
    "cross_attn_dense", "moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router",
)  # fmt: skip
"""The modules that an adapter can name; an index in this tuple is the number on the wire."""

_ALIGNMENT = 64
"""Alignment of matrices in elements, so that a GPU reads them in wide words."""

# Letters: D rank of an adapter, I inputs and O outputs of a linear layer.


class AdapterFormatError(ValueError):
    """An adapter that cannot be read, or that does not fit the model."""


@dataclass(frozen=True, slots=True)
class Target:
    """One part of one linear layer's output, such as the keys of layer 3."""

    index: int
    """Index in `AdapterLayout.targets`; the parts of one layer are neighbours."""

    inputs: DimPartition
    outputs: DimPartition
    """Outputs of this part on this rank."""

    offset: int
    """First of these outputs in this rank's output of the linear layer."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """The update of a module in a layer, ``x @ a.T @ b.T``: a [D, I], b [O, D]."""

    module: int
    layer: int
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """This rank's shard of two matrices, and the shard's position in the adapter's memory."""

    target: int
    rank: int
    """Columns of the second matrix, rows of the first."""

    shape: tuple[int, int]
    """Inputs and outputs of the target on this rank."""

    a: int
    """First element of the first matrix, [rank, inputs]."""

    b: int
    """First element of the second matrix, [outputs, rank], or its transpose on a GPU."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """This rank's shard of one adapter: one flat tensor."""

    data: Tensor
    matrices: tuple[PackedMatrices, ...]


Sizes = dict[tuple[int, int], tuple[tuple[int, int], list[tuple[int, int]]]]
"""By module and layer: inputs and outputs of the whole model, and the inputs and outputs of
each part on one rank."""


class AdapterLayout:
    """All targets of a rank's model, and the targets of each module of an adapter.

    Adapters cover the whole model. After `join` has set the ``sizes`` of all ranks, the layout
    describes the modules of every rank. A shard takes the same memory on every rank, namely
    that of the largest shard. Rank 0 can therefore decide for all ranks.
    """

    def __init__(self, model: CausalLM) -> None:
        self.targets: list[Target] = []
        self.linears: list[tuple[ParallelLinear, list[Target]]] = []
        self._modules: dict[tuple[int, int], list[Target]] = {}
        parts = _parts_by_linear(model.adapter_modules)
        for number, layer in zip(model.layer_numbers(), model.layers.values(), strict=True):
            for path, modules in parts.items():
                linear = _linear_of(layer, path)
                if linear is not None:
                    self._add(number, linear, modules)
        self.num_layers = model.config.num_hidden_layers
        self.dtype = model.dtype
        self._is_gpu = model.device.type == "cuda"
        self._ranks: list[Sizes] = [self.sizes()]

    def _add(self, layer: int, linear: ParallelLinear, modules: dict[str, str]) -> None:
        """Number the parts of one layer's output, and record them under their modules."""
        targets = {}
        for shard, part in linear.output_parts.items():
            targets[shard] = Target(
                index=len(self.targets),
                inputs=linear.input_partition,
                outputs=part.partition,
                offset=part.offset,
            )
            self.targets.append(targets[shard])
        self.linears.append((linear, list(targets.values())))
        for name, shard in modules.items():
            found = list(targets.values()) if shard == "*" else [targets[shard]]
            self._modules[MODULE_NAMES.index(name), layer] = found

    def sizes(self) -> Sizes:
        """The sizes of this rank's targets."""
        return {
            key: (
                (found[0].inputs.whole, sum(target.outputs.whole for target in found)),
                [(target.inputs.size, target.outputs.size) for target in found],
            )
            for key, found in self._modules.items()
        }

    def join(self, ranks: Iterable[Sizes]) -> None:
        """Take in the sizes of all ranks, this rank included."""
        self._ranks = []
        for sizes in ranks:
            if sizes not in self._ranks:
                self._ranks.append(sizes)

    @property
    def module_names(self) -> tuple[str, ...]:
        """The modules that at least one layer has."""
        known = {module for sizes in self._ranks for module, _ in sizes}
        return tuple(MODULE_NAMES[module] for module in sorted(known))

    @property
    def num_modules(self) -> int:
        """Modules of all layers together."""
        return len(set().union(*self._ranks))

    def shape_of(self, module: int, layer: int) -> tuple[int, int] | None:
        """Inputs and outputs of a module in the whole model; None if the model lacks it."""
        for sizes in self._ranks:
            if (module, layer) in sizes:
                return sizes[module, layer][0]
        return None

    def longest_row(self, rank: int) -> int:
        """Weights of the largest module at an adapter size, which is what a row may need."""
        shapes = (shape for sizes in self._ranks for shape, _ in sizes.values())
        return rank * max(map(sum, shapes), default=0)

    def size_of(self, ranks: Sequence[tuple[int, int, int]]) -> int:
        """Elements of the largest rank's shard of an adapter of (module, layer, rank)s."""
        return max(
            sum(
                _padded(rank * inputs) + _padded(rank * outputs)
                for module, layer, rank in ranks
                if (module, layer) in sizes
                for inputs, outputs in sizes[module, layer][1]
            )
            for sizes in self._ranks
        )

    def largest_size(self, rank: int) -> int:
        """Elements of this rank's shard of an adapter of all targets."""
        return sum(
            _padded(rank * target.inputs.size) + _padded(rank * target.outputs.size)
            for target in self.targets
        )

    def pack(
        self,
        matrices: Iterable[Matrices],
        size: int,
        dtype: torch.dtype,
        *,
        is_transposed: bool,
    ) -> PackedAdapter:
        """This rank's shard of ``size`` elements; ``is_transposed`` transposes second matrices.

        For a GPU the memory is page-locked, so that copies are asynchronous.
        """
        data = torch.zeros(size, dtype=dtype, pin_memory=self._is_gpu)
        placed, offset = [], 0
        for one in matrices:
            rank, first_row = one.a.shape[0], 0
            for target in self._modules.get((one.module, one.layer), ()):
                inputs, outputs = target.inputs, target.outputs
                a = data[offset : offset + rank * inputs.size].view(rank, inputs.size)
                copy_partition(one.a.t(), a.t(), inputs)
                at_b = offset + _padded(a.numel())
                b = data[at_b : at_b + rank * outputs.size]
                rows = one.b.narrow(0, first_row, outputs.whole)
                first_row += outputs.whole
                b_rows = b.view(rank, -1).t() if is_transposed else b.view(-1, rank)
                copy_partition(rows, b_rows, outputs)
                shape = inputs.size, outputs.size
                placed.append(PackedMatrices(target.index, rank, shape, offset, at_b))
                offset = at_b + _padded(b.numel())
        return PackedAdapter(data, tuple(placed))


def check_modules(
    sources: Sequence[str],
    ranks: Sequence[tuple[int, int, int]],
    layout: AdapterLayout,
    max_rank: int,
) -> None:
    """Check that a model has all modules of an adapter, given as (module, layer, rank).

    ``sources`` say in errors where each module was read.

    Raises:
        AdapterFormatError: a module is missing in the model, comes twice or has too large a
            rank.
    """
    seen = set()
    for where, (module, layer, rank) in zip(sources, ranks, strict=True):
        if layout.shape_of(module, layer) is None:
            known = ", ".join(layout.module_names) or "none that take adapters"
            raise AdapterFormatError(
                f"{where}: the model has no {module_name(module)} in layer {layer}. Its "
                f"{layout.num_layers} layers have {known}."
            )
        if (module, layer) in seen:
            raise AdapterFormatError(
                f"{where}: {module_name(module)} of layer {layer} stands there twice"
            )
        seen.add((module, layer))
        if not 1 <= rank <= max_rank:
            raise AdapterFormatError(
                f"{where}: the adapter size {rank} must be 1 to {max_rank} "
                "(lora_cache_max_adapter_size of the model)"
            )


def check_values(matrices: Iterable[Matrices], dtype: torch.dtype) -> None:
    """Check that all values of an adapter are finite in the model's dtype.

    Values that are not finite would stay in blocks of the KV cache. The next owner of such a
    block may read them with weights of 0. The check reads every matrix once.

    Raises:
        AdapterFormatError: names the module, the value and the limit.
    """
    for one in matrices:
        for name, matrix in (("A", one.a), ("B", one.b)):
            # Minimum and maximum are NaN if any value is NaN.
            bounds = torch.stack(matrix.aminmax())
            is_finite = bounds.to(dtype).isfinite()
            if not is_finite.all():
                type_name = str(dtype).removeprefix("torch.")
                raise AdapterFormatError(
                    f"matrix {name} of {module_name(one.module)} in layer {one.layer} holds "
                    f"{bounds[~is_finite][0]:g}, which is no finite number in the model's "
                    f"{type_name} (at most {torch.finfo(dtype).max:g}); send finite ones"
                )


def module_name(module: int) -> str:
    """The module in an error message: its number, and its name if it has one."""
    is_known = 0 <= module < len(MODULE_NAMES)
    return f"module {module} ({MODULE_NAMES[module]})" if is_known else f"module {module}"


def _linear_of(layer: nn.Module, path: str) -> ParallelLinear | None:
    """The linear layer at a path; None where the decoder layer has experts instead."""
    found: object = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, ParallelLinear) else None


def _parts_by_linear(modules: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, str]]:
    """The modules' parts by the path of their linear layer in a decoder layer."""
    found: dict[str, dict[str, str]] = {}
    for name, (path, shard) in modules.items():
        found.setdefault(path, {})[name] = shard
    return found


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
