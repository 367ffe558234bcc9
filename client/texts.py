"""The texts of one request, put together from its responses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trimaran.client.tensors import Array


@dataclass(slots=True)
class Texts:
    """Texts by (batch, sequence, beam). Responses of a batch come in any order."""

    is_appended: bool
    """Whether a response holds only new text, rather than all of it."""
    by_place: dict[tuple[int, int, int], str] = field(default_factory=dict)
    last: dict[str, Array] = field(default_factory=dict)
    """The last value of every other output."""

    def take(self, outputs: dict[str, Array]) -> str:
        """Add one response. Returns the text that it brought first."""
        self.last |= {
            name: array
            for name, array in outputs.items()
            if array.size and name != "text_output"
        }
        if "text_output" not in outputs:
            return ""
        batch, sequence = _index(outputs, "batch_index"), _index(outputs, "sequence_index")
        texts = [_decoded(item) for item in outputs["text_output"].reshape(-1)]
        for beam, text in enumerate(texts):
            place = (batch, sequence, beam)
            before = self.by_place.get(place, "") if self.is_appended else ""
            self.by_place[place] = before + text
        return texts[0] if texts else ""

    def text(self, batch: int) -> str:
        """The first sequence's first beam for one prompt."""
        return self.by_place.get((batch, 0, 0), "")

    def labelled(self) -> Iterator[tuple[str, str]]:
        """Every text with its place, as far as places differ."""
        places = sorted(self.by_place)
        names = ("batch", "sequence", "beam")
        differing = [axis for axis in range(3) if len({place[axis] for place in places}) > 1]
        for place in places:
            label = ", ".join(f"{names[axis]} {place[axis]}" for axis in differing)
            yield label, self.by_place[place]


def _index(outputs: dict[str, Array], name: str) -> int:
    """The index that a response carries; one that is absent means 0."""
    return int(outputs[name].flat[0]) if name in outputs else 0


def _decoded(item: bytes | str) -> str:
    return item.decode("utf-8", errors="replace") if isinstance(item, bytes) else item
