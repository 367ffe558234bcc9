"""Coroutine tests run on the event loop that a front end uses."""

from tests.unit.server.models.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
