"""Every client of tritonclient against a server: HTTP and gRPC, blocking and asyncio."""

from __future__ import annotations

import asyncio
import inspect
import queue

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from tensors import IDS, TEXT, inputs, outputs, text_of
from tritonclient.utils import InferenceServerException

CLIENTS = {"http": httpclient, "http.aio": httpaio, "grpc": grpcclient, "grpc.aio": grpcaio}
EACH = pytest.mark.parametrize("kind", CLIENTS)
MODELS = {"ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"}


def run(server, kind, use):
    """Give ``use`` a client and the module of its tensors; with asyncio in a loop.

    ``use`` is a coroutine function that awaits `got` of each call.
    """
    port = server.http_port if kind.startswith("http") else server.grpc_port
    module = httpclient if kind.startswith("http") else grpcclient

    async def main():
        client = CLIENTS[kind].InferenceServerClient(f"localhost:{port}")
        try:
            return await use(client, module)
        finally:
            await got(client.close())

    return asyncio.run(main())


async def got(result):
    """The result of a call of either kind."""
    return await result if inspect.isawaitable(result) else result


def read(answer, *path):
    """A member of an answer that is JSON or a message."""
    for name in path:
        answer = answer[name] if isinstance(answer, dict) else getattr(answer, name)
    return answer


@EACH
def test_every_client_reads_health_metadata_configuration_index_and_statistics(plain, kind):
    async def use(client, module):
        assert await got(client.is_server_live())
        assert await got(client.is_server_ready())
        assert await got(client.is_model_ready("tensorrt_llm"))
        assert "statistics" in read(await got(client.get_server_metadata()), "extensions")
        metadata = await got(client.get_model_metadata("ensemble"))
        assert "text_output" in {read(item, "name") for item in read(metadata, "outputs")}
        config = await got(client.get_model_config("tensorrt_llm"))
        config = config if isinstance(config, dict) else config.config
        assert read(config, "max_batch_size") == 64
        index = await got(client.get_model_repository_index())
        index = index if isinstance(index, list) else index.models
        assert {read(item, "name") for item in index} == MODELS
        statistics = await got(client.get_inference_statistics("tensorrt_llm"))
        assert len(read(statistics, "model_stats")) == 1

    run(plain, kind, use)


@EACH
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_an_answer_has_the_id_and_the_requested_outputs(plain, kind, model):
    async def use(client, module):
        whole = await got(client.infer(model, inputs(module, **TEXT)))
        named = await got(
            client.infer(
                model,
                inputs(module, **TEXT, return_log_probs=True),
                outputs=outputs(module, "text_output"),
                request_id="a 7",
            )
        )
        assert text_of(named) == text_of(whole)
        assert named.as_numpy("cum_log_probs") is None
        assert read(named.get_response(), "id") == "a 7"
        return text_of(whole)

    assert run(plain, kind, use).startswith(" ")


def test_all_clients_get_the_same_text(plain):
    async def use(client, module):
        sampled = inputs(module, **TEXT, top_k=50, temperature=0.8, seed=11)
        return text_of(await got(client.infer("ensemble", sampled)))

    assert len({run(plain, kind, use) for kind in CLIENTS}) == 1


@EACH
def test_requests_and_answers_may_be_compressed(plain, kind):
    async def use(client, module):
        flags = (
            {
                "request_compression_algorithm": "gzip",
                "response_compression_algorithm": "deflate",
            }
            if module is httpclient
            else {"compression_algorithm": "gzip"}
        )
        long = {**TEXT, "text_input": "It was a dark and stormy night. " * 20}
        plainly = await got(client.infer("ensemble", inputs(module, **long)))
        packed = await got(client.infer("ensemble", inputs(module, **long), **flags))
        assert text_of(packed) == text_of(plainly)

    run(plain, kind, use)


@EACH
def test_errors_of_requests_are_reported(plain, kind):
    async def use(client, module):
        for model, values, said in (
            ("nobody", TEXT, "Request for unknown model: 'nobody' is not found"),
            ("ensemble", {"text_input": "x"}, "missing required input"),
            ("ensemble", {**TEXT, "stream": True}, "decoupled mode"),
            ("tensorrt_llm", {**IDS, "input_ids": [99999] * 3}, "outside the vocabulary"),
        ):
            with pytest.raises(InferenceServerException, match=said):
                await got(client.infer(model, inputs(module, **values)))
        with pytest.raises(InferenceServerException, match="nobody"):
            await got(client.get_model_config("nobody"))
        with pytest.raises(InferenceServerException, match="explicit"):
            await got(client.load_model("ensemble"))

    run(plain, kind, use)


@EACH
def test_log_settings_are_read_and_changed(plain, kind):
    async def use(client, module):
        await got(client.update_log_settings({"log_verbose_level": 1}))
        found = await got(client.get_log_settings())
        if not isinstance(found, dict):
            assert found.settings["log_verbose_level"].uint32_param == 1
        else:
            assert found["log_verbose_level"] == 1
        await got(client.update_log_settings({"log_verbose_level": 0}))

    run(plain, kind, use)


@EACH
def test_many_requests_side_by_side_are_not_mixed_up(plain, kind):
    prompts = [f"In chapter {number} of the book" for number in range(24)]

    async def use(client, module):
        async def ask(prompt):
            values = inputs(module, text_input=prompt, max_tokens=6)
            if kind.endswith("aio"):
                return text_of(await client.infer("ensemble", values))
            return text_of(await asyncio.to_thread(_infer_alone, plain, kind, values))

        return await asyncio.gather(*map(ask, prompts)), [await ask(p) for p in prompts]

    together, alone = run(plain, kind, use)
    assert together == alone


def _infer_alone(server, kind, values):
    # The blocking HTTP client may be used only by the thread that created it.
    port = server.http_port if kind == "http" else server.grpc_port
    with CLIENTS[kind].InferenceServerClient(f"localhost:{port}") as client:
        return client.infer("ensemble", values)


def test_callbacks_of_async_infer_get_the_answer(plain):
    with httpclient.InferenceServerClient(
        f"localhost:{plain.http_port}", concurrency=4
    ) as client:
        waiting = [client.async_infer("ensemble", inputs(httpclient, **TEXT)) for _ in range(4)]
        texts = {text_of(each.get_result()) for each in waiting}
    with grpcclient.InferenceServerClient(f"localhost:{plain.grpc_port}") as client:
        answers = queue.Queue()
        for _ in range(4):
            client.async_infer(
                "ensemble",
                inputs(grpcclient, **TEXT),
                lambda result, error: answers.put((result, error)),
            )
        for _ in range(4):
            result, error = answers.get(timeout=60)
            assert error is None
            texts.add(text_of(result))
    assert len(texts) == 1


def test_cancelled_calls_and_calls_over_their_timeout_end(plain):
    long = {**IDS, "request_output_len": 800}
    with grpcclient.InferenceServerClient(f"localhost:{plain.grpc_port}") as client:
        answers = queue.Queue()
        call = client.async_infer(
            "tensorrt_llm",
            inputs(grpcclient, **long),
            lambda result, error: answers.put(error),
        )
        call.cancel()
        assert "CANCELLED" in str(answers.get(timeout=60).status()).upper()
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            client.infer("tensorrt_llm", inputs(grpcclient, **long), client_timeout=0.2)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_streams_of_both_grpc_clients_give_the_same_text(decoupled, model):
    port = decoupled.grpc_port
    asked = inputs(grpcclient, **TEXT, stream=True)
    answers = queue.Queue()
    with grpcclient.InferenceServerClient(f"localhost:{port}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, asked, enable_empty_final_response=True)
        blocking = []
        while not blocking or not _is_final(blocking[-1]):
            result, error = answers.get(timeout=60)
            assert error is None
            blocking.append(result)
        client.stop_stream()

    async def stream():
        async with grpcaio.InferenceServerClient(f"localhost:{port}") as client:

            async def requests():
                yield {
                    "model_name": model,
                    "inputs": asked,
                    "enable_empty_final_response": True,
                }

            found = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                found.append(result)
                if _is_final(result):
                    break
            return found

    texts = [
        "".join(text_of(r) for r in results if r.as_numpy("text_output") is not None)
        for results in (blocking, asyncio.run(stream()))
    ]
    assert texts[0] == texts[1]
    assert len(blocking) > 6


def _is_final(result):
    parameters = result.get_response().parameters
    return parameters["triton_final_response"].bool_param
