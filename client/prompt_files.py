"""Files that go into a request: token ids, prompt tables and adapters."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from trimaran.client.tensors import row, tensor
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import UTF8, parse_json

_WEIGHTS = "model.lora_weights.npy"
# The second is the name that older converters wrote.
_CONFIGS = ("model.lora_config.npy", "model.lora_keys.npy")


def read_ids(flag: str, path: str) -> list[int]:
    """The token ids of a CSV file, rows one after another.

    Raises:
        ConfigError: names the flag, the file and the line.
    """
    ids: list[int] = []
    for number, line in enumerate(_text(flag, path).splitlines(), 1):
        words = [word.strip() for word in line.split(",") if word.strip()]
        try:
            ids += [int(word) for word in words]
        except ValueError:
            raise ConfigError(
                f"{flag} {path}:{number}: {line!r} is not token ids with commas between"
            ) from None
    if not ids:
        raise ConfigError(f"{flag} {path}: holds no token ids")
    return ids


def prompt_table(path: str, task: int, dtype: str) -> list[Any]:
    """The tensors of one task's prompt table.

    Raises:
        ConfigError: not a table, or the table lacks the task.
    """
    table = _array("--prompt-embedding-table-path", Path(path))
    if table.ndim not in (2, 3):
        raise ConfigError(
            f"--prompt-embedding-table-path {path}: has the shape {list(table.shape)} but must "
            "be [entries, hidden size], or [tasks, entries, hidden size]"
        )
    tables = table if table.ndim == 3 else table[None]
    if not 0 <= task < len(tables):
        raise ConfigError(f"--prompt-task-id is {task} but {path} holds {len(tables)} tasks")
    table = tables[task]
    return [
        tensor("prompt_embedding_table", table[None], _numpy_dtype(dtype)),
        row("prompt_vocab_size", len(table), np.int32),
    ]


def lora(args: argparse.Namespace, num_rows: int = 1) -> list[Any]:
    """The tensors of an adapter: its name, or its id, and its weights when a folder is given.

    A folder without an id has one that its weights give, printed for later requests.

    Raises:
        ConfigError: a folder without the two files, or both folder and name.
    """
    path, task_id = args.lora_path, args.lora_task_id
    if args.lora_name is not None and not (path is None and task_id is None):
        raise ConfigError("--lora-name stands alone: drop --lora-path and --lora-task-id")
    if path is None:
        return [
            row("lora_task_id", task_id, np.uint64, num_rows),
            row("lora_name", args.lora_name, str, num_rows),
        ]
    folder = Path(path)
    config = next((folder / name for name in _CONFIGS if (folder / name).exists()), None)
    if config is None:
        raise ConfigError(f"--lora-path {path} holds no {_CONFIGS[0]}")
    weights = _adapter(folder / _WEIGHTS)
    modules = _adapter(config)
    if task_id is None:
        digest = hashlib.blake2b(weights.tobytes() + modules.tobytes(), digest_size=7)
        task_id = int.from_bytes(digest.digest(), "big")
        print("Using lora_task_id: ", task_id)
    return [
        row("lora_task_id", task_id, np.uint64, num_rows),
        tensor("lora_weights", np.repeat(weights, num_rows, axis=0), _numpy_dtype(args.dtype)),
        tensor("lora_config", np.repeat(modules, num_rows, axis=0), np.int32),
    ]


def _adapter(path: Path) -> np.ndarray[Any, Any]:
    array = _array("--lora-path", path)
    if array.ndim != 3 or len(array) != 1:
        raise ConfigError(
            f"--lora-path: {path} has the shape {list(array.shape)} but must be [1, modules, "
            "numbers of each], as trimaran convert-lora writes it"
        )
    return array


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding=UTF8)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: is not a text in UTF-8") from None


def _array(flag: str, path: Path) -> np.ndarray[Any, Any]:
    try:
        # Opened here: numpy does not close a file that it cannot read.
        with path.open("rb") as file:
            array: np.ndarray[Any, Any] = np.load(file)
    except Exception as error:  # numpy lets errors of its header parser through
        raise ConfigError(f"{flag}: {path} cannot be read: {error}") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        what = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else "no array"
        raise ConfigError(f"{flag}: {path} holds {what}. Save one of numbers with numpy.save.")
    return array


def _numpy_dtype(dtype: str) -> Any:
    return "BF16" if dtype == "bfloat16" else np.dtype(dtype)


def read_dataset(path: str) -> list[dict[str, str]]:
    """The records of a dataset file.

    Raises:
        ConfigError: names the file and the fault.
    """
    try:
        records: Any = parse_json(Path(path).read_text(encoding=UTF8))
    except OSError as error:
        raise ConfigError(f"--dataset {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--dataset {path}: is not JSON: {error}") from error
    keys = ("input", "instruction", "output")
    if not isinstance(records, list) or not all(
        isinstance(record, dict) and all(isinstance(record.get(key), str) for key in keys)
        for record in records
    ):
        raise ConfigError(
            f"--dataset {path}: must be a JSON list of objects with texts for {keys}"
        )
    return list(records)
