"""Formats of LoRA adapters: request tensors, converted folders, PEFT, and folders of many."""

from __future__ import annotations

import errno
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.output_files import check_replaceable
from trimaran.worker.config.checkpoint_folder import PEFT_CONFIG
from trimaran.worker.lora.layout import (
    AdapterFormatError,
    AdapterLayout,
    Matrices,
    check_modules,
    module_name,
)
from trimaran.worker.lora.peft import PEFT_WEIGHTS, PeftAdapter

WEIGHTS_FILE = "model.lora_weights.npy"
CONFIG_FILES = ("model.lora_config.npy", "model.lora_keys.npy")
"""The second name is that of older converters."""

_DTYPES = {"FP16": "<f2", "FP32": "<f4", "BF16": "<u2"}


class CheckedSource(Protocol):
    """An adapter that was checked, in a folder, a request or a message."""

    @property
    def ranks(self) -> list[tuple[int, int, int]]:
        """(module, layer, rank) of all pairs of matrices."""
        ...

    def matrices(self, layout: AdapterLayout) -> Iterator[Matrices]:
        """The matrices of an adapter that was checked; every call yields the same values."""
        ...


class AdapterSource(CheckedSource, Protocol):
    """An adapter that was not checked yet."""

    def check(self, layout: AdapterLayout, max_rank: int) -> None:
        """Raise `AdapterFormatError` unless a model of this layout can use every matrix."""
        ...


class AdapterTensors:
    """An adapter as two tensors: rows of weights [n, k], and their config int32 [n, 3].

    A row of the config is (module, layer, rank D); the row of weights holds A [D, inputs],
    then B [outputs, D], then padding. Weights of dtype uint16 are bfloat16.
    """

    def __init__(self, weights_NK: npt.NDArray[Any], config_N3: npt.NDArray[np.int32]) -> None:
        if weights_NK.ndim == 3 and len(weights_NK) == 1:
            weights_NK = weights_NK[0]
        if config_N3.ndim == 3 and len(config_N3) == 1:
            config_N3 = config_N3[0]
        shapes = list(weights_NK.shape), list(config_N3.shape)
        if weights_NK.ndim != 2 or config_N3.ndim != 2 or config_N3.shape[1] != 3:
            raise AdapterFormatError(
                f"lora_weights has shape {shapes[0]} and lora_config {shapes[1]}, but they "
                "must be [n, k] and [n, 3]"
            )
        if len(weights_NK) != len(config_N3):
            raise AdapterFormatError(
                f"lora_weights has {len(weights_NK)} rows but lora_config has "
                f"{len(config_N3)}; there must be one of each for every module"
            )
        self.weights_NK = weights_NK
        self.config_N3 = config_N3

    @classmethod
    def from_wire(cls, weights: dict[str, Any], config: dict[str, Any]) -> AdapterTensors:
        """The tensors of a message: ``datatype``, ``shape`` and ``data`` each."""
        if weights["datatype"] not in _DTYPES:
            raise AdapterFormatError(
                f"lora_weights is {weights['datatype']} but must be one of {', '.join(_DTYPES)}"
            )
        try:
            # A view of the message, which may be large; a thread of its own reads the weights.
            values = np.frombuffer(weights["data"], _DTYPES[weights["datatype"]])
            values = values.reshape(weights["shape"])
            modules = np.frombuffer(config["data"], "<i4").reshape(config["shape"])
        except ValueError as error:
            raise AdapterFormatError(f"lora_weights or lora_config: {error}") from None
        return cls(values, modules)

    @property
    def ranks(self) -> list[tuple[int, int, int]]:
        """(module, layer, rank) of every row."""
        return [(int(m), int(layer), int(rank)) for m, layer, rank in self.config_N3]

    def check(self, layout: AdapterLayout, max_rank: int) -> None:
        """Raise `AdapterFormatError` unless a model of this layout can use all rows."""
        # Before anything is made of each row: a client chooses their number, and steps wait.
        if len(self.config_N3) > layout.num_modules:
            raise AdapterFormatError(
                f"lora_config has {len(self.config_N3)} rows, but the model's "
                f"{layout.num_layers} layers have {layout.num_modules} modules that take "
                "adapters. Send at most one row for each of them."
            )
        sources = [f"lora_config row {n}, {list(row)}" for n, row in enumerate(self.ranks)]
        check_modules(sources, self.ranks, layout, max_rank)
        longest = layout.longest_row(max_rank)
        if self.weights_NK.shape[1] > longest:
            # Front ends keep adapters as they came, with all zeros behind the weights.
            raise AdapterFormatError(
                f"a row of lora_weights has {self.weights_NK.shape[1]} weights, but the "
                f"model's largest module has {longest} at the adapter size {max_rank} "
                "(lora_cache_max_adapter_size of the model). Leave out zeros behind these."
            )
        for where, (module, layer, rank) in zip(sources, self.ranks, strict=True):
            shape = layout.shape_of(module, layer)
            assert shape is not None
            needed, given = rank * sum(shape), self.weights_NK.shape[1]
            if needed > given:
                raise AdapterFormatError(
                    f"{where}: {module_name(module)} of size {rank} has {needed} weights "
                    f"({shape[0]} inputs, {shape[1]} outputs), but a row of lora_weights has "
                    f"{given}"
                )

    def matrices(self, layout: AdapterLayout) -> Iterator[Matrices]:
        """The matrices of rows that were checked."""
        for (module, layer, rank), row in zip(self.ranks, self.weights_NK, strict=True):
            shape = layout.shape_of(module, layer)
            assert shape is not None
            num_inputs, num_outputs = shape
            at_b = rank * num_inputs
            values = torch.from_numpy(row[: at_b + rank * num_outputs].copy())
            if values.dtype is torch.uint16:
                values = values.view(torch.bfloat16)
            a = values[:at_b].view(rank, num_inputs)
            yield Matrices(module, layer, a, values[at_b:].view(num_outputs, rank))


# ---- folders ----------------------------------------------------------------------------


class _FolderTensors(AdapterTensors):
    """The tensors of a folder; the weights are read at their first use and then kept."""

    def __init__(self, path: Path, config_N3: npt.NDArray[np.int32]) -> None:
        weights = _mapped(path)
        if weights.dtype not in (np.float16, np.float32):
            raise AdapterFormatError(
                f"{path}: holds {weights.dtype} but must hold float16 or float32. Convert the "
                "adapter again with --storage-type float16."
            )
        super().__init__(weights, config_N3)
        self._path = path
        self._is_read = False

    def matrices(self, layout: AdapterLayout) -> Iterator[Matrices]:
        """See `AdapterTensors.matrices`.

        Raises:
            AdapterFormatError: the file cannot be read any more, or has changed.
        """
        if not self._is_read:
            weights = AdapterTensors(_read_array(self._path), self.config_N3).weights_NK
            said = self.weights_NK
            if (weights.shape, weights.dtype) != (said.shape, said.dtype):
                raise AdapterFormatError(
                    f"{self._path}: holds another array than a moment ago. Ask again when it "
                    "is written, and replace files of adapters by renaming others."
                )
            self.weights_NK, self._is_read = weights, True
        yield from super().matrices(layout)


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter, converted or of PEFT."""
    has_arrays = (folder / WEIGHTS_FILE).is_file()
    return has_arrays or (folder / PEFT_CONFIG).is_file()


def version_of(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """Times and sizes that change when one of the folder's files is replaced.

    The time of a file's last change counts: a copy can keep the modification time.

    Raises:
        AdapterFormatError: the weight file is missing.
    """
    is_peft = not (folder / WEIGHTS_FILE).is_file()
    weights, configs = (
        (PEFT_WEIGHTS, (PEFT_CONFIG,)) if is_peft else (WEIGHTS_FILE, CONFIG_FILES)
    )
    try:
        found = [(folder / weights).stat()]
    except OSError as error:
        raise AdapterFormatError(f"{folder / weights}: {error.strerror}") from None
    for name in configs:
        # The reader reports the error.
        with suppress(OSError):
            found.append((folder / name).stat())
    return tuple((each.st_mtime_ns, each.st_ctime_ns, each.st_size) for each in found)


def read_folder(folder: Path) -> AdapterSource:
    """The adapter of a folder: the two files of a converter, or the files of PEFT if the folder
    has no converter's files.

    Configurations are checked here; weights are read at their first use.

    Raises:
        AdapterFormatError: names the file and what is wrong with it.
    """
    if (folder / WEIGHTS_FILE).is_file():
        config = next((name for name in CONFIG_FILES if (folder / name).is_file()), None)
        if config is None:
            raise AdapterFormatError(f"{folder}: holds {WEIGHTS_FILE} but no {CONFIG_FILES[0]}")
        return _FolderTensors(folder / WEIGHTS_FILE, _read_config(folder / config))
    return PeftAdapter(folder)


def _read_config(path: Path) -> npt.NDArray[np.int32]:
    config = _read_array(path)
    whole = np.zeros(0, dtype=np.int32)
    if config.dtype.kind in "iuf":
        with np.errstate(invalid="ignore"):
            whole = config.astype(np.int32)
    if not np.array_equal(whole, config):
        raise AdapterFormatError(
            f"{path}: holds {config.dtype} that are no whole numbers of 32 bits, but must hold "
            "a module, a layer and a size in each row. Convert the adapter again."
        )
    return whole


def _read_array(path: Path) -> npt.NDArray[Any]:
    """A file's array, copied to memory: truncating a mapped file would end the process."""
    mapped = _mapped(path)
    try:
        values: npt.NDArray[Any] = np.fromfile(
            path, dtype=mapped.dtype, count=mapped.size, offset=mapped.offset
        )
        values = values.reshape(mapped.shape, order="F" if mapped.flags.fnc else "C")
    # A sparse file may claim more bytes than the host has memory.
    except (OSError, ValueError, MemoryError) as error:
        raise AdapterFormatError(f"{path}: cannot be read: {error}") from None
    return values


def _mapped(path: Path) -> np.memmap[Any, Any]:
    """A file's array, mapped: dtype, shape and length are checked, values are not."""
    try:
        mapped: np.memmap[Any, Any] = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise AdapterFormatError(f"{path}: cannot be read: {error}") from None
    return mapped


def to_tensors(matrices: Sequence[Matrices]) -> AdapterTensors:
    """Matrices as one padded row each."""
    if not matrices:
        raise AdapterFormatError("the adapter holds no matrices")
    sizes = [one.a.numel() + one.b.numel() for one in matrices]
    weights = np.zeros((len(matrices), max(sizes)), dtype=np.float32)
    for row, one, size in zip(weights, matrices, sizes, strict=True):
        row[:size] = torch.cat([one.a.flatten(), one.b.flatten()]).numpy()
    config = [[one.module, one.layer, one.a.shape[0]] for one in matrices]
    return AdapterTensors(weights, np.array(config, dtype=np.int32))


def write_arrays(tensors: AdapterTensors, folder: Path, dtype: str) -> None:
    """The converter's two files, [1, n, k] and [1, n, 3].

    Raises:
        ConfigError: the folder cannot be written, or a weight is beyond what ``dtype`` holds.
    """
    with np.errstate(over="ignore"):
        weights = tensors.weights_NK.astype(dtype)
    if np.isinf(weights).any():
        peak = np.abs(tensors.weights_NK).max()
        raise ConfigError(
            f"{folder}: the adapter's largest weight is {peak:g} but {dtype} ends at "
            f"{np.finfo(dtype).max:g}. Choose --storage-type float32."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {WEIGHTS_FILE: weights[None], CONFIG_FILES[0]: tensors.config_N3[None]}
        for name in arrays:
            check_replaceable("--out-dir:", folder / name)
        # A reader of the folder gets the old adapter or the new adapter, each whole.
        for name, array in arrays.items():
            np.save(_part_of(folder / name), array)
        for name in arrays:
            _part_of(folder / name).replace(folder / name)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}") from None
    finally:
        for name in (WEIGHTS_FILE, CONFIG_FILES[0]):
            # The obstacle that the error names also blocks the temporary file.
            with suppress(OSError):
                _part_of(folder / name).unlink()


def _part_of(path: Path) -> Path:
    """The name of a file until it is complete; numpy appends its suffix to other names."""
    return path.with_name(f".{path.name}.{os.getpid()}.npy")


_MAX_ID = (1 << 64) - 1
_MAX_DIGITS = 20


class AdapterFolders:
    """The subfolders of ``lora_prefetch_dir``, each named by a task id or an adapter's name.

    New folders and replaced weights are found at the next request.
    """

    def __init__(self, root: str) -> None:
        self._root = Path(root) if root else None

    def find(self, key: int | str) -> Path | None:
        """The folder of a task id or name, if there is one."""
        name = str(key)
        # A client may send any name: no name may lead out of the folder.
        if self._root is None or Path(name).name != name or name in ("", ".."):
            return None
        folder = self._root / name
        try:
            return folder if is_adapter_folder(folder) else None
        except OSError as error:
            # No folder can have some names, such as those with a null byte.
            if error.errno == errno.ENAMETOOLONG:
                return None
            raise AdapterFormatError(f"{folder}: {error.strerror}") from None

    def all(self) -> list[tuple[int | str, Path]]:
        """All adapters, in order of their names."""
        return [(key_of(name), self._root / name) for name in self.names() if self._root]

    def names(self) -> list[str]:
        """The names of all adapters, sorted."""
        if self._root is None:
            return []
        try:
            return sorted(p.name for p in self._root.iterdir() if is_adapter_folder(p))
        except OSError as error:
            raise AdapterFormatError(f"{self._root}: {error.strerror}") from None

    def content(self, folder: Path) -> tuple[Hashable, ...]:
        """A value that stays equal as long as the folder's files are not replaced."""
        return str(folder), version_of(folder)

    def unknown(self, folder: Path) -> tuple[Hashable, ...]:
        """A value that is equal to no `content`."""
        return (str(folder),)

    def is_still(self, folder: Path, content: object) -> bool:
        """Whether the folder still has exactly the files of this content."""
        try:
            return self.content(folder) == content
        except AdapterFormatError:
            return False

    def holds(self, content: object) -> bool:
        """Whether this content belongs to a folder."""
        return isinstance(content, tuple)

    def read(self, folder: Path) -> AdapterSource:
        """The adapter of a folder.

        Raises:
            AdapterFormatError: names the file and what is wrong with it.
        """
        try:
            return read_folder(folder)
        except AdapterFormatError:
            raise
        # JSON may hold numbers of too many digits, or lists nested too deep.
        except (ValueError, OverflowError, RecursionError) as error:
            raise AdapterFormatError(f"{folder}: cannot be read: {error}") from None


def key_of(name: str) -> int | str:
    """The key of an adapter of this name: a task id if the name is a number."""
    if len(name) > _MAX_DIGITS or not name.isdecimal():
        return name
    is_task = int(name) <= _MAX_ID and str(int(name)) == name
    return int(name) if is_task else name
