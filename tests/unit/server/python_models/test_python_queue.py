"""How requests of a Python model wait, and which are executed together."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference.request import InferRequest, Tensor
from trimaran.server.python_models.job import Job, JobQueue

INPUTS = """
max_batch_size: 4
input { name: "A" data_type: TYPE_FP32 dims: -1 }
input { name: "R" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true optional: true }
"""


def queue_of(text=""):
    return JobQueue(text_format.Parse(INPUTS + text, ModelConfig()))


def job_of(*shape, priority=0, **others):
    arrays = {"A": np.zeros(shape, np.float32), **others}
    tensors = {name: Tensor(name, "FP32", array) for name, array in arrays.items()}
    return Job(InferRequest(model_name="m", inputs=tensors, priority=priority))


def added(queue, *jobs):
    for job in jobs:
        queue.add(job)
    return jobs


def test_without_dynamic_batching_a_batch_is_one_request():
    queue = queue_of()
    first, second = added(queue, job_of(1, 2), job_of(1, 2))
    assert (queue.take(), queue.take()) == ([first], [second])


def test_a_batch_has_equal_shapes_and_no_more_than_its_size():
    queue = queue_of("dynamic_batching { }")
    a, b, c, d, e = added(
        queue, job_of(1, 2), job_of(1, 3), job_of(2, 2), job_of(2, 2), job_of(1, 2)
    )
    # The fourth request exceeds the batch, and the fifth request does not overtake the fourth.
    assert queue.take() == [a, c]
    assert queue.take() == [b]
    assert queue.take() == [d, e]
    assert not len(queue)


def test_ragged_inputs_may_differ_and_missing_ones_may_not():
    queue = queue_of("dynamic_batching { }")
    ragged = [{"R": np.zeros((1, n), np.float32)} for n in (3, 5)]
    a, b, c = added(queue, job_of(1, 2, **ragged[0]), job_of(1, 2), job_of(1, 2, **ragged[1]))
    assert queue.take() == [a, c]
    assert queue.take() == [b]


def test_urgent_requests_are_executed_first():
    queue = queue_of("dynamic_batching { priority_levels: 3 default_priority_level: 2 }")
    low, usual, urgent = added(
        queue, job_of(1, 2, priority=3), job_of(1, 4), job_of(1, 3, priority=1)
    )
    assert [queue.take() for _ in range(3)] == [[urgent], [usual], [low]]


def test_a_full_queue_refuses():
    queue = queue_of("dynamic_batching { default_queue_policy { max_queue_size: 1 } }")
    (job,) = added(queue, job_of(1, 2))
    text = r"^\[request id: <id_unknown>\] Exceeds maximum queue size: 1"
    with pytest.raises(RequestError, match=text) as caught:
        queue.add(job_of(1, 2))
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert queue.remove(job)
    assert not queue.remove(job)


def test_each_priority_level_has_its_own_queue():
    queue = queue_of(
        "dynamic_batching { priority_levels: 2 default_priority_level: 2 "
        "default_queue_policy { max_queue_size: 1 } "
        "priority_queue_policy { key: 1 value { max_queue_size: 2 } } }"
    )
    low, first, second = added(
        queue, job_of(1, 2), job_of(1, 3, priority=1), job_of(1, 4, priority=1)
    )
    with pytest.raises(RequestError, match="size: 1 requests wait at priority level 2"):
        queue.add(job_of(1, 2))
    with pytest.raises(RequestError, match="size: 2 requests wait at priority level 1"):
        queue.add(job_of(1, 2, priority=1))
    assert [queue.take() for _ in range(3)] == [[first], [second], [low]]


def test_the_queue_delay_ends_at_a_preferred_batch_size():
    queue = queue_of(
        "dynamic_batching { preferred_batch_size: [ 2, 4 ] "
        "max_queue_delay_microseconds: 9000000 }"
    )
    added(queue, job_of(1, 2))
    assert 8 < queue.wait_s() <= 9
    added(queue, job_of(1, 2))
    assert queue.wait_s() == 0


OVERTAKEN = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        while not any(request.is_cancelled() for request in requests):
            time.sleep(0.001)
        raise ValueError("cancelled")
"""
IMPATIENT = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 20000 } }"


@pytest.fixture
def serve_busy(serve, tmp_path):
    """Like ``serve``, with a model that is busy until its requests are cancelled."""

    @asynccontextmanager
    async def start(config="", code=OVERTAKEN):
        async with serve():
            pass
        folder = tmp_path / "models" / "busy"
        (folder / "1").mkdir(parents=True)
        outputs = 'backend: "python" output { name: "B" data_type: TYPE_FP32 dims: -1 }'
        (folder / "config.pbtxt").write_text(INPUTS + outputs + config)
        (folder / "1" / "model.py").write_text(code)
        async with serve(repository=tmp_path / "models") as served:
            yield served

    return start


async def test_waiting_requests_are_a_metric(serve_busy):
    async with serve_busy() as served:
        zeros = np.zeros((4, 1), np.float32)
        name = 'nv_inference_pending_request_count{model="busy",version="1"}'
        assert f"{name} 0\n" in served.metrics.render().decode()
        tasks = [asyncio.ensure_future(served.infer("busy", A=zeros)) for _ in range(3)]
        while f"{name} 2\n" not in served.metrics.render().decode():
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert f"{name} 0\n" in served.metrics.render().decode()


SLOW = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.2)
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


async def test_waiting_for_an_instance_counts_as_queue_time(serve_busy):
    async with serve_busy(code=SLOW) as served:
        zeros = np.zeros((4, 1), np.float32)
        await asyncio.gather(*(served.infer("busy", A=zeros) for _ in range(2)))
        totals = served.models["busy"].statistics.message().inference_stats
        # The second request may arrive some time after the first began.
        assert totals.queue.ns >= 0.1e9


async def test_a_request_over_its_queue_timeout_gets_an_error(serve_busy):
    async with serve_busy(IMPATIENT) as served:
        zeros = np.zeros((4, 1), np.float32)
        running = asyncio.ensure_future(served.infer("busy", A=zeros))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="Request timeout expired"):
            await served.infer("busy", A=zeros)
        assert not running.done()
        running.cancel()
