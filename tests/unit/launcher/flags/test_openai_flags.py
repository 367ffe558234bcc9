"""The flags of the OpenAI port."""

from __future__ import annotations

import os

import pytest
from launcher_repository import parse, resolve, write_engine, write_model

from trimaran.comm.errors import ConfigError
from trimaran.launcher.placement.preflight import endpoints
from trimaran.launcher.resolution.access import forget_secrets, open_port_warnings


@pytest.fixture
def repository(tmp_path):
    engine = write_engine(tmp_path / "engine", tp_size=1)
    write_model(tmp_path / "repo" / "m", gpt_model_path=str(engine))
    return tmp_path / "repo"


def test_the_port_and_its_settings_reach_the_front_end(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_VALUE", "hush")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    flags = (
        "--openai-port", "9000", "--http-address", "127.0.0.1", "--default-max-tokens", "64",
        "--lora-separator", "-lora-", "--chat-template", str(tmp_path / "chat.jinja"),
        "--tool-call-parser", "mistral", "--reasoning-parser", "none",
        "--openai-restricted-api", "model-repository,metrics", "key", "env:OPENAI_VALUE",
    )  # fmt: skip
    frontend = resolve(repository, *flags).frontend
    openai = frontend.openai
    assert (openai.port, openai.address, openai.default_max_tokens) == (9000, "127.0.0.1", 64)
    assert (openai.lora_separator, openai.chat_template) == ("-lora-", "{{ messages }}")
    assert (openai.tool_call_parser, openai.reasoning_parser) == ("mistral", "none")
    restrictions = frontend.access.openai_restrictions
    assert set(restrictions) == {"metadata", "model-repository", "statistics"}
    assert restrictions["metadata"].is_met("hush")
    assert type(frontend).from_wire(frontend.to_wire()) == frontend
    assert "openai" in {each.name for each in endpoints(frontend)}
    forget_secrets(parse(*flags), os.environ)
    assert "OPENAI_VALUE" not in os.environ


def test_parsers_are_named_as_other_servers_name_them(repository):
    flags = ("--tool-call-parser", "glm47", "--reasoning-parser", "deepseek_r1")
    openai = resolve(repository, "--openai-port", "9000", *flags).frontend.openai
    assert (openai.tool_call_parser, openai.reasoning_parser) == ("glm45", "think")


def test_without_the_flag_the_port_is_closed(repository):
    frontend = resolve(repository).frontend
    assert frontend.openai.port is None
    assert "openai" not in {each.name for each in endpoints(frontend)}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--lora-separator", "x"), "--lora-separator has no effect without the OpenAI port"),
        (("--openai-port", "9000", "--chat-template", "/no/file"), "--chat-template /no/file"),
        (("--openai-port", "9000", "--tokenizer", "org/name"), "org/name is no folder"),
        (("--tokenizer", "/tmp"), "--tokenizer has no effect without the OpenAI port"),
        (("--backend", "vllm"), "it must be tensorrtllm"),
        (("--openai-port", "9000", "--openai-restricted-api", "embedding", "k", "v"),
         "unknown restricted api 'embedding'"),
    ],
)  # fmt: skip
def test_flags_without_effect_are_refused(repository, flags, said):
    with pytest.raises(ConfigError, match=said):
        resolve(repository, *flags)


def test_the_flags_of_tritons_openai_front_end_have_their_effect(repository, tmp_path):
    flags = (
        "--openai-port", "9001", "--host", "127.0.0.1", "--backend", "tensorrtllm",
        "--tokenizer", str(tmp_path), "--tritonserver-log-verbose-level", "1",
        "--uvicorn-log-level", "debug", "--max-tool-call-parse-bytes", "1000",
        "--enable-kserve-frontends", "--kserve-http-port", "8100", "--kserve-grpc-port", "8101",
    )  # fmt: skip
    frontend = resolve(repository, *flags).frontend
    assert (frontend.http_port, frontend.grpc_port, frontend.openai.port) == (8100, 8101, 9001)
    addresses = frontend.http_address, frontend.grpc_address, frontend.openai.address
    assert set(addresses) == {"127.0.0.1"}
    assert frontend.openai.chat_tokenizer == str(tmp_path.resolve())
    assert parse(*flags).log_verbose == 1
    assert resolve(repository, "--host", "127.0.0.1").frontend.openai.port is None


def test_a_start_warns_of_loads_through_the_open_port(repository):
    explicit = ("--model-control-mode", "explicit", "--http-address", "127.0.0.1",
                "--grpc-address", "127.0.0.1", "--openai-port", "9000")  # fmt: skip
    open_port = (*explicit, "--openai-address", "0.0.0.0")
    (said,) = open_port_warnings(resolve(repository, *open_port).frontend)
    assert "--openai-restricted-api model-repository KEY VALUE" in said
    assert not list(open_port_warnings(resolve(repository, *explicit).frontend))
