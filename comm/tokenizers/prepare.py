"""Tokenizer folders, converted once: from the cache, or by a child process that fills it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.cache_folder import cache_folder
from trimaran.comm.files.input_files import (
    NoFileError,
    read_json_object,
    require_file,
    special_tokens,
)
from trimaran.comm.tokenizers.convert import FAILURE
from trimaran.comm.tokenizers.prepared import PreparedTokenizer

logger = logging.getLogger(__name__)

_FORMAT = "1"
"""Part of every digest: another format of the cached files finds none of the older ones."""

_PACKAGES = ("transformers", "tokenizers", "sentencepiece", "tiktoken")
"""Packages whose versions decide what a folder is read as."""

_WEIGHTS = frozenset((
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".ot",
    ".so", ".png", ".jpg", ".log", ".lock",
))  # fmt: skip
"""What files end with that no tokenizer reads."""

_MAX_FILE_BYTES = 512 << 20
"""Larger files are no tokenizer's either."""

_PIECE_BYTES = 1 << 20
_JSON_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_MAX_ENTRIES = 64
_SCRATCH = "new-"
"""What the names of folders begin with that a child fills."""

_TIMEOUT_S = 300.0


def prepare(folder: str | Path) -> PreparedTokenizer:
    """The tokenizer of a folder as transformers' ``AutoTokenizer`` reads the folder. A file
    counts as a folder that holds this file alone.

    The first call for these files takes seconds; its result is kept in the user's cache.

    Raises:
        ConfigError: the folder is missing, or its tokenizer cannot be read or converted; names
            the folder and the cause.
    """
    path = Path(folder)
    if not path.exists():
        raise ConfigError(f"tokenizer_dir {folder} is no folder and no file")
    try:
        digest = _digest(path)
    except NoFileError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error}") from error
    except OSError as error:
        raise ConfigError(f"tokenizer_dir {folder} cannot be read: {error}") from error
    cache = cache_folder("tokenizers", "tokenizers are converted at every start")
    entry = cache / digest
    found = _known(entry)
    if found is None:
        _check_json(path)
        found = _converted(path, cache, entry)
        for note in found.facts.notes:
            logger.warning("tokenizer_dir %s: %s", folder, note)
    return found


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder has any tokenizer file."""
    beginnings = ("tokenizer", "vocab", "spiece", "sentencepiece", "tiktoken")
    return any(name.startswith(beginnings) for name in os.listdir(folder))


def tokenizer_fault(config_path: Path, error: Exception) -> ConfigError:
    """The error of a model whose ``tokenizer_dir`` cannot be used, with a remedy."""
    return ConfigError(
        f"{config_path}: {str(error).rstrip('.')}. Name in tokenizer_dir a folder with a "
        "tokenizer that can be read."
    )


def _known(entry: Path) -> PreparedTokenizer | None:
    if not entry.is_dir():
        return None
    try:
        found = PreparedTokenizer.load(entry)
    except (OSError, ValueError):
        # Cut off by a full disk, or changed: made again.
        shutil.rmtree(entry, ignore_errors=True)
        return None
    with suppress(OSError):
        os.utime(entry)
    return found


def _digest(folder: Path) -> str:
    """A digest of the names and contents of all files that a tokenizer may be read from, and of
    the versions that read them."""
    digest = hashlib.sha256(_FORMAT.encode())
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    if folder.is_file():
        digest.update(b"a file alone\n")
    for path in [folder] if folder.is_file() else sorted(folder.iterdir()):
        if path.suffix in _WEIGHTS or path.is_dir() or not path.exists():
            continue
        require_file(path)
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            continue
        digest.update(f"{path.name} {size}\n".encode("utf-8", "surrogateescape"))
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def _check_json(folder: Path) -> None:
    """Refuse damaged settings by file and key, which transformers does not name."""
    for name in _JSON_FILES:
        if (folder / name).exists():
            read_json_object(folder / name)
    special_tokens(folder, ("eos_token", "pad_token"))


def _converted(folder: Path, cache: Path, entry: Path) -> PreparedTokenizer:
    """Fill an entry of the cache, in a child: transformers is slow to import."""
    logger.info("Reading the tokenizer of %s with transformers (once)", folder)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=cache))
    except OSError as error:
        raise ConfigError(
            f"tokenizer_dir {folder} cannot be converted: {cache} cannot be written: {error}. "
            "Make room there, or name another cache in XDG_CACHE_HOME."
        ) from error
    try:
        _run_child(folder, scratch)
        # Read before the rename: another process may delete old entries of the cache.
        found = PreparedTokenizer.load(scratch)
        if _is_still(folder, entry.name):
            with suppress(OSError):
                # Another process may have filled the entry with the same files.
                scratch.rename(entry)
        else:
            logger.warning(
                "tokenizer_dir %s changed during its conversion: the next start repeats the "
                "conversion",
                folder,
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _forget_oldest(cache)
    return found


def _is_still(folder: Path, digest: str) -> bool:
    """Whether the folder's files are those of a digest: a name with the contents of other
    files would mislead every later start."""
    try:
        return _digest(folder) == digest
    except OSError:
        return False


def _run_child(folder: Path, scratch: Path) -> None:
    command = [sys.executable, "-P", "-m", "trimaran.comm.tokenizers.convert"]
    try:
        done = subprocess.run(
            [*command, str(folder.resolve()), str(scratch)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"tokenizer_dir {folder}: reading it with transformers took more than "
            f"{_TIMEOUT_S:.0f} s. Save it with transformers "
            "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))."
        ) from None
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
    told = [line.removeprefix(FAILURE) for line in lines if line.startswith(FAILURE)]
    raise ConfigError(f"tokenizer_dir {folder} cannot be used: {(told or lines)[-1]}")


def _forget_oldest(cache: Path) -> None:
    """Keep the entries that were used last, and delete the folders of killed conversions."""
    began_s = time.time() - 2 * _TIMEOUT_S
    with suppress(OSError):
        times = {path: path.stat().st_mtime for path in cache.iterdir()}
        unfinished = [path for path in times if path.name.startswith(_SCRATCH)]
        killed = [path for path in unfinished if times[path] < began_s]
        entries = sorted(times.keys() - set(unfinished), key=times.__getitem__)
        for path in (*entries[:-_MAX_ENTRIES], *killed):
            shutil.rmtree(path, ignore_errors=True)
