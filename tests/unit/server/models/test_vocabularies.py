"""A tokenizer with ids that its engine does not have is named when they are put together."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tests.unit.server.models.conftest import FACTS, ScriptedEngine
from trimaran.comm.errors import RequestError
from trimaran.server.inference.registry import ModelRegistry
from trimaran.server.loading.model_set import Candidate, ModelSet
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.models.factory import ModelFactory
from trimaran.server.python_models.calls import ModelCalls
from trimaran.server.repository.model_repository import ModelRepository

NUM_IDS = 600


@pytest.fixture
def tokenizer_with(tokenizer_folder, tmp_path):
    """The tokenizer of the tests with one more token, of this id."""

    def write(number, **settings):
        folder = tmp_path / "larger"
        shutil.copytree(tokenizer_folder, folder)
        path = folder / "tokenizer.json"
        values = json.loads(path.read_text())
        values["added_tokens"].append(
            {**values["added_tokens"][0], "id": number, "content": "<image>"}
        )
        path.write_text(json.dumps(values))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return str(folder)

    return write


async def composed(serve, folder):
    """Put the models of a repository together over an engine that is up."""
    async with serve(tokenizer_dir=folder) as served:
        await served.dial(served.answer("a"))
        repository = ModelRepository.load(served.config.model_repository)
        parts = {model.name: model for model in served._plain}
        metrics, registry = Metrics(), ModelRegistry()
        factory = ModelFactory(ModelCalls(registry, metrics.custom))
        ModelSet(factory, metrics, registry).commit(
            [Candidate(source=s, plain=parts.get(n)) for n, s in repository.models.items()]
        )


def warnings(caplog):
    return [r.message for r in caplog.records if "has a vocabulary of" in r.message]


async def test_a_tokenizer_with_more_ids_than_the_engine_is_a_warning_with_both_numbers(
    serve, tokenizer_with, caplog
):
    folder = tokenizer_with(NUM_IDS, eos_token="</s>")
    await composed(serve, folder)
    ensemble, bls = warnings(caplog)
    assert ensemble == (
        f"Model 'ensemble': the tokenizer of 'preprocessing' has 601 ids ({folder}), but the "
        "engine of 'tensorrt_llm' has a vocabulary of 600: a prompt that holds one of the "
        "others is refused. If prompts use those ids, name the model's own tokenizer in "
        "tokenizer_dir."
    )
    assert bls == ensemble.replace("'ensemble'", "'tensorrt_llm_bls'")


async def test_an_end_token_outside_the_engines_vocabulary_is_named(
    serve, tokenizer_with, caplog
):
    await composed(serve, tokenizer_with(NUM_IDS, eos_token="<image>"))
    first, _ = warnings(caplog)
    assert "The end token, 600, is one: no output ends with it." in first


async def test_an_engine_vocabulary_larger_than_the_tokenizer_is_no_warning(
    serve, tokenizer_folder, caplog
):
    await composed(serve, str(tokenizer_folder))
    assert not warnings(caplog)


async def test_words_are_biased_under_a_tokenizer_with_more_ids(serve, tokenizer_with):
    async with serve(tokenizer_dir=tokenizer_with(NUM_IDS, eos_token="</s>")) as served:
        engine = await served.dial(served.answer("a"))
        bias = {"embedding_bias_words": ["a"], "embedding_bias_weights": [2.0]}
        await served.texts("ensemble", text_input="x", max_tokens=2, **bias)
        found = np.frombuffer(engine.submits[0].sampling["embedding_bias"], "<f4")
        assert found.size == NUM_IDS
        assert found.max() == 2.0
        bias["embedding_bias_words"] = ["<image>"]
        with pytest.raises(RequestError, match="has 601 values, but the vocabulary has 600"):
            await served.texts("ensemble", text_input="x", max_tokens=2, **bias)


@pytest.fixture
def folder_with_ends(tokenizer_folder, tmp_path):
    """The tokenizer of the tests beside a model that names these end ids."""

    def write(ids):
        folder = tmp_path / "with_ends"
        shutil.copytree(tokenizer_folder, folder)
        values = json.dumps({"eos_token_id": ids})
        (folder / "generation_config.json").write_text(values)
        return str(folder)

    return write


ENDS = {"end_id": 1, "end_ids": [7, 9]}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_the_ids_of_generation_config_end_an_output_too(serve, folder_with_ends, model):
    async with serve(tokenizer_dir=folder_with_ends([7, 1, 9, 100_000])) as served:
        engine = await served.dial(served.answer("a"))
        await served.texts(model, text_input="x", max_tokens=2)
        sampling = engine.submits[0].sampling
        assert {name: sampling[name] for name in ENDS} == ENDS


@pytest.mark.parametrize("named", [5, -1])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_a_request_that_names_its_end_id_ends_with_no_other(
    serve, folder_with_ends, model, named
):
    async with serve(tokenizer_dir=folder_with_ends([7, 9])) as served:
        engine = await served.dial(served.answer("a"))
        await served.texts(model, text_input="x", max_tokens=2, end_id=named)
        sampling = engine.submits[0].sampling
        assert sampling.get("end_id", -1) == named
        assert "end_ids" not in sampling


async def test_end_ids_of_the_engines_own_files_count(serve, tokenizer_folder):
    async with serve(tokenizer_dir=str(tokenizer_folder)) as served:
        hello = served.hello(facts={**FACTS, "end_ids": [1, 8]})
        engine = ScriptedEngine(served.answer("a"))
        served.dialled.append(engine)
        await engine.dial(served.config.engine_listen[-1], hello)
        await served.texts("ensemble", text_input="x", max_tokens=2)
        assert engine.submits[0].sampling["end_ids"] == [8]


async def test_the_log_names_the_ids_that_end_an_output(serve, folder_with_ends, caplog):
    caplog.set_level("INFO")
    async with serve(tokenizer_dir=folder_with_ends([2, 700])):
        assert (
            "Model 'ensemble': 1 ('</s>'), 2 ('<pad>'), 700 ends an output, unless a request "
            "names end_id" in caplog.text
        )


async def test_a_token_level_request_without_end_id_ends_with_none(serve, folder_with_ends):
    async with serve(tokenizer_dir=folder_with_ends([7, 9])) as served:
        engine = await served.dial(served.answer("a"))
        await served.infer(
            "tensorrt_llm", input_ids=[3, 4], input_lengths=2, request_output_len=2
        )
        assert not {"end_id", "end_ids"} & engine.submits[0].sampling.keys()
