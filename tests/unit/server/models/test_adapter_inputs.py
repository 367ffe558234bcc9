"""LoRA inputs of the token model and of text models, as an engine receives them."""

from __future__ import annotations

import asyncio
import mmap

import numpy as np
import pytest

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import AdapterTaken, KeepAdapter
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.server.decoding.body import LongBody
from trimaran.server.inference.request import Tensor
from trimaran.server.models.sample_inputs import SampleInputs
from trimaran.server.models.token_inputs import read_adapter, read_table

PROMPT = {"input_ids": [7, 8, 9], "input_lengths": 3, "request_output_len": 2}
WEIGHTS = np.arange(12, dtype=np.float16).reshape(1, 2, 6)
CONFIG = np.array([[[1, 0, 1], [3, 0, 1]]], dtype=np.int32)


def _ids(submit):
    return [1, 2, 3]


def _carried(adapter):
    """The arrays that a message carries."""
    weights = np.frombuffer(adapter["weights"]["data"], np.float16)
    config = np.frombuffer(adapter["config"]["data"], np.int32)
    return (
        weights.reshape(adapter["weights"]["shape"]).tolist(),
        config.reshape(adapter["config"]["shape"]).tolist(),
    )


@pytest.mark.feature("input:lora_task_id", "input:lora_weights", "input:lora_config")
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
async def test_an_adapter_reaches_the_engine_whole_and_then_by_its_id(serve, model):
    inputs = PROMPT if model == "tensorrt_llm" else {"text_input": "x", "max_tokens": 2}
    async with serve() as served:
        engine = await served.dial(_ids)
        await served.infer(
            model, **inputs, lora_task_id=2**63, lora_weights=WEIGHTS, lora_config=CONFIG
        )
        await served.infer(model, **inputs, lora_task_id=2**63)
        await served.infer(model, **inputs)

        first, second, third = engine.submits
        assert [s.adapter_id for s in engine.submits] == [2**63, 2**63, 0]
        assert _carried(first.adapter) == (WEIGHTS[0].tolist(), CONFIG[0].tolist())
        assert first.adapter["weights"]["datatype"] == "FP16"
        assert second.adapter == {}
        assert third.adapter is None


async def test_equal_weights_have_equal_digests_and_different_weights_different_digests(serve):
    async with serve() as served:
        engine = await served.dial(_ids)
        for weights in (WEIGHTS, WEIGHTS.copy(), WEIGHTS + np.float16(1)):
            await served.infer(
                "tensorrt_llm", **PROMPT, lora_task_id=1, lora_weights=weights,
                lora_config=CONFIG,
            )  # fmt: skip
        one, same, other = (s.adapter["digest"] for s in engine.submits)
        assert one == same != other


async def test_weights_without_a_task_id_have_an_id_of_their_own(serve):
    async with serve() as served:
        engine = await served.dial(_ids)
        for weights in (WEIGHTS, WEIGHTS.copy(), WEIGHTS + np.float16(1)):
            await served.infer(
                "tensorrt_llm", **PROMPT, lora_weights=weights, lora_config=CONFIG
            )
        first, same, other = (submit.adapter_id for submit in engine.submits)
        assert first == same != other
        assert 0 < first < 1 << 64
        digests = {submit.adapter["digest"] for submit in engine.submits}
        assert len(digests) == 2


async def test_adapter_weights_without_rows_count_as_absent(serve):
    nothing = {"lora_weights": WEIGHTS[:, :0], "lora_config": CONFIG[:, :0]}
    async with serve() as served:
        engine = await served.dial(_ids)
        await served.infer("tensorrt_llm", **PROMPT, lora_task_id=1, **nothing)
        assert [(s.adapter_id, s.adapter) for s in engine.submits] == [(1, {})]

        text = "lora_config is set alone; lora_weights and lora_config must come together"
        with pytest.raises(RequestError, match=text):
            await served.infer(
                "tensorrt_llm", **PROMPT, lora_task_id=1, **{**nothing, "lora_config": CONFIG}
            )


async def test_a_name_that_no_folder_can_have_is_refused_here(serve):
    async with serve() as served:
        engine = await served.dial(_ids)
        text = "lora_name has 256 bytes, but the name of a folder has at most 255"
        with pytest.raises(RequestError, match=text):
            await served.infer("tensorrt_llm", **PROMPT, lora_name="n" * 256)
        await served.infer("tensorrt_llm", **PROMPT, lora_name="n" * 255)
        assert [s.adapter for s in engine.submits] == [{"name": "n" * 255}]


@pytest.mark.feature("input:lora_name")
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
async def test_an_adapter_can_be_requested_by_name(serve, model):
    inputs = PROMPT if model == "tensorrt_llm" else {"text_input": "x", "max_tokens": 2}
    async with serve() as served:
        engine = await served.dial(_ids)
        await served.infer(model, **inputs, lora_name="french")
        assert engine.submits[0].adapter == {"name": "french"}


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"lora_weights": WEIGHTS}, "lora_weights is set alone"),
        ({"lora_config": CONFIG}, "lora_config is set alone"),
        (
            {"lora_task_id": 3, "lora_weights": WEIGHTS},
            "lora_weights is set alone; lora_weights and lora_config must come together",
        ),
        ({"lora_task_id": 3, "lora_name": "x"}, "lora_name is set beside lora_task_id"),
    ],
)
async def test_an_adapter_without_weights_or_config_is_refused(serve, inputs, text):
    async with serve() as served:
        engine = await served.dial(_ids)
        with pytest.raises(RequestError, match=text):
            await served.infer("tensorrt_llm", **PROMPT, **inputs)
        assert engine.submits == []


async def test_an_adapter_is_sent_to_all_instances_of_a_model(serve):
    async with serve(frontend={"groups": {"tensorrt_llm": ("g0", "g1")}}) as served:
        engines = [await served.dial(_ids, group=name) for name in ("g0", "g1")]
        await served.infer(
            "tensorrt_llm", **PROMPT, lora_task_id=4, lora_weights=WEIGHTS, lora_config=CONFIG
        )
        idle = next(engine for engine in engines if not engine.submits)
        await idle.until(lambda: bool(idle.others))

        (kept,) = idle.others
        assert isinstance(kept, KeepAdapter)
        assert kept.adapter_id == 4
        assert _carried(kept.adapter) == (WEIGHTS[0].tolist(), CONFIG[0].tolist())


async def test_a_restarted_group_gets_all_adapters_again(serve):
    inputs = {**PROMPT, "lora_config": CONFIG}
    async with serve() as served:
        engine = await served.dial(_ids)
        for task in (4, 5, 6):
            await served.infer(
                "tensorrt_llm", **inputs, lora_task_id=task, lora_weights=WEIGHTS * task
            )
        # Used again, and the room is that of two.
        await served.infer("tensorrt_llm", **PROMPT, lora_task_id=5)
        await served.infer("tensorrt_llm", **inputs, lora_task_id=7, lora_weights=WEIGHTS * 7)
        await engine.end()
        again = await served.dial(_ids, incarnation=1)
        await again.until(lambda: len(again.others) == 2)

        assert [kept.adapter_id for kept in again.others] == [5, 7]
        assert _carried(again.others[0].adapter)[0] == (WEIGHTS[0] * 5).tolist()


async def test_a_restarted_group_gets_the_newest_accepted_adapter(serve):
    broken = {**PROMPT, "input_ids": [9, 9, 9], "lora_config": CONFIG + 90}
    async with serve() as served:
        engine = await served.dial(_ids)
        engine.refusals[pack_ids([9, 9, 9])] = ("INVALID_ARG", "no module is 91")
        good = {"lora_weights": WEIGHTS, "lora_config": CONFIG}
        await served.infer("tensorrt_llm", **PROMPT, lora_task_id=4, **good)
        with pytest.raises(RequestError, match="no module is 91"):
            await served.infer("tensorrt_llm", **broken, lora_task_id=4, lora_weights=WEIGHTS)
        await engine.end()
        again = await served.dial(_ids, incarnation=1)
        await again.until(lambda: bool(again.others))

        (kept,) = again.others
        assert kept.is_resent
        assert _carried(kept.adapter) == (WEIGHTS[0].tolist(), CONFIG[0].tolist())


async def test_an_adapter_refused_by_one_instance_is_not_sent_to_other_instances(serve):
    async with serve(frontend={"groups": {"tensorrt_llm": ("g0", "g1")}}) as served:
        engines = [await served.dial(_ids, group=name) for name in ("g0", "g1")]
        adapter = {"lora_weights": WEIGHTS, "lora_config": CONFIG}
        refused = {**PROMPT, "input_ids": [9, 9, 9]}
        for engine in engines:
            engine.refusals[pack_ids([9, 9, 9])] = ("INVALID_ARG", "no module is 91")
        with pytest.raises(RequestError, match="no module is 91"):
            await served.infer("tensorrt_llm", **refused, lora_task_id=4, **adapter)
        await served.infer("tensorrt_llm", **PROMPT, lora_task_id=5, **adapter)
        await engines[0].until(lambda: any(engine.others for engine in engines))

        kept = [message for engine in engines for message in engine.others]
        assert [message.adapter_id for message in kept] == [5]


async def test_an_adapter_id_means_its_newest_weights_at_every_front_end(serve):
    inputs = {**PROMPT, "lora_config": CONFIG}
    async with serve() as served:
        engine = await served.dial(_ids)
        for task in (4, 5):
            await served.infer(
                "tensorrt_llm", **inputs, lora_task_id=task, lora_weights=WEIGHTS * task
            )
        engine.send(AdapterTaken(adapter_id=4, digest=b"another"))
        engine.send(AdapterTaken(adapter_id=5, digest=engine.submits[1].adapter["digest"]))
        await served.processed(engine)
        await engine.end()
        again = await served.dial(_ids, incarnation=1)
        await again.until(lambda: bool(again.others))

        assert [kept.adapter_id for kept in again.others] == [5]


async def test_an_adapter_of_a_cancelled_request_is_kept_for_replay(serve):
    adapter = {"lora_task_id": 4, "lora_weights": WEIGHTS, "lora_config": CONFIG}
    async with serve() as served:
        engine = await served.dial(_ids)
        engine.takes_adapters = False
        engine.gate.clear()
        responses = served.stream("tensorrt_llm", **PROMPT, **adapter)
        reading = asyncio.ensure_future(anext(responses))
        await engine.until(lambda: bool(engine.submits))
        reading.cancel()
        await engine.until(lambda: bool(engine.cancelled))
        engine.send(AdapterTaken(adapter_id=4, digest=engine.submits[0].adapter["digest"]))
        await served.processed(engine)
        await engine.end()
        again = await served.dial(_ids, incarnation=1)
        await again.until(lambda: bool(again.others))

        assert [kept.adapter_id for kept in again.others] == [4]


@pytest.mark.parametrize(("size", "is_view"), [(10 << 20, True), (1 << 20, False)])
def test_a_long_tensor_of_a_body_reaches_the_engine_without_a_copy(size, is_view):
    raw = bytes(range(256)) * (size >> 8)
    weights = np.frombuffer(LongBody((raw,)).view(), np.float16).reshape(1, 1, -1)
    tensors = {
        "lora_task_id": Tensor("lora_task_id", "UINT64", np.array([[7]], np.uint64)),
        "lora_weights": Tensor("lora_weights", "FP16", weights),
        "lora_config": Tensor("lora_config", "INT32", CONFIG[:, :1]),
        "prompt_embedding_table": Tensor("prompt_embedding_table", "FP16", weights),
    }
    inputs = SampleInputs(tensors, 0, is_batched=True)

    _, adapter = read_adapter(inputs, tensors)
    table = read_table(inputs, tensors["prompt_embedding_table"])

    for data in (adapter["weights"]["data"], table["data"]):
        assert bytes(data) == raw
        is_mapped = isinstance(data, memoryview) and _is_mapping(data)
        assert is_mapped == is_view


def _is_mapping(view):
    """Whether the bytes of a view are those of a mapping."""
    base = view.obj
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj, mmap.mmap)
