"""An output folder that appears whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.worker.engine_folder import CONFIG_FILE, RankMapping


@contextmanager
def replaced_folder(output: Path) -> Iterator[Path]:
    """Give an empty folder beside ``output`` to write to, and put it in place at the end.

    An earlier engine or checkpoint folder of that name is replaced; whoever has its files
    open keeps them. What a killed build left behind is removed. After an error ``output`` is
    as it was.
    """
    check_replaceable(output)
    output = output.absolute()
    partial = output.with_name(f".{output.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _cannot_write(output, error) from None
    try:
        _lock(lock, partial, output)
        _clear(partial)
        try:
            yield partial
            _put_in_place(partial, output)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise _cannot_write(output, error) from None
            raise
    finally:
        os.close(lock)


def check_replaceable(output: Path) -> None:
    """Refuse a place that holds anything but an earlier output of ours."""
    if not output.exists() and not output.is_symlink():
        return
    if not output.is_dir():
        raise ConfigError(f"{output}: is a file. Name another --output.")
    names = {path.name for path in output.iterdir()}
    if names and not _is_ours(output):
        shown = ", ".join(sorted(names)[:3])
        raise ConfigError(
            f"{output}: holds files that no build wrote ({shown}), which would be lost. "
            "Empty it, or name another --output."
        )


def _is_ours(folder: Path) -> bool:
    try:
        values = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    is_config_ours = isinstance(values, dict) and "format_version" in values
    others = [path.name for path in folder.iterdir() if not path.match("rank*.safetensors")]
    return is_config_ours and others == [CONFIG_FILE]


def _lock(lock: int, partial: Path, output: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{partial}: another build is writing {output}. Wait for it, or name another "
            "--output."
        ) from None


def _cannot_write(output: Path, error: OSError) -> ConfigError:
    existing = next(path for path in output.parents if path.exists())
    free = shutil.disk_usage(existing).free / 2**20
    return ConfigError(
        f"{output}: cannot be written: {error.strerror or error}. The disk has {free:.0f} MiB "
        "free. Free more, correct the access rights, or name another --output."
    )


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _put_in_place(partial: Path, output: Path) -> None:
    replaced = output.with_name(f".{output.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.rename(replaced)
    partial.rename(output)
    shutil.rmtree(replaced, ignore_errors=True)


def say_done(command: str, output: Path, mapping: RankMapping, began: float) -> None:
    """One line with what was written and how long it took since ``began``."""
    num_bytes = sum(path.stat().st_size for path in output.iterdir())
    print(
        f"trimaran {command}: wrote {output}: {mapping.world_size} rank(s) (tp "
        f"{mapping.tp_size}, pp {mapping.pp_size}, dp {mapping.dp_size}), "
        f"{num_bytes / 2**20:.1f} MiB, {time.monotonic() - began:.1f} s"
    )
