"""Compiles CUDA C++ kernels once for each machine by NVRTC, which torch installs."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from trimaran.kernels.build import KernelsUnavailableError, kernels_folder
from trimaran.kernels.compilations import hooks

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("csrc")
_OPTIONS = ("-std=c++17", "-default-device", "-w")


def load_cubin(name: str, architecture: str, defines: tuple[str, ...] = ()) -> bytes:
    """Machine code of ``cuda/<name>.cu``, from the user's cache or compiled now (some seconds).

    ``architecture`` is an NVRTC name, such as "sm_90a"; ``defines`` are macros, such as
    "TILE=64". The file's name holds a hash of the sources, the compiler's version and the
    options. Needs neither a GPU nor a toolkit.
    """
    library = _nvrtc()
    version = _version(library)
    options = [f"-arch={architecture}", *_OPTIONS, *(f"-D{define}" for define in defines)]
    digest = hashlib.sha256(" ".join([version, *options]).encode())
    for source in [SOURCES / f"{name}.cu", *_headers()]:
        digest.update(source.name.encode() + source.read_bytes())
    folder = kernels_folder()
    cubin = folder / f"{name}-{digest.hexdigest()[:16]}.cubin"
    if cubin.exists():
        return cubin.read_bytes()
    # The wait for another thread or rank that compiles the kernel counts too.
    with hooks.waiting(f"{name}.cu"), cubin.with_suffix(".lock").open("w") as lock:
        # Ranks start together: one rank compiles, and the other ranks wait for the result.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cubin.exists():
            logger.info("compiling the kernels of %s.cu with NVRTC %s", name, version)
            partial = cubin.with_suffix(f".{os.getpid()}.partial")
            partial.write_bytes(_compile(library, name, options))
            partial.replace(cubin)
            hooks.compiled()
    return cubin.read_bytes()


def check_compiler() -> None:
    """Raise `KernelsUnavailableError` if NVRTC is not found."""
    _nvrtc()


def _headers() -> list[Path]:
    return sorted(SOURCES.glob("*.cuh"))


def _compile(library: ctypes.CDLL, name: str, options: list[str]) -> bytes:
    headers = _headers()
    texts = (ctypes.c_char_p * len(headers))(*(path.read_bytes() for path in headers))
    names = (ctypes.c_char_p * len(headers))(*(path.name.encode() for path in headers))
    source = SOURCES / f"{name}.cu"
    program = ctypes.c_void_p()
    _check(
        library, "nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(),
        source.name.encode(), len(headers), texts, names,
    )  # fmt: skip
    try:
        words = (ctypes.c_char_p * len(options))(*(word.encode() for word in options))
        is_refused = library.nvrtcCompileProgram(program, len(options), words)
        log = _text(library, "nvrtcGetProgramLog", program).decode(errors="replace")
        if is_refused:
            last_lines = "\n".join(log.splitlines()[-10:])
            raise KernelsUnavailableError(f"NVRTC refuses {source.name}:\n{last_lines}")
        for line in log.splitlines():
            # Another version of the assembler may serialise products.
            if "Performance Loss" in line:
                logger.warning("%s is slower than it can be: %s", source.name, line.strip())
        return _text(library, "nvrtcGetCUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, getter: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(library, f"{getter}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getter, program, buffer)
    return buffer.raw


def _check(library: ctypes.CDLL, function: str, *arguments: object) -> None:
    if code := getattr(library, function)(*arguments):
        raise KernelsUnavailableError(f"NVRTC's {function} fails with code {code}")


def _version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, "nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _nvrtc() -> ctypes.CDLL:
    """The library from torch's own packages, a toolkit or the system's folders."""
    tried = []
    for path in _candidates():
        try:
            # NVRTC loads its builtins library by name alone, so that library is loaded first.
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(path)
        except OSError:
            tried.append(path)
    raise KernelsUnavailableError(
        f"NVRTC is not found (tried {', '.join(tried)}): install the package of torch for "
        "CUDA, which brings nvidia-cuda-nvrtc, or set CUDA_HOME to a toolkit"
    )


def _candidates() -> Iterator[str]:
    major = (torch.version.cuda or "13").partition(".")[0]
    library = f"libnvrtc.so.{major}"
    packages = importlib.util.find_spec("nvidia")
    for root in (packages.submodule_search_locations or ()) if packages else ():
        yield from sorted(map(str, Path(root).glob(f"*/lib/{library}")))
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            yield f"{home}/lib64/{library}"
    yield library
