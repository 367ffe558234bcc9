"""A program that compiles kernels for a Hopper GPU, on a machine without one.

Each line of input is a JSON object: a kernel, the values of its constants, the types of its
other arguments (`i32` where none is named), the integers that are multiples of 16, and options.
Each line of output is the answer: the PTX, the bytes of shared memory and the bytes of the
binary, or the traceback of an error.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)


def compile_kernel(asked: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel; pointers are aligned, as those of torch's tensors are."""
    module = importlib.import_module(f"trimaran.kernels.triton.{asked['module']}")
    kernel = getattr(module, asked["kernel"])
    names, constants, types = kernel.arg_names, asked["constants"], asked["types"]
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {n for n in names if signature[n].startswith("*")} | {*asked["multiples"]}
    source = ASTSource(
        kernel,
        signature,
        {(at,): constants[n] for at, n in enumerate(names) if n in constants},
        {(at,): [["tt.divisibility", 16]] for at, n in enumerate(names) if n in aligned},
    )
    made = triton.compile(source, target=HOPPER, options=asked["options"])
    return {
        "ptx": made.asm["ptx"],
        "shared_bytes": made.metadata.shared,
        "cubin_bytes": len(made.asm["cubin"]),
    }


def main() -> None:
    """Answer every line of input."""
    for line in sys.stdin:
        try:
            answer = compile_kernel(json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
