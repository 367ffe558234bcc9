"""Calls of user code to the server: run, load and unload other models."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Protocol

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference.cooperative import run_cooperatively
from trimaran.server.inference.registry import ModelRegistry
from trimaran.server.inference.request import InferRequest, InferResponse, Model
from trimaran.server.inference.validation import WireInput
from trimaran.server.metrics.custom_metrics import CustomMetrics, HeldMetrics
from trimaran.server.protocol.load_request import LoadRequest, load_request_of_files
from trimaran.server.python_models.wire import (
    SEQUENCE_END,
    SEQUENCE_START,
    Call,
    Packed,
    Question,
    RequestFields,
    Result,
    pack_in_chunks,
    unpack_in_chunks,
)

logger = logging.getLogger(__name__)


class Loader(Protocol):
    """Loads models while the server runs."""

    async def load(self, request: LoadRequest) -> None:
        """Load a model; see `Service.load`."""

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a model; see `Service.unload`."""


class ModelCalls:
    """Runs the calls of user code. Used on the event loop only."""

    def __init__(self, registry: ModelRegistry, metrics: CustomMetrics) -> None:
        self._registry = registry
        self.metrics = metrics
        """The function that wraps models to count requests."""

        self.loader: Loader | None = None
        """None until the server serves."""

    async def run(self, call: Call, send: Callable[[Result], None]) -> None:
        """Run a model and send its responses; the last result is final.

        After a cancellation no further result is sent.
        """
        try:
            fields = RequestFields.from_wire(call.request)
            inputs = [await _wire_input(packed) for packed in fields.inputs]
            model = self._registry.get_ready(fields.model, fields.version)
            if model.is_decoupled and not call.is_decoupled:
                raise RequestError(
                    f"Model {model.name} is using the decoupled. The current BLS request call "
                    "doesn't support models using the decoupled transaction policy. Please use "
                    "'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
                    "decoupled models.",
                    ErrorKind.UNSUPPORTED,
                )
            await self._run(call, model, self._checked(model, fields, inputs), send)
        except RequestError as error:
            send(Result(call=call.call, error=str(error) or "no text", kind=error.kind.name))
        except Exception as error:
            name = call.request.get("model")
            logger.exception("model '%s', run by a Python model, failed", name)
            kind = ErrorKind.INTERNAL.name
            send(Result(call=call.call, error=_words_of(error), kind=kind))

    async def answer(self, question: Question, metrics: HeldMetrics) -> Result:
        """The answer to a question about models, or about the process's metrics."""
        result = Result(call=question.call)
        try:
            if question.verb.startswith("metric_"):
                result.values = _about_metrics(question.verb, question.arguments, metrics)
            else:
                result.values = await self._answer(question.verb, question.arguments)
        except RequestError as error:
            result.error, result.kind = str(error), error.kind.name
        except Exception as error:
            # Without an answer, the model's code would wait for ever.
            logger.exception("%s, asked by a Python model, failed", question.verb)
            result.error = _words_of(error)
            result.kind = ErrorKind.INTERNAL.name
        return result

    async def _run(
        self,
        call: Call,
        model: Model,
        request: InferRequest,
        send: Callable[[Result], None],
    ) -> None:
        async with aclosing(model.infer(request)) as responses:  # type: ignore[type-var]
            async for response in responses:
                send(await _result(call, response, is_final=not call.is_decoupled))
                if not call.is_decoupled:
                    return
        if call.is_decoupled:
            send(Result(call=call.call))
            return
        raise RequestError(f"model '{model.name}' gave no response", ErrorKind.INTERNAL)

    def _checked(
        self, model: Model, fields: RequestFields, inputs: list[WireInput]
    ) -> InferRequest:
        outputs = tuple(fields.outputs)
        request = InferRequest(
            model_name=model.name,
            model_version=fields.version,
            id=fields.id,
            outputs=outputs,
            parameters=fields.parameters,
            priority=fields.priority,
            timeout_us=fields.timeout_us,
            sequence_id=fields.correlation_id,
            sequence_start=bool(fields.flags & SEQUENCE_START),
            sequence_end=bool(fields.flags & SEQUENCE_END),
            arrival_ns=time.monotonic_ns(),
        )
        request.inputs = self._registry.validator(model).check(inputs, outputs, fields.id)
        return request

    async def _answer(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        name = str(arguments["name"])
        if verb == "is_model_ready":
            return {"ready": self._is_ready(name, str(arguments["version"]))}
        if self.loader is None:
            raise RequestError(
                f"model '{name}' cannot be loaded or unloaded while the server starts",
                ErrorKind.UNAVAILABLE,
            )
        if verb == "load_model":
            config, files = str(arguments["config"]), dict(arguments["files"])
            await self.loader.load(load_request_of_files(name, config, files))
        else:
            dependents = bool(arguments["unload_dependents"])
            await self.loader.unload(name, unload_dependents=dependents)
        return {}

    def _is_ready(self, name: str, version: str) -> bool:
        try:
            return self._registry.is_model_ready(name, version)
        except RequestError:
            return False


def _words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _about_metrics(
    verb: str, arguments: dict[str, Any], metrics: HeldMetrics
) -> dict[str, Any]:
    number = int(arguments["metric"])
    if verb == "metric_value":
        return {"value": metrics.value(number)}
    metrics.hold(number, arguments["family"], arguments["labels"])
    return {}


async def _result(call: Call, response: InferResponse, *, is_final: bool) -> Result:
    return Result(
        call=call.call,
        tensors=[
            await run_cooperatively(pack_in_chunks(tensor)) for tensor in response.outputs
        ],
        parameters=dict(response.parameters),
        is_final=is_final,
    )


async def _wire_input(packed: Packed) -> WireInput:
    tensor = await run_cooperatively(unpack_in_chunks(packed))
    return WireInput(tensor.name, tensor.datatype, tensor.shape, tensor.data.reshape(-1))
