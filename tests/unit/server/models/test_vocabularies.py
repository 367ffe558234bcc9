"""A tokenizer with ids that its engine does not have is named when they are put together."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

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
