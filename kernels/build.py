"""Compiles the CPU kernels once for each machine; errors name the cause.

The program `python -m trimaran.kernels.build` compiles the kernels ahead of their first use. It
needs no package, so that `make serve` can run it while packages are installed.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from trimaran.comm.files.cache_folder import cache_folder

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu" / "csrc"
NEEDED_FEATURES = ("avx2", "fma", "f16c")
AVX512_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
"""Instruction sets used if the processor has all of them."""
USED_FEATURES = {
    "avx512_bf16": "avx512bf16",
    "avx512_vnni": "avx512vnni",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
}
"""Additional instruction sets used if the processor has them: its name and the compiler's."""

_COMPILERS = ("g++", "c++", "clang++")
_TIMEOUT_S = 300


class KernelsUnavailableError(RuntimeError):
    """This machine cannot compile or run the CPU kernels; the text names the cause."""


def load_library() -> ctypes.CDLL:
    """The compiled kernels, from the user's cache or compiled now (about 20 s)."""
    library = compiled_library()
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailableError(f"{library} cannot be loaded: {error}") from None


def compiled_library() -> Path:
    """The file of the kernels for this processor, compiled if the cache does not have it.

    The file's name holds a hash of the sources, the compiler and the processor's features,
    so a folder shared by different machines holds one file for each kind.

    Raises:
        KernelsUnavailableError: this machine cannot compile the kernels.
    """
    flags = _feature_flags()
    compiler = _compiler()
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(" ".join([compiler, *flags]).encode())
    folder = kernels_folder()
    library = folder / f"cpu-{digest.hexdigest()[:16]}.so"
    with (folder / ".lock").open("w") as lock:
        # Ranks start together: one rank compiles, and the other ranks wait for the result.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for the CPU kernels, which another process compiles")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, flags, library)
    return library


def cpu_features() -> frozenset[str]:
    """The processor's features by the kernels' names; empty if they cannot be read."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def has_avx512() -> bool:
    """Whether the kernels use AVX-512; they need several of its extensions."""
    return cpu_features().issuperset(AVX512_FEATURES)


def _feature_flags() -> list[str]:
    features = cpu_features()
    missing = [name for name in NEEDED_FEATURES if name not in features]
    if missing:
        raise KernelsUnavailableError(f"this processor lacks {', '.join(missing)}")
    used = list(NEEDED_FEATURES)
    if has_avx512():
        used += AVX512_FEATURES
        used += [word for name, word in USED_FEATURES.items() if name in features]
    return [f"-m{word}" for word in used]


def _compiler() -> str:
    for name in (os.environ.get("CXX"), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise KernelsUnavailableError(f"no C++ compiler found: install {_COMPILERS[0]}")


def kernels_folder() -> Path:
    """The folder of compiled kernels."""
    return cache_folder("kernels", "kernels are compiled at every start")


def _compile(compiler: str, flags: list[str], library: Path) -> None:
    began = time.monotonic()
    features = " ".join(flag.removeprefix("-m") for flag in flags)
    logger.info("compiling the CPU kernels for %s (once a machine)", features)
    partial = library.with_suffix(f".{os.getpid()}.partial")
    command = [
        compiler, "-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", *flags,
        "-fno-math-errno", f"-I{SOURCES}", *map(str, sorted(SOURCES.glob("*.cpp"))),
        "-o", str(partial),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailableError(f"{compiler} failed: {error}") from None
    if done.returncode:
        last_lines = "\n".join(done.stderr.splitlines()[-10:])
        raise KernelsUnavailableError(f"{compiler} failed:\n{last_lines}")
    partial.replace(library)
    logger.info("compiled the CPU kernels in %.0f s: %s", time.monotonic() - began, library)


def main() -> int:
    """Compile the kernels if they are not in the cache. Returns 0 also where they cannot be
    compiled, since torch serves then."""
    logging.basicConfig(level=logging.INFO, format="kernels: %(message)s", stream=sys.stdout)
    try:
        compiled_library()
    except KernelsUnavailableError as error:
        logger.warning("torch's slower operators serve the CPU: %s", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
