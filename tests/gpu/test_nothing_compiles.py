"""A GPU's engine compiles and loads no Triton kernel after its start, whatever requests ask."""

from __future__ import annotations

import itertools
import random
import sys
import threading
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from transformers import (
    AutoConfig,
    DeepseekV2Config,
    LlamaConfig,
    Phi3Config,
    Qwen3MoeConfig,
)
from triton import knobs
from triton.runtime.jit import JITFunction

from tests.driver import Driver
from tests.models.families import family_configs, one_of_each_family
from tests.unit.worker.engine.test_every_feature import MODEL, draw
from tests.unit.worker.execution.test_step_kernels import DrawnSteps
from tests.unit.worker.lora_adapters import LINEARS, make_adapter, on_the_wire
from tests.unit.worker.models import models
from tests.unit.worker.speculation.head_reference import random_medusa, random_redrafter
from trimaran.builder.quantization.kv_calibration import calibrate_kv_scales
from trimaran.comm.deadlines import Watchdog
from trimaran.kernels.adapters import AdapterBlocks, AdapterTables, kernel_variants
from trimaran.kernels.compilations import hooks
from trimaran.kernels.tables.tuned_choices import (
    FILE_NAME,
    Tuning,
    TuningKey,
    write_tuning,
)
from trimaran.kernels.triton.launch import Launcher
from trimaran.kernels.triton.lora import add_adapters, compile_adapters
from trimaran.kernels.tuning.expert_candidates import likely_cuts
from trimaran.kernels.tuning.product_timing import numbers_of
from trimaran.kernels.tuning.tuner import ROWS, TOKENS
from trimaran.worker.config.draft_tree import tree_of
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    GuidedConfig,
    LoraConfig,
    ParallelConfig,
    SchedulerConfig,
)
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.speculation_config import SpeculationConfig
from trimaran.worker.engine.compilations import Compilations
from trimaran.worker.execution.prompt_tables import PromptTable
from trimaran.worker.lora.layout import MODULE_NAMES, AdapterLayout, Matrices
from trimaran.worker.models.tunable import Tunable

pytestmark = pytest.mark.gpu

LENGTHS = (1, 5, 28, 61)
SAMPLINGS = (
    {},
    {"top_p": 0.9, "seed": 4, "min_tokens": 3, "end_id": 7},
    {"top_k": 20, "seed": 3, "repetition_penalty": 1.2, "bad_words": ((3, 4), (9,))},
    {"no_repeat_ngram_size": 2, "return_log_probs": True},
    {"return_context_logits": True, "return_generation_logits": True},
    {"top_p": 0.9, "top_p_decay": 0.9, "top_p_reset_ids": 3},
    {"beam_width": 3, "num_return_sequences": 3, "end_id": 7},
    {"beam_width": 2, "num_return_sequences": 2, "repetition_penalty": 1.2},
)
ADAPTERS = {
    3: (3, tuple(LINEARS)),
    5: (20, ("attn_q", "attn_v")),
    7: (64, ("mlp_gate", "attn_dense")),
    9: (16, ("attn_k",)),
    11: (40, ("mlp_4h_to_h", "mlp_h_to_4h")),
}
"""Rank and modules of the adapter of each task."""


def triton_objects():
    """The kernels and launchers of all modules that are loaded."""
    for name, module in list(sys.modules.items()):
        if name.startswith("trimaran.kernels.triton"):
            yield from vars(module).values()


class CudaNotices:
    """Takes the place of `Compilations` for the kernels in CUDA C++."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def begin(self, name: str) -> None:
        self._names.append(name)

    def end(self, name: str, seconds: float, *, is_cached: bool) -> None:
        pass


@pytest.fixture
def compiled(monkeypatch):
    """The kernels compiled or loaded since `begin`, with types and constants; Triton's of
    earlier tests count as unknown."""
    for each in triton_objects():
        if isinstance(each, JITFunction):
            each.device_caches.clear()
        elif isinstance(each, Launcher):
            each._compiled.clear()
    names: list[str] = []

    def note(*, repr, **_) -> bool:
        names.append(repr)
        return False

    def begin() -> list[str]:
        monkeypatch.setattr(hooks, "_listener", CudaNotices(names))
        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
        return names

    return begin


def make_driver(folder, *, limits=None, cache=None, **changes):
    """An engine of small steps, unless ``limits`` say otherwise."""
    sizes = {"max_num_batched_tokens": 96, "max_num_seqs": 20, "max_seq_len": 128}
    sizes |= {"max_input_len": 127, "max_beam_width": 4, "policy": "max_utilization"}
    values = {"device": "cuda", "dtype": "bfloat16", **changes}
    return Driver(
        EngineConfig(
            model="test",
            engine_dir=str(folder),
            scheduler=SchedulerConfig(**{**sizes, **(limits or {})}),
            cache=CacheConfig(**{"tokens_per_block": 16, "max_tokens": 2048, **(cache or {})}),
            **values,
        )
    )


def serve_in_waves(driver, requests):
    """Prompts begin beside decodes, alone and many at once."""
    for number, fields in enumerate(requests):
        driver.submit(**fields)
        for _ in range((number * 7) % 4):
            driver.step()
    driver.run(max_steps=100_000)


@pytest.mark.parametrize("name", one_of_each_family())
def test_a_family_compiles_nothing_after_its_start(compiled, name, tmp_path):
    models.save_huggingface(tmp_path, family_configs()[name])
    driver = make_driver(tmp_path)
    names = compiled()

    rng = np.random.default_rng(3)
    requests = [
        {"prompt": rng.integers(0, 150, length), "max_tokens": 12, **sampling}
        for sampling in SAMPLINGS
        for length in LENGTHS
    ]
    serve_in_waves(driver, requests)

    driver.engine.shutdown()
    assert not names, "\n".join(names)


def test_drawn_steps_with_masks_of_guides_compile_nothing_after_the_start(compiled, tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    driver = make_driver(tmp_path)
    runner, names = driver.engine.runner, compiled()

    steps = DrawnSteps(7, runner.model.config.hidden_size)
    for _ in range(200):
        decision = steps.next()
        if len(decision.rows):
            runner.execute_model(decision).wait()

    driver.engine.shutdown()
    assert not names, "\n".join(names)


WAYS = {
    "graphs": {},
    "adapters in graphs": {"lora": LoraConfig(has_graphs=True)},
    "launches": {"cuda_graphs": False},
    "deterministic": {"deterministic": True},
    "guides": {"guided": GuidedConfig(backend="xgrammar")},
}


@pytest.mark.parametrize("way", list(WAYS))
def test_every_feature_compiles_nothing_after_the_start(compiled, way):
    if "guided" in WAYS[way]:
        pytest.importorskip("xgrammar")
    adapters = {
        task: on_the_wire(make_adapter(MODEL, task, rank, modules))
        for task, (rank, modules) in ADAPTERS.items()
    }
    driver = make_driver(MODEL, **WAYS[way])
    names = compiled()

    rng = random.Random(way)
    requests = []
    for _ in range(120):
        fields = draw(rng, adapters)
        if "guided" not in WAYS[way]:
            # The masks of guides come from another package; drawn steps have masks.
            fields = {name: value for name, value in fields.items() if "guide" not in name}
        task = rng.choice([0, 0, *adapters])
        if task:
            fields.update(adapter_id=task, adapter=adapters[task])
        requests.append(fields)
    serve_in_waves(driver, requests)

    driver.engine.shutdown()
    assert not names, "\n".join(names)


_SIZES = {
    "vocab_size": 1000, "hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SHAPES = {
    "heads of 128": LlamaConfig(**_SIZES, head_dim=128),
    "heads of 96": Phi3Config(**_SIZES, pad_token_id=None),
    # As in Phi-3-mini: each of the stacked matrices begins at a block of 128 rows.
    "heads of 96, alone": Phi3Config(**{**_SIZES, "num_key_value_heads": 4}, pad_token_id=None),
    "experts": Qwen3MoeConfig(
        **{**_SIZES, "hidden_size": 512}, head_dim=64, num_experts=32, num_experts_per_tok=4,
        moe_intermediate_size=256,
    ),
    "latent": DeepseekV2Config(
        **{**_SIZES, "hidden_size": 512, "num_key_value_heads": 4}, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512, q_lora_rank=None,
        first_k_dense_replace=1, n_routed_experts=16, num_experts_per_tok=6,
        moe_intermediate_size=256, n_shared_experts=2,
    ),
}  # fmt: skip
"""The sizes of heads of published models, to which the choice of kernels goes."""

LIMITS = {
    "max_num_batched_tokens": 1536, "max_num_seqs": 40, "max_seq_len": 600,
    "max_input_len": 500,
}  # fmt: skip
"""Steps so large that the last layer skips the queries of prompts."""

FEW = {**LIMITS, "max_num_seqs": 3, "max_seq_len": 1000, "max_input_len": 900}
ENGINES = {
    "llama": ("heads of 128", {}),
    "llama, adapters in graphs": ("heads of 128", {"lora": LoraConfig(has_graphs=True)}),
    "llama, deterministic": ("heads of 128", {"deterministic": True}),
    "llama, FP8": ("heads of 128", {"quantization": "fp8"}),
    "llama, INT8 inputs": ("heads of 128", {"quantization": "w8a8_int8"}),
    "llama, 4 bits": ("heads of 128", {"quantization": "int4"}),
    "llama, FP8 cache": ("heads of 128", {"cache": {"dtype": "fp8"}}),
    "llama, INT8 cache": ("heads of 128", {"cache": {"dtype": "int8"}}),
    "llama, tuned": ("heads of 128", {}),
    "phi3": ("heads of 96", {}),
    "phi3, float32": ("heads of 96", {"dtype": "float32"}),
    "phi3, INT8 cache": ("heads of 96", {"cache": {"dtype": "int8"}}),
    "phi3, FP8 in blocks": ("heads of 96, alone", {"quantization": "fp8_block"}),
    "experts": ("experts", {}),
    "experts, few sequences": ("experts", {"limits": FEW}),
    "experts, tuned": ("experts", {}),
    "experts, FP8": ("experts", {"quantization": "fp8"}),
    "experts, deterministic": ("experts", {"deterministic": True}),
    "latent": ("latent", {}),
    "latent, FP8 in blocks": ("latent", {"quantization": "fp8_block"}),
}
"""The shape of each engine's model, and what sets the engine apart."""


RANKS = (3, 20, 64, 16, 40, 33)


def adapters_of(model):
    """Adapters of all modules that a model has, of each alone, and of two; of several ranks."""
    layout = AdapterLayout(model)
    modules = [MODULE_NAMES.index(name) for name in layout.module_names]
    generator = torch.Generator().manual_seed(4)
    sets = [modules, *([each] for each in modules), modules[:2]]
    found = {}
    for number, (chosen, rank) in enumerate(zip(sets, itertools.cycle(RANKS), strict=False)):
        adapter = []
        for layer, module in itertools.product(range(layout.num_layers), chosen):
            if shape := layout.shape_of(module, layer):
                inputs, outputs = shape
                a = 0.1 * torch.randn(rank, inputs, generator=generator)
                b = 0.1 * torch.randn(outputs, rank, generator=generator)
                adapter.append(Matrices(module, layer, a, b))
        found[number + 1] = on_the_wire(adapter)
    return found


def mixed_requests(rng, driver, count):
    """Requests of drawn lengths with samplings, adapters and prompt tables."""
    model = driver.engine.runner.model
    vocab, longest = model.config.vocab_size, driver.engine.scheduler.config.max_input_len
    adapters, requests = adapters_of(model), []
    for number in range(count):
        length = min(rng.choice((*LENGTHS, 100, 200, 450, 900)), longest)
        prompt = [rng.randrange(vocab) for _ in range(length)]
        fields = {"prompt": prompt, "max_tokens": 12, **SAMPLINGS[number % len(SAMPLINGS)]}
        if rng.random() < 0.3:
            task = rng.choice(list(adapters))
            fields.update(adapter_id=task, adapter=adapters[task])
        elif rng.random() < 0.15:
            table = np.zeros((2, model.config.hidden_size), dtype="<f2")
            fields["embeddings"] = PromptTable("FP16", table.shape, table.tobytes()).to_wire()
            prompt[-1] = vocab + 1
        requests.append(fields)
    return requests


def choose_own_kernels(folder):
    """A file of tuned choices by which our kernels serve every product and expert."""
    config = EngineFolder.load(folder).config
    tunable = Tunable.of(replace(config, dtype="bfloat16"), ParallelConfig())
    products = {
        each.name: [(rows, numbers_of(each.likely_cuts(rows, 1)[0])) for rows in ROWS]
        for each in tunable.products
    }
    experts = {
        name: [
            (tokens * sizes.chosen, list(astuple(next(likely_cuts(tokens, sizes)))))
            for tokens in TOKENS
        ]
        for sizes in tunable.mixtures
        for name in sizes.names
    }
    key = TuningKey.of(torch.cuda.get_device_name())
    write_tuning(folder / FILE_NAME, Tuning(key, products, experts))


@pytest.mark.parametrize("name", ENGINES)
def test_a_loaded_engine_compiles_nothing_after_its_start(compiled, name, tmp_path):
    shape, changes = ENGINES[name]
    models.save_huggingface(tmp_path, SHAPES[shape])
    if "tuned" in name:
        choose_own_kernels(tmp_path)
    if kind := changes.get("cache", {}).get("dtype"):
        calibrate_kv_scales(models.load_ours(tmp_path), kind, [[3, 4, 5]]).write(tmp_path)
    values = {"limits": LIMITS, **changes, "cache": {"max_tokens": 24000}}
    values["cache"] |= changes.get("cache", {})
    driver = make_driver(tmp_path, **values)
    names = compiled()

    requests = mixed_requests(random.Random(name), driver, 160)
    # Many prompts at once, then waves.
    for fields in requests[:30]:
        driver.submit(**fields)
    serve_in_waves(driver, requests[30:])

    driver.engine.shutdown()
    assert not names, "\n".join(names)


@pytest.mark.parametrize("shape", ["heads of 128", "experts", "latent"])
def test_output_that_is_computed_again_compiles_nothing_after_the_start(
    compiled, shape, tmp_path
):
    models.save_huggingface(tmp_path, SHAPES[shape])
    driver = make_driver(
        tmp_path, limits=LIMITS, deterministic=True, cache={"max_tokens": 24_000}
    )
    names = compiled()

    rng, requests = random.Random(shape), []
    for length in (*range(1, 10), *(rng.randrange(10, 300) for _ in range(60))):
        prompt = [rng.randrange(1000) for _ in range(rng.choice((*LENGTHS, 200)))]
        output = [rng.randrange(1000) for _ in range(length)]
        requests.append({"prompt": prompt, "output": output, "max_tokens": length + 3})
    # Alone, many at once, and in waves.
    for fields in requests[:20]:
        driver.submit(**fields)
        driver.run()
    for fields in requests[20:60]:
        driver.submit(**fields)
    serve_in_waves(driver, requests[60:])

    driver.engine.shutdown()
    assert not names, "\n".join(names)


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DRAFTERS = {
    "draft_tokens": "", "ngram": "", "lookahead": "", "medusa": "",
    "eagle": str(EXAMPLES / "draft_heads" / "eagle"),
    "draft_model": str(EXAMPLES / "demo_models" / "draft"),
    "eagle, dynamic": str(EXAMPLES / "draft_heads" / "eagle"),
    "eagle, tree": str(EXAMPLES / "draft_heads" / "eagle"),
    "medusa, tree": "", "redrafter, dynamic": "",
}  # fmt: skip
DYNAMIC = {"max_draft_tokens": 12, "tree_width": 3, "tree_depth": 4}
SMALL = tree_of([[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0, 0]])
TREES = {"dynamic": DYNAMIC, "tree": {"max_draft_tokens": 64, "tree": SMALL.choices}}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_compile_nothing_after_the_start(compiled, drafter, tmp_path):
    folder, (kind, _, shape) = DRAFTERS[drafter], drafter.partition(", ")
    config = AutoConfig.from_pretrained(MODEL)
    if kind == "medusa":
        folder = str(random_medusa(tmp_path, config, num_heads=4))
    elif kind == "redrafter":
        head = random_redrafter(tmp_path, config, exit_dim=48, is_recurrent=True)
        folder = str(head)
    own = TREES.get(shape, {"max_draft_tokens": 4})
    speculation = SpeculationConfig(drafter=kind, draft_dir=folder, is_adaptive=False, **own)
    driver = make_driver(MODEL, limits={"speculation": speculation, "max_beam_width": 1})
    names = compiled()

    rng, requests = random.Random(drafter), []
    for number in range(100):
        words = [rng.randrange(2, 4096) for _ in range(4)]
        fields = {"prompt": [rng.choice(words) for _ in range(rng.choice(LENGTHS))]}
        fields |= {"max_tokens": 30, **SAMPLINGS[number % 6]}
        if rng.random() < 0.4:
            fields["draft_token_ids"] = tuple(words)
        requests.append(fields)
    serve_in_waves(driver, requests)

    assert driver.engine.scheduler.draft_counts.num_tokens > 50
    driver.engine.shutdown()
    assert not names, "\n".join(names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_adapters_compiled_ahead_are_those_that_steps_launch(compiled, dtype):
    variants = kernel_variants(64, has_large_blocks=True)
    for size, rank in variants:
        compile_adapters(torch.device("cuda", 0), dtype, size, rank)
    names = compiled()

    offsets = torch.zeros((4, 9, 3), dtype=torch.int64, device="cuda")
    tables = AdapterTables(torch.zeros(64, dtype=dtype, device="cuda"), offsets)
    for size, rank in variants:
        packed = torch.full((3, size), -1, dtype=torch.int32, device="cuda")
        blocks = AdapterBlocks(packed, packed[:, 0].contiguous(), rank)
        for first, sizes in ((0, (64, 32, 32)), (3, (64,)), (4, (96, 96))):
            x = torch.zeros((20, 64), dtype=dtype, device="cuda")
            output = torch.zeros((20, sum(sizes)), dtype=dtype, device="cuda")
            add_adapters(x, output, tables, blocks, first, sizes)

    assert not names, "\n".join(names)


@triton.jit
def _add_one_kernel(x, TILE: tl.constexpr):
    places = tl.arange(0, TILE)
    tl.store(x + places, tl.load(x + places) + 1)


def test_a_rank_that_compiles_is_not_hung(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.compilation, "listener", None)
    x = torch.zeros(1 << 14, device="cuda")
    _add_one_kernel[(1,)](x, TILE=128)
    barked, compilations = threading.Event(), Compilations()
    watchdog = Watchdog(0.3, barked.set)
    compilations.watch(watchdog, 60.0)
    sizes = [256 << bits for bits in range(7)]

    # Together the compilations take longer than the step may.
    watchdog.watch(lambda: "a step")
    for size in sizes:
        _add_one_kernel[(1,)](x, TILE=size)
    watchdog.pause()
    watchdog.stop()

    assert not barked.is_set()
    assert compilations.num_compiled == len(sizes)
