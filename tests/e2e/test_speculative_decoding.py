"""A draft model beside a target model, each an engine of its own: texts equal plain texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from multi_model import MultiModel
from served import DEMO_MODEL, run_trimaran
from tritonclient.utils import np_to_triton_dtype

DRAFT_MODEL = DEMO_MODEL.parent / "draft"
SCRIPT = Path(__file__).parent / "draft_script.py"
NUM_DRAFTS, NUM_TOKENS = 5, 48
TREE = "{0}, {0, 0}, {1}, {0, 1}, {0, 0, 0}, {1, 0}, {0, 0, 0, 0}"
PROMPT_IDS = (12, 345, 678, 9)
PROMPTS = ("It was a dark and stormy night", "The old man looked at the sea and", "Once upon")
DTYPES = {
    "text_input": object, "stop_words": object, "temperature": np.float32, "top_p": np.float32,
    "repetition_penalty": np.float32, "presence_penalty": np.float32,
    "frequency_penalty": np.float32, "random_seed": np.uint64, "return_perf_metrics": bool,
    "return_log_probs": bool,
    "return_generation_logits": bool, "use_draft_logits": bool, "exclude_input_in_output": bool,
    "stream": bool,
}  # fmt: skip
SAMPLINGS = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "min_length": 40},
    "seeded": {"top_k": 40, "random_seed": 7},
    "seeded with penalties": {
        "top_p": 0.9, "temperature": 0.8, "random_seed": 99, "frequency_penalty": 0.5,
    },
    "stop words": {"stop_words": ["the"], "top_k": 5, "random_seed": 3},
}  # fmt: skip


class DraftServer(MultiModel):
    """A server of both engines and of the models over them."""

    def ask(self, model: str, **inputs: Any) -> dict[str, np.ndarray]:
        """The outputs of one unary request."""
        tensors = []
        for name, value in inputs.items():
            row = value if isinstance(value, (list, tuple)) else [value]
            row = [each.encode() if isinstance(each, str) else each for each in row]
            array = np.array([row], dtype=DTYPES.get(name, np.int32))
            datatype = np_to_triton_dtype(array.dtype)
            tensors.append(grpcclient.InferInput(name, array.shape, datatype))
            tensors[-1].set_data_from_numpy(array)
        with grpcclient.InferenceServerClient(f"localhost:{self.grpc_port}") as client:
            result = client.infer(model, tensors)
        names = [output.name for output in result.get_response().outputs]
        return {name: result.as_numpy(name) for name in names}

    def text(self, model: str, prompt: str, **inputs: Any) -> tuple[str, dict[str, np.ndarray]]:
        """The text of a request for the usual number of tokens, and all outputs."""
        outputs = self.ask(model, text_input=prompt, max_tokens=NUM_TOKENS, **inputs)
        return outputs["text_output"].item().decode(), outputs


@pytest.fixture(scope="module")
def server(
    build_engine: Callable[..., Path],
    make_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[DraftServer]:
    """The target is built for drafts. The model draft_script runs rounds in Python."""
    engine = build_engine(
        DEMO_MODEL, "--dtype", "float32", "--speculative_decoding_mode",
        "draft_tokens_external", "--max_draft_len", str(NUM_DRAFTS),
    )  # fmt: skip
    draft = build_engine(DRAFT_MODEL, "--dtype", "float32")
    head = DEMO_MODEL.parents[1] / "draft_heads" / "eagle"
    tree = build_engine(
        DEMO_MODEL, "--dtype", "float32", "--speculative_decoding_mode", "eagle",
        "--eagle_model_dir", str(head), "--max_draft_len", "9", "--eagle_choices", TREE,
    )  # fmt: skip
    repository = make_repository(
        engine, tensorrt_llm_draft_model_name="tensorrt_llm_draft", decoupled_mode="False",
        enable_kv_cache_reuse="True",
    )  # fmt: skip
    _copy(repository, "tensorrt_llm", "tensorrt_llm_draft", {str(engine): str(draft)})
    _copy(repository, "tensorrt_llm", "tensorrt_llm_tree", {str(engine): str(tree)})
    _copy(repository, "tensorrt_llm_bls", "draft_script", {})
    shutil.copy(SCRIPT, repository / "draft_script" / "1" / "model.py")
    flags = ("--multi-model", "--python-models", "draft_script")
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with DraftServer(repository, 1, flags, log) as running:
        yield running


def _copy(repository: Path, model: str, name: str, changes: dict[str, str]) -> None:
    shutil.copytree(repository / model, repository / name)
    path = repository / name / "config.pbtxt"
    text = path.read_text().replace(f'name: "{model}"', f'name: "{name}"', 1)
    for old, new in changes.items():
        text = text.replace(old, new)
    path.write_text(text)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_text_with_a_draft_model_is_the_text_without(server, sampling):
    for prompt in PROMPTS:
        plain, _ = server.text("tensorrt_llm_bls", prompt, **sampling)
        for num_drafts in (1, NUM_DRAFTS):
            text, outputs = server.text(
                "tensorrt_llm_bls", prompt, num_draft_tokens=num_drafts,
                use_draft_logits=True, return_perf_metrics=True, **sampling,
            )  # fmt: skip
            assert text == plain
            drafted = outputs["total_draft_tokens"].item()
            accepted = outputs["total_accepted_draft_tokens"].item()
            assert 0 < accepted <= drafted
            assert outputs["acceptance_rate"].item() == pytest.approx(accepted / drafted)


def test_log_probs_and_logits_of_an_answer_with_drafts_are_those_without(server):
    asked = {
        "return_log_probs": True, "return_generation_logits": True, "top_k": 40,
        "random_seed": 5,
    }  # fmt: skip
    _, plain = server.text("tensorrt_llm_bls", PROMPTS[0], **asked)
    _, drafted = server.text(
        "tensorrt_llm_bls", PROMPTS[0], num_draft_tokens=NUM_DRAFTS, **asked
    )
    assert drafted["generation_logits"].shape == (1, 1, NUM_TOKENS, 4096)
    for name in ("output_log_probs", "cum_log_probs", "generation_logits"):
        np.testing.assert_allclose(drafted[name], plain[name], rtol=1e-4, atol=1e-4)


def test_a_script_that_appends_drafts_to_the_prompt_gives_the_same_greedy_text(server):
    for prompt in PROMPTS:
        plain, _ = server.text("tensorrt_llm_bls", prompt)
        text, _ = server.text("draft_script", prompt, num_draft_tokens=NUM_DRAFTS)
        assert text == plain


def test_draft_ids_of_a_request_give_the_accepted_ids_and_one_more(server):
    common = {
        "input_ids": PROMPT_IDS, "input_lengths": len(PROMPT_IDS),
        "exclude_input_in_output": True,
    }  # fmt: skip
    plain = server.ask("tensorrt_llm", request_output_len=8, **common)["output_ids"].tolist()
    right = plain[0][0][:NUM_DRAFTS]
    for num_right, draft in ((5, right), (2, [*right[:2], right[2] ^ 1, *right[3:]])):
        outputs = server.ask(
            "tensorrt_llm", request_output_len=8, draft_input_ids=draft,
            return_perf_metrics=True, **common,
        )  # fmt: skip
        assert outputs["output_ids"].tolist() == [[plain[0][0][: num_right + 1]]]
        assert outputs["total_accepted_draft_tokens"].item() == num_right
    with pytest.raises(Exception, match="holds 6 ids but this engine verifies at most 5"):
        server.ask("tensorrt_llm", request_output_len=8, draft_input_ids=[7] * 6, **common)
    with pytest.raises(Exception, match="speculative decoding is not served by this engine"):
        server.ask("tensorrt_llm_draft", request_output_len=8, draft_input_ids=[7], **common)


def test_an_engine_that_drafts_trees_gives_the_same_ids(server):
    num_drafts = 0
    for sampling in (
        {}, {"frequency_penalty": 0.7}, {"runtime_top_k": 40, "random_seed": 4}, {}, {},
    ):  # fmt: skip
        common = {
            "input_ids": PROMPT_IDS, "input_lengths": len(PROMPT_IDS),
            "request_output_len": 60, "return_perf_metrics": True, **sampling,
        }  # fmt: skip
        plain = server.ask("tensorrt_llm", **common)
        told = server.ask("tensorrt_llm_tree", **common)

        assert told["output_ids"].tolist() == plain["output_ids"].tolist()
        num_drafts += told["total_draft_tokens"].item()
    # The engine tries steps with drafts before it has measured any.
    assert num_drafts > 0


@pytest.mark.parametrize(
    "flags", [(), ("--execute-bls-speculative-decoding", "--return-perf-metrics")],
    ids=["rounds of the client", "rounds of the BLS model"],
)  # fmt: skip
def test_the_speculative_client_finds_equal_texts(server, tmp_path, flags):
    dataset = tmp_path / "data.json"
    words = " ".join(["word"] * 24)
    records = [{"input": each, "instruction": "and", "output": words} for each in PROMPTS]
    dataset.write_text(json.dumps(records))
    url = f"localhost:{server.grpc_port}"
    done = run_trimaran(
        "client", "speculative", "--url-target", url, "--url-draft", url, "--url-control", url,
        "--max-input-len", "50", "--dataset", str(dataset),
        "--draft-tensorrt-llm-model-name", "tensorrt_llm_draft", *flags,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"failed/total: 0/{len(PROMPTS)}" in done.stdout
    accepted = done.stdout.rpartition("accepted ")[2].split()
    assert int(accepted[0]) > 0
