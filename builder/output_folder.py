"""Output folders that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimaran.builder.journal import JOURNAL_FILE, has_finished_units
from trimaran.builder.processes import WorkerLostError
from trimaran.builder.progress import ProgressBar
from trimaran.builder.stop_signals import StoppedError, ignore_stops
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json
from trimaran.worker.config.draft_network import DRAFT_FOLDER
from trimaran.worker.config.engine_folder import CONFIG_FILE, RankMapping
from trimaran.worker.config.kv_cache_dtype import SCALES_FILE

_LOCK_WAIT_S = 1.0
_POLL_S = 0.02
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of a tokenizer that a build writes beside the weights, for a GGUF file. Operators copy
such files there too: a build that writes none keeps those of the folder that it replaces.
"""

_PARTIAL, _MADE = "partial", "smoothed"
_OF_MOUNTS = {f".{_PARTIAL}", f".{_MADE}", "lost+found"}
"""Entries of a mount point that still counts as empty."""


@contextmanager
def replaced_folder(output: Path, *, has_sources: bool = False) -> Iterator[Path]:
    """A folder beside ``output`` to write to, which takes the place of ``output`` at the end.

    A link is followed. A mount point cannot be replaced, so the new folder is inside it, and
    its files are moved out. All data is on the disk before the folder gets its name, so a loss
    of power leaves no half-written folder.

    The new folder may hold files of an interrupted build. An earlier engine or checkpoint
    folder of the same name is replaced; processes with open files keep them. After an error
    ``output`` is unchanged, and the new folder is kept if another build can go on from it, as
    is the `folder_of_sources`, which is removed at the end, and at the beginning unless this
    build has sources.
    """
    output = Path(os.path.realpath(output))
    check_replaceable(output)
    is_mount = os.path.ismount(output)
    partial, sources = _hidden(output, _PARTIAL), folder_of_sources(output)
    try:
        lock = _locked(partial, output)
    except OSError as error:
        raise _cannot_write(output, error) from None
    try:
        if not has_sources:
            shutil.rmtree(sources, ignore_errors=True)
        yield partial
        _keep_tokenizer(output, partial)
        _sync_files(partial)
        # A stop between these two renames would leave neither the old output nor the new.
        ignore_stops()
        (partial / JOURNAL_FILE).unlink(missing_ok=True)
        shutil.rmtree(sources, ignore_errors=True)
        (_move_out if is_mount else _put_in_place)(partial, output)
    except OSError as error:
        raise _cannot_write(output, error, _kept(partial, sources)) from None
    except ConfigError as error:
        # For example, the disk is too small, or a checkpoint cannot be read at the moment.
        raise ConfigError(f"{error}{_kept(partial, sources)}") from None
    except WorkerLostError as error:
        _kept(partial, sources)
        raise error
    except StoppedError as stopped:
        stopped.left = (
            _kept(partial, sources).strip() or "Nothing was finished, so nothing is left of it."
        )
        raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(sources, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _keep_tokenizer(output: Path, partial: Path) -> None:
    """Copy the tokenizer of the earlier folder, unless the new one has a tokenizer."""
    if any((partial / name).exists() for name in TOKENIZER_FILES):
        return
    for name in TOKENIZER_FILES:
        if (output / name).is_file():
            shutil.copy2(output / name, partial / name)


def folder_of_sources(output: Path) -> Path:
    """Where a build of ``output`` puts a checkpoint that its flags make of another one.

    The folder may be used inside `replaced_folder`, which locks it too. An interrupted build
    leaves it if it holds the `JOURNAL_FILE`, which says that the checkpoint is whole.
    """
    return _hidden(Path(os.path.realpath(output)), _MADE)


def _hidden(output: Path, kind: str) -> Path:
    """A folder on the disk of ``output``; nothing lies beside a mount point on that disk."""
    if os.path.ismount(output):
        return output / f".{kind}"
    return output.with_name(f".{output.name}.{kind}")


def _kept(partial: Path, sources: Path) -> str:
    """Remove contents that no build could go on from; otherwise say where they are."""
    kept = []
    for folder, is_kept in (
        (sources, (sources / JOURNAL_FILE).is_file()),
        (partial, has_finished_units(partial)),
    ):
        if is_kept:
            kept.append(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if not kept:
        return ""
    files = [path for folder in kept for path in folder.rglob("*")]
    mib = sum(path.stat().st_blocks * 512 for path in files) / 2**20
    return (
        f" What is done is kept in {' and '.join(map(str, kept))} ({mib:.0f} MiB): run the "
        f"same command again to go on, or remove {'it' if len(kept) == 1 else 'them'}."
    )


def check_replaceable(output: Path) -> None:
    """Refuse a path that holds anything but an earlier output of these commands."""
    output = Path(os.path.realpath(output))
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"{output}: is a file. Name another --output.")
    names = {path.name for path in output.iterdir()} - _OF_MOUNTS
    if names and not _is_ours(output, names):
        shown = ", ".join(sorted(names)[:3])
        raise ConfigError(
            f"{output}: holds files that no build wrote ({shown}), which would be lost. "
            "Empty it, or name another --output."
        )


def _is_ours(folder: Path, names: set[str]) -> bool:
    try:
        values = parse_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    is_config_ours = isinstance(values, dict) and "format_version" in values
    return is_config_ours and CONFIG_FILE in names and all(map(_is_written, names))


def _is_written(name: str) -> bool:
    """Whether builds write files of this name."""
    known = (CONFIG_FILE, SCALES_FILE, DRAFT_FOLDER, *TOKENIZER_FILES)
    return name in known or Path(name).match("rank*.safetensors")


def _locked(partial: Path, output: Path) -> int:
    """A file descriptor of the folder, locked against other processes.

    The processes of a build that was just killed may hold the lock for a moment longer.
    """
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(partial)):
                return lock
        except FileNotFoundError:
            pass  # Another build has just renamed the folder: the lock is on its output.
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise ConfigError(
                    f"{partial}: another build is writing {output}. Wait for it, or name "
                    "another --output."
                ) from None
            time.sleep(_POLL_S)
        os.close(lock)


def _cannot_write(output: Path, error: OSError, kept: str = "") -> ConfigError:
    existing = next(path for path in output.parents if path.exists())
    free = shutil.disk_usage(existing).free / 2**20
    return ConfigError(
        f"{output}: cannot be written: {error.strerror or error}. The disk has {free:.0f} MiB "
        f"free. Free more, correct the access rights, or name another --output.{kept}"
    )


def check_space(folder: Path, num_bytes: int) -> None:
    """Refuse to begin if the disk cannot hold ``num_bytes`` of files, existing ones included.

    Raises:
        ConfigError: the disk is too full.
    """
    there = sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.is_file())
    free = shutil.disk_usage(folder).free
    if num_bytes > there + free:
        raise ConfigError(
            f"{folder.parent}: the files take {num_bytes / 2**20:.0f} MiB but its disk has "
            f"{(there + free) / 2**20:.0f} MiB free. Free more, or name another --output."
        )


def _sync_files(folder: Path) -> None:
    """Wait until the disk has the folder's files and their names."""
    files = {path: path.stat().st_size for path in sorted(folder.iterdir())}
    num_done = 0
    with ProgressBar(sum(files.values())) as progress:
        for path, num_bytes in files.items():
            progress.show(num_done, "waiting for the disk")
            _sync(path)
            num_done += num_bytes
    _sync(folder)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        # Some file systems refuse this for folders, whose changes they write at once.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(file)


def _put_in_place(partial: Path, output: Path) -> None:
    replaced = output.with_name(f".{output.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.rename(replaced)
    partial.rename(output)
    _sync(output.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _move_out(partial: Path, output: Path) -> None:
    """Move the files one after another, config.json last: without it there is no engine."""
    (output / CONFIG_FILE).unlink(missing_ok=True)
    for path in output.iterdir():
        if _is_written(path.name):
            path.unlink()
    for path in partial.iterdir():
        if path.name != CONFIG_FILE:
            path.rename(output / path.name)
    _sync(output)
    (partial / CONFIG_FILE).rename(output / CONFIG_FILE)
    partial.rmdir()
    _sync(output)


def say_done(command: str, output: Path, mapping: RankMapping, began: float) -> None:
    """Print one line about the output and the seconds since ``began``."""
    num_bytes = sum(path.stat().st_size for path in output.iterdir())
    print(
        f"trimaran {command}: wrote {output}: {mapping.world_size} rank(s) (tp "
        f"{mapping.tp_size}, pp {mapping.pp_size}, dp {mapping.dp_size}), "
        f"{num_bytes / 2**20:.1f} MiB, {time.monotonic() - began:.1f} s"
    )
