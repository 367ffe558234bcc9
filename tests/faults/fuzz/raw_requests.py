"""Random bytes on the ports: invalid HTTP, other protocols, and unusual frames of HTTP/2."""

from __future__ import annotations

import random
from typing import Any

import mutations
from cases import Case
from pieces import Piece

_PREFACE = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = {"frame": 4, "of": ""}
_HELLO = {"hex": "16030100c8010000c40303" + "00" * 32}
_HEAD = "POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\n"
_BLOCK = {
    # Literal fields of HPACK: :method POST, :scheme http, :path, te, content-type.
    "hex": "8386"
    + "04" + "2b" + b"/inference.GRPCInferenceService/ServerLive\x00"[:43].hex()
    + "410178" + "4002" + b"te".hex() + "08" + b"trailers".hex()
    + "5f10" + b"application/grpc".hex()
}  # fmt: skip


def raw_case(rng: random.Random) -> Case:
    """A connection with bytes that no client sends."""
    make = rng.choice((_no_http, _slow, _frames, _frames))
    case = make(rng)
    leaves = case.leaves_after_s
    if leaves is None:
        leaves = rng.choice((0.2, 1.0, 4.0))
    return Case(**{**case.to_dict(), "leaves_after_s": leaves})


def _no_http(rng: random.Random) -> Case:
    noise = bytes(rng.choices(range(256), k=rng.choice((1, 30, 4000))))
    piece: Piece = rng.choice((
        {"hex": noise.hex()}, _HELLO, "GET /\r\n\r\n", "\r\n" * 1000, "\x00" * 5000,
        {"times": rng.choice((1000, 300_000)), "of": rng.choice(("x", "\n", "A: b\r\n"))},
        ["GET / HTTP/1.1\r\n", {"times": 20_000, "of": "a: b\r\n"}, "\r\n"],
        ["GET /", {"times": 1 << 20, "of": "a"}, " HTTP/1.1\r\n\r\n"],
        [_HEAD, "A: ", {"times": 1 << 20, "of": "b"}, "\r\n\r\n"],
        [_HEAD, "Transfer-Encoding: chunked\r\n\r\n", {"times": 50_000, "of": "1\r\na\r\n"}],
        [_HEAD, "Transfer-Encoding: chunked\r\n\r\n", "f" * 300, "\r\n"],
        [_HEAD, "Transfer-Encoding: chunked\r\n\r\n1;", {"times": 200_000, "of": "x"}, "\r\n"],
        [_HEAD, "Transfer-Encoding: chunked\r\n\r\n0\r\n", {"times": 9000, "of": "A: b\r\n"}],
        "GET /v2 HTTP/9.9\r\n\r\n", "GET /v2 HTTP/1.0\r\n\r\n", "SSH-2.0-x\r\n", "*1\r\n$4\r\n",
        _PREFACE, ["GET /v2 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"],
    ))  # fmt: skip
    if rng.random() < 0.3:
        raw = mutations.built(piece)
        if len(raw) < 50_000:
            piece = mutations.of_bytes(rng, raw)
    port = rng.choice(("http", "http", "grpc", "metrics"))
    return Case(f"no HTTP for {port}", port, parts=[piece])


def _slow(rng: random.Random) -> Case:
    head = rng.choice((_HEAD, _HEAD + 'Content-Length: 1000\r\n\r\n{"text', "GET /v2/heal"))
    parts: list[Piece] = [head, *("x" * rng.randint(1, 3) for _ in range(rng.randint(0, 8)))]
    port = rng.choice(("http", "grpc", "metrics"))
    return Case(f"slow bytes for {port}", port, parts=parts, pause_s=0.3)


def _frames(rng: random.Random) -> Case:
    """A connection of HTTP/2 with unusual frames."""
    frames: list[Piece] = [_frame(rng) for _ in range(rng.choice((1, 3, 10)))]
    if rng.random() < 0.3:
        frames = [{"times": rng.choice((50, 2000)), "of": frames}]
    opening: list[Piece] = [_PREFACE, _SETTINGS] if rng.random() < 0.9 else []
    port = "grpc" if rng.random() < 0.9 else "http"
    return Case(f"frames of HTTP/2 for {port}", port, parts=[[*opening, *frames]])


def _frame(rng: random.Random) -> dict[str, Any]:
    stream = rng.choice((0, 1, 1, 3, 5, 2, 2**31 - 1, 2**32 - 1))
    noise = {"hex": bytes(rng.choices(range(256), k=rng.choice((0, 4, 8, 100)))).hex()}
    frame: dict[str, Any] = rng.choice((
        {"frame": 1, "flags": rng.choice((4, 5, 0, 0x2D)), "of": _BLOCK},
        {"frame": 0, "flags": rng.choice((0, 1, 8)), "of": {"hex": "0000000000"}},
        {"frame": 0, "flags": 1, "of": {"hex": "00ffffffff"}},
        {"frame": 0, "flags": 1, "of": {"hex": "01000000020a00"}},
        {"frame": 3, "of": {"hex": "00000008"}}, {"frame": 4, "of": noise},
        {"frame": 4, "of": {"hex": "000400ffffff"}}, {"frame": 6, "of": "12345678"},
        {"frame": 7, "of": noise}, {"frame": 8, "of": {"hex": "7fffffff"}},
        {"frame": 8, "of": {"hex": "00000000"}}, {"frame": 9, "of": noise},
        {"frame": 9, "flags": 4, "of": _BLOCK}, {"frame": rng.randrange(256), "of": noise},
        {"frame": 1, "flags": 4, "of": noise}, {"frame": 2, "of": "12345"},
    ))  # fmt: skip
    frame["stream"] = stream
    if rng.random() < 0.1:
        frame["length"] = rng.choice((0, 1, 16_384, 16_385, 2**24 - 1))
    return frame
