"""Compiling the CUDA kernels: once a machine, with the cause in an error."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
import types

import pytest
import torch

from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.cuda.build import load_cubin

# Stands in for NVIDIA's library: its machine code is the list of options.
COMPILER = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
static std::string code, headers;
static const char* log_text =
    "gemm.cu(3): error: no such thing\n(C7512) Potential Performance Loss: serialized";
extern "C" {
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 7; return 0; }
int nvrtcCreateProgram(void** program, const char*, const char* name, int count,
                       const char* const* texts, const char* const* names) {
    *program = &code;
    code = name;
    for (int i = 0; i < count; ++i) code += std::string(" ") + (*texts[i] ? names[i] : "");
    return 0;
}
int nvrtcCompileProgram(void*, int count, const char* const* options) {
    FILE* calls = fopen(getenv("CALLS"), "a");
    fputs("call\n", calls);
    fclose(calls);
    for (int i = 0; i < count; ++i) code += std::string(" ") + options[i];
    return getenv("FAILS") ? 6 : 0;
}
int nvrtcGetProgramLogSize(void*, size_t* size) { *size = strlen(log_text); return 0; }
int nvrtcGetProgramLog(void*, char* to) { memcpy(to, log_text, strlen(log_text)); return 0; }
int nvrtcGetCUBINSize(void*, size_t* size) { *size = code.size(); return 0; }
int nvrtcGetCUBIN(void*, char* to) { memcpy(to, code.data(), code.size()); return 0; }
int nvrtcDestroyProgram(void**) { return 0; }
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of compiled kernels, and a torch without NVRTC."""
    empty = types.ModuleType("nvidia")
    empty.__spec__ = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    monkeypatch.setitem(sys.modules, "nvidia", empty)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    return tmp_path / "trimaran" / "kernels"


@pytest.fixture
def compiler(cache, tmp_path):
    folder = tmp_path / "toolkit" / "lib64"
    folder.mkdir(parents=True)
    source = tmp_path / "nvrtc.cpp"
    source.write_text(COMPILER)
    library = folder / "libnvrtc.so.99"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_a_second_start_uses_what_the_first_compiled(cache, compiler, tmp_path):
    code = load_cubin("attention_prefill", "sm_90a")
    assert load_cubin("attention_prefill", "sm_90a") == code
    assert (tmp_path / "calls").read_text() == "call\n"
    words = code.decode().split()
    assert words[0] == "attention_prefill.cu"
    assert {"hopper.cuh", "-arch=sm_90a"} <= set(words)
    assert len(list(cache.glob("attention_prefill-*.cubin"))) == 1


def test_other_macros_compile_another_kernel(cache, compiler, tmp_path):
    load_cubin("gemm", "sm_90a", ("GEMM_STAGES=3",))
    assert b"-DGEMM_STAGES=4" in load_cubin("gemm", "sm_90a", ("GEMM_STAGES=4",))
    assert (tmp_path / "calls").read_text() == "call\ncall\n"


def test_a_compiler_error_is_quoted_and_leaves_no_code(cache, compiler, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(KernelsUnavailableError, match=r"gemm\.cu\(3\): error: no such thing"):
        load_cubin("gemm", "sm_90a")
    assert not list(cache.glob("*.cubin"))


def test_performance_warnings_of_the_assembler_are_logged(cache, compiler, caplog):
    load_cubin("gemm", "sm_90a")
    assert caplog.messages == [
        "gemm.cu is slower than it can be: (C7512) Potential Performance Loss: serialized"
    ]


def test_the_error_without_a_compiler_names_the_searched_programs(cache):
    with pytest.raises(
        KernelsUnavailableError, match=r"toolkit/lib64/libnvrtc\.so\.99.*install"
    ):
        load_cubin("gemm", "sm_90a")
