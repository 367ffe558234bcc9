"""A Hugging Face folder whose linear layers are quantized, written tensor by tensor."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimaran.builder.progress import ProgressBar
from trimaran.builder.quantization.byte_form import ByteForm
from trimaran.builder.quantization.calibrated_weights import (
    FloatWeights,
    calibrated_weights,
    float_weights,
)
from trimaran.builder.quantization.quantized_forms import Fp8Form, PackedForm, QuantizedForm
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json, read_text
from trimaran.worker.config.engine_folder import CONFIG_FILE, EngineFolder
from trimaran.worker.config.schemes import Fp8Scheme, Scheme
from trimaran.worker.config.shard_file import TensorEntry
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.registry import build_model, dtype_by_name
from trimaran.worker.models.weights.checkpoint import (
    file_entries,
    find_tensors,
    is_safetensors,
    mapped_file,
)
from trimaran.worker.models.weights.parts import Conversion, Part, parts_of
from trimaran.worker.parallel.tensor_parallel import ShardPosition

_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pth", ".pt", ".index.json")
_MATRIX_DIMS = 2


def _form_of(scheme: Scheme) -> QuantizedForm:
    """The format in which a folder holds weights of a scheme."""
    if isinstance(scheme, Fp8Scheme):
        return Fp8Form(scheme)
    return PackedForm(scheme) if scheme.activations is None else ByteForm(has_row_scales=True)


class QuantizedFolder:
    """The files of a quantized folder; files of the source keep their names.

    FP8 with a scale a row is compressed-tensors' ``float-quantized``, with blocks transformers'
    ``fp8``; integers are compressed-tensors' ``pack-quantized``, with INT8 inputs
    ``int-quantized``: other programs load all of them. Memory holds one tensor, unless weights
    are fitted to a text.
    """

    def __init__(self, source: EngineFolder, form: QuantizedForm | None = None) -> None:
        """``source`` is quantized as it is read; ``form`` is that of its scheme unless given.

        Raises:
            ConfigError: the checkpoint does not fit its configuration, or is not served
                quantized.
        """
        self._source = source
        quantization = source.config.quantization
        assert quantization is not None, "quantized as it is read"
        self._form = form or _form_of(quantization.rules[0].scheme)
        self._floats: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor
        unread = [path for path in source.weight_files if not is_safetensors(path)]
        if unread:
            raise ConfigError(
                f"{unread[0]}: only safetensors are quantized. Save the weights with "
                "transformers (model.save_pretrained)."
            )
        stage = StageRange.of(source.config.num_hidden_layers, 0, 1)
        model = build_model(
            source.config,
            stage,
            ShardPosition(),
            dtype=dtype_by_name(source.config.dtype),
            device=torch.device("meta"),
        )
        self._parts: dict[str, Part] = {}
        """What is quantized, by the names of tensors."""

        self._calibrated: dict[str, list[tuple[str, Tensor]]] = {}
        for part in parts_of(model, find_tensors(model, source.weight_files)):
            if part.conversion not in (Conversion.VALUES, Conversion.INTEGERS):
                continue
            if part.target.is_transposed:
                raise ConfigError(
                    f"{source.path}: stores matrices as [in, out], which no format of "
                    "quantized weights has. Build or serve it with --quantization."
                )
            # The weight itself comes before its scales.
            self._parts.setdefault(part.stored.name, part)
        self.numbers = self._form.numbers
        """What the weights become."""

        self.num_quantized = len(self._parts)
        self._num_read = 0
        self.num_bytes = 0
        """Bytes of the weights that were written."""

    def calibrate(
        self, text: str, max_sequences: int | None, bits: float | None = None
    ) -> FloatWeights | None:
        """Fit the weights of linear layers to the inputs of a text (`calibrated_weights`).

        With ``bits`` the most sensitive layers stay floats, so that weights have at most so
        many bits in the mean (`float_weights`). Memory holds the model and its quantized
        weights from then on.

        Raises:
            ConfigError: the file cannot be read as text, some inputs are not finite, or the
                layers cannot have so many bits.
        """
        least, most = self._form.bits, 8 * dtype_by_name(self._source.config.dtype).itemsize
        if bits is not None and not least < bits < most:
            raise ConfigError(
                f"--auto_quantize_bits {bits:g}: must be more than the {least} bits of "
                f"{self.numbers} weights and less than the {most} bits of floats. Name "
                f"{(least + most) / 2:g}, or leave the flag out."
            )
        parts = list(self._parts.values())
        self._calibrated = calibrated_weights(
            self._source, parts, self._form, text, max_sequences
        )
        if bits is None:
            return None
        kept = float_weights(self._source, parts, self._form, self._calibrated, text, bits)
        for name in kept.names:
            del self._parts[name], self._calibrated[name]
        self.num_quantized = len(self._parts)
        return kept

    def use_floats(self, floats: Callable[[str, Tensor], Tensor]) -> None:
        """Let ``floats`` change tensors, which are named, before they are quantized; others
        keep their shape and dtype."""
        self._floats = floats

    def write(self, output: Path) -> None:
        """Write the folder, which appears whole or not at all.

        Raises:
            ConfigError: ``output`` exists, or cannot be written.
        """
        self._write_whole(output, has_values=True)

    def write_outline(self, output: Path) -> None:
        """As `write`, but with holes in place of all tensors, which take no room on the disk:
        a build can be laid out."""
        self._write_whole(output, has_values=False)

    def _write_whole(self, output: Path, *, has_values: bool) -> None:
        if output.exists():
            raise ConfigError(f"{output}: exists already. Name another --output.")
        partial = output.with_name(f".{output.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._write(partial, has_values)
            partial.rename(output)
        except OSError as error:
            raise ConfigError(
                f"{output}: cannot be written: {error.strerror or error}. Free space, or name "
                "another --output."
            ) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _write(self, folder: Path, has_values: bool) -> None:
        places: dict[str, str] = {}
        kept: list[str] = []
        files = self._source.weight_files
        with ProgressBar(sum(path.stat().st_size for path in files)) as progress:
            for path in files:
                entries = file_entries(path)
                kept += [
                    name.removesuffix(".weight")
                    for name, entry in entries.items()
                    if name not in self._parts and name.endswith(".weight")
                    if len(entry.shape) == _MATRIX_DIMS
                ]
                made = self._entries(entries)
                places |= dict.fromkeys(made, path.name)
                with _TensorFile(folder / path.name, made) as file:
                    if has_values:
                        self._write_tensors(file, path, entries, progress)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": places}
        if len(files) > 1:
            (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        self._write_config(folder, sorted(kept))

    def _write_tensors(
        self,
        file: _TensorFile,
        source: Path,
        entries: dict[str, TensorEntry],
        progress: ProgressBar,
    ) -> None:
        with mapped_file(source) as tensor_of:
            for name in entries:
                for made, tensor in self._made(name, tensor_of(name)):
                    file.put(made, tensor)
                    self.num_bytes += tensor.nbytes
                self._num_read += entries[name].num_bytes
                progress.show(self._num_read, source.name)

    def _entries(self, entries: dict[str, TensorEntry]) -> dict[str, tuple[str, list[int]]]:
        """Type and shape of each tensor that a file will hold."""
        made: dict[str, tuple[str, list[int]]] = {}
        for name, entry in entries.items():
            if name in self._parts:
                made |= self._form.entries(name, entry)
            else:
                made[name] = entry.dtype, list(entry.shape)
        return made

    def _made(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """What becomes of a tensor: itself, or its quantized values and their scales."""
        tensor = self._floats(name, tensor)
        if name not in self._parts:
            return [(name, tensor)]
        return self._calibrated.get(name) or self._form.tensors(name, tensor)

    def _write_config(self, folder: Path, kept: list[str]) -> None:
        """Describe the format in ``config.json``, and copy tokenizer and templates."""
        source = self._source.path
        values = dict(parse_json(read_text(source / CONFIG_FILE)))
        values["quantization_config"] = self._form.description(kept)
        text = json.dumps(values, indent=2) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        for path in source.iterdir():
            is_other = path.is_file() and not path.name.endswith(_WEIGHTS)
            if is_other and path.name != CONFIG_FILE:
                shutil.copyfile(path, folder / path.name)


_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


class _TensorFile:
    """A safetensors file whose header is written before its tensors, which come in any
    order."""

    def __init__(self, path: Path, entries: dict[str, tuple[str, list[int]]]) -> None:
        self._path = path
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        # Wide types first, so that every tensor is aligned.
        for name in sorted(entries, key=lambda name: -_ITEM_BYTES.get(entries[name][0], 1)):
            word, shape = entries[name]
            size = _ITEM_BYTES.get(word, 1)
            for length in shape:
                size *= length
            self._starts[name] = end
            header[name] = {"dtype": word, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._num_bytes = len(self._header) + end
        self._file = -1

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to its place."""
        data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        start, done = len(self._header) + self._starts[name], 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], start + done)

    def __enter__(self) -> _TensorFile:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.write(self._file, self._header)
        os.ftruncate(self._file, self._num_bytes)
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            os.fsync(self._file)
        os.close(self._file)
