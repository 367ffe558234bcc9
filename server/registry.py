"""The served models by name and version, and whether they are ready."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference import Model
from trimaran.server.validation import Validator


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index."""

    name: str
    version: str
    state: str
    reason: str = ""


class NotReadyError(RequestError):
    """The model exists but cannot run now; the client may try again."""

    def __init__(self, name: str, version: str) -> None:
        super().__init__(
            f"Request for unknown model: '{name}' version {version} is not at ready state",
            ErrorKind.UNAVAILABLE,
        )


class ModelRegistry:
    """All models of one front end. An empty version text means the highest version."""

    def __init__(
        self,
        models: Iterable[Model],
        *,
        strict_readiness: bool = True,
        repository: Path | None = None,
    ) -> None:
        self._models: dict[str, dict[int, Model]] = {}
        self._validators: dict[tuple[str, str], Validator] = {}
        self._labels: dict[tuple[str, str], dict[str, list[str]]] = {}
        self._strict_readiness = strict_readiness
        for model in models:
            self._models.setdefault(model.name, {})[int(model.version)] = model
            self._validators[model.name, model.version] = Validator(model.config)
            self._labels[model.name, model.version] = _read_labels(model, repository)

    def get(self, name: str, version: str = "") -> Model:
        """The model, ready or not.

        Raises:
            RequestError: no such model or version, or ``version`` is not a number.
        """
        versions = self._models.get(name)
        if versions is None:
            raise _unknown(f"'{name}' is not found")
        number = parse_version(version)
        if number is None:
            return versions[max(versions)]
        if number not in versions:
            raise _unknown(f"'{name}' version {number} is not found")
        return versions[number]

    def get_ready(self, name: str, version: str = "") -> Model:
        """The model, able to run.

        Raises:
            RequestError: as for `get`.
            NotReadyError: known but not able to run now.
        """
        model = self.get(name, version)
        if not model.is_ready:
            raise NotReadyError(model.name, model.version)
        return model

    def validator(self, model: Model) -> Validator:
        """The checks of this model's requests."""
        return self._validators[model.name, model.version]

    def labels(self, model: Model) -> dict[str, list[str]]:
        """The class labels of the model's outputs that have them."""
        return self._labels[model.name, model.version]

    def models(self) -> list[Model]:
        """All models, by name and version."""
        return [
            versions[number]
            for _, versions in sorted(self._models.items())
            for number in sorted(versions)
        ]

    def ready_versions(self, name: str) -> list[str]:
        """The versions of a model that could run now."""
        versions = self._models[name]
        return [str(number) for number in sorted(versions) if versions[number].is_ready]

    @property
    def is_ready(self) -> bool:
        """Whether the whole server counts as ready."""
        return not self._strict_readiness or all(model.is_ready for model in self.models())

    def index(self, *, only_ready: bool = False) -> list[IndexEntry]:
        """All versions of all models, by name."""
        entries = [
            IndexEntry(model.name, model.version, "READY")
            if model.is_ready
            else IndexEntry(
                model.name, model.version, "UNAVAILABLE", "its workers are not connected"
            )
            for model in self.models()
        ]
        return [entry for entry in entries if entry.state == "READY" or not only_ready]


def _read_labels(model: Model, repository: Path | None) -> dict[str, list[str]]:
    if repository is None:
        return {}
    folder = repository / model.name
    return {
        output.name: (folder / output.label_filename).read_text().splitlines()
        for output in model.config.output
        if output.label_filename
    }


def parse_version(text: str) -> int | None:
    """A version number; None for an empty text or -1's meaning, the latest.

    Raises:
        RequestError: not a number, or not above 0.
    """
    if not text:
        return None
    try:
        number = int(text)
    except ValueError:
        raise RequestError(
            f"failed to get model version from specified version string '{text}' (expected a "
            "number)"
        ) from None
    if number <= 0:
        raise RequestError(
            f"invalid model version specified '{text}' , version should be an integral value "
            "> 0"
        )
    return number


def _unknown(what: str) -> RequestError:
    return RequestError(f"Request for unknown model: {what}", ErrorKind.NOT_FOUND)
