"""The choice of kernels for a device and dtype, made once and visible by name."""

from __future__ import annotations

import importlib.util
import logging

import torch

from trimaran.comm.errors import ConfigError
from trimaran.kernels.build import KernelsUnavailableError, load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.operators import Ops
from trimaran.kernels.tables.tuned_choices import TunedChoices
from trimaran.kernels.torch_ops import TorchOps

logger = logging.getLogger(__name__)


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int = 1,
    deterministic: bool = False,
    choices: TunedChoices | None = None,
) -> Ops:
    """The fastest operators for ``device`` and ``dtype``; ``num_threads`` is for a CPU.

    ``choices`` among a GPU's kernels are those that the package ships by default.

    With ``deterministic``, a token's result is independent of the other tokens in the batch.
    The C++ kernels for a CPU always have that property.

    Raises:
        ConfigError: the device has no operators, or no deterministic operators.
    """
    if device.type != "cpu":
        return _gpu_ops(device, dtype, deterministic, choices)
    try:
        return CpuOps(load_library(), dtype, num_threads)
    except KernelsUnavailableError as error:
        if deterministic:
            raise ConfigError(
                f"--deterministic is set but the CPU's kernels are not available ({error}), "
                "and torch, which would serve all operators, rounds a token's products "
                "depending on the number of tokens. Provide the kernels, or serve without "
                "--deterministic."
            ) from error
        logger.warning("torch serves all operators, several times slower: %s", error)
        return TorchOps()


def _gpu_ops(
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool,
    choices: TunedChoices | None,
) -> Ops:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"device is {device.type} but the package triton, by which a GPU runs, is not "
            "installed. Install it (pip install 'trimaran[gpu]'), or serve on the CPU."
        )
    # These modules import Triton, which a CPU installation lacks.
    from trimaran.kernels.decode_attention import select_decode_attention
    from trimaran.kernels.experts.floats import select_experts
    from trimaran.kernels.gpu import TritonOps
    from trimaran.kernels.integer_products import select_integer_products
    from trimaran.kernels.products import select_products
    from trimaran.kernels.prompt_attention import select_prompt_attention

    return TritonOps(
        deterministic,
        select_products(device, dtype, deterministic, choices),
        select_prompt_attention(device, dtype),
        select_decode_attention(device, dtype),
        select_experts(device, dtype, deterministic, choices),
        select_integer_products(device, dtype, deterministic),
    )
