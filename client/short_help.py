"""Keeps a command's ``--help`` to a screen: rarer flags show in ``--help-all`` only."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def hide(parser: argparse.ArgumentParser, *dests: str) -> None:
    """Leave these flags out of the short help, where the parser knows a longer one."""
    hide_flags: Callable[..., None] | None = getattr(parser, "hide", None)
    if hide_flags is not None:
        hide_flags(*dests)
