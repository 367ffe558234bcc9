"""`trimaran client speculative`: its rounds, and the result of a difference."""

from __future__ import annotations

import json

import pytest
from scripted_server import Reply, text_reply

PROMPT, ANSWER, END = [5, 6], [7, 8, 9, 10, 11], 2
ONE = ("INT32", [[END]])
WORDS = ("INT32", [[[9, 10], [2, -1]]])
BEFORE = {
    "INPUT_ID": ("INT32", [PROMPT]), "REQUEST_INPUT_LEN": ONE, "REQUEST_OUTPUT_LEN": ONE,
    "OUT_END_ID": ONE, "OUT_PAD_ID": ONE, "STOP_WORDS_IDS": WORDS,
    "BAD_WORDS_IDS": ("INT32", [[[], []]]),
}  # fmt: skip


def num_equal(draft, right):
    pairs = enumerate(zip(draft, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), len(draft))


def models(text="It was dark"):
    """Both models on one server. The draft model's second id is always wrong."""

    def script(request):
        inputs = request.inputs
        if request.model == "preprocessing":
            return [Reply(BEFORE, is_final=True)]
        if request.model == "postprocessing":
            return [Reply({"OUTPUT": ("BYTES", ["It was dark"])}, is_final=True)]
        if request.model in ("ensemble", "tensorrt_llm_bls"):
            drafts = {"total_draft_tokens": ("INT32", [[4]]),
                      "total_accepted_draft_tokens": ("INT32", [[3]])}  # fmt: skip
            return [text_reply(text, is_final=True, **drafts)]
        given = inputs["input_ids"][0].tolist()
        rest = ANSWER[len(given) - len(PROMPT) :][: int(inputs["request_output_len"][0, 0])]
        if request.model == "draft":
            new = [rest[0], 99][: len(rest)]
        else:
            draft = inputs["draft_input_ids"][0].tolist() if "draft_input_ids" in inputs else []
            new = rest[: num_equal(draft, rest) + 1]
        outputs = {"output_ids": ("INT32", [[given + new]])}
        return [Reply(outputs, is_final=True)]

    return script


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "data.json"
    record = {"input": "It was", "instruction": "dark", "output": "and so on until 8 words"}
    path.write_text(json.dumps([record, {**record, "input": "many words " * 50}]))
    return str(path)


def flags(server, dataset, *more):
    url = f"127.0.0.1:{server.port}"
    return (
        "client", "speculative", "--url-target", url, "--url-draft", url, "--url-control", url,
        "--dataset", dataset, "--max-input-len", "20", "--num-draft-tokens", "2",
        "--draft-tensorrt-llm-model-name", "draft", *more,
    )  # fmt: skip


def test_rounds_of_drafts_go_on_until_a_stop_word_and_their_acceptance_is_printed(
    trimaran, server, dataset
):
    server.script = models()

    code, out, err = trimaran(*flags(server, dataset))

    assert code == 0, err
    assert "1: Outputs match" in out
    assert "failed/total: 0/1" in out
    assert "accepted 2 of 4 draft tokens (0.500), 2.00 tokens a verify" in out
    asked = [each.inputs for each in server.received if each.model == "tensorrt_llm"]
    assert [each["draft_input_ids"].tolist() for each in asked] == [[[7, 99]], [[9, 99]]]
    # The answer ends at the stop word [9, 10].
    (after,) = (each.inputs for each in server.received if each.model == "postprocessing")
    assert after["TOKENS_BATCH"].tolist() == [[PROMPT + ANSWER[:4]]]


def test_a_different_text_is_shown_and_is_a_failure(trimaran, server, dataset):
    server.script = models("It was light")

    code, out, _ = trimaran(*flags(server, dataset))

    assert code == 1
    assert "1: Outputs don't match" in out
    assert "It was light" in out
    assert "failed/total: 1/1" in out


def test_the_bls_model_runs_the_rounds_where_the_flag_says_so(trimaran, server, dataset):
    server.script = models()

    code, out, err = trimaran(
        *flags(server, dataset, "--execute-bls-speculative-decoding", "--return-perf-metrics",
               "--use-draft-logits")
    )  # fmt: skip

    assert code == 0, err
    assert "accepted 3 of 4 draft tokens (0.750)" in out
    (asked,) = (e.inputs for e in server.received if e.model == "tensorrt_llm_bls")
    assert asked["num_draft_tokens"].tolist() == [[2]]
    assert asked["use_draft_logits"].tolist() == [[True]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["-b", "2"], "--beam-width is 2 but beams are not drafted"),
        (["--num-draft-tokens", "0"], "--num-draft-tokens is 0 but must be 1 or more"),
        (["-p", "Hello"], "either --dataset FILE or --prompt TEXT"),
        (["--url-draft", "nowhere"], "--url-draft is 'nowhere' but must be HOST:PORT"),
    ],
)
def test_flags_that_cannot_be_served_are_refused(trimaran, server, dataset, more, message):
    code, _, err = trimaran(*flags(server, dataset, *more))

    assert code == 2
    assert message in err
