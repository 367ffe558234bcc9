"""Reads models from the repository or from a load request, and notices changed files."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimaran.comm.errors import ConfigError, ErrorKind, RequestError
from trimaran.server.models.factory import read_labels
from trimaran.server.protocol.load_request import LoadRequest, OverrideFolders
from trimaran.server.repository.config_pbtxt import ModelParameters, read_config
from trimaran.server.repository.model_repository import (
    CONFIG_FILE,
    NATIVE,
    NoVersionError,
    PythonModels,
    RepositoryModel,
    load_model,
    model_folders,
    parameters_of,
    repository_model,
)


def fingerprint(folder: Path, parameters: ModelParameters | None) -> str:
    """A digest of names, sizes and times of a model's files; file contents are not read.

    The files are all below the model's folder. If the configuration can be read, they include
    the folders that parameters name: the engine and the tokenizer.
    """
    digest = hashlib.sha256()
    for line in _files(folder):
        digest.update(os.fsencode(line))
    for named in [] if parameters is None else _named_folders(parameters):
        for line in _entries(named):
            digest.update(os.fsencode(line))
    return digest.hexdigest()


def _named_folders(parameters: ModelParameters) -> list[str]:
    values = [parameters.get_str(name) for name in sorted(parameters.names)]
    return [value for value in values if value is not None and os.path.isdir(value)]


def _files(folder: Path) -> Iterator[str]:
    for parent, folders, _ in os.walk(folder):
        folders.sort()
        yield from _entries(parent)


def _entries(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(_line(entry) for entry in entries)
    except OSError as error:
        # A missing or unreadable folder has a digest too; the load that follows reports the
        # cause.
        return [f"{folder}: {error.errno}\n"]


def _line(entry: os.DirEntry[str]) -> str:
    try:
        stat = entry.stat()
    except OSError as error:
        # A dangling link, as editors create beside a file: only the other files count.
        return f"{entry.path} {error.errno}\n"
    # A folder's time changes with every lock file, so only files count.
    times = "" if entry.is_dir() else f"{stat.st_mtime_ns} {stat.st_size}"
    return f"{entry.path} {times}\n"


class LoadError(RequestError):
    """A model was not loaded; the loaded models are unchanged."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"failed to load '{name}', {text}", ErrorKind.INTERNAL)
        self.reason = text


def _new_load_id() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model as read from disk."""

    source: RepositoryModel
    labels: dict[str, list[str]] = field(default_factory=dict)
    fingerprint: str = ""
    """Empty for a model that came with its request."""

    load_id: str = field(default_factory=_new_load_id)
    """Identifies this reading of the model, also at other front ends."""


class ModelReader:
    """Reads models from a repository's folder. Blocks on files: not for the event loop."""

    def __init__(
        self, root: Path, overrides: OverrideFolders, python: PythonModels = NATIVE
    ) -> None:
        self._root = root
        self._python = python
        self._overrides = overrides

    def names(self) -> list[str]:
        """The models that the repository holds now.

        Raises:
            ConfigError: the repository is not a folder.
        """
        return list(model_folders(self._root))

    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of every model of the repository.

        Raises:
            ConfigError: the repository is not a folder.
        """
        return {name: _state_of(folder) for name, folder in model_folders(self._root).items()}

    def read(
        self, requests: Sequence[LoadRequest], is_loaded: Callable[[str], bool]
    ) -> dict[str, ReadModel]:
        """The requested models and their steps that are not loaded, by name.

        Raises:
            LoadError: a model cannot be read.
        """
        found: dict[str, ReadModel] = {}
        if not requests:
            return found
        try:
            folders = model_folders(self._root)
        except ConfigError as error:
            raise _unreadable(requests[0].name, error) from error
        try:
            for request in requests:
                found[request.name] = self._requested(request, folders.get(request.name))
            unseen = list(found)
            while unseen:
                for step in found[unseen.pop()].source.steps:
                    if step not in found and not is_loaded(step) and step in folders:
                        found[step] = self._of_repository(step, folders[step])
                        unseen.append(step)
        except LoadError:
            self.discard(found)
            raise
        return found

    def discard(self, read: Mapping[str, ReadModel]) -> None:
        """Delete the files that came with the requests of models which are not loaded."""
        for each in read.values():
            self._overrides.remove(each.source.folder)

    def _requested(self, request: LoadRequest, folder: Path | None) -> ReadModel:
        if not request.config:
            return self._of_repository(request.name, folder)
        if request.files:
            folder = self._written(request)
        elif folder is None:
            raise _not_found(request.name)
        try:
            return self._described(request, folder)
        except BaseException:
            self._overrides.remove(folder)
            raise

    def _described(self, request: LoadRequest, folder: Path) -> ReadModel:
        try:
            source = repository_model(folder, request.model_config(), self._python)
            return ReadModel(source, read_labels(source))
        except ConfigError as error:
            raise _unreadable(request.name, error) from error

    def _written(self, request: LoadRequest) -> Path:
        try:
            return self._overrides.write(request)
        except OSError as error:
            text = f"its files cannot be written on the server: {error}"
            raise LoadError(request.name, text) from error

    def _of_repository(self, name: str, folder: Path | None) -> ReadModel:
        if folder is None:
            raise _not_found(name)
        # Taken before the files are read: a change during the read is seen at the next poll.
        state = _state_of(folder)
        try:
            source = load_model(folder, self._python)
            return ReadModel(source, read_labels(source), state)
        except ConfigError as error:
            raise _unreadable(name, error) from error


def _state_of(folder: Path) -> str:
    """The fingerprint of a model's files as they are now."""
    try:
        config = read_config(folder / CONFIG_FILE)
    except ConfigError:
        return fingerprint(folder, None)
    return fingerprint(folder, parameters_of(folder, config))


def _not_found(name: str) -> LoadError:
    return LoadError(name, "failed to poll from model repository")


def _unreadable(name: str, error: ConfigError) -> LoadError:
    if isinstance(error, NoVersionError):
        return LoadError(name, f"no version is available: {error}")
    return LoadError(name, f"failed to poll from model repository: {error}")
