"""The models of `tests/unit/server/models` over an engine whose tokens the test sets."""

from tests.unit.server.models.conftest import (  # noqa: F401
    pytest_pyfunc_call,
    serve,
    tokenizer_folder,
)
