"""Compiling the CPU kernels: once a machine, and never a silent substitute."""

from __future__ import annotations

import importlib.util
import logging
import os
import pwd
from pathlib import Path

import pytest
import torch

from trimaran.comm.errors import ConfigError
from trimaran.kernels.build import KernelsUnavailableError, load_library
from trimaran.kernels.dispatch import select_ops

CPU = torch.device("cpu")
EMPTY_LIBRARY = (
    'while [ "$1" != -o ]; do shift; done; exec g++ -shared -fPIC -x c++ /dev/null -o "$2"'
)
"""A compiler's script that writes a library without contents, at once."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "trimaran" / "kernels"


def _install_compiler(folder: Path, script: str, monkeypatch) -> Path:
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return compiler


def test_a_second_start_uses_what_the_first_compiled(cache, tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    _install_compiler(tmp_path, f"echo call >> {calls}; {EMPTY_LIBRARY}", monkeypatch)

    load_library()
    load_library()

    assert calls.read_text() == "call\n"
    assert [path.suffix for path in cache.iterdir() if path.name != ".lock"] == [".so"]


def test_a_compiler_error_is_quoted_and_leaves_no_library(cache, tmp_path, monkeypatch):
    _install_compiler(tmp_path, "echo vec.h is unreadable >&2; exit 1", monkeypatch)

    with pytest.raises(
        KernelsUnavailableError, match=r"compiler failed:\nvec\.h is unreadable"
    ):
        load_library()

    assert not list(cache.glob("*.so"))


def test_a_gpu_without_triton_is_refused_with_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else real(name)
    )

    with pytest.raises(ConfigError, match=r"device is cuda .*pip install 'trimaran\[gpu\]'"):
        select_ops(torch.device("cuda"), torch.bfloat16)


def test_without_a_compiler_torch_operators_serve_with_a_warning(cache, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")

    with caplog.at_level(logging.WARNING):
        ops = select_ops(CPU, torch.float32)

    assert set(ops.backends.values()) == {"torch"}
    assert "no C++ compiler found: install g++" in caplog.text


def test_deterministic_mode_on_a_cpu_is_refused_without_a_compiler(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(ConfigError, match=r"--deterministic is set but .*install g\+\+"):
        select_ops(CPU, torch.float32, deterministic=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_operator_has_a_named_backend(dtype):
    ops = select_ops(CPU, dtype)
    assert ops.backends["linear"].startswith(("avx512", "avx2", "amx", "torch"))
    assert all(ops.backends.values())


def test_a_compilation_cache_without_write_access_is_logged_and_compiles_anew(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "trimaran").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    _install_compiler(tmp_path, EMPTY_LIBRARY, monkeypatch)

    with caplog.at_level(logging.WARNING):
        load_library()

    assert "compiled at every start" in caplog.text
    assert os.path.isfile(tmp_path / "trimaran")


def test_a_user_without_a_passwd_entry_gets_a_cache_folder_for_the_process(
    tmp_path, monkeypatch, caplog
):
    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    calls = tmp_path / "calls"
    _install_compiler(tmp_path, f"echo call >> {calls}; {EMPTY_LIBRARY}", monkeypatch)

    load_library()
    load_library()

    assert calls.read_text() == "call\n"
    assert "no home folder: kernels are compiled at every start" in caplog.text
