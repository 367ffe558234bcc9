"""Third-party programs, installed or named if missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def program(name: str, package: str) -> str:
    """A program's path; as root on Debian a missing program is installed first."""
    if shutil.which(name) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], env=env, check=True, timeout=300)
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package],
            env=env, check=True, timeout=600, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    path = shutil.which(name)
    assert path is not None, f"{name} is missing: apt-get install {package}"
    return path


def python_tool(name: str) -> str:
    """A program that a wheel of the deploy extra brings."""
    path = Path(sys.executable).parent / name
    assert path.exists(), f"{name} is missing: pip install -e '.[deploy]'"
    return str(path)
