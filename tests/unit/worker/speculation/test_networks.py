"""Networks that draft in the ranks: outputs are those without, drafts those of a plain loop."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.driver import Driver
from tests.unit.worker.conftest import VOCAB
from tests.unit.worker.quantization.checkpoints import quantize_folder
from tests.unit.worker.speculation.head_reference import (
    EagleReference,
    FirstEagleReference,
    MedusaReference,
    RedrafterReference,
    first_eagle,
    generate,
    random_eagle,
    random_medusa,
    random_redrafter,
)
from tests.unit.worker.speculation.test_exactness import WAYS, check, draw, serve
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.config.speculation_config import SpeculationConfig
from trimaran.worker.execution.warm_up import load_step_kernels

EXAMPLES = Path(__file__).parents[4] / "examples"
COUNT = 4


def make_engine(folder, speculation, load_format="auto", **changes):
    """An engine step by step, whose other values are those of `conftest.make_engine`."""
    values = {
        "max_num_batched_tokens": 64, "max_num_seqs": 16, "max_seq_len": 128,
        "max_input_len": 127, "policy": "max_utilization", "expected_output_tokens": 1,
        "depth": 1, "tokens_per_block": 16, "max_tokens": 2048, "max_beam_width": 3, **changes,
    }  # fmt: skip
    names = {f.name for f in dataclasses.fields(SchedulerConfig)}
    scheduler = {name: value for name, value in values.items() if name in names}
    cache = {name: value for name, value in values.items() if name not in names}
    return Driver(
        EngineConfig(
            model="test", engine_dir=str(folder), dtype="float32", device="cpu",
            load_format=load_format,
            scheduler=SchedulerConfig(speculation=speculation, **scheduler),
            cache=CacheConfig(**cache),
        )
    )  # fmt: skip


def drafts_by(kind, networks, **fields):
    """The configuration of one kind of network."""
    values = {"max_draft_tokens": COUNT, "is_adaptive": False, **fields}
    return SpeculationConfig(drafter=kind, draft_dir=str(networks[kind]), **values)


@pytest.mark.matrix(keep=7)
@pytest.mark.parametrize("kind", ["eagle", "draft_model", "medusa", "redrafter"])
@pytest.mark.parametrize("way", WAYS)
def test_drafts_of_networks_change_no_output(target_folder, networks, kind, way):
    rng = random.Random(way)
    asked = [draw(rng) for _ in range(40)]
    expected = serve(make_engine(target_folder, SpeculationConfig(), **WAYS[way]), asked)

    driver = make_engine(target_folder, drafts_by(kind, networks), **WAYS[way])
    check(serve(driver, asked), expected)

    counts = driver.engine.scheduler.draft_counts
    assert counts.num_tokens
    assert counts.num_accepted or kind != "draft_model"


@pytest.mark.parametrize("kind", ["eagle", "draft_model", "medusa", "redrafter"])
def test_the_start_runs_networks_with_and_without_drafts_to_verify(
    target_folder, networks, kind
):
    driver = make_engine(target_folder, drafts_by(kind, networks))
    runner, asked = driver.engine.runner, []
    propose = runner.end.drafting.propose

    def note(wanted, inputs, decision, token_ids):
        found = propose(wanted, inputs, decision, token_ids)
        if found is not None:
            asked.append((len(decision.proposals), *decision.proposals[0, 1:3], found.shape))
        return found

    runner.end.drafting.propose = note
    load_step_kernels(runner, driver.engine.scheduler.config)

    # Up to the largest number of sequences, each with a draft that the step verifies.
    counts = [1, 2, 3, 4, 5, 6, 7, 8, 16]
    assert asked == [(count, count, 1, (count, COUNT)) for count in counts]
    prompt = [3, 4, 5]
    request = driver.submit(prompt, max_tokens=8, top_k=1)
    driver.run()
    plain = make_engine(target_folder, SpeculationConfig())
    assert plain.submit(prompt, max_tokens=8, top_k=1) == request
    plain.run()
    assert driver.output(request) == plain.output(request)


def test_drafts_of_networks_now_and_then_change_no_output(target_folder, networks):
    rng = random.Random(5)
    asked = [draw(rng) for _ in range(40)]
    expected = serve(make_engine(target_folder, SpeculationConfig()), asked)

    adaptive = drafts_by("draft_model", networks, is_adaptive=True)
    driver = make_engine(target_folder, adaptive)

    check(serve(driver, asked), expected)


def count_with(driver, prompts, num_tokens):
    """Outputs one after another, and the engine's counts of drafts."""
    outputs = []
    for prompt in prompts:
        request = driver.submit(prompt, max_tokens=num_tokens, top_k=1)
        driver.run(max_steps=100_000)
        outputs.append(driver.output(request))
    return outputs, driver.engine.scheduler.draft_counts


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("plain", {}),
        ("plain", {"max_num_batched_tokens": 16}),
        ("plain", {"tokens_per_block": 4, "max_tokens": 160}),
        ("normed residual", {}),
        ("speculators", {}),
        ("named layers", {}),
    ],
)
def test_an_eagle_head_drafts_as_the_plain_loop_does(
    target, target_folder, tmp_path, variant, changes
):
    more, prefix, taps = {}, "midlayer", (2, 3, 3)
    if variant == "normed residual":
        more["norm_before_residual"] = True
    if variant == "named layers":
        more["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
        taps = 1, 3, 5
    # Small weights leave the head near its inputs, so that some of its drafts are right.
    folder = random_eagle(
        tmp_path / "head", target.config, draft_vocab=VOCAB, prefix=prefix, scale=0.2, **more
    )
    if variant == "speculators":
        as_speculators(folder)
    prompts = [[rng % VOCAB for rng in range(n, 3 * n + 9, 2)] for n in range(1, 13, 2)]
    head = EagleReference(folder, target, taps)
    if variant == "speculators":
        head.values.update(head_dim=8, rms_norm_eps=1e-5, norm_before_residual=True)
    told = [generate(target, head, prompt, 40, COUNT) for prompt in prompts]

    driver = make_engine(target_folder, drafts_by("eagle", {"eagle": folder}), **changes)
    outputs, counts = count_with(driver, prompts, 40)

    assert outputs == [ids for ids, _ in told]
    assert counts.num_drafts == sum(each.drafts for _, each in told)
    assert counts.num_accepted == sum(each.accepted for _, each in told)


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("kind", ["eagle", "medusa", "redrafter"])
def test_heads_draft_for_a_quantized_target(target_folder, networks, tmp_path, kind):
    """Weights of heads are floats, though the target's are FP8."""
    folder = shutil.copytree(target_folder, tmp_path / "target")
    quantize_folder(folder, "fp8-blocks")
    prompts = [[place % VOCAB for place in range(n, 3 * n + 9, 2)] for n in range(1, 5)]
    expected, _ = count_with(make_engine(folder, SpeculationConfig()), prompts, 20)

    driver = make_engine(folder, drafts_by(kind, networks))
    outputs, counts = count_with(driver, prompts, 20)

    assert outputs == expected
    assert counts.num_tokens


def test_a_head_of_the_first_eagle_drafts_as_the_plain_loop_does(
    target, target_folder, tmp_path
):
    folder = random_eagle(tmp_path / "head", target.config, draft_vocab=VOCAB, scale=0.2)
    first_eagle(folder)
    prompts = [[place % VOCAB for place in range(n, 3 * n + 9, 2)] for n in range(1, 7)]
    head = FirstEagleReference(folder, target, ())
    told = [generate(target, head, prompt, 30, COUNT) for prompt in prompts]

    driver = make_engine(
        target_folder, drafts_by("eagle", {"eagle": folder}), max_num_batched_tokens=16
    )
    outputs, counts = count_with(driver, prompts, 30)

    assert outputs == [ids for ids, _ in told]
    assert (counts.num_drafts, counts.num_accepted) == (
        sum(each.drafts for _, each in told),
        sum(each.accepted for _, each in told),
    )


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(
    "changes", [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 3}, {"tokens_per_block": 4}]
)
def test_the_shipped_head_drafts_as_the_plain_loop_does(changes):
    base = EXAMPLES / "demo_models" / "base"
    folder = EXAMPLES / "draft_heads" / "eagle"
    target = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    texts = ["Once upon a time there was", "The captain ordered the men to"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    head = EagleReference(folder, target, (2, 4, 5))
    told = [generate(target, head, prompt, 60, COUNT) for prompt in prompts]

    driver = make_engine(base, drafts_by("eagle", {"eagle": folder}), **changes)
    outputs, counts = count_with(driver, prompts, 60)

    assert outputs == [ids for ids, _ in told]
    length = 1 + counts.num_accepted / counts.num_drafts
    drafts = sum(each.drafts for _, each in told)
    wanted = 1 + sum(each.accepted for _, each in told) / drafts
    assert length == pytest.approx(wanted, rel=0.02)
    assert length > 1.8


def as_speculators(folder):
    """Rewrite a head's config.json in the format of speculators."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    own = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    own["draft_vocab_size"] = values.pop("draft_vocab_size")
    del values["architectures"]
    path.write_text(json.dumps({**own, "transformer_layer_config": values}))


@pytest.mark.parametrize("draft_vocab", [0, 70])
def test_medusa_heads_draft_as_the_plain_loop_does(
    target, target_folder, draft_vocab, tmp_path
):
    prompts = [[rng % VOCAB for rng in range(n, 3 * n + 9, 2)] for n in range(1, 9)]
    folder = random_medusa(tmp_path, target.config, num_heads=COUNT, draft_vocab=draft_vocab)
    head = MedusaReference(folder)
    told = [generate(target, head, prompt, 30, COUNT) for prompt in prompts]

    driver = make_engine(target_folder, drafts_by("medusa", {"medusa": folder}))
    outputs, counts = count_with(driver, prompts, 30)

    assert outputs == [ids for ids, _ in told]
    assert (counts.num_drafts, counts.num_accepted) == (
        sum(each.drafts for _, each in told),
        sum(each.accepted for _, each in told),
    )


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(
    ("exit_dim", "is_recurrent", "spelling"),
    [
        (40, True, "lm_head."),
        (64, False, "lm_heads."),
        (40, False, "lm_heads."),
        (64, True, "0."),
    ],
)
def test_redrafter_drafts_as_the_plain_loop_does(
    target, target_folder, tmp_path, exit_dim, is_recurrent, spelling
):
    folder = random_redrafter(
        tmp_path / "head", target.config, exit_dim=exit_dim, is_recurrent=is_recurrent,
        spelling=spelling,
    )  # fmt: skip
    prompts = [[place % VOCAB for place in range(n, 3 * n + 9, 2)] for n in range(1, 7)]
    head = RedrafterReference(folder, target)
    told = [generate(target, head, prompt, 30, COUNT) for prompt in prompts]

    driver = make_engine(target_folder, drafts_by("redrafter", {"redrafter": folder}))
    outputs, counts = count_with(driver, prompts, 30)

    assert outputs == [ids for ids, _ in told]
    assert (counts.num_drafts, counts.num_accepted) == (
        sum(each.drafts for _, each in told),
        sum(each.accepted for _, each in told),
    )


def test_a_target_that_drafts_for_itself_is_always_right(target_folder):
    own = {"draft_model": target_folder}
    driver = make_engine(target_folder, drafts_by("draft_model", own), tokens_per_block=4)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 9, 60]))] for _ in range(12)]

    count_with(driver, prompts, 30)

    counts = driver.engine.scheduler.draft_counts
    assert counts.num_accepted == counts.num_tokens > 0


@pytest.mark.parametrize("change", [{}, {"host_bytes": 1 << 21}])
def test_the_cache_of_a_network_follows_pauses_and_reuse(target_folder, change):
    """Sequences that pause, and prompts whose blocks are reused, go on to draft rightly."""
    own = drafts_by("draft_model", {"draft_model": target_folder})
    driver = make_engine(
        target_folder, own, tokens_per_block=4, max_tokens=320, max_num_batched_tokens=40,
        **change,
    )  # fmt: skip
    rng = random.Random(6)
    start = [rng.randrange(VOCAB) for _ in range(24)]
    for number in range(24):
        driver.submit([*start[: number % 25], number], max_tokens=50, top_k=1)
        driver.step()
    driver.run(max_steps=100_000)
    driver.check_idle()

    scheduler = driver.engine.scheduler
    counts = scheduler.draft_counts
    assert scheduler.cache.num_reused_blocks
    assert counts.num_accepted == counts.num_tokens > 0


def test_a_request_can_opt_out_and_limit_its_drafts(target_folder, networks):
    driver = make_engine(target_folder, drafts_by("draft_model", networks))
    driver.submit([5, 6, 7], max_tokens=12, max_draft_tokens=0)
    driver.run()
    assert driver.engine.scheduler.draft_counts.num_drafts == 0

    driver.submit([5, 6, 7], max_tokens=12, max_draft_tokens=1)
    driver.run()
    counts = driver.engine.scheduler.draft_counts
    assert 0 < counts.num_tokens == counts.num_drafts


def edit(folder, **values):
    """A copy of a head's folder with changed values."""
    copy = folder.with_name(f"{folder.name}-{random.randrange(1 << 30)}")
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return copy


@pytest.mark.parametrize(
    ("kind", "values", "complaint"),
    [
        ("eagle", {"vocab_size": 151}, "the head belongs to another model"),
        ("eagle", {"target_hidden_size": 64}, "target_hidden_size is 64"),
        ("eagle", {"num_hidden_layers": 2}, "heads of one layer are served"),
        ("eagle", {"draft_vocab_size": 41}, "has shape [40]"),
        ("eagle", {"norm_before_fc": True}, "norm_before_fc is True"),
        ("eagle", {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "but must be a list of"),
        ("eagle", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "has shape [32, 96]"),
        ("medusa", {"medusa_num_heads": 5}, "lacks heads.4."),
        ("medusa", {"medusa_num_heads": 2}, "holds the unexpected"),
        ("medusa", {"medusa_num_heads": 0}, "medusa_num_heads is 0"),
        ("medusa", {"truncated_vocab_size": 40}, "no tensor token_map"),
        ("redrafter", {"exit_dim": 41}, "has shape"),
        ("redrafter", {"num_draft_layers": 3}, "lacks blocks.2."),
        ("redrafter", {"rnn": False}, "holds the unexpected"),
        ("redrafter", {"hidden_size": 64}, "hidden_size is 64"),
        ("draft_model", {"vocab_size": 151}, "vocab_size"),
        ("draft_model", {"max_position_embeddings": 64}, "has 64 positions"),
    ],
)
def test_networks_of_another_model_are_refused(
    target_folder, networks, kind, values, complaint
):
    folder = edit(networks[kind], **values)

    with pytest.raises(ConfigError) as caught:
        make_engine(target_folder, drafts_by(kind, {kind: folder}, max_draft_tokens=2))

    assert complaint in str(caught.value)


def test_more_drafts_than_heads_are_refused(target_folder, networks):
    with pytest.raises(ConfigError) as caught:
        make_engine(target_folder, drafts_by("medusa", networks, max_draft_tokens=COUNT + 1))

    assert f"has {COUNT} heads" in str(caught.value)


def test_medusa_heads_of_random_weights_are_refused(target_folder, networks):
    with pytest.raises(ConfigError, match="--load-format random makes no medusa heads"):
        make_engine(target_folder, drafts_by("medusa", networks), load_format="random")
