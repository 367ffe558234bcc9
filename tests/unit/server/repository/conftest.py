"""A filled model repository that a test may then spoil."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trimaran.launcher.cli.fill_template import fill
from trimaran.launcher.cli.init_repo import MODELS, template

FILL = {
    "triton_max_batch_size": "8",
    "decoupled_mode": "True",
    "tokenizer_dir": "/tokenizer",
    "engine_dir": "/engine",
    "batching_strategy": "inflight_fused_batching",
    "triton_backend": "tensorrtllm",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "bls_instance_count": "1",
    "logits_datatype": "TYPE_FP32",
    "encoder_input_features_data_type": "TYPE_FP16",
}


@pytest.fixture
def write_repository(tmp_path: Path) -> Callable[..., Path]:
    """Write the five models, filled; a keyword changes or adds a filled value."""

    def write(**values: str) -> Path:
        for model in MODELS:
            (tmp_path / model / "1").mkdir(parents=True)
            text = fill(template(model), {**FILL, **values})
            (tmp_path / model / "config.pbtxt").write_text(text)
        return tmp_path

    return write


@pytest.fixture
def edit() -> Callable[[Path, str, str], None]:
    """Replace text of a file; the text must be present."""

    def replace(path: Path, old: str, new: str) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return replace
