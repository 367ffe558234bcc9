"""Python models with ``sequence_batching``: slots, batches, control inputs, states, ends.

The expected batches and texts are those of Triton 2.51 with the same model and configuration.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError, ErrorKind, RequestError
from trimaran.server.python_models.sequence_inputs import SequenceInputs
from trimaran.server.python_models.sequence_queue import check_sequences
from trimaran.server.python_models.wire import SEQUENCE_END, SEQUENCE_START

TENSORS = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: -1 }
output { name: "ROWS" data_type: TYPE_STRING dims: 1 }
"""
CONTROLS = """
  control_input { name: "START" control {
    kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control {
    kind: CONTROL_SEQUENCE_END int32_false_true: [ 5, 7 ] } }
  control_input { name: "READY" control {
    kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } }
"""
# Each answer holds the inputs of its whole batch. X of -1 ends the process; X of 9 waits for
# the file "go" beside model.py; other X are added to the state.
CODE = """
import json, os, pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        rows = [{t.name(): t.as_numpy().tolist() for t in r.inputs()} for r in requests]
        for row, request in zip(rows, requests):
            row["corr"], row["flags"] = request.correlation_id(), request.flags()
        x = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy().flatten() for r in requests]
        if any(each[0] == -1 for each in x):
            os._exit(1)
        while any(each[0] == 9 for each in x) and not pathlib.Path(__file__).with_name(
            "go").exists():
            time.sleep(0.001)
        text = np.array([json.dumps(rows).encode()], dtype=np.object_)
        made = []
        for request, each in zip(requests, x):
            shape = [1] * pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ndim
            tensors = [pb_utils.Tensor("ROWS", text.reshape(shape))]
            state = pb_utils.get_input_tensor_by_name(request, "IN_STATE")
            if state is not None:
                tensors.append(pb_utils.Tensor("OUT_STATE", state.as_numpy() + each[0]))
            made.append(pb_utils.InferenceResponse(tensors))
        return made
"""


@pytest.fixture
def serve_sequences(serve, tmp_path):
    """A server with the model ``told`` and this ``sequence_batching``."""

    @asynccontextmanager
    async def start(batching, max_batch_size=4, code=CODE, files=(), **options):
        async with serve():
            pass
        folder = tmp_path / "models" / "told"
        (folder / "1").mkdir(parents=True)
        sizes = f"max_batch_size: {max_batch_size} sequence_batching {{ {batching} }}"
        (folder / "config.pbtxt").write_text(TENSORS + sizes + options.pop("besides", ""))
        (folder / "1" / "model.py").write_text(code)
        for name, data in files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        async with serve(repository=tmp_path / "models", **options) as served:
            served.go = folder / "1" / "go"
            yield served

    return start


async def ask(served, sequence, flags=0, x=1, shape=(1, 1)):
    """The rows of the batch that answered a request."""
    tensors = {"X": np.full(shape, x, np.int32)}
    (response,) = await served.infer("told", sequence=(sequence, flags), **tensors)
    return json.loads(response.outputs[0].data.flatten()[0])


async def failure_of(work):
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value


async def waiting(served, count):
    line = f'nv_inference_pending_request_count{{model="told",version="1"}} {count}\n'
    while line not in served.metrics.render().decode():
        await asyncio.sleep(0.001)


def ids(rows):
    return [row["corr"] for row in rows]


async def test_control_inputs_tell_the_place_in_the_sequence(serve_sequences):
    async with serve_sequences(CONTROLS) as served:
        found = [await ask(served, 3, flags) for flags in (SEQUENCE_START, 0, SEQUENCE_END)]
    row = {"X": [[1]], "READY": [[True]], "ID": [[3]], "corr": 3}
    assert found == [
        [{**row, "START": [[1.0]], "END": [[5]], "flags": 1}],
        [{**row, "START": [[0.0]], "END": [[5]], "flags": 0}],
        [{**row, "START": [[0.0]], "END": [[7]], "flags": 2}],
    ]


async def test_a_model_without_batches_gets_controls_of_one_dimension(serve_sequences):
    async with serve_sequences(CONTROLS, max_batch_size=0) as served:
        (row,) = await ask(served, 3, SEQUENCE_START | SEQUENCE_END, shape=(1,))
    assert (row["START"], row["END"], row["READY"], row["ID"]) == ([1.0], [7], [True], [3])


NO_ID = "inference request to model 'told' must specify a non-zero or non-empty correlation ID"
NO_START = (
    "inference request for sequence 5 to model 'told' must specify the START flag on the first "
    "request of the sequence"
)
OUTSIDE = (
    (0, 1, (1, 1), NO_ID),
    ("", 1, (1, 1), NO_ID),
    (5, 0, (1, 1), NO_START),
    (5, 2, (1, 1), NO_START),
    (
        5, 1, (2, 1),
        "inference request to model 'told' must specify batch-size 1 due to requirements of "
        "sequence batcher",
    ),
    (
        "five", 1, (1, 1),
        "sequence id 'five' is a string, but the model's control input 'ID' is INT32; send a "
        "number",
    ),
    (
        1 << 40, 1, (1, 1),
        "sequence id 1099511627776 is outside of -2147483648 to 2147483647, the numbers of the "
        "model's control input 'ID' of INT32",
    ),
)  # fmt: skip


async def test_requests_outside_of_a_sequence_are_refused(serve_sequences):
    async with serve_sequences(CONTROLS) as served:
        for sequence, flags, shape, text in OUTSIDE:
            error = await failure_of(ask(served, sequence, flags, shape=shape))
            assert (str(error), error.kind) == (text, ErrorKind.INVALID_ARG)
        # The refused requests have taken no slot and opened no sequence.
        assert ids(await ask(served, 6, SEQUENCE_START)) == [6]


async def test_direct_batches_have_a_row_of_each_slot(serve_sequences):
    async with serve_sequences("direct { }" + CONTROLS) as served:
        for sequence in (11, 12, 13):
            await ask(served, sequence, SEQUENCE_START)
        rows = await ask(served, 13, SEQUENCE_END)
        assert [(row["READY"], row["corr"], row["ID"]) for row in rows] == [
            ([[False]], 0, [[0]]), ([[False]], 0, [[0]]), ([[True]], 13, [[13]]),
        ]  # fmt: skip
        assert rows[0] == {
            "X": [[0]], "START": [[0.0]], "END": [[5]], "READY": [[False]], "ID": [[0]],
            "corr": 0, "flags": 0,
        }  # fmt: skip
        # The slot that is free again, and no rows behind the last request.
        assert ids(await ask(served, 14, SEQUENCE_START)) == [0, 0, 14]
        assert ids(await ask(served, 11)) == [11]
        counted = served.models["told"].statistics.message()
        assert (counted.inference_count, counted.execution_count) == (6, 6)


async def test_requests_of_other_sequences_join_and_those_of_one_wait(serve_sequences):
    async with serve_sequences("direct { }") as served:
        first = asyncio.ensure_future(ask(served, 1, SEQUENCE_START, x=9))
        await asyncio.sleep(0.01)
        others = [asyncio.ensure_future(ask(served, *each)) for each in ((1,), (2, 1), (1, 2))]
        await waiting(served, 3)
        served.go.touch()
        assert ids(await first) == [1]
        assert [ids(await other) for other in others] == [[1, 2], [1, 2], [1]]


async def test_oldest_batches_have_the_requests_that_came_first(serve_sequences):
    async with serve_sequences("oldest { max_candidate_sequences: 3 }", 2) as served:
        for sequence in ("a", "b", "c"):
            await ask(served, sequence, SEQUENCE_START)
        busy = asyncio.ensure_future(ask(served, "a", x=9))
        await asyncio.sleep(0.01)
        order = ["c", "a", "b", "c"]
        waiters = [asyncio.ensure_future(ask(served, each)) for each in order]
        # No candidate's place is free for a fourth sequence.
        late = asyncio.ensure_future(ask(served, "d", SEQUENCE_START))
        await waiting(served, 5)
        served.go.touch()
        assert ids(await busy) == ["a"]
        assert [ids(await each) for each in waiters] == [
            ["c", "a"], ["c", "a"], ["b", "c"], ["b", "c"],
        ]  # fmt: skip
        assert not late.done()
        await ask(served, "b", SEQUENCE_END)
        assert ids(await late) == ["d"]


async def test_a_sequence_without_a_slot_waits_until_another_is_idle_for_too_long(
    serve_sequences,
):
    batching = "max_sequence_idle_microseconds: 300000 direct { }"
    async with serve_sequences(batching, 1) as served:
        await ask(served, 1, SEQUENCE_START)
        later = [asyncio.ensure_future(ask(served, 2, flags)) for flags in (1, 2)]
        await waiting(served, 2)
        assert [ids(await each) for each in later] == [[2], [2]]
        error = await failure_of(ask(served, 1))
        assert "for sequence 1 to model 'told' must specify the START flag" in str(error)


async def test_a_second_start_continues_in_the_slot_with_a_warning(serve_sequences, caplog):
    async with serve_sequences(CONTROLS) as served:
        await ask(served, 1, SEQUENCE_START)
        (row,) = await ask(served, 1, SEQUENCE_START)
    assert row["START"] == [[1.0]]
    assert "sequence 1 for model 'told' has a conflict" in caplog.text


STATE = """
  state { input_name: "IN_STATE" output_name: "OUT_STATE" data_type: TYPE_INT32 dims: 2 %s }
"""


async def test_a_state_goes_from_response_to_request_of_its_sequence(serve_sequences):
    async with serve_sequences(STATE % "") as served:
        for sequence, x in ((1, 10), (2, 20), (1, 1), (2, 2)):
            await ask(served, sequence, int(x >= 10), x=x)
        assert (await ask(served, 1))[0]["IN_STATE"] == [[11, 11]]
        assert (await ask(served, 2))[-1]["IN_STATE"] == [[22, 22]]
        # A start begins with the initial state again.
        assert (await ask(served, 1, SEQUENCE_START))[0]["IN_STATE"] == [[0, 0]]


async def test_an_initial_state_comes_from_its_file(serve_sequences):
    initial = 'initial_state { name: "i" data_type: TYPE_INT32 dims: 2 data_file: "first" }'
    files = [("initial_state/first", np.int32([3, 4]).tobytes())]
    async with serve_sequences(STATE % initial, files=files) as served:
        assert (await ask(served, 1, SEQUENCE_START))[0]["IN_STATE"] == [[3, 4]]


async def test_the_delay_ends_when_enough_slots_have_requests(serve_sequences):
    batching = "direct { max_queue_delay_microseconds: 60000000 minimum_slot_utilization: 0.5 }"
    async with serve_sequences(batching) as served:
        first = asyncio.ensure_future(ask(served, 1, SEQUENCE_START))
        await waiting(served, 1)
        assert ids(await ask(served, 2, SEQUENCE_START)) == [1, 2]
        assert ids(await first) == [1, 2]


async def test_a_client_that_is_gone_ends_its_waiting_sequence(serve_sequences):
    async with serve_sequences("direct { }") as served:
        await ask(served, 2, SEQUENCE_START)
        busy = asyncio.ensure_future(ask(served, 1, SEQUENCE_START, x=9))
        await asyncio.sleep(0.01)
        gone, after, other = (asyncio.ensure_future(ask(served, each)) for each in (2, 2, 1))
        await waiting(served, 3)
        gone.cancel()
        error = await failure_of(after)
        assert (error.kind, str(error)) == (
            ErrorKind.CANCELLED,
            "the sequence ended: the client of an earlier request of it is gone",
        )
        served.go.touch()
        await asyncio.gather(busy, other)
        assert "START flag" in str(await failure_of(ask(served, 2)))


async def test_sequences_of_a_process_that_died_fail_and_others_wait(serve_sequences):
    async with serve_sequences("direct { }", 2) as served:
        await ask(served, 1, SEQUENCE_START)
        await ask(served, 2, SEQUENCE_START)
        dying = asyncio.ensure_future(failure_of(ask(served, 1, x=-1)))
        waits = asyncio.ensure_future(failure_of(ask(served, 1)))
        backlog = asyncio.ensure_future(ask(served, 3, SEQUENCE_START))
        assert "ended while it ran the request" in str(await dying)
        error = await waits
        assert error.kind is ErrorKind.UNAVAILABLE
        assert "the process that held sequence 1 of model 'told' ended; start" in str(error)
        assert ids(await backlog) == [3]
        assert "START flag" in str(await failure_of(ask(served, 2)))


ITERATIVE = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.rows = {}

    def execute(self, requests):
        made = []
        for request in requests:
            rows = self.rows.setdefault(request.correlation_id(), [])
            rows.append(request.flags())
            count = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0, 0]
            if len(rows) < count:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                made.append(None)
                continue
            text = json.dumps([{"corr": request.correlation_id(), "flags": rows}]).encode()
            made.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("ROWS", np.array([[text]], dtype=np.object_))]))
        return made
"""


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 2 }"])
async def test_a_request_is_executed_until_it_is_not_rescheduled(serve_sequences, strategy):
    batching = "iterative_sequence: true " + strategy
    async with serve_sequences(batching, 2, ITERATIVE) as served:
        found = await asyncio.gather(*(ask(served, 0, x=count) for count in (3, 1, 2)))
        assert [row["flags"] for (row,) in found] == [[1, 0, 0], [1], [1, 0]]
        assert len({row["corr"] for (row,) in found}) == 3
        (row,) = await ask(served, 77, SEQUENCE_START, x=2)
        assert row == {"corr": 77, "flags": [1, 0]}


async def test_only_iterative_sequences_are_rescheduled(serve_sequences):
    async with serve_sequences("direct { }", 2, ITERATIVE) as served:
        error = await failure_of(ask(served, 1, SEQUENCE_START, x=2))
        assert "Unable to reschedule the request: its model has no" in str(error)


START = 'control_input { name: "%s" control { kind: CONTROL_SEQUENCE_START %s } }'


@pytest.mark.parametrize(
    ("batching", "text"),
    [
        (
            "oldest { }",
            "max_candidate_sequences of sequence_batching is 0 but must be from 1 to",
        ),
        (
            "oldest { max_candidate_sequences: 1 preferred_batch_size: 8 }",
            "preferred_batch_size of sequence_batching is 8 but must be from 1 to 4",
        ),
        ("direct { minimum_slot_utilization: 2 }", "minimum_slot_utilization .* is 2 but must"),
        (START % ("X", "fp32_false_true: [ 0, 1 ]"), "the input 'X' is declared twice"),
        (START % ("", "fp32_false_true: [ 0, 1 ]"), "a control input or a state has no name"),
        (START % ("S", ""), "'S' of CONTROL_SEQUENCE_START needs one of int32_false_true,"),
        (START % ("S", "fp32_false_true: [ 0 ]"), "'S' of CONTROL_SEQUENCE_START needs one of"),
        (
            START % ("S", "fp32_false_true: [0, 1]") + START % ("T", "fp32_false_true: [0, 1]"),
            "the control 'CONTROL_SEQUENCE_START' is declared twice",
        ),
        (
            'control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID '
            "data_type: TYPE_FP32 } }",
            "has the data_type FP32; give it one data_type of TYPE_UINT64",
        ),
        (STATE % "use_growable_memory: true", "use_growable_memory of state 'IN_STATE' needs"),
        (
            STATE % 'initial_state { data_type: TYPE_INT32 dims: 2 data_file: "none" }',
            "initial_state/none of sequence_batching cannot be read",
        ),
        (
            STATE % "initial_state { data_type: TYPE_INT32 dims: 3 zero_data: true }",
            r"the initial state of 'IN_STATE' is \[3\] of INT32, but the state is \[2\]",
        ),
    ],
)
def test_sequence_batching_that_cannot_take_effect_is_refused(tmp_path, batching, text):
    path = tmp_path / "config.pbtxt"
    sizes = f"max_batch_size: 4 sequence_batching {{ {batching} }}"
    config = text_format.Parse(TENSORS + sizes, ModelConfig())
    with pytest.raises(ConfigError, match=text) as caught:
        check_sequences(path, config)
        SequenceInputs(path, config)
    assert str(caught.value).startswith(str(tmp_path))


async def test_several_front_ends_have_no_sequences(serve_sequences):
    with pytest.raises(ConfigError, match=r"but --frontend-processes is 2\. Set it to 1"):
        async with serve_sequences("", frontend={"num_frontends": 2}):
            pass


async def test_threads_beside_sequences_are_refused(serve_sequences):
    threads = 'parameters { key: "execute_threads" value { string_value: "2" } }'
    with pytest.raises(ConfigError, match="execute_threads is set beside sequence_batching"):
        async with serve_sequences("", besides=threads):
            pass


async def test_native_models_have_no_sequences(serve_own):
    config = {"tensorrt_llm_bls": "sequence_batching { }"}
    with pytest.raises(ConfigError, match="this bls model runs natively"):
        async with serve_own(config=config):
            pass
