"""The operator's page: a status document as HTML that needs nothing from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

_DAY_S = 86400


def render_page(status: Mapping[str, Any]) -> str:
    """The page of one status document (`status.StatusReport.document`).

    A browser with scripts refreshes it every two seconds in place; one without, such as a
    text browser, reloads it every five.
    """
    return str(_TEMPLATE.render(s=status))


def _duration(seconds: float) -> str:
    days, rest = divmod(int(seconds), _DAY_S)
    clock = time.strftime("%H:%M:%S", time.gmtime(rest))
    return f"{days} d {clock}" if days else clock


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _gib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / (1 << 30):.1f} GiB"


def _whole(value: float) -> str:
    return str(int(value))


def _template() -> Any:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        duration=_duration, clock=_clock, ms=_ms, percent=_percent, gib=_gib, whole=_whole
    )
    text = (
        files("trimaran.server.http").joinpath("status_page.html").read_text(encoding="utf-8")
    )
    return environment.from_string(text)


_TEMPLATE = _template()
