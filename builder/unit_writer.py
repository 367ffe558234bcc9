"""Makes the tensors of a unit from a checkpoint and writes them to the ranks' files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from trimaran.builder.build_plan import BuildPlan, Unit
from trimaran.builder.journal import Checksums
from trimaran.comm.files.input_files import unreadable
from trimaran.kernels.quantized import FP8
from trimaran.worker.config.shard_file import (
    CHECKSUM_CHARS,
    CHUNK_BYTES,
    TensorEntry,
    checksum_of,
    num_chunk_chars,
)
from trimaran.worker.models.weights.checkpoint import CheckpointTensors, is_safetensors
from trimaran.worker.models.weights.weight_loader import load_weight, refuse_overflow


class UnitWriter:
    """Writes units one after another; each process of a build has its own.

    Memory holds one tensor of one rank, and mapped pages of the checkpoint's files for the
    unit, which the system may evict.
    """

    def __init__(self, plan: BuildPlan, paths: Sequence[Path]) -> None:
        self._plan = plan
        self._paths = paths
        self._memory = torch.empty(0, dtype=torch.uint8)

    def make(self, unit: Unit, report: Callable[[int], None]) -> Checksums:
        """Write a unit's tensors; ``report`` gets the bytes of each finished tensor.

        Raises:
            ConfigError: the checkpoint cannot be read.
            OSError: a file cannot be written.
        """
        checksums: Checksums = {}
        with CheckpointTensors() as checkpoint, ExitStack() as stack:
            self._read_ahead(unit)
            files: dict[int, int] = {}
            # A tensor for all ranks at once: a read of a GGUF tensor dequantizes the tensor.
            for rank, name in sorted(unit.places, key=lambda pair: pair[1]):
                if rank not in files:
                    files[rank] = stack.enter_context(_opened(self._paths[rank], os.O_WRONLY))
                tensor = self._filled(rank, name, checkpoint)
                data = _bytes_of(tensor)
                _write(files[rank], data, self._plan.ranks[rank].layout.entries[name].start)
                checksums.setdefault(str(rank), {})[name] = _checksums(data)
                report(len(data))
        return checksums

    def is_intact(self, unit: Unit, expected: Checksums) -> bool:
        """Whether the files hold the unit with these checksums."""
        for rank, name in unit.places:
            entry = self._plan.ranks[rank].layout.entries[name]
            found = checksum_of(self._paths[rank], entry.start, entry.num_bytes)
            text = expected.get(str(rank), {}).get(name, "")
            # A build that an earlier version began has no checksums of chunks.
            has_chunks = len(text) == CHECKSUM_CHARS + num_chunk_chars(entry.num_bytes)
            if not has_chunks or found != text[:CHECKSUM_CHARS]:
                return False
        return True

    def _filled(self, rank: int, name: str, checkpoint: CheckpointTensors) -> Tensor:
        """A rank's tensor, in memory that the next tensor reuses."""
        plan = self._plan.ranks[rank]
        shape = plan.parameters[name]
        if self._memory.numel() < shape.nbytes:
            self._memory = torch.empty(shape.nbytes, dtype=torch.uint8)
        tensor = self._memory[: shape.nbytes].view(shape.dtype).view(shape.shape)
        # Rows that no part fills are padding.
        parameter = nn.Parameter(tensor.zero_(), requires_grad=False)
        for part in plan.parts[name]:
            stored = checkpoint.read(part.stored)
            whole = part.whole(stored, checkpoint.read, tensor.dtype)
            load_weight(plan.model, parameter, part.target, whole, part.stored)
        # Search whole tensors, which every rank reads, only if the result is not finite.
        is_float = tensor.dtype.is_floating_point and tensor.dtype != FP8
        if is_float and not tensor.isfinite().all():
            for part in plan.parts[name]:
                refuse_overflow(checkpoint.read(part.stored), tensor.dtype, part.stored)
        return tensor

    def _read_ahead(self, unit: Unit) -> None:
        """Let the system read the unit's further tensors while the first ones are made."""
        stored = {
            part.stored.name: part.stored
            for rank, name in unit.places
            for part in self._plan.ranks[rank].parts[name]
        }
        for path in {each.path for each in stored.values() if is_safetensors(each.path)}:
            _read_soon(path, [each.entry for each in stored.values() if each.path == path])


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)


def _read_soon(path: Path, entries: Sequence[TensorEntry]) -> None:
    """Ask the system to read these tensors; raises ConfigError if the file is gone."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            for each in entries:
                os.posix_fadvise(file, each.start, each.num_bytes, os.POSIX_FADV_WILLNEED)
    except OSError as error:
        raise unreadable(f"{path}:", error) from None


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _checksums(data: memoryview) -> str:
    """SHA-256 of a tensor, then XXH3 of its chunks, as `ShardLayout.header` takes them."""
    chunks = (
        xxhash.xxh3_128_hexdigest(data[start : start + CHUNK_BYTES])
        for start in range(0, len(data), CHUNK_BYTES)
    )
    return "".join([hashlib.sha256(data).hexdigest(), *chunks])


def _write(file: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], start + done)
