"""The unmodified tritonclient against the whole system."""

from __future__ import annotations

import asyncio
import queue
import threading

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype


def tensor(module, name, values, dtype):
    """A tritonclient input of this client module."""
    array = np.array(values, dtype=dtype)
    holder = module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    holder.set_data_from_numpy(array)
    return holder


def text_inputs(module, text="Once upon a time", max_tokens=16, **flags):
    """Inputs of the text models."""
    inputs = [
        tensor(module, "text_input", [[text.encode()]], object),
        tensor(module, "max_tokens", [[max_tokens]], np.int32),
    ]
    inputs += [tensor(module, name, [[value]], bool) for name, value in flags.items()]
    return inputs


def token_inputs(module, ids, max_tokens, **flags):
    """Inputs of the token model."""
    inputs = [
        tensor(module, "input_ids", [ids], np.int32),
        tensor(module, "input_lengths", [[len(ids)]], np.int32),
        tensor(module, "request_output_len", [[max_tokens]], np.int32),
    ]
    inputs += [tensor(module, name, [[value]], bool) for name, value in flags.items()]
    return inputs


def test_http_infer_answers_in_binary_and_json(plain_server):
    with httpclient.InferenceServerClient(f"127.0.0.1:{plain_server.http_port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("ensemble")
        texts = []
        for is_binary in (True, False):
            wanted = [httpclient.InferRequestedOutput("text_output", binary_data=is_binary)]
            result = client.infer(
                "ensemble", text_inputs(httpclient), outputs=wanted, request_id="r7"
            )
            assert result.get_response()["id"] == "r7"
            texts.append(result.as_numpy("text_output").reshape(-1)[0])
    assert bytes(texts[0]) == (
        texts[1].encode() if isinstance(texts[1], str) else bytes(texts[1])
    )


def test_grpc_infer_equals_http_generate(plain_server):
    body = {"text_input": "Once upon a time", "max_tokens": 16}
    _, reply = plain_server.post("/v2/models/ensemble/generate", body)
    with grpcclient.InferenceServerClient(f"127.0.0.1:{plain_server.grpc_port}") as client:
        result = client.infer("ensemble", text_inputs(grpcclient))
    assert result.as_numpy("text_output").reshape(-1)[0].decode() == reply["text_output"]


def test_unary_grpc_on_a_decoupled_model_is_refused(decoupled_server):
    url = f"127.0.0.1:{decoupled_server.grpc_port}"
    with (
        grpcclient.InferenceServerClient(url) as client,
        pytest.raises(InferenceServerException, match="decoupled transaction policy") as raised,
    ):
        client.infer("ensemble", text_inputs(grpcclient))
    assert raised.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_stop_request_ends_a_stream_with_an_empty_final(decoupled_server):
    results: queue.Queue = queue.Queue()
    url = f"127.0.0.1:{decoupled_server.grpc_port}"
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        client.async_stream_infer(
            "tensorrt_llm",
            token_inputs(grpcclient, [5, 6, 7], 800, streaming=True),
            request_id="stop-me",
            enable_empty_final_response=True,
        )
        first, error = results.get(timeout=60)
        assert error is None
        assert first.get_response().id == "stop-me"
        client.async_stream_infer(
            "tensorrt_llm",
            token_inputs(grpcclient, [0], 0, stop=True),
            request_id="stop-me",
            enable_empty_final_response=True,
        )
        num_tokens, finals = 1, 0
        while finals < 2:
            result, error = results.get(timeout=60)
            assert error is None
            response = result.get_response()
            finals += response.parameters["triton_final_response"].bool_param
            ids = result.as_numpy("output_ids")
            num_tokens += 0 if ids is None else ids.size
        client.stop_stream()
    assert num_tokens < 800


def test_cancelling_a_grpc_stream_frees_its_blocks(decoupled_server):
    url = f"127.0.0.1:{decoupled_server.grpc_port}"

    async def run() -> None:
        async with aioclient.InferenceServerClient(url) as client:

            async def requests():
                yield {
                    "model_name": "tensorrt_llm",
                    "inputs": token_inputs(aioclient, [9] * 40, 850, streaming=True),
                }
                await asyncio.sleep(60)

            stream = client.stream_infer(requests())
            async for result, error in stream:
                assert error is None
                assert result is not None
                break
            stream.cancel()

    asyncio.run(run())

    def num_active() -> float:
        name = "nv_trt_llm_request_metrics"
        return decoupled_server.metric(name, model="tensorrt_llm", request_type="active")

    decoupled_server.wait_until(lambda: num_active() == 0, "no active request", 60)
    used = decoupled_server.metric(
        "nv_trt_llm_kv_cache_block_metrics", model="tensorrt_llm", kv_cache_block_type="used"
    )
    assert used == 0


@pytest.mark.timeout(240)
def test_200_concurrent_streams_finish_and_none_is_mixed_up(decoupled_server):
    prompts = [[3 + i % 50, 60 + i, 300 + i, 7] for i in range(200)]
    url = f"127.0.0.1:{decoupled_server.grpc_port}"

    async def stream(client, prompt) -> list[int]:
        async def requests():
            yield {
                "model_name": "tensorrt_llm",
                "inputs": token_inputs(aioclient, prompt, 12, streaming=True),
                "request_id": str(prompt[1]),
                "enable_empty_final_response": True,
            }

        ids: list[int] = []
        async for result, error in client.stream_infer(requests()):
            assert error is None
            response = result.get_response()
            assert response.id == str(prompt[1])
            part = result.as_numpy("output_ids")
            ids += [] if part is None else part.reshape(-1).tolist()
            if response.parameters["triton_final_response"].bool_param:
                break
        return ids

    async def run_all() -> list[list[int]]:
        async with aioclient.InferenceServerClient(url) as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in prompts))

    streamed = asyncio.run(run_all())

    assert all(len(ids) == 12 for ids in streamed)
    for prompt, ids in list(zip(prompts, streamed, strict=True))[::20]:
        body = {
            "input_ids": prompt, "input_lengths": 4, "request_output_len": 12,
            "exclude_input_in_output": True,
        }  # fmt: skip
        _, reply = decoupled_server.post("/v2/models/tensorrt_llm/generate", body)
        # The demo runs in bfloat16: another batch may round a close call the other way.
        assert reply["output_ids"][:2] == ids[:2]


def test_a_request_sent_mid_stream_starts_before_the_stream_is_much_further(decoupled_server):
    arrivals: queue.Queue = queue.Queue()
    url = f"127.0.0.1:{decoupled_server.grpc_port}"
    tenth = threading.Event()
    seen = {"long": 0}
    long_when_short_began: list[int] = []

    def take(result, error) -> None:
        assert error is None
        response = result.get_response()
        if response.id == "long":
            seen["long"] += 1
            if seen["long"] == 10:
                tenth.set()
        elif not long_when_short_began:
            long_when_short_began.append(seen["long"])
        if response.parameters["triton_final_response"].bool_param:
            arrivals.put(response.id)

    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(take)
        for name, length in (("long", 200), ("short", 8)):
            client.async_stream_infer(
                "tensorrt_llm",
                token_inputs(grpcclient, [11, 12, 13], length, streaming=True),
                request_id=name,
                enable_empty_final_response=True,
            )
            if name == "long":
                assert tenth.wait(60)
        ended = [arrivals.get(timeout=60), arrivals.get(timeout=60)]
        client.stop_stream()

    assert long_when_short_began[0] < 40
    assert ended == ["short", "long"]
