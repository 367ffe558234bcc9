"""Makes the tensors of one unit from a checkpoint and writes them to the ranks' files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from trimaran.builder.build_plan import BuildPlan, Part, Unit
from trimaran.builder.journal import Checksums
from trimaran.comm.files.input_files import unreadable
from trimaran.worker.config.shard_file import TensorEntry, checksum_of
from trimaran.worker.models.weights.checkpoint import is_safetensors, mapped_file
from trimaran.worker.models.weights.weight_loader import load_weight, refuse_overflow


class UnitWriter:
    """Writes units one after another; each process of a build has its own.

    In memory are one tensor of one rank, and the pages of the checkpoint's files that the
    unit is made of, which the system may take back.
    """

    def __init__(self, plan: BuildPlan, paths: Sequence[Path]) -> None:
        self._plan = plan
        self._paths = paths
        self._memory = torch.empty(0, dtype=torch.uint8)

    def make(self, unit: Unit, say: Callable[[int], None]) -> Checksums:
        """Write a unit's tensors; ``say`` gets the bytes of each that is done.

        Raises:
            ConfigError: the checkpoint cannot be read.
            OSError: a file cannot be written.
        """
        checksums: Checksums = {}
        with _Checkpoint() as checkpoint, ExitStack() as stack:
            self._read_ahead(unit)
            files: dict[int, int] = {}
            for rank, name in unit.places:
                if rank not in files:
                    files[rank] = stack.enter_context(_opened(self._paths[rank], os.O_WRONLY))
                tensor = self._filled(rank, name, checkpoint)
                data = _bytes_of(tensor)
                _write(files[rank], data, self._plan.ranks[rank].layout.entries[name].start)
                digest = hashlib.sha256(data).hexdigest()
                checksums.setdefault(str(rank), {})[name] = digest
                say(len(data))
        return checksums

    def is_intact(self, unit: Unit, expected: Checksums) -> bool:
        """Whether the files hold the unit as it was once written."""
        for rank, name in unit.places:
            entry = self._plan.ranks[rank].layout.entries[name]
            found = checksum_of(self._paths[rank], entry.start, entry.num_bytes)
            if found != expected.get(str(rank), {}).get(name):
                return False
        return True

    def _filled(self, rank: int, name: str, checkpoint: _Checkpoint) -> Tensor:
        """A rank's tensor, in memory that the next one uses again."""
        plan = self._plan.ranks[rank]
        shape = plan.parameters[name]
        if self._memory.numel() < shape.nbytes:
            self._memory = torch.empty(shape.nbytes, dtype=torch.uint8)
        tensor = self._memory[: shape.nbytes].view(shape.dtype).view(shape.shape)
        # What no part fills is padding.
        parameter = nn.Parameter(tensor.zero_(), requires_grad=False)
        for part in plan.parts[name]:
            whole = checkpoint.tensor(part)
            load_weight(plan.model, parameter, part.target, whole, part.stored)
        # The whole tensors, which every rank reads, are looked through only when it matters.
        if not tensor.isfinite().all():
            for part in plan.parts[name]:
                refuse_overflow(checkpoint.tensor(part), tensor.dtype, part.stored)
        return tensor

    def _read_ahead(self, unit: Unit) -> None:
        """Let the system read what a unit needs while its first tensors are made."""
        stored = {
            part.stored.name: part.stored
            for rank, name in unit.places
            for part in self._plan.ranks[rank].parts[name]
        }
        for path in {each.path for each in stored.values() if is_safetensors(each.path)}:
            _read_soon(path, [each.entry for each in stored.values() if each.path == path])


class _Checkpoint:
    """A checkpoint's files, memory-mapped as they are needed and let go together."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._files: dict[Path, Callable[[str], Tensor]] = {}

    def tensor(self, part: Part) -> Tensor:
        """A whole tensor, read when it is used."""
        path, name = part.stored.path, part.stored.name
        if path not in self._files:
            self._files[path] = self._stack.enter_context(mapped_file(path))
        return self._files[path](name)

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.clear()
        self._stack.close()


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)


def _read_soon(path: Path, entries: Sequence[TensorEntry]) -> None:
    """Raises ConfigError where the file is there no more."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            for each in entries:
                os.posix_fadvise(file, each.start, each.num_bytes, os.POSIX_FADV_WILLNEED)
    except OSError as error:
        raise unreadable(f"{path}:", error) from None


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write(file: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], start + done)
