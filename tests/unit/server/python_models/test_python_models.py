"""Python models of users in separate processes, over the built-in models."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import aclosing

import numpy as np
import pytest

from trimaran.comm.errors import ConfigError, ErrorKind, RequestError
from trimaran.comm.messages.token_ids import unpack_ids


def values(response):
    return {tensor.name: tensor.data.tolist() for tensor in response.outputs}


async def failure_of(work):
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value


async def after_one_step(engine, responses):
    """The first response of a stream, whose engine then waits."""
    engine.gate.clear()
    first = asyncio.ensure_future(anext(responses))
    await engine.until(lambda: engine.num_live == 1)
    engine.step()
    return await first


async def test_concurrent_requests_are_executed_in_one_batch(serve_own):
    async with serve_own("arithmetic") as served:
        one, two = np.float32([[1, 2]]), np.float32([[3, 4], [5, 6]])
        outputs = ("SUM", "BATCH")
        answers = await asyncio.gather(
            served.infer("arithmetic", outputs=outputs, INPUT0=one, INPUT1=one),
            served.infer("arithmetic", outputs=outputs, INPUT0=two, INPUT1=two),
            # Requests of another shape get a separate batch.
            served.infer("arithmetic", outputs=outputs, INPUT0=one[:, :1], INPUT1=one[:, :1]),
        )
        assert [values(response) for (response,) in answers] == [
            {"SUM": [[12, 14]], "BATCH": [[2]]},
            {"SUM": [[16, 18], [20, 22]], "BATCH": [[2], [2]]},
            {"SUM": [[12]], "BATCH": [[1]]},
        ]
        assert all(response.is_final for (response,) in answers)
        counted = served.models["arithmetic"].statistics.message()
        assert (counted.inference_count, counted.execution_count) == (4, 2)
        sizes = {batch.batch_size: batch.compute_infer.count for batch in counted.batch_stats}
        assert sizes == {3: 1, 1: 1}
        name = 'nv_inference_exec_count{model="arithmetic",version="1"}'
        assert f"{name} 2\n" in served.metrics.render().decode()


FLAT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        made = [("SCALAR", (2,)), ("ROW", (2, 6)), ("LONG", (2, 3)), ("OTHER", (2, 5))]
        tensors = [pb_utils.Tensor(name, np.zeros(shape, np.int32)) for name, shape in made]
        return [pb_utils.InferenceResponse(tensors) for _ in requests]
"""
RESHAPED = """
output { name: "SCALAR" data_type: TYPE_INT32 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "ROW" data_type: TYPE_INT32 dims: [ 2, 3 ] reshape { shape: [ 6 ] } }
output { name: "LONG" data_type: TYPE_INT32 dims: [ 1, -1 ] reshape { shape: [ -1 ] } }
output { name: "OTHER" data_type: TYPE_INT32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
"""


async def test_clients_see_the_dims_of_an_output_and_the_code_sees_the_reshape(serve_own):
    config = {"arithmetic": RESHAPED}
    async with serve_own("arithmetic", config=config, arithmetic=FLAT) as served:
        one = np.zeros((2, 1), np.float32)
        (response,) = await served.infer("arithmetic", INPUT0=one, INPUT1=one)
        assert {tensor.name: tensor.shape for tensor in response.outputs} == {
            "SCALAR": (2, 1), "ROW": (2, 2, 3), "LONG": (2, 1, 3), "OTHER": (2, 5),
        }  # fmt: skip


async def test_an_invalid_request_does_not_fail_its_batch(serve_own):
    async with serve_own("arithmetic") as served:
        good, bad = np.float32([[1]]), np.float32([[-1]])
        (response,), error = await asyncio.gather(
            served.infer("arithmetic", INPUT0=good, INPUT1=good, WORD="größer\0"),
            failure_of(served.infer("arithmetic", id="r7", INPUT0=bad, INPUT1=good)),
        )
        assert values(response)["WORD_BACK"] == [["größer\0".encode()]]
        assert (str(error), error.kind) == ("negative, r7, {}", ErrorKind.INVALID_ARG)


async def test_large_tensors_arrive_whole_and_leave_no_memory_behind(serve_own):
    async with serve_own("arithmetic") as served:
        large = np.arange(1 << 16, dtype=np.float32).reshape(4, -1)
        (response,) = await served.infer("arithmetic", INPUT0=large, INPUT1=large)
        outputs = {tensor.name: tensor.data for tensor in response.outputs}
        assert (outputs["SUM"] == 2 * large + 10).all()
        open_files = [
            os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
        ]
        assert not [name for name in open_files if "trimaran-bulk" in name]


async def test_an_exception_fails_its_batch_with_its_text(serve_own, caplog):
    async with serve_own("arithmetic") as served:
        numbers = np.float32([[np.nan]])
        error = await failure_of(served.infer("arithmetic", INPUT0=numbers, INPUT1=numbers))
        assert str(error) == (
            "Failed to process the request(s) for model 'arithmetic', message: ValueError: "
            "not a number"
        )
        assert error.kind is ErrorKind.INTERNAL
        assert 'raise ValueError("not a number")' in caplog.text
        numbers = np.float32([[np.inf]])
        error = await failure_of(served.infer("arithmetic", INPUT0=numbers, INPUT1=numbers))
        assert "output 'SUM' is FP64, but the model's config.pbtxt says FP32" in str(error)


UNSPEAKABLE = r"""
class Silent(Exception):
    def __str__(self):
        raise AttributeError("no text")

class TritonPythonModel:
    def execute(self, requests):
        number = int(requests[0].inputs()[0].as_numpy()[0])
        raise {0: ValueError("half \ud83d"), 1: Silent()}[number]
"""


@pytest.mark.parametrize("num_threads", [1, 2])
async def test_an_exception_whose_text_cannot_be_sent_fails_its_batch_alone(
    serve_own, num_threads
):
    threads = {"repeater": parameter("execute_threads", num_threads)}
    async with serve_own("repeater", config=threads, repeater=UNSPEAKABLE) as served:
        for _ in range(2):
            error = await failure_of(served.infer("repeater", IN=[0]))
            assert str(error).endswith("message: ValueError: half \\ud83d")
            error = await failure_of(served.infer("repeater", IN=[1]))
            assert str(error).endswith("message: Silent: <exception str() failed>")


async def test_a_decoupled_model_answers_after_execute_has_returned(serve_own):
    async with serve_own("repeater") as served:
        responses = await served.infer("repeater", IN=[4, 5, 6])
        assert [values(r) for r in responses] == [
            {"OUT": [4]}, {"OUT": [5]}, {"OUT": [6]}, {"CANCELLED": [0]},
        ]  # fmt: skip
        assert [r.is_final for r in responses] == [False, False, False, True]
        error = await failure_of(served.infer("repeater", IN=[-2]))
        assert "let go of the request without a final response" in str(error)


async def test_custom_metrics_of_a_model_are_shown_by_the_server(serve_own):
    async with serve_own("repeater") as served:
        await served.infer("repeater", IN=[4, 5])
        text = served.metrics.render().decode()
        assert "# TYPE repeated_numbers_total counter" in text
        assert 'repeated_numbers_total{model="repeater"} 2\n' in text
        assert 'sizes_bucket{model="repeater",le="4.5"} 1\n' in text
        assert 'sizes_bucket{model="repeater",le="+Inf"} 2\n' in text
        assert 'sizes_sum{model="repeater"} 9\n' in text
        assert 'last_number{model="repeater"} 5\n' in text
    assert "repeated_numbers" not in served.metrics.render().decode()


async def test_a_model_calls_other_models_and_streams_their_responses(serve_own):
    async with serve_own("pipeline") as served:
        await served.dial(served.answer("größer than 東京"))
        responses = await served.infer("pipeline", text="hello", length=99)
        texts = [tensor.data.item().decode() for r in responses for tensor in r.outputs]
        assert "THAN" in "".join(texts)
        assert len(texts) > 3
        error = await failure_of(served.infer("pipeline", text="hello", length=0))
        assert "request_output_len" in str(error) or "max_tokens" in str(error)


async def test_a_cancelled_request_cancels_its_model_calls(serve_own):
    async with serve_own("pipeline") as served:
        engine = await served.dial(lambda submit: [5] * 100)
        async with aclosing(served.stream("pipeline", text="hello", length=100)) as responses:
            await after_one_step(engine, responses)
        await engine.until(lambda: engine.cancelled == [engine.submits[0].request_id])


async def test_a_stop_request_reaches_model_calls(serve_own):
    async with serve_own("pipeline") as served:
        engine = await served.dial(lambda submit: [5] * 100)
        async with aclosing(served.stream("pipeline", text="hello", length=100)) as responses:
            await after_one_step(engine, responses)
            stop = {"input_ids": [1], "input_lengths": 0, "request_output_len": 0, "stop": True}
            (answer,) = await served.infer("tensorrt_llm", id="inner", **stop)
            assert (answer.outputs, answer.is_final) == ([], True)
            assert len([response async for response in responses]) < 99


async def test_coroutines_of_one_instance_run_concurrently(serve_own):
    async with serve_own("chorus") as served:
        engine = await served.dial(served.answer("größer than 東京"))
        engine.gate.clear()
        both = asyncio.gather(*(served.infer("chorus", text=t) for t in ("a", "b")))
        await engine.until(lambda: len(engine.submits) == 6)
        engine.gate.set()
        first, second = await both
        assert values(first[0]) == values(second[0])
        lengths = [len(text.decode()) for text in values(first[0])["answers"][0]]
        assert lengths == sorted(lengths)
        assert lengths[0] < lengths[2]


async def test_the_example_streams_answers_and_stops_at_the_next_question(serve_own):
    async with serve_own("chat") as served:
        engine = await served.dial(served.answer(" größer than 東京 Question: why?"))
        options = {"question": "größer?", "earlier": ["Question: a", "Answer: b"]}
        responses = await served.infer("chat", id="c1", max_tokens=99, **options)
        texts = [tensor.data.item().decode() for r in responses for tensor in r.outputs]
        assert "".join(texts) == " größer than 東京 Question:"
        assert len(texts) > 2
        (submit,) = engine.submits
        assert submit.client_request_id == "c1"
        prompt = "Question: a\nAnswer: b\nQuestion: größer?\nAnswer:"
        ids = served.tokenizer.encode_now(prompt, True)
        assert unpack_ids(submit.prompt_ids).tolist() == ids
        engine.gate.clear()
        async with aclosing(served.stream("chat", max_tokens=99, **options)) as stream:
            waiting = asyncio.ensure_future(anext(stream))
            await engine.until(lambda: len(engine.submits) == 2)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await engine.until(lambda: engine.submits[1].request_id in engine.cancelled)


async def test_many_chats_with_cancellations_leave_nothing_behind(serve_own):
    async with serve_own("chat", "pipeline") as served:
        engine = await served.dial(served.answer("größer than 東京 and ever so long"))

        async def chat(number):
            options = {"question": str(number), "max_tokens": 99}
            if number % 2:
                model, options = "pipeline", {"text": str(number), "length": 99}
            else:
                model = "chat"
            async with aclosing(served.stream(model, **options)) as responses:
                if number % 3 == 0:
                    await asyncio.wait_for(anext(responses), 0.001 * number)
                    return None
                found = [t.data.item() async for r in responses for t in r.outputs]
            return b"".join(found).decode()

        done = await asyncio.gather(*map(chat, range(60)), return_exceptions=True)
        assert set(done[2::6]) == {"größer than 東京 and ever so long"}
        assert {type(text) for text in done[::3]} <= {type(None), asyncio.TimeoutError}
        await engine.until(lambda: engine.num_live == 0)
        (again,) = await asyncio.gather(chat(2))
        assert again == "größer than 東京 and ever so long"
        assert all(not model.num_running for model in served.models.values())


def parameter(key, value):
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


async def test_waiting_code_may_use_threads(serve_own):
    threads = {"pipeline": parameter("execute_threads", 3)}
    async with serve_own("pipeline", config=threads) as served:
        engine = await served.dial(lambda submit: [5] * 9)
        engine.gate.clear()
        waiting = [
            asyncio.ensure_future(served.infer("pipeline", text="a", length=9))
            for _ in range(4)
        ]
        await engine.until(lambda: engine.num_live == 3)
        waiting.pop().cancel()
        waiting.pop(0).cancel()
        await engine.until(lambda: len(engine.cancelled) == 1)
        engine.gate.set()
        assert all(await asyncio.gather(*waiting))


BY_SENDER = """
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            text = request.inputs()[0].as_numpy().item()
            data = np.array([[text] * 3], dtype=object)
            sender = request.get_response_sender()
            if text != b"none":
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("answers", data)]))
            try:
                if text == b"two":
                    sender.send(pb_utils.InferenceResponse([]))
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_warn(f"refused: {error}")
            sender.send(flags=FINAL)
"""


async def test_a_model_that_is_not_decoupled_may_send_its_one_response(serve_own, caplog):
    async with serve_own("chorus", chorus=BY_SENDER) as served:
        for text in ("one", "two"):
            (response,) = await served.infer("chorus", text=text)
            assert values(response)["answers"] == [[text.encode()] * 3]
        assert "[chorus_0_0] refused: a request of a model that is not dec" in caplog.text
        error = await failure_of(served.infer("chorus", text="none"))
        assert "ended the request without a response" in str(error)


COUNT_IDS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        ids = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        text = np.array([[f"{ids.size} ids;"]], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", text)])
"""


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_a_python_postprocessing_replaces_the_built_in_postprocessing(serve_own, model):
    chosen = {"python_models": "postprocessing"}
    async with serve_own(frontend=chosen, postprocessing=COUNT_IDS) as served:
        await served.dial(lambda submit: [5, 6, 7])
        options = {"text_input": "hello", "max_tokens": 3}
        streamed = await served.texts(model, stream=True, **options)
        # A slow reader is given the ids of several steps at once.
        assert sum(int(text.removesuffix(" ids;")) for text in streamed) == 3
        assert len(streamed) > 1
        assert await served.texts(model, exclude_input_in_output=True, **options) == ["3 ids;"]
        stop = {"text_input": "", "max_tokens": 0, "stop": True}
        assert await served.infer(model, id="unknown", **stop) == []
        # Like built-in steps: only the ensemble's prefix, and the checks of either step.
        error = await failure_of(served.infer(model, text_input="hello", max_tokens=0))
        assert ("in ensemble" in str(error)) == (model == "ensemble")
        assert "max_tokens" in str(error)


TEMPLATED = """
import json
import os
import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

class TritonPythonModel:
    def initialize(self, args):
        folder = json.loads(args["model_config"])["parameters"]["tokenizer_dir"]
        file = os.path.join(folder["string_value"], "tokenizer.json")
        self.tokenizer = Tokenizer.from_file(file)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        query, length = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("QUERY", "REQUEST_OUTPUT_LEN")
        )
        ids = self.tokenizer.encode(f"Q: {query.item().decode()} A:").ids
        outputs = {
            "INPUT_ID": [ids], "REQUEST_INPUT_LEN": [[len(ids)]], "REQUEST_OUTPUT_LEN": length,
        }
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(n, np.array(v, np.int32)) for n, v in outputs.items()]
        )
"""


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_a_python_preprocessing_keeps_built_in_streaming_and_stop_words(serve_own, model):
    chosen = {"python_models": "execute"}
    async with serve_own(frontend=chosen, preprocessing=TEMPLATED) as served:
        await served.dial(served.answer("größer 東京 than this"))
        options = {"text_input": "why?", "max_tokens": 99, "stop_words": ["r 東"]}
        streamed = await served.texts(model, stream=True, **options)
        assert "".join(streamed) == "größer 東"
        assert len(streamed) > 1
        assert await served.texts(model, **options) == ["Q: why? A:größer 東"]


async def test_an_ensemble_runs_the_version_of_a_python_preprocessing_that_its_step_names(
    serve, tmp_path
):
    async with serve():
        root = tmp_path / "models"
    folder, ensemble = root / "preprocessing", root / "ensemble" / "config.pbtxt"
    (folder / "2").mkdir()
    (folder / "1" / "model.py").write_text(TEMPLATED)
    (folder / "2" / "model.py").write_text(TEMPLATED.replace("Q:", "Latest:"))
    with (folder / "config.pbtxt").open("a") as file:
        file.write("version_policy { all { } }")
    named = re.sub(r'("preprocessing"\s+model_version: )-1', r"\g<1>1", ensemble.read_text())
    for text, begin in ((named, "Q:"), (ensemble.read_text(), "Latest:")):
        ensemble.write_text(text)
        async with serve(repository=root, frontend={"python_models": "execute"}) as served:
            await served.dial(served.answer(" so"))
            texts = await served.texts("ensemble", text_input="why?", max_tokens=9)
            assert texts == [f"{begin} why? A: so"]


async def test_an_exec_name_without_code_is_refused(serve_own):
    with pytest.raises(ConfigError, match=r"names 'preprocessing', but .* does not exist"):
        async with serve_own(frontend={"python_models": "preprocessing"}):
            pass


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (parameter("execute_threads", 0), "execute_threads is 0 but must be from 1 to 512"),
        (parameter("EXECUTION_ENV_PATH", "/env"), "EXECUTION_ENV_PATH is set, but"),
        ("instance_group { count: 65 }", "asks for 65 instances, .* at most 64"),
        ("instance_group { count: 2147483647 gpus: [0, 1] }", "asks for 4294967294 instances"),
    ],
)
async def test_a_configuration_that_cannot_take_effect_is_refused(serve_own, config, text):
    with pytest.raises(ConfigError, match=text):
        async with serve_own("repeater", config={"repeater": config}):
            pass


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("x = 1", "has no class TritonPythonModel with a method execute"),
        (
            "class TritonPythonModel:\n"
            "    def initialize(self, args): raise OSError('no weights')\n"
            "    def execute(self, requests): pass\n",
            "OSError: no weights",
        ),
        ("import os; os._exit(3)", "its process ended before the model was initialized"),
    ],
)
async def test_code_that_fails_to_load_is_reported_with_its_traceback(serve_own, code, text):
    with pytest.raises(ConfigError, match=text):
        async with serve_own("repeater", repeater=code):
            pass
