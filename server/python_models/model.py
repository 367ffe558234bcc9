"""A model whose code a user wrote in Python, as the front end serves it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup, ModelOutput

from trimaran.comm.errors import ConfigError, EngineDeadError, ErrorKind, RequestError
from trimaran.server.inference.cooperative import run_cooperatively
from trimaran.server.inference.metadata import completed_config, to_json
from trimaran.server.inference.request import InferRequest, InferResponse, Model, Tensor
from trimaran.server.inference.tensor_bytes import from_config
from trimaran.server.python_models.calls import ModelCalls
from trimaran.server.python_models.instance import Instance, InstanceSequences
from trimaran.server.python_models.job import Job, JobQueue
from trimaran.server.python_models.sequence_inputs import SequenceInputs
from trimaran.server.python_models.sequence_queue import SequenceQueue, check_sequences
from trimaran.server.python_models.wire import NULL_KEY, Respond, Start, unpack_in_chunks
from trimaran.server.repository.model_repository import RepositoryModel


class OutputShapes:
    """Undoes the ``reshape`` of outputs: user code uses the shape of ``reshape``, clients
    ``dims``.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._reshaped = {o.name: o for o in config.output if o.HasField("reshape")}
        self._num_batch_dims = int(config.max_batch_size > 0)

    def for_clients(self, tensor: Tensor) -> Tensor:
        """The same values in the configured ``dims``, if the sizes match."""
        output = self._reshaped.get(tensor.name)
        if output is None:
            return tensor
        batch = tensor.shape[: self._num_batch_dims]
        shape = batch + _dims(output, tensor.shape[self._num_batch_dims :])
        if math.prod(shape) != tensor.data.size:
            return tensor
        return Tensor(tensor.name, tensor.datatype, tensor.data.reshape(shape))


def _dims(output: ModelOutput, made: tuple[int, ...]) -> tuple[int, ...]:
    """The configured ``dims``, with variable dimensions as long as those of ``reshape``."""
    given = zip(output.reshape.shape, made, strict=False)
    variable = iter(length for configured, length in given if configured == -1)
    return tuple(next(variable, -1) if dim == -1 else dim for dim in output.dims)


MAX_INSTANCES = 64
"""Most processes of one model."""

THREADS, MAX_THREADS = "execute_threads", 512
"""The parameter for the number of threads of a process that call ``execute``, and its limit."""


class PythonModel:
    """Runs requests in the processes of its instances; between `start` and `close`."""

    def __init__(
        self,
        model: RepositoryModel,
        version: int,
        calls: ModelCalls,
        older: Sequence[PythonModel] = (),
    ) -> None:
        """Check the configuration. ``older`` versions start and end with this one.

        Raises:
            ConfigError: the configuration requests an unsupported feature.
        """
        self.name = model.name
        self.version = str(version)
        self.older = tuple(older)
        self.config: ModelConfig = model.config
        self._file = model.folder / self.version / "model.py"
        _check(model)
        self.is_decoupled = bool(self.config.model_transaction_policy.decoupled)
        """Whether a request may have other than one response."""
        self._num_threads = _num_threads(model)
        self._shapes = OutputShapes(self.config)
        self._timer: asyncio.TimerHandle | None = None
        arguments = self._arguments(model)
        self._sequence_inputs: SequenceInputs | None = None
        self._queue: JobQueue | SequenceQueue = JobQueue(self.config)
        if self.config.HasField("sequence_batching"):
            self._sequence_inputs = SequenceInputs(model.config_path, self.config)
            self._queue = SequenceQueue(
                self.config, len(arguments), self._sequence_inputs, self._dispatch
            )
        self._instances = [
            Instance(self._start(own), calls, self._dispatch, self._told(index))
            for index, own in enumerate(arguments)
        ]

    @property
    def is_ready(self) -> bool:
        """Whether an instance could take a request."""
        return any(instance.is_ready for instance in self._instances)

    @property
    def num_queued(self) -> int:
        """Requests that wait for an instance."""
        return len(self._queue)

    async def start(self) -> None:
        """Start every instance, those of older versions too; returns once all are initialized.

        Raises:
            ConfigError: an instance failed; none is left running.
        """
        work = [*(version.start() for version in self.older), self._start_own()]
        starting = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            # A version that is still starting would leave its processes behind.
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.close()
            raise

    async def _start_own(self) -> None:
        opened = [asyncio.ensure_future(instance.open()) for instance in self._instances]
        try:
            await asyncio.gather(*opened)
        except BaseException as error:
            for task in opened:
                task.cancel()
            await asyncio.gather(*opened, return_exceptions=True)
            await self._close_own()
            if isinstance(error, ConfigError):
                raise ConfigError(f"{self._file}: {error}") from error
            raise

    async def close(self) -> None:
        """Finalize every instance and end its process, those of older versions too."""
        await asyncio.gather(*(version.close() for version in self.older), self._close_own())

    async def _close_own(self) -> None:
        await asyncio.gather(*(instance.close() for instance in self._instances))

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request; see `inference.Model`."""
        job = Job(request)
        await job.pack()
        self._check_alive()
        self._queue.add(job)
        expiry = self._limit_wait(job)
        try:
            self._dispatch()
            is_over, needs_response = False, not self.is_decoupled
            while not is_over:
                message = await job.next()
                is_over = message.is_final
                if message.tensors is not None or message.error or needs_response:
                    yield await self._response(request, message)
                    needs_response = False
        finally:
            if expiry is not None:
                expiry.cancel()
            if not self._queue.remove(job):
                for instance in self._instances:
                    instance.cancel(job)

    async def _response(self, request: InferRequest, message: Respond) -> InferResponse:
        if message.error:
            raise RequestError(message.error, ErrorKind[message.kind])
        if message.tensors is None:
            text = f"model '{self.name}' ended the request without a response"
            raise RequestError(text, ErrorKind.INTERNAL)
        return InferResponse(
            model_name=self.name,
            model_version=self.version,
            id=request.id,
            outputs=[
                self._shapes.for_clients(await run_cooperatively(unpack_in_chunks(packed)))
                for packed in message.tensors
            ],
            parameters=message.parameters,
            is_final=message.is_final,
        )

    # ---- queue --------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give batches to the instances that are free."""
        if all(instance.has_failed for instance in self._instances):
            for job in self._queue.drain():
                job.take(self._dead())
        while True:
            # A batch that any instance may execute goes to the one with the fewest requests.
            free = sorted(
                (n for n, instance in enumerate(self._instances) if instance.is_free),
                key=lambda n: self._instances[n].num_jobs,
            )
            number, wait_s = self._queue.place(free)
            if number is None:
                if math.isfinite(wait_s):
                    self._dispatch_later(wait_s)
                return
            batch = self._queue.take(number)
            _note_begin([job for job in batch if job.key != NULL_KEY])
            self._instances[number].execute(batch)

    def _dispatch_later(self, wait_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._dispatch)

    def _limit_wait(self, job: Job) -> asyncio.TimerHandle | None:
        timeout_s = self._queue.timeout_s(job)
        if not timeout_s:
            return None
        return asyncio.get_running_loop().call_later(timeout_s, self._expire, job)

    def _expire(self, job: Job) -> None:
        if self._queue.remove(job):
            job.take(RequestError("Request timeout expired", ErrorKind.UNAVAILABLE))

    def _check_alive(self) -> None:
        if all(instance.has_failed for instance in self._instances):
            raise self._dead()

    def _dead(self) -> RequestError:
        text = (
            f"every process of model '{self.name}' died too often and was given up; the "
            "server's log says why. Load the model again once its code is mended."
        )
        return EngineDeadError(text)

    # ---- instances ----------------------------------------------------------------------

    def _start(self, arguments: dict[str, str]) -> Start:
        return Start(
            name=self.name,
            version=self.version,
            file=str(self._file),
            args=arguments,
            is_decoupled=self.is_decoupled,
            num_threads=self._num_threads,
            outputs={t.name: from_config(t.data_type) for t in self.config.output},
            states={} if self._sequence_inputs is None else self._sequence_inputs.state_outputs,
            is_iterative=self.config.sequence_batching.iterative_sequence,
        )

    def _told(self, instance: int) -> InstanceSequences | None:
        queue = self._queue
        if not isinstance(queue, SequenceQueue):
            return None
        return InstanceSequences(queue.reschedule, partial(queue.lose, instance))

    def _arguments(self, model: RepositoryModel) -> list[dict[str, str]]:
        """The arguments of ``initialize`` for each instance."""
        config = completed_config(self)
        # The count is checked first: memory might not hold the arguments of all.
        count = sum(group.count * max(1, len(group.gpus)) for group in config.instance_group)
        if count > MAX_INSTANCES:
            raise ConfigError(
                f"{model.config_path}: instance_group asks for {count} instances, each a "
                f"process, but at most {MAX_INSTANCES} are started. Lower the count."
            )
        common = {
            "model_config": json.dumps(to_json(config)),
            "model_repository": str(model.folder),
            "model_version": self.version,
            "model_name": self.name,
        }
        found = []
        for group in config.instance_group:
            kind = ModelInstanceGroup.Kind.Name(group.kind).removeprefix("KIND_")
            devices = [(i, d) for d in list(group.gpus) or [0] for i in range(group.count)]
            for index, (_, device) in enumerate(devices):
                own = {
                    "model_instance_name": f"{group.name}_{index}",
                    "model_instance_kind": kind,
                    "model_instance_device_id": str(device),
                }
                found.append({**common, **own})
        return found


async def start_model(model: Model) -> None:
    """Start the processes of a model.

    Raises:
        ConfigError: a process does not start.
    """
    if isinstance(model, PythonModel):
        await model.start()


async def close_model(model: Model | None) -> None:
    """End the processes of a model."""
    if isinstance(model, PythonModel):
        await model.close()


def _num_threads(model: RepositoryModel) -> int:
    count = model.parameters.get_int(THREADS)
    if count is not None and not 1 <= count <= MAX_THREADS:
        raise ConfigError(
            f"{model.config_path}: {THREADS} is {count} but must be from 1 to {MAX_THREADS}; "
            "a coroutine (async def execute) needs no threads"
        )
    return count or 1


def _note_begin(batch: list[Job]) -> None:
    """Record when the requests of a batch begin, and which request reports the batch."""
    now = time.monotonic_ns()
    for job in batch:
        job.request.started_ns = now
        if len(batch) > 1:
            job.request.executed_batch = 0
    if len(batch) > 1:
        batch[0].request.executed_batch = sum(job.batch_size for job in batch)


def _check(model: RepositoryModel) -> None:
    path, config = model.config_path, model.config
    if not config.input or not config.output:
        side = "output" if config.input else "input"
        raise ConfigError(
            f"{path}: model '{model.name}' declares no {side}, and configurations are never "
            "completed from model.py. Declare its inputs and outputs."
        )
    if config.HasField("sequence_batching"):
        check_sequences(path, config)
        if model.parameters.get_int(THREADS) is not None:
            raise ConfigError(
                f"{path}: {THREADS} is set beside sequence_batching, but an instance executes "
                "one batch of sequences after the other. Remove one of the two."
            )
    if model.parameters.get_str("EXECUTION_ENV_PATH"):
        raise ConfigError(
            f"{path}: EXECUTION_ENV_PATH is set, but a Python model runs in the environment "
            "of the server. Install its packages there and leave the parameter unset."
        )
