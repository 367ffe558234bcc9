"""Whether what a tokenizer makes of a prompt are ids of the engine's vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from trimaran.server.inference.request import Model
from trimaran.server.models.preprocessing import PreprocessingModel
from trimaran.server.models.token_model import TokenModel

logger = logging.getLogger(__name__)


def warn_of_surplus_ids(name: str, steps: Mapping[str, Model]) -> None:
    """Say of a composed model whose prompts may hold ids that its engine does not have.

    No refusal: tokenizers are published with more special tokens than their models were
    trained on, and whoever does not use those lacks nothing.
    """
    readers = [step for step in steps.values() if isinstance(step, TokenModel)]
    writers = [step for step in steps.values() if isinstance(step, PreprocessingModel)]
    for writer in writers:
        for reader in readers:
            if reader.vocab_size is not None and writer.tokenizer.num_ids > reader.vocab_size:
                logger.warning(
                    "%s", " ".join(_sentences(name, writer, reader.name, reader.vocab_size))
                )


def _sentences(
    name: str, writer: PreprocessingModel, reader: str, vocab_size: int
) -> Iterable[str]:
    tokenizer = writer.tokenizer
    yield (
        f"Model '{name}': the tokenizer of '{writer.name}' has {tokenizer.num_ids} ids "
        f"({tokenizer.folder}), but the engine of '{reader}' has a vocabulary of "
        f"{vocab_size}: a prompt that holds one of the others is refused."
    )
    if tokenizer.end_id is not None and tokenizer.end_id >= vocab_size:
        yield f"The end token, {tokenizer.end_id}, is one: no output ends with it."
    yield "Unless nobody uses those, name the model's own tokenizer in tokenizer_dir."
