"""The method of experts with integer matrices: its parameters, and what ranks hold of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimaran.comm.errors import ConfigError
from trimaran.kernels.integer_reference import expert_storage
from trimaran.kernels.integers import IntegerExperts, IntegerWeight
from trimaran.kernels.operators import Ops
from trimaran.worker.config.schemes import IntegerScheme, Zeros
from trimaran.worker.layers.experts import Experts
from trimaran.worker.quantization.fp8_linear import add_parameter
from trimaran.worker.quantization.integer_formats import kind_of, parameter_name
from trimaran.worker.quantization.integer_shards import IntegerShards
from trimaran.worker.quantization.self_check import check_integer_experts

# Shapes: X slots of experts of this rank, T tokens, D hidden size, C experts of a token.

_REMEDY = "Name a checkpoint whose experts have weights alone in integers, or one in bfloat16."


class IntegerExpertMethod:
    """Experts as `IntegerLinearMethod` treats linear layers, one by one.

    Once weights are loaded, the device's storage of the experts replaces the parameters; the
    first dimension of its tensors is the slots too.
    """

    def __init__(self, ops: Ops, scheme: IntegerScheme) -> None:
        """Raises `ConfigError` for schemes whose experts are not served."""
        if scheme.activations is not None:
            raise ConfigError(f"experts whose inputs become INT8 are not served. {_REMEDY}")
        assert scheme.zeros is not Zeros.MINIMUM, "GGUF files with experts are refused"
        self._ops = ops
        self._shards = IntegerShards(scheme)
        self.scheme = scheme
        self.name = scheme.label
        self._forms: dict[str, IntegerExperts] = {}

    def create_weights(
        self, layer: nn.Module, num_experts: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """For each matrix the parameters of `IntegerShards`, of all slots.

        Raises:
            ConfigError: an odd number of inputs does not fill bytes.
        """
        assert isinstance(layer, Experts)
        for name, matrix in layer.matrices.items():
            for kind, (size, numbers) in self._shards.parameters(matrix, matrix.shape).items():
                own = parameter_name(name, kind)
                add_parameter(layer, own, (num_experts, *size), numbers, device)

    def load_part(
        self, layer: nn.Module, parameter: nn.Parameter, loaded: Tensor, target: tuple[str, str]
    ) -> None:
        """Copy this rank's shard of an expert's whole unpacked tensor
        (`integer_formats.unpacked`); ``target`` is the parameter's name and the shard.

        Raises:
            WeightShapeError: the tensor has another shape than the configuration implies.
        """
        assert isinstance(layer, Experts)
        slot, part = layer.place(target[1])
        mine = nn.Parameter(parameter.data[slot], requires_grad=False)
        self._shards.load(layer.matrix_of(part), kind_of(target[0]), mine, loaded, part)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Store the matrices as the device's products take them, and compare the products with
        their definition.

        Raises:
            ConfigError: the results differ.
        """
        assert isinstance(layer, Experts)
        weights = {name: self.weights_of(layer, name) for name in layer.matrices}
        layer._parameters.clear()
        for name in layer.matrices:
            stored = self._ops.integer_expert_storage(weights[name], is_gated=name == "gate_up")
            tensors = stored.tensors()
            for field, tensor in tensors.items():
                own = nn.Parameter(tensor, requires_grad=False)
                layer.register_parameter(_stored_name(name, field), own)
            # The layer alone owns the tensors: slots that are added take new memory.
            self._forms[name] = stored.with_tensors(
                {field: tensor.new_empty(0) for field, tensor in tensors.items()}
            )
        defined = expert_storage(weights["gate_up"]), expert_storage(weights["down"])
        check_integer_experts(self._ops, self._experts(layer), defined, layer.dtype)

    def weights_of(self, layer: Experts, name: str) -> list[IntegerWeight]:
        """The matrices of the slots as operators take them, before they are stored."""
        kinds = self._shards.parameters(layer.matrices[name], layer.matrices[name].shape)
        stacks = {kind: getattr(layer, parameter_name(name, kind)).data for kind in kinds}
        return [
            self._shards.weight(
                layer.matrices[name], {kind: stack[slot] for kind, stack in stacks.items()}
            )
            for slot in range(layer.num_slots)
        ]

    def apply(
        self, layer: nn.Module, x_TD: Tensor, weights_TC: Tensor, ids_TC: Tensor
    ) -> Tensor:
        """The sum of this rank's experts."""
        assert isinstance(layer, Experts)
        gate_up, down = self._experts(layer)
        return self._ops.integer_expert_mlp(
            x_TD, weights_TC, ids_TC, gate_up, down, layer.first, layer.form
        )

    def _experts(self, layer: Experts) -> tuple[IntegerExperts, IntegerExperts]:
        """The two stacks of matrices, as the slots hold them now."""
        found = [
            form.with_tensors(
                {
                    field: getattr(layer, _stored_name(name, field)).data
                    for field in form.tensors()
                }
            )
            for name, form in self._forms.items()
        ]
        return found[0], found[1]


def _stored_name(matrix: str, field: str) -> str:
    return matrix if field == "values" else f"{matrix}_{field}"
