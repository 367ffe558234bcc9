"""Every input, output and key of every model, from the product's own tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources

import input_texts
import output_texts
import parameter_texts

from trimaran.comm.messages.sampling_fields import FIELDS
from trimaran.server.models import preprocessing, sampling_inputs
from trimaran.server.models.text_models import BLS_MAPS
from trimaran.server.repository import signatures
from trimaran.server.repository.parameter_table import (
    BLS_PARAMETERS,
    POSTPROCESSING_PARAMETERS,
    PREPROCESSING_PARAMETERS,
    TOKEN_PARAMETERS,
    Effect,
    Known,
)
from trimaran.server.repository.signatures import Role

SERVED, NO_EFFECT, REFUSED, NEVER = "served", "no effect", "refused", "never comes"
_ROLES = {
    Role.TOKEN: "tensorrt_llm",
    Role.BLS: "tensorrt_llm_bls",
    Role.ENSEMBLE: "ensemble",
    Role.PREPROCESSING: "preprocessing",
    Role.POSTPROCESSING: "postprocessing",
}


class MissingText(Exception):
    """A name of the product without an entry here."""


@dataclass(frozen=True, slots=True)
class Row:
    """One feature: its effect, and the mark of the tests that show the effect."""

    feature: str
    name: str
    effect: str
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """The features of one kind of one model."""

    title: str
    rows: list[Row] = field(default_factory=list)


def tables() -> list[Table]:
    """All of them, in the order of the page."""
    return [
        _table("Token model: inputs", "token", "input", _token_inputs()),
        _table("Token model: outputs", "token", "output", _outputs(Role.TOKEN)),
        _table("Token model: parameters", "token", "parameter", _parameters("token")),
        _table("Ensemble and BLS model: inputs", "text", "input", _text_inputs()),
        _table("Ensemble and BLS model: outputs", "text", "output", _outputs(Role.BLS)),
        _table("BLS model: parameters", "text", "parameter", _parameters("text")),
        _table("Preprocessing: inputs", "preprocessing", "input", _preprocessing_inputs()),
        _table(
            "Preprocessing: outputs", "preprocessing", "output", _outputs(Role.PREPROCESSING)
        ),
        _table(
            "Preprocessing: parameters", "preprocessing", "parameter",
            _parameters("preprocessing"),
        ),
        _table(
            "Postprocessing: inputs", "postprocessing", "input",
            _postprocessing_inputs(),
        ),
        _table(
            "Postprocessing: outputs", "postprocessing", "output", _outputs(Role.POSTPROCESSING)
        ),
        _table(
            "Postprocessing: parameters", "postprocessing", "parameter",
            _parameters("postprocessing"),
        ),
        _table("Other placeholders of the templates", "request", "setting", _settings()),
        _table(
            "Parameters of a request", "request", "parameter",
            _all(SERVED, parameter_texts.REQUEST_PARAMETERS),
        ),
        _table(
            "Environment", "request", "variable", _all(SERVED, parameter_texts.VARIABLES)
        ),
    ]  # fmt: skip


def placeholders() -> dict[str, set[str]]:
    """Every placeholder of the templates, and the keys that the placeholder fills, if any."""
    found: dict[str, set[str]] = {}
    for name in _ROLES.values():
        text = _template(name)
        for placeholder in re.findall(r"\$\{(\w+)\}", text):
            found.setdefault(placeholder, set())
        pattern = r'key: "(\w+)"\s*value \{ string_value: "\$\{(\w+)\}"'
        for key, placeholder in re.findall(pattern, text):
            found[placeholder].add(key)
    return found


# ---- the tables ---------------------------------------------------------------------------


def _table(
    title: str, section: str, kind: str, entries: Mapping[str, tuple[str, str]]
) -> Table:
    rows = [
        Row(f"{section} {kind}:{name}", name, effect, text)
        for name, (effect, text) in entries.items()
    ]
    return Table(title, rows)


def _template(model: str) -> str:
    folder = resources.files("trimaran.server.repository") / "templates" / model
    return (folder / "config.pbtxt").read_text(encoding="utf-8")


def _names(role: Role) -> tuple[list[str], list[str]]:
    """Declared inputs and outputs, in the template's order."""
    inputs, outputs = signatures._known(role)
    return list(inputs), list(outputs)


def _all(effect: str, texts: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {name: (effect, text) for name, text in texts.items()}


def _found(name: str, *choices: tuple[str, Mapping[str, str]]) -> tuple[str, str]:
    """The effect and text of the first table that has the name."""
    for effect, texts in choices:
        if name in texts:
            return effect, texts[name]
    raise MissingText(f"nothing in tests/features says what {name!r} does")


def _token_inputs() -> dict[str, tuple[str, str]]:
    scalars = [name for row in FIELDS.values() for name in row.inputs]
    return {
        name: _found(
            name,
            (REFUSED, dict(sampling_inputs._REFUSED)),
            (NO_EFFECT, input_texts.TOKEN_WITHOUT_EFFECT),
            (SERVED, input_texts.TOKEN),
        )
        # Some names are those of older repositories alone.
        for name in dict.fromkeys([*_names(Role.TOKEN)[0], *scalars])
    }


def _preprocessing_inputs() -> dict[str, tuple[str, str]]:
    refused = dict.fromkeys(preprocessing._REFUSED, input_texts.IMAGES)
    return {
        name: _found(name, (REFUSED, refused), (SERVED, input_texts.PREPROCESSING))
        for name in _names(Role.PREPROCESSING)[0]
    }


def _postprocessing_inputs() -> dict[str, tuple[str, str]]:
    texts = {
        **input_texts.POSTPROCESSING,
        **{
            name: f"of older configurations: passed on as `OUT_{name}`"
            for name in sorted(signatures.PASSED_ON)
        },
    }
    declared = _names(Role.POSTPROCESSING)[0]
    return {name: _found(name, (SERVED, texts)) for name in dict.fromkeys([*declared, *texts])}


def _text_inputs() -> dict[str, tuple[str, str]]:
    """Those of the BLS model, which are the ensemble's and some more."""
    token, before = _token_inputs(), _preprocessing_inputs()
    of_token = {outer: inner for inner, outer in BLS_MAPS.token.items()}
    of_preprocessing = {outer: inner for inner, outer in BLS_MAPS.preprocessing.items()}
    of_ensemble = set(_names(Role.ENSEMBLE)[0])
    found = {}
    for name in _names(Role.BLS)[0]:
        effect, text = _found(
            name,
            (REFUSED, input_texts.TEXT_REFUSED),
            (NO_EFFECT, input_texts.TEXT_WITHOUT_EFFECT),
            (SERVED, input_texts.TEXT),
            ("", dict.fromkeys(of_token, "")),
            ("", dict.fromkeys(of_preprocessing, "")),
        )
        if name in of_token:
            effect, text = token[of_token[name]]
            text = text if name == of_token[name] else f"`{of_token[name]}`: {text}"
        elif name in of_preprocessing and not effect:
            effect, text = before[of_preprocessing[name]]
        if name in token and name not in of_token:
            # Preprocessing passes on the given id, or the tokenizer's.
            effect, text = token[name]
        found[name] = (effect, text if name in of_ensemble else f"{text} (BLS model alone)")
    return found


def _outputs(role: Role) -> dict[str, tuple[str, str]]:
    texts = {
        Role.TOKEN: output_texts.TOKEN,
        Role.BLS: output_texts.TEXT,
        Role.PREPROCESSING: output_texts.PREPROCESSING,
        Role.POSTPROCESSING: output_texts.POSTPROCESSING,
    }[role]
    never = dict(output_texts.NEVER)
    if role is Role.PREPROCESSING:
        # Inputs that are not for text are for images.
        images = set(_names(role)[1]) - set(texts)
        never.update(dict.fromkeys(images, input_texts.IMAGES))
    return {name: _found(name, (NEVER, never), (SERVED, texts)) for name in _names(role)[1]}


def _parameters(section: str) -> dict[str, tuple[str, str]]:
    known, texts = {
        "token": (TOKEN_PARAMETERS, parameter_texts.TOKEN),
        "text": (BLS_PARAMETERS, parameter_texts.TEXT),
        "preprocessing": (PREPROCESSING_PARAMETERS, parameter_texts.PREPROCESSING),
        "postprocessing": (POSTPROCESSING_PARAMETERS, parameter_texts.POSTPROCESSING),
    }[section]
    fills = {k: name for name, keys in placeholders().items() for k in keys if k != name}
    return {key: _parameter(key, known[key], texts, fills.get(key, "")) for key in known}


def _parameter(
    key: str, known: Known, texts: Mapping[str, str], placeholder: str
) -> tuple[str, str]:
    effect = {
        Effect.SERVED: SERVED, Effect.ACCEPTED: NO_EFFECT, Effect.REFUSED: REFUSED,
    }[known.effect]  # fmt: skip
    if known.effect is Effect.SERVED:
        text = _found(key, (SERVED, texts))[1]
    else:
        text = known.reason or _found(key, (effect, parameter_texts.FIXED))[1]
    if known.neutral:
        text += f"; {_listed(known.neutral)} are taken"
    if placeholder:
        text += f" (placeholder `{placeholder}`)"
    return effect, text


def _settings() -> dict[str, tuple[str, str]]:
    """Placeholders that fill no parameter."""
    return {
        name: _found(
            name,
            (SERVED, parameter_texts.SETTINGS),
            (NO_EFFECT, parameter_texts.SETTINGS_WITHOUT_EFFECT),
        )
        for name, keys in placeholders().items()
        if not keys
    }


def _listed(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)
