"""`trimaran bench report`: result files as Markdown tables and a plot."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trimaran.bench.results import results
from trimaran.bench.results.svg import Bar, Group, bar_chart
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.json_types import JsonType, check_types
from trimaran.comm.files.output_files import writing

Line = dict[str, Any]

_REMEDY = "Take the line out, or name files of `trimaran bench ... --output`."
_LOAD = {"isl": JsonType.INTEGER, "osl": JsonType.INTEGER, "requests": JsonType.INTEGER}
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
        "concurrency": JsonType.INTEGER,
    },
    "kernels": {
        "operator": JsonType.TEXT, "size": JsonType.TEXT, "us": JsonType.AMOUNT,
        "limit_pct": JsonType.AMOUNT,
    },
}  # fmt: skip
_LAYOUT = dict.fromkeys(("tp_size", "pp_size", "dp_size", "moe_ep_size"), JsonType.INTEGER)
_LIMIT = {"limit_tok_s": JsonType.AMOUNT, "limit_pct": JsonType.AMOUNT}
_OFFLINE = {**_LAYOUT, **_LIMIT}
_IF_THERE = {"throughput": _OFFLINE, "latency": _OFFLINE, "serve": _LAYOUT, "kernels": _LAYOUT}
_OR_NULL = {
    **dict.fromkeys(("engine", "device", *_MODEL), JsonType.TEXT), "gpus": JsonType.INTEGER,
}  # fmt: skip
_TIME_STARTS = ("ttft_ms_", "itl_ms_", "e2e_ms_")


def check_line(line: Line, path: str) -> None:
    """Refuse a malformed line of a benchmark.

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
    """A line break would end a table's row, and an unpaired surrogate cannot be written."""
    for name, value in values.items():
        if isinstance(value, str) and not value.isprintable():
            raise ConfigError(f"{name} is {value!r} but must be a text that can be printed")


_OURS = "trimaran"
_MEASURED = (
    "shape", "device", "gpus", "dtype", "isl", "osl", "requests", "protocol", "request_rate",
    "concurrency", "operator", "size",
)  # fmt: skip
"""The fields that distinguish measurements of one benchmark, beside the engine and the
layout.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON lines of --output")
    parser.add_argument("--plot", metavar="FILE", help="write bars as SVG")


def run_report(args: argparse.Namespace) -> int:
    """Print a table of each benchmark; of equal measurements the last line counts.

    Raises:
        ConfigError: the files hold no results, or no results that can be plotted.
    """
    by_kind = _lines_by_kind(args.files)
    tables = [row for kind, own in by_kind.items() for row in (*_KINDS[kind][0](own), "")]
    if args.plot:
        chart = _chart(args.plot, by_kind)
        is_there = os.path.exists(args.plot)
        if is_there and any(os.path.samefile(args.plot, file) for file in args.files):
            raise ConfigError(f"--plot {args.plot} holds the results. Name another file.")
        with writing("--plot", args.plot):
            Path(args.plot).write_text(chart, encoding="utf-8")
    print("\n".join(tables))
    return 0


def _chart(path: str, by_kind: dict[str, list[Line]]) -> str:
    """One chart of all lines: in percent of the limit, or with a server's in tokens a second.

    Raises:
        ConfigError: the lines share no unit that can be plotted.
    """
    in_percent = "serve" not in by_kind
    if not in_percent and "kernels" in by_kind:
        raise ConfigError(
            f"--plot {path}: a server's lines are drawn in tokens a second, which kernels have "
            "none of. Leave the files of one of them out."
        )
    groups = [
        group for kind, own in by_kind.items() for group in _KINDS[kind][1](own, in_percent)
    ]
    if not groups:
        raise ConfigError(
            f"--plot {path}: no line has a percentage of the limit to draw. Leave "
            "it out, or measure with --ceiling-seconds above 0."
        )
    title = "Percentage of the machine's limit" if in_percent else "Output tokens a second"
    return bar_chart(title, groups, 100.0 if in_percent else None)


def _lines_by_kind(files: list[str]) -> dict[str, list[Line]]:
    """The checked lines of each benchmark; of equal measurements the last.

    Raises:
        ConfigError: no lines, or a line lacks a key or has a value of another type.
    """
    found: dict[str, dict[str, Line]] = {kind: {} for kind in _KINDS}
    for path in files:
        for line in results.read([path]):
            kind = line.get("benchmark")
            if isinstance(kind, str) and kind in found:
                check_line(line, path)
                found[kind][_measurement(line)] = line
    if not any(found.values()):
        raise ConfigError(f"{', '.join(files)}: no line names a benchmark of this command")
    return {kind: list(lines.values()) for kind, lines in found.items() if lines}


def _measurement(line: Line) -> str:
    names = (_who(line), layout_of(line), *(line.get(name) for name in _MEASURED))
    return json.dumps(names)


def _who(line: Line) -> str:
    return str(line.get("engine") or _OURS)


def _load_of(line: Line) -> tuple[Any, ...]:
    names = ("shape", "device", "gpus", "dtype", "isl", "osl", "requests")
    return (*(line.get(name) for name in names), layout_of(line))


def layout_of(line: Line) -> str:
    """The layout of the ranks as a word, such as ``tp2ep2``; empty for one rank."""
    axes = {"tp": "tp_size", "pp": "pp_size", "dp": "dp_size", "ep": "moe_ep_size"}
    sizes = {axis: line.get(name, 1) for axis, name in axes.items()}
    return "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)


def _models(lines: list[Line]) -> list[str]:
    """The measurement of each line, and the device if there are several."""
    has_several = len({line.get("device") for line in lines}) > 1
    return [
        ", ".join(
            filter(
                None,
                (
                    line.get("shape"),
                    line.get("dtype"),
                    layout_of(line),
                    line.get("device") if has_several else None,
                ),
            )
        )
        for line in lines
    ]


def _by_load(lines: Iterable[Line]) -> dict[tuple[Any, ...], dict[str, Line]]:
    found: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        found.setdefault(_load_of(line), {})[_who(line)] = line
    return found


def _throughput_table(lines: list[Line]) -> list[str]:
    loads = _by_load(lines)
    peers = sorted({name for who in loads.values() for name in who} - {_OURS})
    head = ["model", "in/out", "requests", *peers, _OURS, "runs", "limit", "% of limit"]
    rows = []
    told = [who.get(_OURS) or next(iter(who.values())) for who in loads.values()]
    for who, line, model in zip(loads.values(), told, _models(told), strict=True):
        others = [f"{who[name]['out_tok_s']:,.0f}" if name in who else "" for name in peers]
        own = who.get(_OURS)
        runs = [f"{rate:,.0f}" for rate in own["out_tok_s_runs"]] if own else [""]
        rows.append(
            [
                model,
                f"{line['isl']}/{line['osl']}",
                f"{line['requests']:,}",
                *others,
                f"{own['out_tok_s']:,.0f}" if own else "",
                f"{runs[0]} to {runs[-1]}" if own else "",
                f"{line['limit_tok_s']:,.0f}" if "limit_tok_s" in line else "",
                f"{own['limit_pct']:.1f}" if own and "limit_pct" in own else "",
            ]
        )
    return _markdown(head, rows)


def _throughput_chart(lines: list[Line], in_percent: bool) -> list[Group]:
    groups = []
    for who in _by_load(lines).values():
        bars = [
            Bar(
                series=name,
                value=line["limit_pct" if in_percent else "out_tok_s"],
                text=f"{line['out_tok_s']:,.0f} tokens/s"
                + (f", {line['limit_pct']:.1f} %" if "limit_pct" in line else ""),
            )
            for name, line in sorted(who.items())
            if "limit_pct" in line or not in_percent
        ]
        if bars:
            line = next(iter(who.values()))
            name = " ".join(filter(None, (line["shape"], layout_of(line))))
            label = f"{name} {line['isl']}/{line['osl']}, {line['requests']} requests"
            groups.append(Group(label, bars))
    return groups


def _latency_table(lines: list[Line]) -> list[str]:
    times = ("first_token_ms", "token_ms_p50", "token_ms_p99")
    named = [name.replace("_", " ") for name in times]
    head = ["model", "in/out", "requests", *named, "% of limit"]
    rows = [
        [
            model,
            f"{line['isl']}/{line['osl']}",
            f"{line['requests']:,}",
            *(f"{line[name]:.2f}" for name in times),
            f"{line['limit_pct']:.1f}" if "limit_pct" in line else "",
        ]
        for line, model in zip(lines, _models(lines), strict=True)
    ]
    return _markdown(head, rows)


_SERVE_TIMES = ("ttft_ms_avg", "ttft_ms_p99", "itl_ms_avg", "itl_ms_p99", "e2e_ms_p99")


def _serve_table(lines: list[Line]) -> list[str]:
    head = ["model", "protocol", "in/out", "requests", "rate", "streams", "tokens/s"]
    head += [name.replace("_ms_", " ") + " ms" for name in _SERVE_TIMES]
    rows = [
        [
            model,
            line["protocol"],
            f"{line['isl']}/{line['osl']}",
            f"{line['requests']:,}",
            "at once" if line["request_rate"] <= 0 else f"{line['request_rate']:g}",
            str(line["concurrency"]),
            f"{line['out_tok_s']:,.0f}",
            *(f"{line[name]:.1f}" if name in line else "" for name in _SERVE_TIMES),
        ]
        for line, model in zip(lines, _models(lines), strict=True)
    ]
    return _markdown(head, rows)


def _serve_chart(lines: list[Line], _: bool) -> list[Group]:
    groups: dict[str, list[Bar]] = {}
    for line in lines:
        pace = "" if line["request_rate"] <= 0 else f", {line['request_rate']:g} a second"
        label = f"{line['isl']}/{line['osl']}, {line['concurrency']} streams{pace}"
        text = f"{line['out_tok_s']:,.0f} tokens/s"
        bar = Bar(series=line["protocol"], value=line["out_tok_s"], text=text)
        groups.setdefault(label, []).append(bar)
    return [Group(label, bars) for label, bars in groups.items()]


def _kernel_table(lines: list[Line]) -> list[str]:
    names = {key.removesuffix("_us") for line in lines for key in line if key.endswith("_us")}
    others = ["torch", *sorted(names - {"torch"})]
    head = ["model", "operator", "size", "us", "% of limit"]
    head += [f"{name} us" for name in others]
    rows = [
        [
            model,
            line["operator"],
            line["size"],
            f"{line['us']:,.1f}",
            f"{line['limit_pct']:.0f}",
            *(f"{us:,.1f}" if (us := line.get(f"{name}_us")) else "" for name in others),
        ]
        for line, model in zip(lines, _models(lines), strict=True)
    ]
    return _markdown(head, rows)


def _kernel_chart(lines: list[Line], _: bool) -> list[Group]:
    return [
        Group(
            f"{line['operator']} {line['size']}",
            [
                Bar(
                    series=_OURS,
                    value=line["limit_pct"],
                    text=f"{line['us']:,.1f} us, {line['limit_pct']:.0f} %",
                )
            ],
        )
        for line in lines
    ]


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    told = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    told.insert(1, ["---"] * len(head))
    return ["| " + " | ".join(row) + " |" for row in told]


_Table = Callable[[list[Line]], list[str]]
_Chart = Callable[[list[Line], bool], list[Group]]
_KINDS: dict[str, tuple[_Table, _Chart]] = {
    "throughput": (_throughput_table, _throughput_chart),
    "latency": (_latency_table, _throughput_chart),
    "serve": (_serve_table, _serve_chart),
    "kernels": (_kernel_table, _kernel_chart),
}
