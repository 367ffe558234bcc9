"""``trimaran verify``: checks an engine folder's weights against the checksums of their
build."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from trimaran.builder.foreign_flags import FlagSink
from trimaran.builder.processes import ForkedWorkers, ReportProgress
from trimaran.builder.progress import ProgressBar
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import workers
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind
from trimaran.worker.config.host_limits import usable_cores
from trimaran.worker.config.shard_file import ShardHeader, checksum_of, read_header

_MAX_NAMES = 5


def add_arguments(parser: FlagSink) -> None:
    """Declare the flags of ``trimaran verify``."""
    parser.add_argument("--engine", "--engine-dir", type=Path, required=True, metavar="DIR",
                        help="a folder made by `build` or `convert`")  # fmt: skip
    parser.add_argument("--workers", type=workers, metavar="N",
                        help="processes that read (one a core)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Verify one folder. Returns the exit code.

    Raises:
        ConfigError: tensors differ from the build, or there are no checksums.
    """
    began = time.monotonic()
    folder = EngineFolder.load(args.engine)
    if folder.kind is FolderKind.HUGGINGFACE:
        raise ConfigError(
            f"{args.engine}: is a Hugging Face folder, which has no checksums. Name a folder "
            "made by `trimaran build`."
        )
    files = folder.weight_files
    headers = [read_header(path) for path in files]
    for path, header in zip(files, headers, strict=True):
        if header.checksums.keys() != header.entries.keys():
            raise ConfigError(
                f"{path}: has no checksums: an earlier version built it. Build it again."
            )
    broken = _broken(files, headers, args.workers)
    num_tensors = sum(len(header.entries) for header in headers)
    if broken:
        shown = ", ".join(f"{file.name} {name}" for file, name in broken[:_MAX_NAMES])
        more = ", ..." if len(broken) > _MAX_NAMES else ""
        raise ConfigError(
            f"{args.engine}: {len(broken)} of {num_tensors} tensors are not as they were built "
            f"({shown}{more}). Copy the folder again, or build it again; then check the disk."
        )
    num_bytes = sum(path.stat().st_size for path in files)
    print(
        f"trimaran verify: {args.engine} is as it was built: {len(files)} file(s), "
        f"{num_tensors} tensors, {num_bytes / 2**20:.1f} MiB, {time.monotonic() - began:.1f} s"
    )
    return 0


def _broken(
    files: tuple[Path, ...], headers: list[ShardHeader], num_workers: int | None
) -> list[tuple[Path, str]]:
    """Tensors whose checksums differ from those in their headers."""
    tasks = [(number, name) for number, each in enumerate(headers) for name in each.entries]

    def job(task: tuple[int, str], report: ReportProgress) -> tuple[int, str, bool]:
        number, name = task
        entry = headers[number].entries[name]
        found = checksum_of(files[number], entry.start, entry.num_bytes)
        report(entry.num_bytes)
        return number, name, found == headers[number].checksums[name]

    num_bytes = sum(entry.num_bytes for each in headers for entry in each.entries.values())
    processes = ForkedWorkers(job, num_workers or usable_cores(), prepare=lambda: None)
    broken = []
    num_done = 0
    with ProgressBar(num_bytes) as progress:
        for result in processes.run(tasks):
            if result is not None:
                num_done += 1
                number, name, is_same = result
                if not is_same:
                    broken.append((files[number], name))
            progress.show(processes.num_done, f"{num_done} of {len(tasks)} tensors")
    return sorted(broken)
