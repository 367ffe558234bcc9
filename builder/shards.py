"""Writes one weight file a rank, layer by layer in several processes."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trimaran.builder.build_plan import BuildPlan
from trimaran.builder.config_file import ShardTable
from trimaran.builder.journal import Checksums, Journal, empty, stamp
from trimaran.builder.output_folder import check_space
from trimaran.builder.processes import ForkedWorkers, ReportProgress
from trimaran.builder.progress import ProgressBar
from trimaran.builder.unit_writer import UnitWriter
from trimaran.worker.config.engine_folder import (
    FORMAT_VERSION,
    EngineFolder,
    RankMapping,
    shard_path,
)
from trimaran.worker.config.host_limits import free_memory_bytes, usable_cores
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.config.shard_file import read_header

_BYTES_OF_A_WORKER = 64 << 20
"""Bytes per process: smaller models are built faster by fewer processes."""

_MEMORY_SHARE = 0.5
"""Fraction of the free memory for tensors that are being made."""


def write_shards(
    source: EngineFolder,
    config: PretrainedConfig,
    mapping: RankMapping,
    output: Path,
    num_workers: int | None = None,
) -> ShardTable:
    """Shard a Hugging Face folder's weights for every rank; returns the table of files.

    Each process has one tensor of one rank in memory at a time, in ``config.dtype``. Files of
    an interrupted build with the same result are kept in ``output`` if their checksums are
    right.

    Raises:
        ConfigError: the checkpoint does not fit its configuration, or the disk is too small.
        OSError: a file cannot be written.
        WorkerLostError: a process was killed.
    """
    plan = BuildPlan(source, config, mapping)
    paths = [shard_path(output, rank) for rank in range(mapping.world_size)]
    with Journal(output, _identity(source, config, mapping)) as journal:
        check_space(output, plan.num_bytes)
        for path, rank in zip(paths, plan.ranks, strict=True):
            _make_file(path, rank.layout.num_bytes)
        _write_units(plan, paths, journal, num_workers or _num_workers(plan))
        _write_headers(plan, paths, journal)
    return [_entry(path) for path in paths]


def _write_units(
    plan: BuildPlan, paths: list[Path], journal: Journal, num_workers: int
) -> None:
    writer = UnitWriter(plan, paths)
    earlier = dict(journal.finished)

    def job(number: int, report: ReportProgress) -> tuple[str, Checksums]:
        unit = plan.units[number]
        expected = earlier.get(unit.name)
        if expected is not None and writer.is_intact(unit, expected):
            report(unit.num_bytes)
            return unit.name, expected
        return unit.name, writer.make(unit, report)

    # There is a process for each core, so torch needs no threads in them.
    workers = ForkedWorkers(job, num_workers, prepare=lambda: torch.set_num_threads(1))
    num_done = 0
    with ProgressBar(plan.num_bytes) as progress:
        # Close the workers before inspecting the rest, because they write to the files.
        with closing(workers.run(range(len(plan.units)))) as results:
            for result in results:
                if result is not None:
                    journal.add(*result)
                    num_done += 1
                progress.show(workers.num_done, f"{num_done} of {len(plan.units)} parts")


def check_shards(source: EngineFolder, config: PretrainedConfig, mapping: RankMapping) -> int:
    """Check for all refusals of `write_shards` without writing; returns the bytes of all files.

    Raises:
        ConfigError: the checkpoint does not fit its configuration.
    """
    return BuildPlan(source, config, mapping).num_bytes


def take_shards(source: EngineFolder, output: Path) -> ShardTable:
    """Put a checkpoint folder's files into ``output``; returns the table of files.

    The files are linked if the file system can, so that no weight is on disk twice.
    """
    empty(output)
    sizes = [path.stat().st_size for path in source.weight_files]
    with ProgressBar(sum(sizes)) as progress:
        for number, path in enumerate(source.weight_files):
            progress.show(sum(sizes[:number]), f"taking {path.name}")
            target = output / path.name
            try:
                # Follow a link to its file, so that the folder holds the weights.
                target.hardlink_to(path.resolve())
            except OSError:  # another file system, or one without links
                shutil.copyfile(path, target)
    return [_entry(output / path.name) for path in source.weight_files]


def _identity(
    source: EngineFolder, config: PretrainedConfig, mapping: RankMapping
) -> dict[str, Any]:
    """All values that the weight files depend on."""
    files = [[str(path.resolve()), *stamp(path)] for path in source.weight_files]
    return {
        "format_version": FORMAT_VERSION,
        "config": config.to_dict(),
        "mapping": asdict(mapping),
        "files": files,
    }


def _num_workers(plan: BuildPlan) -> int:
    """Number of processes: limited by the cores, the work and the memory."""
    by_memory = free_memory_bytes() * _MEMORY_SHARE // plan.largest_tensor_bytes
    return max(
        1,
        min(
            usable_cores(),
            plan.num_bytes // _BYTES_OF_A_WORKER,
            int(by_memory),
        ),
    )


def _make_file(path: Path, num_bytes: int) -> None:
    """Give a file this length; its contents stay."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(file, num_bytes)
    finally:
        os.close(file)


def _write_headers(plan: BuildPlan, paths: list[Path], journal: Journal) -> None:
    """Write all headers, last: a file without a header is no weight file."""
    for number, (path, rank) in enumerate(zip(paths, plan.ranks, strict=True)):
        checksums: dict[str, str] = {}
        for of_unit in journal.finished.values():
            checksums |= of_unit.get(str(number), {})
        with path.open("r+b") as file:
            file.write(rank.layout.header(checksums))


def _entry(path: Path) -> dict[str, str | int]:
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "header_sha256": read_header(path).checksum,
    }
