"""The metrics in OpenMetrics 1.0, for scrapers that take no other format."""

from __future__ import annotations

import re
from collections.abc import Iterator

TEXT_TYPE = "text/plain; charset=utf-8"
"""Triton's type of the text format 0.0.4."""

OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_MEDIA_TYPE = "application/openmetrics-text"
_OTHER_TYPES = ("text/plain", "text/*", "*/*")
_TOTAL = "_total"
_BOUND = re.compile(r'\b(le|quantile)="([^"]*)"')


def negotiated(text: bytes, accept: str) -> tuple[bytes, str]:
    """The metrics for an ``Accept`` header, and their content type."""
    return (of_text(text), OPENMETRICS_TYPE) if is_wanted(accept) else (text, TEXT_TYPE)


def is_wanted(accept: str) -> bool:
    """Whether an ``Accept`` header takes OpenMetrics and not the text format.

    Prometheus takes both and gets the text format, as from Triton: in OpenMetrics the samples
    of counters have other names, and dashboards would lose their series.
    """
    types = set()
    for part in accept.lower().split(","):
        name, *parameters = (each.strip() for each in part.split(";"))
        if not any(re.fullmatch(r"q=0(\.0*)?", each) for each in parameters):
            types.add(name)
    return _MEDIA_TYPE in types and not types.intersection(_OTHER_TYPES)


def of_text(text: bytes) -> bytes:
    """Metrics in the text format 0.0.4, rewritten.

    Samples of counters end in ``_total``, bounds of buckets are floats, and the end is marked.
    """
    return "".join(line + "\n" for line in _lines(text.decode())).encode()


def _lines(text: str) -> Iterator[str]:
    kinds = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE "))
    for line in text.splitlines():
        if not line:
            continue
        if line.startswith("#"):
            _, word, name, *rest = line.split(" ", 3)
            if kinds.get(name) == "counter":
                name = name.removesuffix(_TOTAL)
            yield " ".join(["#", word, name, *rest])
            continue
        name, values = _cut(line)
        if kinds.get(name) == "counter" and not name.endswith(_TOTAL):
            name += _TOTAL
        if kinds.get(name.removesuffix("_bucket")) in ("histogram", "summary"):
            values = _BOUND.sub(_as_float, values)
        yield name + re.sub(r" nan$", " NaN", values, flags=re.IGNORECASE)
    yield "# EOF"


def _cut(line: str) -> tuple[str, str]:
    """The name of a sample, and its labels and value."""
    name = re.split("[{ ]", line, maxsplit=1)[0]
    return name, line[len(name) :]


def _as_float(found: re.Match[str]) -> str:
    label, bound = found.groups()
    return f'{label}="{bound if bound == "+Inf" else float(bound)}"'
