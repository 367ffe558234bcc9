"""Packages that tests of clients fetch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

_PERF_ANALYZER = "tritonclient==2.47.0"
"""Its wheel carries the program; the package perf-analyzer is empty."""

_CUDA_RUNTIME = "nvidia-cuda-runtime-cu12"


def pip(*arguments: str) -> None:
    """Run pip, which must succeed."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=600)


def fetch_perf_analyzer(folder: Path) -> tuple[Path, Path]:
    """NVIDIA's perf_analyzer: the program, and the folder of the libraries that the program
    needs on its LD_LIBRARY_PATH."""
    wheels = (_PERF_ANALYZER, _CUDA_RUNTIME)
    pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), *wheels)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    (program,) = folder.glob("*.data/data/bin/perf_analyzer")
    program.chmod(0o755)
    libraries = folder / "libraries"
    libraries.mkdir()
    shutil.copy(folder / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12", libraries)
    subprocess.run(["apt-get", "download", "-qq", "libb64-0d"], cwd=folder, check=True)
    (package,) = folder.glob("libb64*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(folder / "package")], check=True)
    (base64,) = folder.glob("package/usr/lib/*/libb64.so.0d")
    shutil.copy(base64, libraries)
    return program, libraries
