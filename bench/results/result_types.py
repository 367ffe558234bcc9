"""The keys of a result line that tables and plots are made of, and their types."""

from __future__ import annotations

from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.json_types import JsonType, check_types

Line = dict[str, Any]

_REMEDY = "Take the line out, or name files of `trimaran bench ... --output`."
_LOAD = {"isl": JsonType.WHOLE, "osl": JsonType.WHOLE, "requests": JsonType.WHOLE}
_MODEL = {"shape": JsonType.TEXT, "dtype": JsonType.TEXT}
_RATE = {"out_tok_s": JsonType.AMOUNT}
_NEEDED: dict[str, dict[str, JsonType]] = {
    "throughput": {**_LOAD, **_MODEL, **_RATE, "out_tok_s_runs": JsonType.AMOUNTS},
    "latency": {
        **_LOAD, **_MODEL, **_RATE, "first_token_ms": JsonType.AMOUNT,
        "token_ms_p50": JsonType.AMOUNT, "token_ms_p99": JsonType.AMOUNT,
    },
    "serve": {
        **_LOAD, **_RATE, "protocol": JsonType.TEXT, "request_rate": JsonType.NUMBER,
        "concurrency": JsonType.WHOLE,
    },
    "kernels": {
        "operator": JsonType.TEXT, "size": JsonType.TEXT, "us": JsonType.AMOUNT,
        "limit_pct": JsonType.AMOUNT,
    },
}  # fmt: skip
_LAYOUT = dict.fromkeys(("tp_size", "pp_size", "dp_size", "moe_ep_size"), JsonType.WHOLE)
_LIMIT = {"limit_tok_s": JsonType.AMOUNT, "limit_pct": JsonType.AMOUNT}
_OFFLINE = {**_LAYOUT, **_LIMIT}
_IF_THERE = {"throughput": _OFFLINE, "latency": _OFFLINE, "serve": _LAYOUT, "kernels": _LAYOUT}
_OR_NULL = {
    **dict.fromkeys(("engine", "device", *_MODEL), JsonType.TEXT), "gpus": JsonType.WHOLE,
}  # fmt: skip
_TIME_STARTS = ("ttft_ms_", "itl_ms_", "e2e_ms_")


def check_line(line: Line, path: str) -> None:
    """Refuse a line of one of the benchmarks that no table can be made of.

    Raises:
        ConfigError: names the file, the key and its value.
    """
    kind = line["benchmark"]
    lacking = [name for name in _NEEDED[kind] if name not in line]
    if lacking:
        raise ConfigError(
            f"{path}: a line of the benchmark {kind!r} lacks {lacking[0]!r}. {_REMEDY}"
        )
    needed = {**_NEEDED[kind], **_IF_THERE.get(kind, {})}
    others = {name: JsonType.AMOUNT for name in line if name.endswith("_us")}
    times = {
        name: JsonType.AMOUNT
        for name in line
        if name.startswith(_TIME_STARTS) and not name.endswith("_runs")
    }
    try:
        check_types(line, {**needed, **times}, may_be_null=False)
        check_types(line, {**_OR_NULL, **others})
        _check_printable({name: line.get(name) for name in (*needed, *_OR_NULL)})
    except ConfigError as error:
        raise ConfigError(
            f"{path}: in a line of the benchmark {kind!r} {error}. {_REMEDY}"
        ) from None


def _check_printable(values: dict[str, Any]) -> None:
    """A line break would end a table's row, and half a surrogate pair cannot be written."""
    for name, value in values.items():
        if isinstance(value, str) and not value.isprintable():
            raise ConfigError(f"{name} is {value!r} but must be a text that can be printed")
