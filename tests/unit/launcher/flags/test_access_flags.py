"""The flags of access control, TLS and connections, and what a start warns of."""

from __future__ import annotations

import os

import pytest
from launcher_repository import parse, resolve, write_engine, write_model

from trimaran.comm.errors import ConfigError
from trimaran.launcher.placement.preflight import endpoints
from trimaran.launcher.resolution.access import forget_secrets, is_loopback, open_port_warnings
from trimaran.launcher.supervisor.readiness import endpoint_lines

KEY = "k" * 32
EXPLICIT = ("--model-control-mode", "explicit")


@pytest.fixture
def repository(tmp_path):
    engine = write_engine(tmp_path / "engine", tp_size=1)
    write_model(tmp_path / "repo" / "m", gpt_model_path=str(engine))
    return tmp_path / "repo"


def test_restrictions_and_keys_reach_the_front_end(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("ADMIN_VALUE", "hush")
    (tmp_path / "keys").write_text(f"operator all {KEY}\n")
    flags = (
        "--http-restricted-api=model-repository,logging:admin-key=env:ADMIN_VALUE",
        "--http-restricted-api", "inference:infer-key=v",
        "--grpc_restricted_protocol=model-repository:k=hush",
        "--api-keys", str(tmp_path / "keys"), "--admin-port=8003", "--admin-grpc-port=8004",
    )  # fmt: skip
    config = resolve(repository, *flags)
    access = config.frontend.access
    assert access.http_restrictions["logging"].is_met("hush")
    assert access.http_restrictions["inference"].header == "infer-key"
    assert access.grpc_restrictions["model-repository"].header == "triton-grpc-protocol-k"
    assert access.api_keys == str(tmp_path / "keys")
    assert "hush" not in repr(config)
    frontend = config.frontend
    assert type(frontend).from_wire(frontend.to_wire()) == frontend
    ports = {each.name: (each.address, each.port) for each in endpoints(frontend)}
    assert ports["admin"] == ("127.0.0.1", 8003)
    assert ports["admin-grpc"] == ("127.0.0.1", 8004)
    forget_secrets(parse(*flags), os.environ)
    assert "ADMIN_VALUE" not in os.environ


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--http-restricted-api=nothing:k=v",), "unknown restricted api 'nothing'"),
        (("--api-keys=/no/keys",), "--api-keys /no/keys: No such file"),
        (("--admin-address=0.0.0.0",), "--admin-address 0.0.0.0 has no effect"),
        (("--grpc-server-cert=c",), "--grpc-server-cert: the port is not encrypted"),
        (("--http-use-ssl=true",), "--http-use-ssl needs --http-server-cert FILE"),
        (("--grpc-use-ssl-mutual=1", "--grpc-server-cert=c", "--grpc-server-key=k"),
         "--grpc-use-ssl-mutual needs --grpc-root-cert FILE"),
        (("--grpc-use-ssl=1", "--grpc-server-cert=/c", "--grpc-server-key=/k"),
         "--grpc-server-cert /c: No such file"),
    ],
)  # fmt: skip
def test_flags_that_cannot_take_effect_are_refused(repository, flags, said):
    with pytest.raises(ConfigError) as caught:
        resolve(repository, *flags)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "num_warnings"),
    [
        ((), 0),
        (EXPLICIT, 2),
        ((*EXPLICIT, "--allow-grpc=false"), 1),
        ((*EXPLICIT, "--http-address=127.0.0.1", "--grpc-address=localhost"), 0),
        ((*EXPLICIT, "--http-restricted-api=model-repository:k=v"), 1),
        ((*EXPLICIT, "--http-restricted-api=logging:k=v"), 2),
        ((*EXPLICIT, "--http-restricted-api=model-repository:k=v",
          "--grpc-restricted-protocol=model-repository:k=v"), 0),
        ((*EXPLICIT, "--admin-port=8003"), 0),
        ((*EXPLICIT, "--admin-port=8003", "--admin-address=0.0.0.0"), 1),
        ((*EXPLICIT, "--api-keys=KEYS"), 0),
    ],
)  # fmt: skip
def test_a_start_warns_where_every_client_may_load_models(
    repository, tmp_path, flags, num_warnings
):
    (tmp_path / "keys").write_text(f"operator all {KEY}\n")
    words = [word.replace("KEYS", str(tmp_path / "keys")) for word in flags]
    warnings = list(open_port_warnings(resolve(repository, *words).frontend))
    assert len(warnings) == num_warnings
    assert all("may load models" in warning for warning in warnings)


def test_addresses_of_this_host_alone():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_limits_of_connections_reach_the_front_end(repository):
    frontend = resolve(
        repository, "--http-header-timeout=1.5", "--http-body-timeout", "0",
        "--http-max-connections=7", "--http_min_rate=9", "--grpc-max-connections=5",
        "--grpc-max-connection-idle=1000", "--grpc-max-calls=3", "--grpc-send-timeout=2",
    ).frontend  # fmt: skip
    limits = frontend.http_limits
    assert (limits.header_timeout_s, limits.body_timeout_s) == (1.5, 0)
    assert (limits.max_connections, limits.min_rate) == (7, 9)
    assert frontend.grpc_options == {
        "grpc.max_allowed_incoming_connections": 5, "grpc.max_connection_idle_ms": 1000,
    }  # fmt: skip
    assert (frontend.grpc_max_calls, frontend.grpc_send_timeout_s) == (3, 2.0)


def test_the_ports_of_the_administration_are_among_the_printed_lines(repository):
    lines = endpoint_lines(resolve(repository, "--admin-port=8003"))
    assert "Admin    http://127.0.0.1:8003" in lines
