"""The arguments for which Triton is told not to compile are arguments of their kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[4] / "kernels" / "triton"


def run_time_arguments():
    """The name of each kernel with such arguments, these, and the arguments that are not
    constants."""
    for path in sorted(KERNELS.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            for call in getattr(node, "decorator_list", ()):
                for keyword in getattr(call, "keywords", ()):
                    if keyword.arg == "do_not_specialize":
                        every = {arg.arg for arg in node.args.args if arg.annotation is None}
                        named = ast.literal_eval(keyword.value)
                        yield pytest.param(named, every, id=f"{path.stem}-{node.name}")


@pytest.mark.parametrize(("named", "every"), list(run_time_arguments()))
def test_named_arguments_are_arguments(named, every):
    assert set(named) <= every
