"""Weights on their way to a GPU, traces of its kernels, and its clock."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.control.control_plane import LocalControlPlane
from trimaran.comm.messages.messages import Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ProfileConfig,
    RankConfig,
    SchedulerConfig,
)
from trimaran.worker.engine.engine import Engine
from trimaran.worker.models.weights.tensor_reader import TensorReader
from trimaran.worker.steps.step_types import NewRow, SchedulerOutput, int32s

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("chunk_bytes", [1 << 10, 100_000, 8 << 20])
def test_weights_arrive_whole_despite_reuse_of_staging_memory(tmp_path, chunk_bytes):
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"w{n}": torch.randn(211 + n, 509, generator=generator).bfloat16() for n in range(40)
    }
    path = tmp_path / "w.safetensors"
    save_file(tensors, path)
    reader = TensorReader(GPU, chunk_bytes=chunk_bytes, max_ahead_bytes=1 << 20)
    seen = {}
    for name, tensor in reader.read(path, tensors):
        # Copied on the current stream; the source memory is released at once.
        seen[name] = tensor.clone()
    reader.close()
    torch.cuda.synchronize()
    for name, expected in load_file(path).items():
        assert torch.equal(seen[name].cpu(), expected), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def load(folder, profile=None, *, num_seqs=4, num_tokens=64):
    config = EngineConfig(
        model="test",
        engine_dir=folder,
        device="cuda",
        dtype="bfloat16",
        scheduler=SchedulerConfig(
            max_num_batched_tokens=num_tokens,
            max_num_seqs=num_seqs,
            max_seq_len=128,
            max_input_len=64,
        ),
        cache=CacheConfig(tokens_per_block=32, max_tokens=1024),
    )
    rank = RankConfig(engine=config, group="test", profile=profile)
    return Engine.load(rank, ParallelLayout(), LocalControlPlane(), SingleRankGroup())


def run(folder, profile=None):
    """An engine that has answered four requests."""
    engine = load(folder, profile)
    for number in range(4):
        sampling = SamplingParams(max_tokens=30).to_wire()
        prompt = pack_ids(list(range(1, 9 + number)))
        engine.submit(
            0, Submit(request_id=number, model="m", prompt_ids=prompt, sampling=sampling)
        )
    while engine.has_work:
        engine.step()
    return engine


def test_a_trace_has_the_kernels_of_every_step_also_of_graphs(folder, tmp_path):
    profile = ProfileConfig(first=10, last=14, folder=str(tmp_path))
    run(folder, profile).shutdown()
    (path,) = tmp_path.iterdir()
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    launches = [event for event in events if event["name"] == "engine: launch"]
    assert len(launches) >= 5
    # Two layers alone are more than ten kernels a step.
    assert len(kernels) >= 10 * 5


def test_the_device_is_timed_on_its_own_clock(folder):
    engine = run(folder)
    torch.cuda.synchronize()
    values = engine.stats()
    engine.shutdown()
    assert values["device_seconds"] > 0
    assert values["sample_seconds"] > 0
    host = ("schedule", "launch", "wait", "emit", "receive")
    busy = sum(values[f"{part}_seconds"] for part in host)
    # Steps follow one another on one stream, so their times cannot overlap.
    assert values["device_seconds"] + values["sample_seconds"] <= busy + 0.1


def step_of(chunks, new_rows=()):
    """One that goes on with the first rows, so many tokens each."""
    count = len(chunks)
    return SchedulerOutput(
        step=0,
        rows=int32s(range(count)),
        num_scheduled_tokens=int32s(chunks),
        num_computed_tokens=int32s([1] * count),
        sampled=int32s(range(count)),
        new_blocks=int32s((), 4),
        block_copies=int32s((), 3),
        finished_rows=int32s(()),
        new_rows=list(new_rows),
        num_decodes=count if max(chunks) == 1 else 0,
    )


def test_the_warm_up_loads_the_kernels_of_every_step_size(folder):
    engine = load(folder, num_seqs=200, num_tokens=1024)
    sampling = SamplingParams(top_p=1.0).to_wire()
    rows = [
        NewRow(row=row, token_ids=int32s([1]), num_prompt_tokens=1, sampling=sampling)
        for row in range(200)
    ]
    engine.runner.execute_model(step_of([1] * 200, rows)).wait()
    waited = []
    begun = torch.cuda.Event()
    steps = [[1] * count for count in range(8, 200, 8)]
    for chunks in steps + [[60] * count for count in range(1, 17)]:
        torch.cuda._sleep(100_000_000)
        begun.record()
        output = engine.runner.execute_model(step_of(chunks))
        if begun.query():
            waited.append(chunks)
        output.wait()
    engine.shutdown()

    assert not waited, "launches that waited for the device"
