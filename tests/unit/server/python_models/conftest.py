"""The fixtures of the models' tests: five models over an engine whose tokens the test sets."""

from tests.unit.server.models.conftest import (
    build_models,
    pytest_pyfunc_call,
    serve,
    serve_own,
    tokenizer_folder,
)

__all__ = ["build_models", "pytest_pyfunc_call", "serve", "serve_own", "tokenizer_folder"]
