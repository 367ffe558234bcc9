"""A bar chart as SVG, for browsers and for embedding in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_COLOURS = ("#2a6f97", "#c97b2d", "#7a9e3f", "#8a5a99", "#6b6b6b")
_PLOT_WIDTH, _VALUE_WIDTH, _LETTER_WIDTH = 430, 190, 7
_BAR, _GAP, _TOP = 15, 10, 58


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: its owner, its length, and its label."""

    series: str
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """Adjacent bars under one label."""

    label: str
    bars: Sequence[Bar]


def bar_chart(title: str, groups: Sequence[Group], mark: float | None = None) -> str:
    """Horizontal bars, one group below the other; ``mark`` draws a line at that value."""
    series = list(dict.fromkeys(bar.series for group in groups for bar in group.bars))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(series)}
    values = [bar.value for group in groups for bar in group.bars]
    largest = max([*values, mark or 0.0]) or 1.0
    left = 20 + _LETTER_WIDTH * max([len(group.label) for group in groups], default=0)
    body = [_text(10, 22, title, "title"), *_legend(colours, left)]
    top = _TOP
    for group in groups:
        height = _BAR * len(group.bars)
        body.append(_text(left - 8, top + height / 2 + 4, group.label, "label"))
        for number, bar in enumerate(group.bars):
            y, width = top + _BAR * number, _PLOT_WIDTH * (bar.value / largest)
            body.append(
                f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" '
                f'fill="{colours[bar.series]}"/>'
            )
            body.append(_text(left + width + 5, y + 11, bar.text, "value"))
        top += height + _GAP
    if mark is not None:
        x = left + _PLOT_WIDTH * (mark / largest)
        body.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{top}" stroke="#b00020" '
            'stroke-dasharray="4 3"/>'
        )
    width = left + _PLOT_WIDTH + _VALUE_WIDTH
    style = (
        "text{font:12px sans-serif;fill:#222}.title{font-size:15px}.label{text-anchor:end}"
        ".value{font-size:11px}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + 10}">',
            f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _legend(colours: dict[str, str], left: float) -> list[str]:
    lines, x = [], left
    for name, colour in colours.items():
        lines.append(f'<rect x="{x}" y="34" width="11" height="11" fill="{colour}"/>')
        lines.append(_text(x + 16, 44, name, "value"))
        x += 32 + _LETTER_WIDTH * len(name)
    return lines


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'
