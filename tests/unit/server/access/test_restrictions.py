"""The settings of restricted APIs: Triton's form, its errors, and where values come from."""

from __future__ import annotations

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.server.access.restrictions import (
    GRPC_PREFIX,
    parse_restrictions,
    secret_variables,
)

HTTP, GRPC = "--http-restricted-api", "--grpc-restricted-protocol"


def parse(*settings, flag=HTTP, prefix="", environ=None):
    return parse_restrictions(settings, flag, prefix=prefix, environ=environ or {})


def test_groups_of_categories_share_a_header_and_its_value():
    found = parse("model-repository,health:Admin-Key=a=b:c", "inference:infer-key=v")
    assert set(found) == {"model-repository", "health", "inference"}
    assert found["health"] is found["model-repository"]
    assert found["health"].header == "Admin-Key"
    assert found["health"].is_met("a=b:c")
    assert not found["health"].is_met("a=b:d")
    assert not found["health"].is_met(None)


def test_the_key_of_a_protocol_has_triton_s_prefix():
    found = parse("health:K1=v1", flag=GRPC, prefix=GRPC_PREFIX)
    assert found["health"].header == "triton-grpc-protocol-k1"


@pytest.mark.parametrize(
    ("flag", "settings", "said"),
    [
        (HTTP, ("model-reposit,health:k1=v1",), "unknown restricted api 'model-reposit'"),
        (GRPC, ("model-reposit,health:k1=v1",), "unknown restricted protocol 'model-reposit'"),
        (HTTP, ("health:k1=v1", "metadata,health:k2=v2"),
         "restricted api 'health' can not be specified in multiple config groups"),
        (GRPC, ("health:k1=v1", "metadata,health:k2=v2"),
         "restricted protocol 'health' can not be specified in multiple config groups"),
        (HTTP, ("health",), "--http-restricted-api option format is"),
        (HTTP, ("health:=hush",), "--http-restricted-api option format is"),
        (HTTP, (":k=hush",), "--http-restricted-api option format is"),
        (HTTP, ("health:k=",), "--http-restricted-api option format is"),
        (HTTP, ("health:k=env:NO_SUCH",), "env:NO_SUCH is empty or not set"),
        (HTTP, ("health:k=file:/no/such",), "/no/such: No such file or directory"),
    ],
)  # fmt: skip
def test_an_invalid_setting_is_refused_without_printing_values(flag, settings, said):
    with pytest.raises(ConfigError) as caught:
        parse(*settings, flag=flag)
    assert said in str(caught.value)
    assert "hush" not in str(caught.value)


def test_a_value_comes_from_a_file_or_a_variable(tmp_path):
    (tmp_path / "value").write_text("from a file\n")
    settings = (f"health:k=file:{tmp_path}/value", "metadata:k=env:ADMIN")
    found = parse(*settings, environ={"ADMIN": "from a variable"})
    assert found["health"].is_met("from a file")
    assert found["metadata"].is_met("from a variable")
    assert secret_variables(settings) == ["ADMIN"]
    assert "from a" not in repr(found)
