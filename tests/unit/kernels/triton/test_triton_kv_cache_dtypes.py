"""The tests of quantized KV caches on a GPU, here by Triton's interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parents[3] / "gpu" / "test_kv_cache_dtypes.py"
_SPEC = importlib.util.spec_from_file_location("gpu_kv_cache_dtypes", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
_tests = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_tests)

# Tests and fixtures keep their names; the mark that requires a GPU is not imported.
_NAMES = [
    name for name in vars(_tests) if name.startswith("test_") or name in ("dtype", "kind")
]
globals().update({name: vars(_tests)[name] for name in _NAMES})

# The interpreter takes seconds for a case that a GPU computes in milliseconds.
_KEPT = {
    "test_windows_sinks_and_caps_are_those_of_the_reference": 1,
    "test_attention_is_that_of_the_reference": 2,
    "test_rotated_keys_are_quantized_as_by_the_reference": 3,
}
for _name, _keep in _KEPT.items():
    pytest.mark.matrix(keep=_keep)(globals()[_name])
