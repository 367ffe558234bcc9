"""The choices of kernels that `trimaran tune` measured: their files, and their use."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.cache_folder import cache_folder
from trimaran.kernels.tables.grouped_table import GroupedTable
from trimaran.kernels.tables.product_table import ProductTable

FILE_NAME = "tuned_choices.json"
_FORMAT = 1
_KERNELS = Path(__file__).parents[1]
_SOURCES = (
    "cuda/csrc/gemm.cu", "cuda/csrc/skinny_gemm.cu", "cuda/skinny_gemm.py",
    "cuda/csrc/grouped_gemm.cu", "cuda/csrc/*.cuh", "cuda/hopper_gemm.py",
    "cuda/grouped_gemm.py", "triton/experts.py", "triton/few_tokens/few_experts.py",
    "triton/permutation.py", "triton/skinny.py",
)  # fmt: skip
"""The kernels that choices are among."""

Entries = dict[str, list[tuple[int, list[int] | None]]]
"""Steps ``[most rows, numbers of a tile shape or null]`` by the name of a weight."""


@dataclass(frozen=True, slots=True)
class TuningKey:
    """The machine that choices are valid for. Another card, other kernels or another torch,
    whose library products are candidates too, would choose otherwise."""

    card: str
    kernels: str
    torch: str

    @classmethod
    def of(cls, card: str) -> TuningKey:
        """The key of this installation on a GPU by its name."""
        return cls(card, kernels_version(), version("torch"))


@dataclass(frozen=True, slots=True)
class Tuning:
    """The measured choices of one machine: entries of `ProductTable` and `GroupedTable`."""

    key: TuningKey
    products: Entries
    experts: Entries

    def with_entries(self, products: Entries, experts: Entries) -> Tuning:
        """The same with these choices in place of earlier ones for the same weights."""
        return replace(self, products=self.products | products, experts=self.experts | experts)


class TunedChoices:
    """The choices for one GPU that choosers of kernels ask.

    Measured choices of ``files`` go before those that the package ships for the card. For any
    other weight or number of rows the tables return None, and a chooser's own rule decides.
    Later files go before earlier ones.
    """

    def __init__(self, card: str, files: Sequence[Path] = ()) -> None:
        """Raises `ConfigError` if a file cannot be used."""
        self._card, key = card, TuningKey.of(card)
        found = [(path, tuning) for path in files for tuning in read_tunings(path)]
        used = [(path, tuning) for path, tuning in found if tuning.key == key]
        self._stale = [
            path for path, each in found if each.key.card == card and each.key != key
        ]
        self._sources = list(dict.fromkeys(path for path, _ in used))
        products, experts = ProductTable.shipped(card), GroupedTable.shipped(card)
        self._num_products = len({name for _, each in used for name in each.products})
        self._num_experts = len({name for _, each in used for name in each.experts})
        for _, tuning in used:
            products, experts = products | tuning.products, experts | tuning.experts
        self.products = ProductTable(products)
        self.experts = GroupedTable(experts)

    def __str__(self) -> str:
        if self._sources:
            names = ", ".join(map(str, self._sources))
            return (
                f"kernels are chosen as measured by trimaran tune for {self._num_products} "
                f"products and {self._num_experts} products of experts on {self._card}: {names}"
            )
        if self._stale:
            names = ", ".join(map(str, self._stale))
            return (
                "kernels are chosen by rule: the measured choices are of other kernels or "
                f"another torch ({names}). Run trimaran tune again"
            )
        return f"kernels are chosen by rule: trimaran tune has not measured on {self._card}"


def tuned_files(engine_dir: str | Path) -> list[Path]:
    """The files of measured choices that exist for an engine: the user's, then the folder's."""
    places = [user_file(), Path(engine_dir, FILE_NAME)]
    return [path for path in places if path.is_file()]


def user_file() -> Path:
    """The file of the user's cache, for engines whose folders cannot be written."""
    return cache_folder("tuned", "measured choices are lost when the process ends") / FILE_NAME


def read_tunings(path: Path) -> list[Tuning]:
    """The choices in a file, by machine.

    Raises:
        ConfigError: the file cannot be read or holds no valid choices.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != _FORMAT:
            raise ConfigError(
                f"{path}: has the format {values['format']!r} but must have {_FORMAT}. Delete "
                "the file and run trimaran tune again"
            )
        found = [
            Tuning(TuningKey(**each["key"]), each["products"], each["experts"])
            for each in values["tunings"]
        ]
        for each in found:
            ProductTable(each.products).check()
            GroupedTable(each.experts).check()
    except ConfigError:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: holds no choices of kernels ({type(error).__name__}: {error}). Delete "
            "the file and run trimaran tune again"
        ) from None
    return found


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Put ``tuning`` in a file, with what the file holds for the same key, and for other
    cards. Choices of the same card by other kernels or another torch are dropped.

    Raises:
        ConfigError: the existing file cannot be used.
        OSError: the file cannot be written.
    """
    others = read_tunings(path) if path.exists() else []
    for each in others:
        if each.key == tuning.key:
            tuning = each.with_entries(tuning.products, tuning.experts)
    kept = [each for each in others if each.key.card != tuning.key.card]
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(_text([*kept, tuning]), encoding="utf-8")
    partial.replace(path)


def _text(tunings: Iterable[Tuning]) -> str:
    """JSON with a line for each weight."""
    parts = []
    for each in tunings:
        tables: dict[str, Any] = {"products": each.products, "experts": each.experts}
        texts = [f'"key": {json.dumps(_plain(each.key))}']
        for name, entries in tables.items():
            lines = [
                f"{json.dumps(key)}: {json.dumps(entries[key])}" for key in sorted(entries)
            ]
            texts.append(f'"{name}": {{\n' + ",\n".join(lines) + "\n}")
        parts.append("{" + ",\n".join(texts) + "}")
    return f'{{"format": {_FORMAT}, "tunings": [\n' + ",\n".join(parts) + "\n]}\n"


def _plain(key: TuningKey) -> dict[str, str]:
    return {"card": key.card, "kernels": key.kernels, "torch": key.torch}


@functools.cache
def kernels_version() -> str:
    """A hash of the sources of the kernels that choices are among."""
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_KERNELS.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
