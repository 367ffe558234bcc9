"""From a repository of models to the served models."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from trimaran.comm.errors import ConfigError

OTHER = """
name: "mine" backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
"""


def _edit(config: Path, old: str, new: str) -> None:
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))


async def test_all_five_models_are_built_before_the_engine_connects(serve):
    async with serve() as served:
        ready = {name: model.is_ready for name, model in served.models.items()}
        assert ready == {
            "preprocessing": True,
            "postprocessing": True,
            "tensorrt_llm": False,
            "ensemble": False,
            "tensorrt_llm_bls": False,
        }
        await served.dial(served.answer("a"))
        assert all(model.is_ready for model in served.models.values())
        assert all(
            served.models[name].is_decoupled
            for name in ("ensemble", "tensorrt_llm", "tensorrt_llm_bls")
        )


async def test_an_unused_python_file_of_a_model_is_logged(
    serve, build_models, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    async with serve():
        (tmp_path / "models" / "preprocessing" / "1" / "model.py").touch()
        build_models(tmp_path / "models")
    messages = [record.message for record in caplog.records]
    not_run = "its model.py is not run (--python-models execute would)"
    assert f"Model 'preprocessing': native preprocessing; {not_run}" in messages
    assert "Model 'ensemble': native ensemble" in messages


@pytest.mark.feature("parameter:tensorrt_llm_model_name", of="text")
@pytest.mark.parametrize(
    ("model", "old", "new", "texts"),
    [
        (
            "tensorrt_llm_bls",
            "${tensorrt_llm_model_name}",
            "other_llm",
            ("tensorrt_llm_bls/config.pbtxt", "its step 'other_llm' is not loaded"),
        ),
        (
            "tensorrt_llm_bls",
            "${tensorrt_llm_draft_model_name}",
            "draft",
            ("tensorrt_llm_bls/config.pbtxt", "its step 'draft' is not loaded"),
        ),
        (
            "preprocessing",
            "${multimodal_model_path}",
            "/some/where",
            ("preprocessing/config.pbtxt", "multimodal_model_path"),
        ),
    ],
)
async def test_parameters_that_cannot_be_served_are_refused_by_file_and_key(
    serve, build_models, tmp_path, model, old, new, texts
):
    async with serve():
        _edit(tmp_path / "models" / model / "config.pbtxt", old, new)
        with pytest.raises(ConfigError) as got:
            build_models(tmp_path / "models")
    assert all(text in str(got.value) for text in texts)


async def test_a_model_with_unknown_tensors_is_refused(serve, build_models, tmp_path):
    async with serve():
        (tmp_path / "models" / "mine" / "1").mkdir(parents=True)
        (tmp_path / "models" / "mine" / "config.pbtxt").write_text(OTHER)
        with pytest.raises(
            ConfigError, match="model 'mine' has the inputs and outputs of none"
        ):
            build_models(tmp_path / "models")


async def test_an_ensemble_may_have_any_tensor_names(serve, tmp_path):
    async with serve():
        config = tmp_path / "models" / "ensemble" / "config.pbtxt"
        for name in ("text_input", "text_output", "stop_words", "stream", "_INPUT_ID"):
            _edit(config, f'"{name}"', f'"my_{name}"')
    shutil.move(tmp_path / "models", tmp_path / "again")
    async with serve(repository=tmp_path / "again") as served:
        await served.dial(served.answer("one two halt three"))
        responses = await served.infer(
            "ensemble", my_text_input="x", max_tokens=99, my_stop_words=["halt"]
        )
        (output,) = responses[0].outputs
        assert output.name == "my_text_output"
        assert output.data.item() == b"xone two halt"
        streamed = await served.infer(
            "ensemble", my_text_input="x", max_tokens=99, my_stream=True
        )
        assert len(streamed) > 2


async def test_metrics_of_an_engine_have_the_served_version(serve, tmp_path):
    async with serve():
        (tmp_path / "models" / "tensorrt_llm" / "5").mkdir()
    shutil.move(tmp_path / "models", tmp_path / "again")
    async with serve(repository=tmp_path / "again") as served:
        assert served.models["tensorrt_llm"].version == "5"
        await served.dial(served.answer("a"))
        text = served.metrics.render().decode()
        assert 'trimaran_group_up{group="g0",model="tensorrt_llm",version="5"} 1' in text
        assert 'trimaran_group_up{group="g0",model="tensorrt_llm",version="1"' not in text
