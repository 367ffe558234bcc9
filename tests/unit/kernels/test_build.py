"""Compiling the CPU kernels: once a machine, and never a silent substitute."""

from __future__ import annotations

import importlib.util
import logging
import os
import pwd
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trimaran.comm.errors import ConfigError
from trimaran.comm.files import cache_folder
from trimaran.kernels import build
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


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files; the user's cache cannot be written."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(cache_folder, "_ROOTS", (tmp_path / "missing", folder))
    (tmp_path / "trimaran").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for function in (cache_folder._writable_folder, cache_folder._temporary_folder):
        monkeypatch.setattr(cache_folder, function.__name__, function.__wrapped__)
    return folder


def test_without_a_writable_cache_a_temporary_folder_of_the_user_keeps_the_kernels(
    temporary, tmp_path, monkeypatch, caplog
):
    _install_compiler(tmp_path, EMPTY_LIBRARY, monkeypatch)

    with caplog.at_level(logging.WARNING):
        load_library()

    folder = temporary / f"trimaran-kernels-{os.getuid()}"
    assert "trimaran/kernels is not writable, or other users can write into it" in caplog.text
    assert f"kernels are kept in {folder}" in caplog.text
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.glob("*.so"))) == 1


def test_a_cache_that_other_users_could_fill_is_not_used(
    temporary, tmp_path, monkeypatch, caplog
):
    _install_compiler(tmp_path, EMPTY_LIBRARY, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    folder = tmp_path / "shared" / "trimaran" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)

    with caplog.at_level(logging.WARNING):
        load_library()

    assert "other users can write into it" in caplog.text
    assert not list(folder.iterdir())
    assert len(list((temporary / f"trimaran-kernels-{os.getuid()}").glob("*.so"))) == 1


@pytest.mark.parametrize("kind", ["writable by other users", "a link"])
def test_a_temporary_folder_that_other_users_could_fill_is_not_used(
    kind, temporary, tmp_path, monkeypatch, caplog
):
    _install_compiler(tmp_path, EMPTY_LIBRARY, monkeypatch)
    folder = temporary / f"trimaran-kernels-{os.getuid()}"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)

    with caplog.at_level(logging.WARNING):
        load_library()

    assert "kernels are compiled at every start" in caplog.text
    assert not list(folder.glob("*.so"))


def _compile_ahead():
    """The output of the module as a program, in a checkout without installed packages."""
    root = Path(build.__file__).parents[1]
    root = root if root.name != "trimaran" else root.parent
    command = [sys.executable, "-S", "-m", "trimaran.kernels.build"]
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def test_the_module_compiles_ahead_without_any_package(cache, tmp_path, monkeypatch):
    _install_compiler(tmp_path, EMPTY_LIBRARY, monkeypatch)

    first, second = _compile_ahead(), _compile_ahead()

    (library,) = cache.glob("*.so")
    assert first.endswith(f"{library}\n")
    assert second == ""


def test_a_machine_without_a_compiler_is_told_that_torch_serves(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")

    assert "torch's slower operators serve the CPU: no C++ compiler" in _compile_ahead()


def test_a_user_without_a_passwd_entry_has_a_temporary_folder(
    temporary, tmp_path, monkeypatch, caplog
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
    assert "no home folder: kernels are kept in" in caplog.text
