"""The text for which a model is run to calibrate numbers, and that model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import read_text
from trimaran.comm.tokenizers.prepare import has_tokenizer, prepare
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind
from trimaran.worker.config.host_limits import usable_cores

if TYPE_CHECKING:
    from trimaran.worker.models.interfaces import CausalLM

SEQUENCE_TOKENS = 512
NUM_SEQUENCES = 512
"""Sequences that are read at most, unless ``--calib_size`` names another number."""


def check_calibration(flag: str, file: str, source: EngineFolder) -> None:
    """Refuse a text that the model of ``source`` cannot read; ``flag`` is named in messages.

    Raises:
        ConfigError: the folder holds no Hugging Face model or no tokenizer, or the file cannot
            be read as text.
    """
    if source.kind is not FolderKind.HUGGINGFACE or not source.path.is_dir():
        raise ConfigError(
            f"{flag} {file}: {source.path} is no Hugging Face folder, whose model "
            "could read the text. Calibrate where the Hugging Face folder is converted."
        )
    if not has_tokenizer(source.path):
        raise ConfigError(
            f"{flag} {file}: {source.path} holds no tokenizer for the text. Add "
            "the tokenizer's files."
        )
    _text_of(flag, file)


def calibration_sequences(
    flag: str, file: str, source: EngineFolder, most: int | None
) -> list[list[int]]:
    """The token ids of a text, cut into at most ``most`` sequences.

    Raises:
        ConfigError: the file cannot be read as text, or is empty.
    """
    ids = prepare(source.path).fast().encode(_text_of(flag, file)).ids
    length = _length(source)
    return list(_sequences(ids, length, most or NUM_SEQUENCES))


def calibration_model(source: EngineFolder, dtype: str, quantization: str) -> CausalLM:
    """The whole model, on a GPU if there is one, with a KV cache of floats."""
    import torch

    from trimaran.comm.collectives.tensor_group import SingleRankGroup
    from trimaran.comm.topology import ParallelLayout
    from trimaran.worker.config.engine_config import CacheConfig, SchedulerConfig
    from trimaran.worker.models.registry import load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length = _length(source)
    engine = EngineConfig(
        model="calibration",
        engine_dir=str(source.path),
        dtype=dtype,
        quantization=quantization,
        device=device.type,
        num_threads=usable_cores(),
        scheduler=SchedulerConfig(max_seq_len=length, max_input_len=length),
        cache=CacheConfig(dtype=dtype),
    )
    return load_model(engine, ParallelLayout(), SingleRankGroup(), device)


def _length(source: EngineFolder) -> int:
    return min(SEQUENCE_TOKENS, source.config.max_position_embeddings)


def _sequences(ids: list[int], length: int, most: int) -> Iterator[list[int]]:
    for first in range(0, min(len(ids), most * length), length):
        yield ids[first : first + length]


def _text_of(flag: str, file: str) -> str:
    """The text of a file.

    Raises:
        ConfigError: the file cannot be read as text, or is empty.
    """
    try:
        text = read_text(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{flag} {file}: cannot be read as a text in UTF-8 ({error}). Name a file "
            "of text that resembles the requests."
        ) from None
    if not text.strip():
        raise ConfigError(f"{flag} {file}: is empty. Name a file with some text.")
    return text
