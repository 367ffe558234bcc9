"""The demo models match their README and predict English."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimaran.worker.config.engine_folder import EngineFolder

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "demo_models"
PARAMETERS = {"base": 5_771_520, "draft": 582_464, "moe": 1_774_720}
# Written for this test, so that no model was trained on it.
PASSAGE = """\
The rain had stopped before morning, but the road to the village was still deep in mud, \
and the old doctor walked slowly, leaning upon his stick. He had been called from his bed \
at four o'clock by a boy who could say nothing except that his mother was very ill, and \
that he must come at once.
"Is it far?" asked the doctor, when they had passed the last of the houses.
"No, sir," said the boy, without turning his head. "It is only beyond the bridge."
They went on in silence. The wind moved in the trees, and now and then a few drops fell \
from the branches. When they came to the bridge the boy stood still, and the doctor saw by \
the light of the lantern that there were tears upon his face.
"""


def _bits_per_byte(name: str, text: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32).eval()
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        loss = float(model(ids, labels=ids).loss)
    return loss * (ids.shape[1] - 1) / math.log(2) / len(text.encode())


@pytest.mark.parametrize(("name", "at_most"), [("base", 1.1), ("moe", 1.15), ("draft", 1.2)])
def test_a_demo_model_predicts_unseen_english(name, at_most):
    assert _bits_per_byte(name, PASSAGE) < at_most


def test_the_base_model_depends_on_the_order_of_words():
    words = PASSAGE.split(" ")
    backwards = " ".join(reversed(words))
    assert _bits_per_byte("base", backwards) > _bits_per_byte("base", PASSAGE) + 0.5


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_demo_model_has_the_stated_size_in_bfloat16(name):
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert model.dtype == torch.bfloat16
    assert f"{PARAMETERS[name]:,}" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_models_share_one_tokenizer():
    files = [(FOLDER / name / "tokenizer.json").read_bytes() for name in PARAMETERS]
    assert files[0] == files[1] == files[2]
    tokenizer = Tokenizer.from_str(files[0].decode())
    assert tokenizer.get_vocab_size() == 4096
    assert [tokenizer.token_to_id(token) for token in ("<s>", "</s>", "<pad>")] == [0, 1, 2]


@pytest.mark.parametrize(
    "text", [PASSAGE, "naïve café — 東京 🚀\n\ttabs", "", " leading space"]
)
def test_the_tokenizer_spells_any_text(text):
    tokenizer = Tokenizer.from_file(str(FOLDER / "base" / "tokenizer.json"))
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 0
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == text


def test_all_demo_models_can_be_served_on_four_ranks():
    for name, moe_ep_size in (("base", 1), ("draft", 1), ("moe", 1), ("moe", 2), ("moe", 4)):
        EngineFolder.load(FOLDER / name).check_parallel(4, 2, moe_ep_size)


def test_the_mixture_of_experts_has_eight_experts():
    config = json.loads((FOLDER / "moe" / "config.json").read_text(encoding="utf-8"))
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)


def test_the_draft_often_agrees_with_the_base_model():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "base")
    ids = tokenizer(PASSAGE, return_tensors="pt").input_ids
    guesses = []
    for name in ("base", "draft"):
        model = AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32).eval()
        with torch.inference_mode():
            guesses.append(model(ids).logits.argmax(-1))
    agreement = float((guesses[0] == guesses[1]).float().mean())
    assert agreement > 0.55
