"""Our models against transformers on the same weights."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun, logits_alone_and_beside
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.torch_ops import TorchOps

CONFIGS = {
    "llama": models.llama_config(),
    "llama-tied": models.llama_config(tie_word_embeddings=True),
    "llama-one-kv-head": models.llama_config(num_key_value_heads=1),
    "llama-all-heads": models.llama_config(num_key_value_heads=8),
    "llama-biases": models.llama_config(attention_bias=True, mlp_bias=True),
    "llama-wide-heads": models.llama_config(head_dim=32),
    "llama-rope-llama3": models.llama_config(rope_parameters=models.LLAMA3_ROPE),
    "llama-rope-linear": models.llama_config(
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    ),
    "llama-rope-dynamic": models.llama_config(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    ),
    "llama-rope-yarn": models.llama_config(rope_parameters=models.YARN_ROPE),
    "llama-rope-yarn-mscale": models.llama_config(
        rope_parameters={
            **models.YARN_ROPE,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
            "beta_fast": 16,
            "truncate": False,
        }
    ),
    "llama-gelu": models.llama_config(hidden_act="gelu"),
    "llama-gelu-tanh": models.llama_config(hidden_act="gelu_pytorch_tanh"),
    "gpt2": models.gpt2_config(),
    "gpt2-gelu": models.gpt2_config(activation_function="gelu"),
    "gpt2-relu-untied": models.gpt2_config(
        activation_function="relu", tie_word_embeddings=False
    ),
    **models.dense_configs(),
    **models.parallel_configs(),
    **models.latent_configs(),
}


@pytest.fixture(params=list(CONFIGS))
def pair(request, tmp_path, ops_of):
    theirs = models.save_huggingface(tmp_path, CONFIGS[request.param])
    return theirs, models.load_ours(tmp_path, ops=ops_of(torch.float32))


@pytest.mark.matrix(keep=15)
def test_greedy_tokens_in_float32_are_those_of_transformers(pair):
    theirs, ours = pair
    prompts = models.prompts(1, 3, 4, 5, 37)

    outputs = PagedRun(ours, 5).greedy(prompts, 20)

    assert outputs == models.reference_greedy(theirs, prompts, 20)


@pytest.mark.matrix(keep=28)
def test_logits_in_float32_are_those_of_transformers(pair):
    theirs, ours = pair
    (prompt,) = models.prompts(40)

    logits = PagedRun(ours, 1).logits({0: prompt})

    expected = theirs(torch.tensor([prompt])).logits[0].detach()
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.matrix(keep=19)
@pytest.mark.parametrize("makes_all_queries", [True, False])
@torch.inference_mode()
def test_hidden_states_of_sampled_tokens_equal_theirs_among_all_tokens(pair, makes_all_queries):
    _, ours = pair
    first, second, third = models.prompts(9, 30, 6)
    whole, narrow = PagedRun(ours, 3), PagedRun(ours, 3)
    for run in (whole, narrow):
        run.hidden({2: third})
    wanted = torch.tensor([0, 9, 39])
    chunks = {2: [7], 0: first, 1: second}

    found = narrow.hidden(chunks, wanted=wanted, makes_all_queries=makes_all_queries)

    # Products of fewer rows, which torch may add up in another order.
    torch.testing.assert_close(found, whole.hidden(chunks)[wanted], atol=2e-6, rtol=1e-5)
    # Further tokens depend on the keys and values of all tokens of all layers.
    following = {0: [3], 1: [5], 2: [8]}
    torch.testing.assert_close(
        narrow.hidden(following), whole.hidden(following), atol=2e-6, rtol=1e-5
    )


# Weights of the output projection and of the MLP. Additions in place are not counted.
_BEHIND_ATTENTION = {"llama-biases": 64 * 8 * 16 + 3 * 64 * 96, "gpt2": 64 * 64 + 2 * 64 * 96}


@pytest.mark.parametrize("name", _BEHIND_ATTENTION)
@torch.inference_mode()
def test_the_last_layer_multiplies_sampled_tokens_alone(name, tmp_path):
    models.save_huggingface(tmp_path, CONFIGS[name])
    ours = models.load_ours(tmp_path, ops=TorchOps())
    (prompt,) = models.prompts(30)

    def operations(wanted, **how):
        with FlopCounterMode(display=False) as counter:
            PagedRun(ours, 1).hidden({0: prompt}, wanted=wanted, **how)
        return counter.get_total_flops()

    saved = operations(None) - operations(torch.tensor([29]))

    assert saved == 2 * _BEHIND_ATTENTION[name] * 29


@torch.inference_mode()
def test_the_last_layer_computes_queries_of_sampled_tokens_alone(tmp_path):
    models.save_huggingface(tmp_path, CONFIGS["llama"])
    ours = models.load_ours(tmp_path, ops=TorchOps())
    (prompt,) = models.prompts(30)

    def operations(*, makes_all_queries):
        with FlopCounterMode(display=False) as counter:
            PagedRun(ours, 1).hidden(
                {0: prompt}, wanted=torch.tensor([29]), makes_all_queries=makes_all_queries
            )
        counts = counter.get_flop_counts()["Global"]
        # Projections alone: attention multiplies batches.
        return sum(n for operator, n in counts.items() if "bmm" not in str(operator))

    saved = operations(makes_all_queries=True) - operations(makes_all_queries=False)

    # The wanted token's keys and values are computed twice.
    queries, keys_and_values = 8 * 16, 2 * 4 * 16
    assert saved == 2 * 64 * (29 * queries - keys_and_values)


_IN_HALF = [
    "llama", "llama-rope-llama3", "gpt2", "qwen3", "gemma2", "gemma3", "gptj", "neox",
    "falcon",
]  # fmt: skip


@pytest.mark.matrix(keep=13)
@pytest.mark.parametrize("name", _IN_HALF)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision_are_within_rounding_of_float32(name, dtype, tmp_path, ops_of):
    theirs = models.save_huggingface(tmp_path, CONFIGS[name], dtype=dtype)
    ours = models.load_ours(tmp_path, dtype=dtype, ops=ops_of(dtype))
    (prompt,) = models.prompts(40)

    logits = PagedRun(ours, 1).logits({0: prompt})

    expected = theirs(torch.tensor([prompt])).logits[0].detach().float()
    exact = theirs.float()(torch.tensor([prompt])).logits[0].detach()
    # The error is no larger than the rounding error of transformers.
    error = (logits - exact).abs().max()
    assert error <= 1.5 * (expected - exact).abs().max()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj", "falcon-groups-untied"])
def test_chunked_prompts_beside_decodes_change_no_token(name, tmp_path, ops_of):
    theirs = models.save_huggingface(tmp_path, CONFIGS[name])
    run = PagedRun(models.load_ours(tmp_path, ops=ops_of(torch.float32)), 3)
    first, second, third = models.prompts(9, 30, 6)
    expected = models.reference_greedy(theirs, [first, second, third], 4)

    token = int(run.logits({0: first})[-1].argmax())
    run.logits({2: third[:5]})
    steps = [
        {0: [token], 1: second[:10]},
        {0: [], 1: second[10:11], 2: third[5:]},
        {0: [], 1: second[11:]},
    ]
    outputs = [[token], [], []]
    for chunks in steps:
        if outputs[0]:
            chunks[0] = outputs[0][-1:]
        rows = run.logits(chunks)
        row = -1
        for sequence, ids in chunks.items():
            row += len(ids)
            if sequence != 1 or run.lengths[1] == len(second):
                outputs[sequence].append(int(rows[row].argmax()))

    assert outputs[0] == expected[0]
    assert outputs[1] == expected[1][:1]
    assert outputs[2] == expected[2][:1]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj", "neox", "falcon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_logits_on_the_cpu_do_not_depend_on_the_batch(name, dtype, tmp_path):
    models.save_huggingface(tmp_path, CONFIGS[name], dtype=dtype)
    ours = models.load_ours(tmp_path, dtype=dtype, ops=CpuOps(load_library(), dtype, 1))

    alone, beside = logits_alone_and_beside(ours)

    assert beside.equal(alone)


_FUSED = ["llama", "llama-biases", "gpt2", "neox-after-each-other-tied"]


@pytest.mark.parametrize("name", _FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_layers_give_the_bits_of_layers_run_operator_by_operator(name, dtype, tmp_path):
    models.save_huggingface(tmp_path, CONFIGS[name], dtype=dtype)
    ops = CpuOps(load_library(), dtype, 1)
    fused = models.load_ours(tmp_path, dtype=dtype, ops=ops)
    stepwise = models.load_ours(tmp_path, dtype=dtype, ops=ops, is_finished=False)
    first, second = models.prompts(21, 33)

    chunks = {0: first, 1: second}
    assert fused.backends()["decoder"] != stepwise.backends()["decoder"]
    expected = PagedRun(stepwise, 2).logits(chunks)
    assert PagedRun(fused, 2).logits(chunks).equal(expected)
