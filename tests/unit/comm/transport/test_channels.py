"""Which addresses clients reach without a proxy."""

from __future__ import annotations

import pytest

from trimaran.comm.transport.channels import NO_PROXY, channel_options


@pytest.mark.parametrize(
    "url",
    ["localhost:8001", "LOCALHOST:8001", "127.0.0.1:8001", "127.8.9.1:1", "[::1]:8001",
     "::1", "0.0.0.0:8001", "[::]:8001", "a.localhost:80", "localhost"],
)  # fmt: skip
def test_this_machine_is_reached_directly(url):
    assert NO_PROXY in channel_options(url)


@pytest.mark.parametrize(
    "url",
    ["host:8001", "10.0.0.1:8001", "[2001:db8::1]:8001", "localhost.example.com:8001",
     "128.0.0.1:1", "unix:/tmp/x"],
)  # fmt: skip
def test_other_machines_are_reached_as_the_environment_says(url):
    assert NO_PROXY not in channel_options(url)
