"""An engine folder takes along the head that drafts for it, checked against the model."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from tests.driver import Driver
from tests.unit.worker.speculation.head_reference import (
    random_eagle,
    random_medusa,
    random_redrafter,
)
from trimaran.worker.config.draft_tree import read_choices
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.speculation_config import SpeculationConfig

EAGLE = ("--speculative_decoding_mode", "eagle")
REDRAFTER = ("--speculative_decoding_mode", "explicit_draft_tokens")
MEDUSA = ("--speculative_decoding_mode", "medusa")


@pytest.fixture
def model(llama):
    """The folder of the model."""
    return llama().folder


@pytest.fixture
def heads(model, tmp_path):
    """An EAGLE-3 head and Medusa heads for the model."""
    config = AutoConfig.from_pretrained(model)
    config.head_dim = config.hidden_size // config.num_attention_heads
    random_eagle(tmp_path / "eagle", config, draft_vocab=40)
    random_medusa(tmp_path / "medusa", config, num_heads=3)
    random_redrafter(tmp_path / "redrafter", config, exit_dim=24, is_recurrent=True)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "mode", "most"),
    [
        ((*EAGLE, "--eagle_model_dir", "eagle", "--max_draft_len", "4"), "eagle", 4),
        # The first number counted the tokens of a tree.
        (
            (*EAGLE, "--eagle_model_dir", "eagle", "--max_draft_len", "63",
             "--num_eagle_layers", "4"),
            "eagle", 4,
        ),
        # Three heads draft the tree mc_sim_7b_63 without its paths of four tokens.
        ((*MEDUSA, "--medusa_model_dir", "medusa", "--max_draft_len", "63"), "medusa", 61),
        ((*MEDUSA, "--medusa_model_dir", "medusa"), "medusa", 61),
        ((*MEDUSA, "--medusa_model_dir", "medusa", "--max_draft_len", "20"), "medusa", 20),
        ((*MEDUSA, "--medusa_model_dir", "medusa", "--max_draft_len", "2"), "medusa", 2),
        (
            (*MEDUSA, "--medusa_model_dir", "medusa", "--medusa_choices", "{0, 0}, {1}"),
            "medusa", 3,
        ),
        (
            (*EAGLE, "--eagle_model_dir", "eagle", "--max_draft_len", "63",
             "--eagle_choices", "[[0], [1], [0, 0], [0, 1], [0, 0, 0], [0, 0, 0, 0]]"),
            "eagle", 6,
        ),
        (
            (*EAGLE, "--eagle_model_dir", "eagle", "--max_draft_len", "14",
             "--eagle_use_dynamic_tree", "--eagle_dynamic_tree_max_top_k", "3",
             "--num_eagle_layers", "4"),
            "eagle", 14,
        ),
        ((*REDRAFTER, "--drafter_model_dir", "redrafter"), "explicit_draft_tokens", 5),
        (
            (*REDRAFTER, "--drafter_model_dir", "redrafter", "--redrafter_num_beams", "3",
             "--redrafter_draft_len_per_beam", "4"),
            "explicit_draft_tokens", 12,
        ),
        # The first number counted the tokens of all beams.
        (
            (*REDRAFTER, "--drafter_model_dir", "redrafter", "--max_draft_len", "25",
             "--redrafter_num_beams", "1", "--redrafter_draft_len_per_beam", "3"),
            "explicit_draft_tokens", 3,
        ),
    ],
)  # fmt: skip
def test_an_engine_folder_drafts_with_its_head(
    model, trimaran, heads, tmp_path, flags, mode, most
):
    names = "eagle", "medusa", "redrafter"
    flags = [str(heads / flag) if flag in names else flag for flag in flags]
    flags[1] = mode
    output = tmp_path / "engine"
    for _ in range(2):  # The second build replaces the first.
        done = trimaran("build", "--checkpoint", model, "--output", output, *flags)
        assert done.code == 0, done.err

    build = EngineFolder.load(output).build
    assert (build.speculative_decoding_mode, build.max_draft_len) == (mode, most)
    choices = build.draft_choices
    tree = read_choices(choices, "draft_choices") if choices else ()
    has_tree = (mode == "medusa" and most > 3) or any("choices" in flag for flag in flags)
    assert len(tree) == (most if has_tree else 0)
    is_dynamic = "--eagle_use_dynamic_tree" in flags or most == 12
    assert (build.draft_width, build.draft_depth) == ((3, 4) if is_dynamic else (0, 0))
    outputs = []
    drafting = "redrafter" if mode == "explicit_draft_tokens" else mode
    for drafter in ("none", drafting):
        folder = str(output / "draft_head") if drafter == drafting else ""
        driver = Driver(
            EngineConfig(
                model="test", engine_dir=str(output), device="cpu", dtype="float32",
                scheduler=SchedulerConfig(
                    max_seq_len=64, max_input_len=40, max_num_seqs=4,
                    speculation=SpeculationConfig(
                        drafter=drafter, draft_dir=folder, max_draft_tokens=most,
                        is_adaptive=False, tree=tree if folder else (),
                        tree_width=build.draft_width if folder else 0,
                        tree_depth=build.draft_depth if folder else 0,
                    ),
                ),
                cache=CacheConfig(max_tokens=512),
            )
        )  # fmt: skip
        request = driver.submit([5, 6, 7], max_tokens=20, top_k=1)
        driver.run()
        outputs.append(driver.output(request))
    assert outputs[0] == outputs[1]
    assert driver.engine.scheduler.draft_counts.num_tokens


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*EAGLE, "--max_draft_len", "4"), ["--eagle_model_dir is not set"]),
        (("--eagle_model_dir", "x"), ["--eagle_model_dir is x", "is none"]),
        (
            (*MEDUSA, "--max_draft_len", "2", "--num_eagle_layers", "2"),
            ["--num_eagle_layers is 2"],
        ),
        ((*EAGLE, "--eagle_model_dir", "medusa"), ["--max_draft_len is 0"]),
        (
            (*EAGLE, "--eagle_model_dir", "medusa", "--max_draft_len", "2"),
            ["holds no model.safetensors"],
        ),
        ((*REDRAFTER, "--max_draft_len", "2"), ["--drafter_model_dir is not set"]),
        (
            (*REDRAFTER, "--drafter_model_dir", "redrafter", "--redrafter_num_beams", "14"),
            ["14 beams of 5 tokens are drafted", "product at most 64"],
        ),
        (("--redrafter_num_beams", "1"), ["--speculative_decoding_mode is none"]),
        (
            (*EAGLE, "--eagle_model_dir", "eagle", "--medusa_choices", "{0}"),
            ["--medusa_choices is '{0}'", "is eagle"],
        ),
        (
            (
                *MEDUSA,
                "--medusa_model_dir",
                "medusa",
                "--medusa_choices",
                "{0}, {1}, {2}",
                "--max_draft_len",
                "2",
            ),
            ["--medusa_choices has 3 nodes", "--max_draft_len is 2"],
        ),
        (
            (*EAGLE, "--eagle_model_dir", "eagle", "--eagle_dynamic_tree_max_top_k", "4"),
            ["--eagle_dynamic_tree_max_top_k is 4", "--eagle_use_dynamic_tree is not set"],
        ),
        (
            (*MEDUSA, "--medusa_model_dir", "medusa", "--eagle_use_dynamic_tree"),
            ["--eagle_use_dynamic_tree is set together with --speculative_decoding_mode medu"],
        ),
        (
            (
                *EAGLE,
                "--eagle_model_dir",
                "eagle",
                "--eagle_use_dynamic_tree",
                "--eagle_choices",
                "{0}",
                "--max_draft_len",
                "8",
            ),
            ["--eagle_use_dynamic_tree is set together with --eagle_choices"],
        ),
        (
            (
                *EAGLE,
                "--eagle_model_dir",
                "eagle",
                "--eagle_use_dynamic_tree",
                "--num_eagle_layers",
                "9",
                "--max_draft_len",
                "60",
            ),
            ["top-k 10 and depth 9", "expands 80 nodes", "covers 63"],
        ),
        (
            (*EAGLE, "--eagle_model_dir", "eagle", "--eagle_use_dynamic_tree"),
            ["--max_draft_len is 0"],
        ),
        (
            (*MEDUSA, "--medusa_model_dir", "medusa", "--medusa_choices", "{0, 0, 0, 0}"),
            ["a path of 4 tokens", "drafts 3"],
        ),
    ],
)
def test_heads_that_cannot_draft_are_refused(model, refused, heads, flags, words):
    folders = {"eagle", "medusa", "redrafter"}
    values = [
        str(heads / flag) if flag in folders and flags[place - 1].endswith("_dir") else flag
        for place, flag in enumerate(flags)
    ]
    error = refused(model, *values)
    for word in words:
        assert word in error


def test_a_head_of_another_model_is_refused(model, refused, heads):
    path = heads / "eagle" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 8}))
    flags = (*EAGLE, "--eagle_model_dir", heads / "eagle", "--max_draft_len", "2")

    assert "belongs to another model" in refused(model, *flags)
