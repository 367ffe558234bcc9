"""Prompts with virtual tokens, whose embeddings the client sends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from trimaran.comm.errors import RequestError
from trimaran.worker.execution.prompt_tables import PromptTable

VOCAB, HIDDEN = 150, 32
PROMPT = [5, 6, VOCAB, VOCAB + 1, VOCAB + 2, 7, 8, VOCAB + 1, *range(20, 45)]


def _table(seed=0, entries=3):
    return np.random.default_rng(seed).normal(0, 0.3, (entries, HIDDEN)).astype(np.float32)


def _wire(table):
    return PromptTable("FP32", table.shape, table.tobytes()).to_wire()


def _greedy(model_folder, prompt, table, num_tokens):
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    weight = torch.cat((model.get_input_embeddings().weight.data, torch.from_numpy(table)))
    embeds, output = weight[torch.tensor([prompt])], []
    with torch.inference_mode():
        for _ in range(num_tokens):
            output.append(int(model(inputs_embeds=embeds).logits[0, -1].argmax()))
            embeds = torch.cat((embeds, weight[torch.tensor([[output[-1]]])]), dim=1)
    return output


@pytest.mark.feature("input:prompt_embedding_table")
@pytest.mark.parametrize("tokens_a_step", [64, 9])
def test_ids_beyond_the_vocabulary_take_vectors_of_the_prompt_table(
    make_engine, model_folder, tokens_a_step
):
    driver = make_engine(max_num_batched_tokens=tokens_a_step, max_num_seqs=4, depth=2)
    tables = [_table(seed) for seed in (0, 1)]
    # Salts separate the caches, as front ends do.
    asked = [
        driver.submit(PROMPT, max_tokens=8, embeddings=_wire(t), cache_salt=bytes([n]))
        for n, t in enumerate(tables)
    ]
    plain = driver.submit(range(20, 45), max_tokens=8)
    driver.run()

    for request_id, table in zip(asked, tables, strict=True):
        assert driver.output(request_id) == _greedy(model_folder, PROMPT, table, 8)
    assert driver.output(asked[0]) != driver.output(asked[1])
    assert driver.output(plain) == _greedy(model_folder, list(range(20, 45)), tables[0], 8)
    driver.check_idle()


def test_prompt_tables_work_with_cached_replayed_and_penalised_prompts(make_engine):
    driver = make_engine()
    wire = _wire(_table())
    values = {"max_tokens": 10, "embeddings": wire, "repetition_penalty": 1.3}
    first = driver.submit(PROMPT, **values)
    driver.run()
    expected = driver.output(first)
    again = driver.submit(PROMPT, **values)
    replayed = driver.submit(PROMPT, output=expected[:4], **values)
    ngrams = driver.submit(PROMPT, no_repeat_ngram_size=2, **values)
    driver.run()

    assert driver.output(again) == expected
    assert driver.output(replayed) == expected[4:]
    assert len(driver.output(ngrams)) == 10
    assert all(0 <= token < VOCAB for token in driver.output(ngrams))


def test_an_id_beyond_the_prompt_table_is_refused(make_engine):
    driver = make_engine()
    with pytest.raises(RequestError, match=r"input_ids holds 153.* ids are 0 to 152"):
        driver.submit([4, VOCAB + 3], embeddings=_wire(_table()))
