"""The generate extension: one flat JSON object in, flat JSON objects out."""

from __future__ import annotations

from json.encoder import encode_basestring
from typing import Any, cast

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference.cooperative import Cooperative, run_at_once
from trimaran.server.inference.request import (
    InferRequest,
    InferResponse,
    ParameterValue,
    Tensor,
)
from trimaran.server.inference.tensor_bytes import Buffer, from_config
from trimaran.server.inference.text_limits import PromptBound
from trimaran.server.inference.validation import WireInput
from trimaran.server.protocol import json_access
from trimaran.server.protocol.infer_json import check_size, custom_value
from trimaran.server.protocol.json_access import RepeatedKeys, as_string
from trimaran.server.protocol.limits import check_id, check_number
from trimaran.server.protocol.single_values import SINGLES, NotPlainError, is_short_id
from trimaran.server.protocol.tensor_json import (
    BodyPart,
    array_from_json,
    flatten,
    text_of,
    to_body,
    to_json,
)

EXACTLY_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)
_PARAMETERS = "parameters"


class GenerateMapper:
    """Turns generate bodies for one model into requests. Stateless."""

    def __init__(
        self, config: ModelConfig, max_input_bytes: int, prompts: PromptBound | None = None
    ) -> None:
        """``prompts`` refuses prompts that are too long for the model."""
        batch = (-1,) if config.max_batch_size > 0 else ()
        self._name = config.name
        self._inputs = {
            entry.name: (from_config(entry.data_type), batch + tuple(entry.dims))
            for entry in config.input
        }
        self._max_input_bytes = max_input_bytes
        self._prompts = prompts
        self._required = frozenset(e.name for e in config.input if not e.optional)
        self._singles = {
            entry.name: SINGLES[self._inputs[entry.name][0]]
            for entry in config.input
            if self._is_single(entry)
        }
        """What reads the inputs that one value fits."""

    def parse(self, body: Buffer) -> tuple[InferRequest, list[WireInput]]:
        """The request without inputs, and its inputs, not yet checked against the model.

        Raises:
            RequestError: with the kind and text that clients know.
        """
        return self.request_of(self.document(body))

    @staticmethod
    def document(body: Buffer) -> dict[str, Any]:
        """The members of a body.

        Raises:
            RequestError: no JSON, or no object.
        """
        document = json_access.parse(body)
        if not isinstance(document, dict):
            raise RequestError("attempt to get members for non-object", ErrorKind.INTERNAL)
        return document

    def plain_values(self, document: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """The request's id, and the value of each input, of a request in which every member is
        an input of one value; None of any other request, and of a wrong one.
        """
        values: dict[str, Any] = {}
        request_id = ""
        if isinstance(document, RepeatedKeys):
            return None
        for name, value in document.items():
            read = self._singles.get(name)
            if read is not None:
                try:
                    values[name] = read(value)
                except NotPlainError:
                    return None
            elif name == "id" and name not in self._inputs and is_short_id(value):
                request_id = value
            else:
                return None
        return (request_id, values) if self._required <= values.keys() else None

    def request_of(self, document: dict[str, Any]) -> tuple[InferRequest, list[WireInput]]:
        """`parse`, of the members of a body.

        Raises:
            RequestError: as for `parse`.
        """
        request = InferRequest(model_name=self._name)
        if "id" in document:
            request.id = check_id("the request's id", as_string(document["id"], "'id'"))
        inputs: list[WireInput] = []
        for name, value in document.items():
            if name == _PARAMETERS:
                self._nested(value, request, inputs)
            else:
                self._convert(name, value, request, inputs)
        self._check_repeated(document)
        check_number("parameters", len(request.parameters))
        return request, inputs

    def _is_single(self, entry: ModelInput) -> bool:
        datatype, dims = self._inputs[entry.name]
        if entry.name in ("id", _PARAMETERS) or datatype not in SINGLES:
            return False
        return all(dim in (-1, 1) for dim in dims)

    def _nested(self, value: object, request: InferRequest, inputs: list[WireInput]) -> None:
        if _PARAMETERS in self._inputs:
            raise RequestError(
                f"keyword '{_PARAMETERS}' is also the name of an input of model '{self._name}'"
            )
        if not isinstance(value, dict):
            raise RequestError(
                f"Expected JSON object for keyword: '{_PARAMETERS}': attempt to access JSON "
                "non-object as object",
                ErrorKind.INTERNAL,
            )
        for name, member in value.items():
            try:
                self._convert(name, member, request, inputs)
            except RequestError as error:
                raise RequestError(
                    f"Converting keyword: '{_PARAMETERS}': {error}", error.kind
                ) from None
        self._check_repeated(value)

    def _check_repeated(self, members: dict[str, Any]) -> None:
        for name in members.repeated if isinstance(members, RepeatedKeys) else ():
            if name in self._inputs:
                raise RequestError(
                    f"[request id: <id_unknown>] input '{name}' already exists in request"
                )

    def _convert(
        self, name: str, value: Any, request: InferRequest, inputs: list[WireInput]
    ) -> None:
        if name not in self._inputs:
            request.parameters[name] = custom_value(name, value)
            return
        datatype, dims = self._inputs[name]
        if isinstance(value, list):
            count, values = len(value), flatten(value)
        else:
            count, values = 1, [value]
        shape = self._shape(name, dims, count) if count else ()
        if self._prompts is not None:
            self._prompts.check(name, values)
        data = array_from_json(values, datatype, name)
        size = sum(map(len, data)) if datatype == "BYTES" else data.nbytes
        check_size(f"JSON input '{name}'", size, self._max_input_bytes)
        inputs.append(WireInput(name, datatype, shape, data))

    @staticmethod
    def _shape(name: str, dims: tuple[int, ...], count: int) -> tuple[int, ...]:
        """The innermost variable dimension absorbs the elements that the fixed ones leave."""
        for dim in dims:
            if dim > 0 and count % dim == 0:
                count //= dim
            elif dim != -1:
                raise RequestError(
                    f"The schema can not convert input '{name}' to tensor with proper shape"
                )
        shape = list(dims)
        for index in range(len(shape) - 1, -1, -1):
            if shape[index] == -1:
                shape[index], count = count, 1
        if count != 1:
            raise RequestError(
                f"The schema can not convert input '{name}' to tensor with proper shape"
            )
        return tuple(shape)


class GenerateEncoder:
    """Turns responses into JSON objects with their keys in order.

    Streams, and most requests to one model, repeat the same keys, so the text between values is
    reused until the outputs or parameters change.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._constants: tuple[str, str, str] | None = None
        self._parameters: dict[str, ParameterValue] = {}
        self._order: list[int] = []
        self._pieces: list[bytes] = []

    def encode_short(self, response: InferResponse) -> bytes | None:
        """`encode`, at once; None if an output has other than one element.

        Raises:
            RequestError: as for `encode`.
        """
        outputs = response.outputs
        for output in outputs:
            if output.data.size != 1:
                return None
        self._lay_out_if_changed(response)
        parts = [self._pieces[0]]
        for index, piece in zip(self._order, self._pieces[1:], strict=True):
            parts += (_value(outputs[index]), piece)
        return b"".join(parts)

    def encode_text(self, response: InferResponse, output: str, text: str) -> bytes:
        """``response``, which has no outputs, with one text as its only output.

        Raises:
            RequestError: as for `encode`.
        """
        constants = response.model_name, response.model_version, response.id
        names = [output]
        if (
            constants != self._constants
            or names != self._names
            or response.parameters != self._parameters
        ):
            self._lay_out(response, names)
            self._constants = constants
        head, tail = self._pieces
        quoted = encode_basestring(text).encode("utf-8", "surrogateescape")
        return b"".join((head, quoted, tail))

    def encode(self, response: InferResponse) -> Cooperative[bytes]:
        """One response as a JSON object.

        Raises:
            RequestError: an output's datatype has no JSON form.
        """
        parts = yield from self._encode(response, is_whole=True)
        return b"".join(cast("list[bytes]", parts))

    def encode_parts(self, response: InferResponse) -> Cooperative[list[BodyPart]]:
        """`encode` without the last copy; long outputs become texts while they are sent.

        Raises:
            RequestError: as for `encode`.
        """
        return (yield from self._encode(response, is_whole=False))

    def _encode(
        self, response: InferResponse, *, is_whole: bool
    ) -> Cooperative[list[BodyPart]]:
        outputs = response.outputs
        self._lay_out_if_changed(response)
        parts: list[BodyPart] = [self._pieces[0]]
        for index, piece in zip(self._order, self._pieces[1:], strict=True):
            output = outputs[index]
            if output.data.size == 1:
                parts += (_value(output), piece)
                continue
            own = output.data, output.datatype, output.name
            values = yield from to_body(*own, is_whole=is_whole)
            parts += (b"[", *values, b"]", piece)
        return parts

    def _lay_out_if_changed(self, response: InferResponse) -> None:
        names = [output.name for output in response.outputs]
        constants = response.model_name, response.model_version, response.id
        if (
            constants != self._constants
            or names != self._names
            or response.parameters != self._parameters
        ):
            self._lay_out(response, names)
            self._constants = constants

    def _lay_out(self, response: InferResponse, names: list[str]) -> None:
        constants: dict[str, ParameterValue] = {
            **response.parameters,
            "model_name": response.model_name,
            "model_version": response.model_version,
        }
        if response.id:
            constants["id"] = response.id
        position = {name: index for index, name in enumerate(names)}
        pieces, order, text = [], [], b"{"
        for number, key in enumerate(sorted({*constants, *position})):
            text += (b"," if number else b"") + json_access.dump(key) + b":"
            if key in position:
                pieces.append(text)
                order.append(position[key])
                text = b""
            else:
                text += json_access.dump(constants[key])
        self._names, self._parameters = names, dict(response.parameters)
        self._order, self._pieces = order, [*pieces, text + b"}"]


def _value(output: Tensor) -> bytes:
    """The value of an output with a single element."""
    # The single number of a streamed token: the JSON encoder takes ten times as long.
    if output.datatype == "BYTES":
        text = encode_basestring(text_of(output.data.item()))
        return text.encode("utf-8", "surrogateescape")
    if "INT" in output.datatype:
        return b"%d" % output.data.item()
    return b"".join(run_at_once(to_json(output.data, output.datatype, output.name)))


def error_object(text: str) -> bytes:
    """The JSON object of an error."""
    return json_access.dump({"error": text})
