"""One thing that a client does to a server, as data that a file of the corpus holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pieces import Piece, weight

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Case:
    """A connection with bytes, or a gRPC call with messages."""

    name: str
    """What it is, in words."""
    port: str = "http"
    """``http``, ``grpc``, ``openai`` or ``metrics``."""
    method: str = ""
    """The full name of a gRPC method; empty: the bytes go over a connection as they are."""
    parts: list[Piece] = field(default_factory=list)
    """What is sent at once: bytes of the connection, or the messages of a call."""
    pause_s: float = 0.0
    """Between two parts."""
    leaves_after_s: float | None = None
    """When the client leaves, whatever came; None: with the answer."""
    reads: bool = True
    """Whether the client reads at all before it leaves."""
    half_closes: bool = False
    """Whether the client says that nothing more comes; a call always does, without `stays`."""
    metadata: list[list[str]] = field(default_factory=list)
    is_stream: bool = False
    """Whether both sides of a call send any number of messages."""

    @property
    def weight(self) -> int:
        """About how many bytes the server has to handle."""
        return sum(map(weight, self.parts))

    def to_dict(self) -> dict[str, Any]:
        """The case without fields at their defaults."""
        usual = asdict(Case(""))
        return {key: value for key, value in asdict(self).items() if value != usual[key]}


def write(path: Path, cases: list[Case], **remarks: Any) -> None:
    """A file of the corpus: cases that are sent together."""
    text = {**remarks, "cases": [case.to_dict() for case in cases]}
    path.write_text(json.dumps(text, indent=1) + "\n")


def read(path: Path) -> list[Case]:
    """The cases of a file.

    Raises:
        ValueError: the file is no file of cases.
    """
    entries = json.loads(path.read_text())["cases"]
    known = {each.name for each in fields(Case)}
    for entry in entries:
        if unknown := set(entry) - known:
            raise ValueError(f"{path}: unknown: {', '.join(sorted(unknown))}")
    return [Case(**entry) for entry in entries]


def corpus() -> list[Path]:
    """All files of the committed corpus, by name."""
    return sorted(CORPUS.glob("*.json"))
