"""A request to load a model: its parameters, and the folders of files sent with it."""

from __future__ import annotations

import base64
import binascii
import itertools
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError, ErrorKind, RequestError
from trimaran.server.inference.tensor_bytes import Buffer
from trimaran.server.protocol import json_access

FILE_PREFIX = "file:"
_MAX_FILES = 1 << 10
_MAX_CONFIG_BYTES = 1 << 20
_NAME = re.compile(r"[^/\0.][^/\0]*")


REPOSITORY_NAME_REFUSED = "'repository_name' specification is not supported"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One model to load."""

    name: str
    config: str = ""
    """A JSON configuration that overrides the repository's; empty means none."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Path below the model's folder to content; these files override the repository's."""

    def model_config(self) -> ModelConfig:
        """The configuration that came with the request.

        Raises:
            ConfigError: the text is not a model configuration.
        """
        try:
            config = json_format.Parse(self.config, ModelConfig())
        except json_format.ParseError as error:
            raise ConfigError(
                f"the parameter 'config' is not a model configuration: {error}"
            ) from (error)
        assert isinstance(config, ModelConfig)
        return config


def load_request_of_json(name: str, body: Buffer) -> LoadRequest:
    """Read the body of an HTTP request.

    Raises:
        RequestError: a parameter is unknown or of another type.
    """
    parameters = _parameters(body)
    config = json_access.as_string(parameters.pop("config", ""), "")
    files = {}
    for key, value in parameters.items():
        text = json_access.as_string(value, "")
        if not key.startswith(FILE_PREFIX):
            raise _internal("unexpected error on creating Triton parameter")
        try:
            files[_file_path(key)] = base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error):
            raise _internal(f"the load parameter '{key}' must be base64 text") from None
    return _checked(LoadRequest(name, config, files))


def load_request_of_grpc(message: pb.RepositoryModelLoadRequest) -> LoadRequest:
    """Read a gRPC request.

    Raises:
        RequestError: it names a repository, or a parameter is unknown or of another type.
    """
    refuse_repository_name(message.repository_name)
    config, files = "", {}
    for key, value in message.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if key == "config":
            _expect(key, kind, "string_param")
            config = value.string_param
        elif key.startswith(FILE_PREFIX):
            _expect(key, kind, "bytes_param")
            files[_file_path(key)] = value.bytes_param
        else:
            raise RequestError(f"unrecognized load parameter '{key}'.")
    return _checked(LoadRequest(message.model_name, config, files))


def refuse_repository_name(name: str) -> None:
    """Refuse a request that names a repository: a server has one, without a name.

    Raises:
        RequestError: ``name`` is not empty.
    """
    if name:
        raise RequestError(REPOSITORY_NAME_REFUSED, ErrorKind.UNSUPPORTED)


def load_request_of_files(name: str, config: str, files: Mapping[str, bytes]) -> LoadRequest:
    """Make the request of a Python model's code; file names begin with `FILE_PREFIX`.

    Raises:
        RequestError: a file name does not name a file of a version.
    """
    for key in files:
        if not key.startswith(FILE_PREFIX):
            raise RequestError(f"unrecognized load parameter '{key}'.")
    return _checked(LoadRequest(name, config, {_file_path(k): v for k, v in files.items()}))


def unload_dependents_of_json(body: bytes) -> bool:
    """The only parameter of an HTTP request to unload.

    Raises:
        RequestError: the value is not a boolean.
    """
    value = _parameters(body).get("unload_dependents", False)
    return json_access.as_bool(value, "'unload_dependents'")


def unload_dependents_of_grpc(parameters: Mapping[str, Any]) -> bool:
    """The only parameter of a gRPC request to unload.

    Raises:
        RequestError: the value is not a boolean.
    """
    value = parameters.get("unload_dependents")
    if value is None:
        return False
    if value.WhichOneof("parameter_choice") != "bool_param":
        raise RequestError(
            "invalid value type for 'unload_dependents' parameter, expected bool_param."
        )
    return bool(value.bool_param)


class OverrideFolders:
    """Folders for files that come with requests. The owner of the parent folder deletes it."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._numbers = itertools.count(1)

    def write(self, request: LoadRequest) -> Path:
        """Write the files of a request; returns the model's folder.

        Raises:
            OSError: for example, the disk is full. Nothing is left.
        """
        while True:
            numbered = self._base / str(next(self._numbers))
            try:
                numbered.mkdir(parents=True)
            except FileExistsError:
                # A folder of the previous front end, whose models may still use it.
                continue
            break
        folder = numbered / request.name
        try:
            folder.mkdir()
            for path, content in request.files.items():
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        except OSError:
            self.remove(folder)
            raise
        return folder

    def folders(self) -> list[Path]:
        """The existing folders of models, including those of a previous front end."""
        return list(self._base.glob("*/*"))

    def remove(self, folder: Path) -> None:
        """Delete a model's folder, if the folder is one of these."""
        if self._base in folder.parents:
            shutil.rmtree(folder.parent, ignore_errors=True)


def _parameters(body: Buffer) -> dict[str, Any]:
    if not body:
        return {}
    document = json_access.as_object(json_access.parse(body), "the request")
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise _internal("attempt to get members for non-object")
    return dict(parameters)


def _file_path(key: str) -> str:
    text = key[len(FILE_PREFIX) :]
    path = PurePosixPath(text)
    if path.is_absolute() or len(path.parts) < 2 or ".." in path.parts or "\0" in text:
        raise _internal(
            f"the load parameter '{key}' names no file of a version. Name it as in "
            f"'{FILE_PREFIX}1/model.py'."
        )
    return str(path)


def _checked(request: LoadRequest) -> LoadRequest:
    if len(request.files) > _MAX_FILES:
        raise _internal(
            f"failed to load '{request.name}', {len(request.files)} files came with the "
            f"request, and at most {_MAX_FILES} may. Put the files into the model repository."
        )
    if len(request.config) > _MAX_CONFIG_BYTES:
        raise _internal(
            f"failed to load '{request.name}', the parameter 'config' has "
            f"{len(request.config)} characters, and at most {_MAX_CONFIG_BYTES} are allowed."
        )
    if request.files and not request.config:
        raise _internal(
            f"failed to load '{request.name}', override files were given without the load "
            "parameter 'config'. Send the model's configuration along."
        )
    if request.files and not _NAME.fullmatch(request.name):
        raise _internal(f"failed to load '{request.name}', the name cannot be a folder's")
    return request


def _expect(key: str, kind: str | None, wanted: str) -> None:
    if kind != wanted:
        raise RequestError(f"invalid value type for load parameter '{key}', expected {wanted}.")


def _internal(text: str) -> RequestError:
    return RequestError(text, ErrorKind.INTERNAL)
