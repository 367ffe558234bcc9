"""The method of experts with FP8 matrices: its parameters, and how ranks cut them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimaran.comm.errors import ConfigError
from trimaran.kernels.operators import Ops
from trimaran.kernels.quantized import FP8, BlockMap, ByteInputs, Fp8Experts
from trimaran.worker.config.schemes import Activations, Fp8Scheme
from trimaran.worker.layers.experts import Experts
from trimaran.worker.quantization.fp8_linear import (
    INPUT_SCALE,
    WEIGHT_SCALE,
    add_parameter,
    block_rows,
    load_input_scale,
    load_weight_scales,
    scale_prefix,
)
from trimaran.worker.quantization.self_check import check_experts

# Shapes: X slots of experts of this rank, E outputs, D inputs of this rank; of scales: R rows
# and C columns of blocks.


class Fp8ExpertMethod:
    """Experts as `Fp8LinearMethod` treats linear layers, one by one.

    Each expert has its own static scales of inputs: a token's result does not depend on the
    experts that a rank holds.
    """

    name = "fp8"

    def __init__(self, ops: Ops, scheme: Fp8Scheme) -> None:
        self._ops = ops
        self.scheme = scheme
        self._blocks: dict[str, BlockMap | None] = {}

    @property
    def has_input_scale(self) -> bool:
        """Whether the checkpoint holds the scales of inputs."""
        return self.scheme.activations is Activations.STATIC

    def create_weights(
        self, layer: nn.Module, num_experts: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """For each matrix FP8 values [X, E, D], float32 scales [X, E] or [X, R, C], and for
        static inputs float32 scales [X, stacked matrices].

        Raises:
            ConfigError: the experts have biases.
        """
        assert isinstance(layer, Experts)
        if layer.biases is not None:
            raise ConfigError(
                "experts with biases are not served in FP8. Serve the model in bfloat16, or "
                "with integer or MXFP4 experts."
            )
        for name, matrix in layer.matrices.items():
            prefix, block = scale_prefix(name), self.scheme.block
            scales: tuple[int, ...] = matrix.shape[:1]
            if block is not None:
                # Shares are whole blocks.
                scales = block_rows(matrix, block[0]).count, -(-matrix.shape[1] // block[1])
            add_parameter(layer, name, (num_experts, *matrix.shape), FP8, device)
            add_parameter(
                layer, prefix + WEIGHT_SCALE, (num_experts, *scales), torch.float32, device
            )
            if self.has_input_scale:
                shape = num_experts, len(matrix.output_parts)
                add_parameter(layer, prefix + INPUT_SCALE, shape, torch.float32, device)

    def load_scale(
        self, layer: nn.Module, parameter: nn.Parameter, loaded: Tensor, target: tuple[str, str]
    ) -> None:
        """Copy this rank's scales of an expert from a checkpoint's tensor; ``target`` is the
        parameter's name and the shard.

        Raises:
            WeightShapeError: the tensor has another shape than the configuration implies.
        """
        assert isinstance(layer, Experts)
        slot, part = layer.place(target[1])
        scales = nn.Parameter(parameter.data[slot], requires_grad=False)
        matrix = layer.matrix_of(part)
        if target[0].endswith(INPUT_SCALE):
            load_input_scale(matrix, scales, loaded, part)
        else:
            load_weight_scales(self.scheme.block, matrix, scales, loaded, part)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Store the matrices as the device's products take them, and compare the products with
        their definition.

        Raises:
            ConfigError: the results differ, or the device has no such products.
        """
        assert isinstance(layer, Experts)
        for name, matrix in layer.matrices.items():
            blocks = None
            if self.scheme.block is not None:
                rows, columns = self.scheme.block
                rows_E = block_rows(matrix, rows).of_outputs
                blocks = BlockMap.of(rows_E, columns, 0, layer.gate_up.device)
            self._blocks[name] = blocks
            if self.has_input_scale:
                # Stacked matrices share their input.
                scale = getattr(layer, scale_prefix(name) + INPUT_SCALE)
                scale.data = scale.data.amax(1)
        stored = self._experts(layer)
        for name in layer.matrices:
            values = self._ops.fp8_expert_storage(getattr(layer, name).data, self._blocks[name])
            setattr(layer, name, nn.Parameter(values, requires_grad=False))
        check_experts(self._ops, self._experts(layer), stored, layer.dtype)

    def apply(
        self, layer: nn.Module, x_TD: Tensor, weights_TC: Tensor, ids_TC: Tensor
    ) -> Tensor:
        """The sum of this rank's experts."""
        assert isinstance(layer, Experts)
        gate_up, down = self._experts(layer)
        return self._ops.fp8_expert_mlp(x_TD, weights_TC, ids_TC, gate_up, down, layer.first)

    def _experts(self, layer: Experts) -> tuple[Fp8Experts, Fp8Experts]:
        """The two stacks of matrices, as the slots hold them now."""
        return self._matrices(layer, "gate_up"), self._matrices(layer, "down")

    def _matrices(self, layer: Experts, name: str) -> Fp8Experts:
        prefix = scale_prefix(name)
        static = getattr(layer, prefix + INPUT_SCALE, None)
        inputs = ByteInputs(
            None if static is None else static.data,
            self.scheme.activation_bound,
            self.scheme.has_power_scales,
        )
        values = getattr(layer, name).data
        scales = getattr(layer, prefix + WEIGHT_SCALE).data
        return Fp8Experts(values, scales, self._blocks[name], inputs)
