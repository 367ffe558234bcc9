"""Quantized weights that are fitted to the inputs of a text, before a folder is written."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trimaran.builder.calibration_text import calibration_model, calibration_sequences
from trimaran.builder.progress import ProgressBar
from trimaran.builder.quantized_forms import QuantizedForm
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.models.input_grams import input_grams
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.models.weights.checkpoint import mapped_file
from trimaran.worker.models.weights.parts import Part

_PASS_BYTES = 4 << 30
"""Memory for the sums over inputs: layers beyond are measured in a further pass."""


def calibrated_weights(
    source: EngineFolder,
    parts: list[Part],
    form: QuantizedForm,
    text: str,
    max_sequences: int | None,
) -> dict[str, list[tuple[str, Tensor]]]:
    """The tensors that replace each float weight, by the weight's name in the checkpoint.

    The model of ``source``, without quantization, reads the file ``text`` (``--calib``) once
    for as many layers as fit into 4 GiB. Later passes run on the rounded weights of earlier
    ones. Experts are not among the results: few tokens of a text reach each of them.

    Raises:
        ConfigError: the file cannot be read as text, or some inputs are not finite.
    """
    sequences = calibration_sequences("--calib", text, source, max_sequences)
    model = calibration_model(source, source.config.dtype, "none")
    made: dict[str, list[tuple[str, Tensor]]] = {}
    passes = list(_passes(model, parts))
    num_tokens = len(passes) * sum(map(len, sequences))
    done = 0
    with ProgressBar(num_tokens) as progress:

        def tell(count: int) -> None:
            nonlocal done
            done += count
            progress.show(done, f"{done} of {num_tokens} tokens read")

        for layers in passes:
            grams = input_grams(model, layers, sequences, tell)
            for path, gram_DD in grams.items():
                if not bool(gram_DD.isfinite().all()):
                    raise ConfigError(
                        f"--calib {text}: some inputs of {path} are not finite. Check the "
                        "checkpoint's weights."
                    )
                for part in layers[path]:
                    made[part.stored.name] = _fit(model, part, form, gram_DD)
    return made


def _passes(model: CausalLM, parts: list[Part]) -> Iterator[dict[str, list[Part]]]:
    """The parts of linear layers by the layer's name, in the model's order."""
    of_layers: dict[str, list[Part]] = {}
    for part in parts:
        of_layers.setdefault(part.target.parameter.rpartition(".")[0], []).append(part)
    chosen: dict[str, list[Part]] = {}
    num_bytes = 0
    for path, module in model.named_modules():
        if path not in of_layers or not isinstance(module, ParallelLinear):
            continue
        needed = 4 * module.weight.shape[1] ** 2
        if chosen and num_bytes + needed > _PASS_BYTES:
            yield chosen
            chosen, num_bytes = {}, 0
        chosen[path] = of_layers[path]
        num_bytes += needed
    if chosen:
        yield chosen


@torch.inference_mode()
def _fit(
    model: CausalLM, part: Part, form: QuantizedForm, gram_DD: Tensor
) -> list[tuple[str, Tensor]]:
    """Round one weight, also in the model."""
    with mapped_file(part.stored.path) as tensor_of:
        floats = tensor_of(part.stored.name)
    made = form.tensors(part.stored.name, floats, gram_DD)
    path, _, name = part.target.parameter.rpartition(".")
    layer = model.get_submodule(path)
    assert isinstance(layer, ParallelLinear)
    rounded = form.floats([tensor for _, tensor in made])
    layer.weight_loader(getattr(layer, name), rounded.to(layer.weight), part.target.shard)
    return made
