"""Packages that tests of clients fetch."""

from __future__ import annotations

import subprocess
import sys


def pip(*arguments: str) -> None:
    """Run pip, which must succeed."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=600)
