"""Random changes of texts, bytes and trees of protobuf fields."""

from __future__ import annotations

import copy
import random
from typing import Any

from pieces import DELIMITED, END_GROUP, FIXED32, FIXED64, GROUP, VARINT, Piece, build, hexed

_TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"NaN", b"-Infinity", b"1e999", b"-",
    b"\\u0000", b"\\ud800", b"0x1", b"\x00", b"\xff\xfe", b"\xc3\x28", b"\r\n\r\n", b"true",
    b"9" * 400, b"[" * 2000, b"/*", b"\\",
)  # fmt: skip
_VARINTS = (0, 1, 127, 128, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def built(piece: Piece) -> bytes:
    """The bytes of a piece."""
    return build(piece)


def piece_of(raw: bytes) -> Piece:
    """A piece of bytes."""
    return hexed(raw)


def of_text(rng: random.Random, text: str) -> str:
    """A text with some of its bytes changed."""
    return _changed(rng, text.encode()).decode("latin-1")


def of_bytes(rng: random.Random, raw: bytes) -> Piece:
    """Bytes with some of them changed."""
    return hexed(_changed(rng, raw))


def _changed(rng: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place = rng.randint(0, len(changed))
        end = min(len(changed), place + rng.choice((1, 1, 4, 30)))
        kind = rng.randrange(5)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[place:end]
        elif kind == 2:
            changed[place:place] = rng.choice(_TOKENS)
        elif kind == 3:
            changed[place:place] = changed[place:end] * rng.choice((1, 3, 50))
        else:
            changed[place:end] = rng.choice(_TOKENS)
    return bytes(changed)


def of_fields(rng: random.Random, fields: list[Any]) -> list[Any]:
    """The fields of a message with some of them, at any depth, changed."""
    changed = copy.deepcopy(fields)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        lists = list(_lists(changed))
        _change_field(rng, rng.choice(lists))
    return changed


def _lists(fields: list[Any]) -> Any:
    yield fields
    for each in fields:
        if isinstance(each, dict) and isinstance(each.get("value"), list):
            yield from _lists(each["value"])


def _change_field(rng: random.Random, fields: list[Any]) -> None:
    kind = rng.randrange(10)
    if not fields or kind == 0:
        fields.insert(rng.randint(0, len(fields)), _random_field(rng))
        return
    place = rng.randrange(len(fields))
    one = fields[place]
    if kind == 1:
        del fields[place]
    elif kind == 2:
        fields.insert(rng.randint(0, len(fields)), copy.deepcopy(one))
    elif kind == 3:
        fields[place] = {"times": rng.choice((20, 1000, 70_000, 300_000)), "of": one}
    elif not isinstance(one, dict) or "field" not in one:
        rng.shuffle(fields)
    elif kind == 4:
        one["field"] = rng.choice((0, 1, 2, 3, 5, 7, 15, 16, 999, 19_000, 2**29 - 1))
    elif kind == 5:
        one["wire"] = rng.randrange(8)
        one["value"] = rng.choice(_VARINTS) if one["wire"] != DELIMITED else ""
    elif kind == 6 and one["wire"] == DELIMITED:
        one["length"] = rng.choice((0, 1, 127, 10_000, 2**31, 2**63, 2**64 - 1))
    elif one["wire"] == DELIMITED:
        value = one.get("value", "")
        if isinstance(value, str):
            one["value"] = of_bytes(rng, value.encode(errors="surrogatepass"))
        elif kind == 7:
            one["value"] = of_bytes(rng, build(value)[:50_000])
    else:
        one["value"] = rng.choice(_VARINTS)


def _random_field(rng: random.Random) -> dict[str, Any]:
    wire = rng.choice((VARINT, FIXED64, DELIMITED, FIXED32, GROUP, END_GROUP, 6, 7))
    field: dict[str, Any] = {"field": rng.choice((1, 2, 5, 7, 99, 536_870_911)), "wire": wire}
    if wire == DELIMITED:
        field["value"] = {"times": rng.choice((0, 1, 100, 100_000)), "of": {"hex": "2a00"}}
    elif wire == GROUP and rng.random() < 0.5:
        return {"times": rng.choice((1, 90, 5000)), "of": field}
    else:
        field["value"] = rng.choice(_VARINTS)
    return field
