"""The five models over an engine whose tokens the test sets, connected by a real socket."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import re
import shutil
import socket
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from trimaran.comm.messages.messages import (
    AdapterTaken,
    Cancel,
    EngineHello,
    FinishReason,
    FrameBuffer,
    FrontendHello,
    Message,
    RequestFailed,
    StatsReport,
    StepOutput,
    Submit,
    encode,
)
from trimaran.comm.messages.token_ids import unpack_ids
from trimaran.comm.transport.greeting import greet
from trimaran.comm.transport.sockets import Address
from trimaran.launcher.cli.fill_template import fill
from trimaran.launcher.cli.init_repo import MODELS, template
from trimaran.server.config import FrontendConfig
from trimaran.server.engines.client import EngineClient
from trimaran.server.inference.registry import ModelRegistry
from trimaran.server.inference.request import InferRequest, InferResponse, Model
from trimaran.server.inference.tensor_bytes import from_config
from trimaran.server.inference.validation import Validator, WireInput
from trimaran.server.loading.model_set import Candidate, ModelSet
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.models.factory import COMPOSED, FactoryOptions, ModelFactory
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.python_models.calls import ModelCalls
from trimaran.server.python_models.model import close_model, start_model
from trimaran.server.repository.model_repository import ModelRepository, PythonModels, Role

_DEADLINE_S = 100
_PAD = {"__type": "AddedToken", "content": "<pad>", "special": True}
"""A token as newer folders write it."""

USER_MODELS = Path(__file__).parents[1] / "python_models" / "user_models"
EXAMPLES = Path(__file__).parents[4] / "examples" / "python_models"
Script = Callable[[Submit], list[int]]
FACTS = {
    "max_batch_size": 64,
    "max_num_tokens": 1024,
    "max_seq_len": 512,
    "max_input_len": 256,
    "vocab_size": 600,
    "world_size": 1,
    "lora_host_bytes": 48,
    "max_draft_len": 5,
    "lookahead": (4, 3, 4),
}


class ScriptedEngine:
    """Answers each request with the ids of ``script``.

    ``max_per_step`` above 1 gives a row a random number of ids a step. While `gate` is clear no
    step runs, so that a test controls the time of tokens.
    """

    def __init__(self, script: Script, *, max_per_step: int = 1) -> None:
        self.script = script
        self._random = random.Random(7)
        self._max_per_step = max_per_step
        self._frames = FrameBuffer()
        self._unread: list[Message] = []
        self._answers: dict[int, list[int]] = {}
        self._given: dict[int, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._num_steps = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.takes_adapters = True
        """Whether it says at once of adapters that come that it took them."""
        self.submits: list[Submit] = []
        self.cancelled: list[int] = []
        self.others: list[Message] = []
        """What came besides."""
        self.refusals: dict[bytes, tuple[str, str]] = {}
        self.extras: Callable[[list[int]], dict[str, Any]] = lambda ids: {}

    async def dial(self, address: str, hello: EngineHello) -> FrontendHello:
        """Connect and greet; serve if the front end accepts."""
        parsed = Address.parse(address)
        if parsed.path:
            opened = asyncio.open_unix_connection(parsed.path)
        else:
            sock = socket.create_connection((parsed.host, parsed.port))
            await asyncio.to_thread(greet, sock, hello.token.encode())
            hello = replace(hello, token="")
            opened = asyncio.open_connection(sock=sock)
        self._reader, self._writer = await opened
        self.send(hello)
        answer = await self.receive()
        assert isinstance(answer, FrontendHello)
        if answer.accepted:
            self._tasks = [
                asyncio.ensure_future(self._read()),
                asyncio.ensure_future(self._run()),
            ]
        return answer

    def send(self, message: Message) -> None:
        """Send any message."""
        self._writer.write(encode(message))

    async def receive(self) -> Message | None:
        """The next message, or None at the connection's end. Only before the engine serves."""
        while not self._unread:
            data = await self._reader.read(65536)
            if not data:
                return None
            self._unread += self._frames.feed(data)
        return self._unread.pop(0)

    async def end(self) -> None:
        """Die: the connection ends at any point of the work."""
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    @property
    def num_live(self) -> int:
        """Requests that still have ids to come."""
        return len(self._answers)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds."""
        while not condition():
            await asyncio.sleep(0.001)

    async def _read(self) -> None:
        while (message := await self.receive()) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, Submit):
            self.submits.append(message)
            if message.prompt_ids in self.refusals:
                kind, text = self.refusals[message.prompt_ids]
                self.send(RequestFailed(request_id=message.request_id, kind=kind, text=text))
                return
            if self.takes_adapters and "weights" in (message.adapter or {}):
                task, digest = message.adapter_id, message.adapter["digest"]
                self.send(AdapterTaken(adapter_id=task, digest=digest))
            ids = self.script(message)[: message.sampling.get("max_tokens", 16)]
            done = unpack_ids(message.output_ids).tolist()
            assert done == ids[: len(done)]
            self._answers[message.request_id] = ids
            self._given[message.request_id] = len(done)
        elif isinstance(message, Cancel):
            self.cancelled += message.request_ids
            for request_id in message.request_ids:
                self._answers.pop(request_id, None)
        else:
            self.others.append(message)

    async def _run(self) -> None:
        while True:
            await self.gate.wait()
            if self._answers:
                self.step()
                await self._writer.drain()
            await asyncio.sleep(0 if self._answers else 0.001)

    def step(self) -> None:
        """Send one step's ids of every request."""
        rows = {r: self._next_ids(r) for r in list(self._answers)}
        ends = [self._given[r] == len(self._answers[r]) for r in rows]
        self._num_steps += 1
        self.send(
            StepOutput(
                step=self._num_steps,
                request_ids=array("Q", rows).tobytes(),
                sequence_indices=array("H", [0] * len(rows)).tobytes(),
                num_tokens=array("H", [len(ids) for ids in rows.values()]).tobytes(),
                finish_reasons=bytes(FinishReason.LENGTH if end else 0 for end in ends),
                token_ids=array("i", [i for ids in rows.values() for i in ids]).tobytes(),
                extras={
                    row: extras
                    for row, ids in enumerate(rows.values())
                    if (extras := self.extras(ids))
                },
            )
        )
        for request_id, end in zip(rows, ends, strict=True):
            if end:
                del self._answers[request_id]

    def _next_ids(self, request_id: int) -> list[int]:
        start = self._given[request_id]
        count = self._random.randint(1, self._max_per_step)
        ids = self._answers[request_id][start : start + count]
        self._given[request_id] = start + len(ids)
        return ids


def build(
    config: FrontendConfig, engines: EngineClient, metrics: Metrics
) -> tuple[dict[str, Model], list[Model]]:
    """Every model of a repository by name, and the models without steps without their counters.

    Raises:
        ConfigError: a model cannot be served.
    """
    registry = ModelRegistry()
    factory = ModelFactory(ModelCalls(registry, metrics.custom), FactoryOptions.of(config))
    candidates = []
    python = PythonModels.parse(config.python_models)
    repository = ModelRepository.load(config.model_repository, python=python)
    for source in repository.models.values():
        plain = None
        if source.role is Role.TOKEN:
            groups = config.groups.get(source.name, ())
            version = str(source.versions[-1])
            plain = factory.single(source, engines.add_model(source.name, version, 1, groups))
        elif source.role not in COMPOSED:
            plain = factory.single(source)
        candidates.append(Candidate(source=source, plain=plain))
    outcome = ModelSet(factory, metrics, registry).commit(candidates)
    for failure in outcome.failures.values():
        raise failure
    plain = [candidate.plain for candidate in candidates if candidate.plain is not None]
    return {model.name: model for model in registry.models()}, plain


@pytest.fixture
def build_models() -> Callable[[Path], dict[str, Model]]:
    """Builds every model of a repository, over no engines."""

    def build_all(root: Path) -> dict[str, Model]:
        config, metrics = FrontendConfig(model_repository=str(root)), Metrics()
        return build(config, EngineClient(config, metrics), metrics)[0]

    return build_all


class Served:
    """All models of a repository over one engine group, called as the protocols call them."""

    def __init__(self, config: FrontendConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.metrics = Metrics()
        self.engines = EngineClient(config, self.metrics)
        self.tokenizer = tokenizer
        self.models: dict[str, Model] = {}
        self._plain: list[Model] = []
        self.dialled: list[ScriptedEngine] = []
        self._num_reports = 0

    async def start(self) -> None:
        """Build the models and listen for engines."""
        self.models, self._plain = build(self.config, self.engines, self.metrics)
        await self.engines.start()
        await asyncio.gather(*map(start_model, self._plain))

    async def dial(self, script: Script, *, max_per_step: int = 1, **fields: Any) -> Any:
        """Another engine, accepted and serving; ``fields`` are those of its greeting."""
        engine = ScriptedEngine(script, max_per_step=max_per_step)
        self.dialled.append(engine)
        answer = await engine.dial(self.config.engine_listen[-1], self.hello(**fields))
        assert answer.accepted, answer.reason
        return engine

    def hello(self, **fields: Any) -> EngineHello:
        """A greeting that is accepted, but for ``fields``."""
        values = {"token": "secret", "model": "tensorrt_llm", "group": "g0", "facts": FACTS}
        return EngineHello(**{**values, **fields})

    async def processed(self, engine: ScriptedEngine) -> None:
        """Return once the front end has processed all messages of an engine."""
        self._num_reports += 1
        report = {"active_requests": self._num_reports, "max_requests": 1 << 20}
        engine.send(StatsReport(values=report))
        line = re.compile(rf',request_type="active",version="\d+"}} {self._num_reports}\n')
        await engine.until(lambda: line.search(self.metrics.render().decode()) is not None)
        for _ in range(10):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """End engines and connections."""
        await asyncio.gather(*map(close_model, self._plain))
        await self.engines.close()
        for engine in self.dialled:
            await engine.end()

    def stream(
        self,
        model: str,
        outputs: tuple[str, ...] = (),
        id: str = "",
        parameters: dict[str, Any] | None = None,
        sequence: tuple[int | str, int] = (0, 0),
        **inputs: Any,
    ) -> Any:
        """The responses as they come. A value is a sample's scalar or list, or the whole
        array; ``sequence`` is an id with its flags."""
        config = self.models[model].config
        types = {tensor.name: tensor.data_type for tensor in config.input}
        wires = [
            _wire(name, from_config(types[name]), value, config.max_batch_size > 0)
            for name, value in inputs.items()
        ]
        request = InferRequest(
            model_name=model, id=id, outputs=outputs, parameters=parameters or {}
        )
        request.sequence_id, flags = sequence
        request.sequence_start, request.sequence_end = bool(flags & 1), bool(flags & 2)
        request.inputs = Validator(config).check(wires, outputs, id)
        return self.models[model].infer(request)

    async def infer(self, model: str, **options: Any) -> list[InferResponse]:
        """All responses."""
        async with aclosing(self.stream(model, **options)) as responses:
            return [response async for response in responses]

    async def texts(self, model: str, **options: Any) -> list[str]:
        """The text of each response."""
        return [text_of(response) for response in await self.infer(model, **options)]

    def answer(self, text: str) -> Script:
        """A script that answers every request with the ids of this text."""
        ids = self.tokenizer.encode_now(text, False)
        return lambda submit: ids


def text_of(response: InferResponse) -> str:
    """The text output of a response."""
    (text,) = next(o.data for o in response.outputs if o.name == "text_output").flat
    return text.decode()


def _wire(name: str, datatype: str, value: Any, is_batched: bool) -> WireInput:
    if not isinstance(value, np.ndarray):
        sample = value if isinstance(value, list) else [value]
        if datatype == "BYTES":
            sample = [text.encode() if isinstance(text, str) else text for text in sample]
        value = np.array([sample] if is_batched else sample, dtype=_NUMPY.get(datatype, object))
    return WireInput(name, datatype, value.shape, value.reshape(-1))


_NUMPY = {
    "INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64, "FP32": np.float32,
    "BOOL": np.bool_, "FP16": np.float16, "UINT8": np.uint8,
}  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 600 ids with bos, eos and pad, trained here."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = FastTokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = Path(__file__).read_text(encoding="utf-8").split()
    tokenizer.train_from_iterator([" ".join(words), "größer 東京 Ünïcödé 🙂🎉 " * 9], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": _PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(tmp_path: Path, tokenizer_folder: Path) -> Serve:
    """Builds and starts the five models; options are template values and front-end fields."""

    @asynccontextmanager
    async def start(
        frontend: dict[str, Any] | None = None, repository: Path | None = None, **values: str
    ) -> AsyncIterator[Served]:
        root = repository or _write_repository(tmp_path, tokenizer_folder, values)
        config = FrontendConfig(
            model_repository=str(root),
            token="secret",
            **{
                "engine_listen": (f"unix:{tmp_path}/engine.sock",),
                "groups": {"tensorrt_llm": ("g0",)},
                **(frontend or {}),
            },
        )
        served = Served(config, Tokenizer(str(tokenizer_folder)))
        try:
            await served.start()
            yield served
        finally:
            await served.close()

    return start


@pytest.fixture
def serve_own(serve: Serve, tmp_path: Path) -> Serve:
    """Like ``serve``, with the given Python models of `user_models`; code of other models by
    name."""

    @asynccontextmanager
    async def start(
        *names: str,
        frontend: dict[str, Any] | None = None,
        config: dict[str, str] | None = None,
        **codes: str,
    ) -> AsyncIterator[Served]:
        async with serve():
            pass
        root = tmp_path / "own"
        shutil.move(tmp_path / "models", root)
        for name in names:
            folder = next(f for f in (USER_MODELS, EXAMPLES) if (f / name).is_dir())
            shutil.copytree(folder / name, root / name)
        for name, text in (config or {}).items():
            with (root / name / "config.pbtxt").open("a") as file:
                file.write(text)
        for name, code in codes.items():
            (root / name / "1" / "model.py").write_text(code)
        async with serve(repository=root, frontend=frontend) as served:
            yield served

    return start


def _write_repository(root: Path, tokenizer_folder: Path, values: dict[str, str]) -> Path:
    filled = {
        "triton_max_batch_size": "4",
        "decoupled_mode": "True",
        "tokenizer_dir": str(tokenizer_folder),
        "triton_backend": "tensorrtllm",
        "preprocessing_instance_count": "1",
        "postprocessing_instance_count": "1",
        "bls_instance_count": "1",
        "logits_datatype": "TYPE_FP32",
        "encoder_input_features_data_type": "TYPE_FP16",
        "prompt_embedding_table_data_type": "TYPE_FP16",
        **values,
    }
    for model in MODELS:
        folder = root / "models" / model
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(fill(template(model), filled))
    return root / "models"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests on the event loop that a front end uses."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test: Callable[..., Awaitable[None]] = pyfuncitem.obj

    async def run() -> None:
        # The loop does not see the signal by which pytest ends a test that hangs.
        arguments = {name: pyfuncitem.funcargs[name] for name in names}
        await asyncio.wait_for(test(**arguments), _DEADLINE_S)

    uvloop.run(run())
    return True
