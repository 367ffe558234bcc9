"""An output folder that appears whole or not at all."""

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
from trimaran.worker.config.engine_folder import CONFIG_FILE, RankMapping

_LOCK_WAIT_S = 1.0
_POLL_S = 0.02
_INSIDE = ".partial"
_OF_MOUNTS = {_INSIDE, "lost+found"}
"""Entries that a mount point may hold and still count as empty."""


@contextmanager
def replaced_folder(output: Path) -> Iterator[Path]:
    """Give a folder beside ``output`` to write to, and put it in place at the end.

    Where ``output`` is a link it is what that leads to, and where it is a mount point, which
    nothing can be put in the place of, the folder is inside and its files are moved out. All is
    on the disk before it has its name, so that a loss of power leaves no folder half written.

    It may hold what an interrupted build left. An earlier engine or checkpoint folder of that
    name is replaced; processes with open files keep them. After an error ``output`` is as it
    was, and the other folder is kept if the build can go on with what is in there.
    """
    output = Path(os.path.realpath(output))
    check_replaceable(output)
    is_mount = os.path.ismount(output)
    partial = output / _INSIDE if is_mount else output.with_name(f".{output.name}.partial")
    try:
        lock = _locked(partial, output)
    except OSError as error:
        raise _cannot_write(output, error) from None
    try:
        yield partial
        _sync_files(partial)
        # Stopped between two steps, this would leave neither the old output nor the new.
        ignore_stops()
        (partial / JOURNAL_FILE).unlink(missing_ok=True)
        (_move_out if is_mount else _put_in_place)(partial, output)
    except OSError as error:
        raise _cannot_write(output, error, _kept(partial)) from None
    except ConfigError as error:
        # Of a disk that is still too small, or a checkpoint that cannot be read just now.
        raise ConfigError(f"{error}{_kept(partial)}") from None
    except WorkerLostError as error:
        _kept(partial)
        raise error
    except StoppedError as stopped:
        stopped.left = (
            _kept(partial).strip() or "Nothing was finished, so nothing is left of it."
        )
        raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _kept(partial: Path) -> str:
    """Remove what no build could go on with, or say where the rest is."""
    if not has_finished_units(partial):
        shutil.rmtree(partial, ignore_errors=True)
        return ""
    mib = sum(path.stat().st_blocks * 512 for path in partial.iterdir()) / 2**20
    return (
        f" What is done is kept in {partial} ({mib:.0f} MiB): run the same command again to go "
        "on, or remove it."
    )


def check_replaceable(output: Path) -> None:
    """Refuse a place that holds anything but an earlier output of ours."""
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
    others = [name for name in names if not Path(name).match("rank*.safetensors")]
    return is_config_ours and others == [CONFIG_FILE]


def _locked(partial: Path, output: Path) -> int:
    """A file descriptor of the folder, which no other process has locked.

    The processes of a build that was just killed may have it for a moment longer.
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
            pass  # Another build has just put it in place: what is locked is its output.
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
    """Refuse to begin where files of ``num_bytes`` in all, some of them there, cannot end.

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
    """Wait until the disk has a folder's files, and their names."""
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
        # What some file systems say of folders, which they write at once or cannot wait for.
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
    """Put files in place one after another: without config.json there is no engine folder."""
    (output / CONFIG_FILE).unlink(missing_ok=True)
    for path in output.glob("rank*.safetensors"):
        path.unlink()
    for path in partial.glob("rank*.safetensors"):
        path.rename(output / path.name)
    _sync(output)
    (partial / CONFIG_FILE).rename(output / CONFIG_FILE)
    partial.rmdir()
    _sync(output)


def say_done(command: str, output: Path, mapping: RankMapping, began: float) -> None:
    """One line with what was written and how long it took since ``began``."""
    num_bytes = sum(path.stat().st_size for path in output.iterdir())
    print(
        f"trimaran {command}: wrote {output}: {mapping.world_size} rank(s) (tp "
        f"{mapping.tp_size}, pp {mapping.pp_size}, dp {mapping.dp_size}), "
        f"{num_bytes / 2**20:.1f} MiB, {time.monotonic() - began:.1f} s"
    )
