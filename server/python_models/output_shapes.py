"""The shapes of a Python model's outputs: as its code makes them, and as clients see them."""

from __future__ import annotations

import math

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelOutput

from trimaran.server.inference.request import Tensor


class OutputShapes:
    """Undoes the ``reshape`` of outputs: the code's shape follows it, the client's ``dims``."""

    def __init__(self, config: ModelConfig) -> None:
        self._reshaped = {o.name: o for o in config.output if o.HasField("reshape")}
        self._num_batch_dims = int(config.max_batch_size > 0)

    def for_clients(self, tensor: Tensor) -> Tensor:
        """The same values in the configured ``dims``, if they have as many."""
        output = self._reshaped.get(tensor.name)
        if output is None:
            return tensor
        batch = tensor.shape[: self._num_batch_dims]
        shape = batch + _dims(output, tensor.shape[self._num_batch_dims :])
        if math.prod(shape) != tensor.data.size:
            return tensor
        return Tensor(tensor.name, tensor.datatype, tensor.data.reshape(shape))


def _dims(output: ModelOutput, made: tuple[int, ...]) -> tuple[int, ...]:
    """The configured ``dims``, the variable ones as long as those of ``reshape`` were made."""
    given = zip(output.reshape.shape, made, strict=False)
    variable = iter(length for configured, length in given if configured == -1)
    return tuple(next(variable, -1) if dim == -1 else dim for dim in output.dims)
