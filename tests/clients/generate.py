"""Writes docs/compatibility.md from what became of each row with each version's repository."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE), str(HERE.parent / "e2e")]

from test_versions import ROWS, Row  # noqa: E402
from versions import VERSIONS  # noqa: E402

PAGE = ROOT / "docs" / "compatibility.md"
WORKS, ABSENT = "yes", "-"
HEAD = """# Compatibility, version by version

Each column stands for a server whose model repository has the tensors, the types and the
connections between models of that version of Triton's TensorRT-LLM backend.
`make compatibility` starts the servers, runs every cell and writes this page. *yes*: the row
works; *-*: the version has no such feature. The page is not written if a row fails. Rows apply
to a server whose model is not decoupled. The model of a row named *decoupled* is decoupled and
streams its responses.
"""
_BEHAVIOUR = (
    ("0.5, 0.6", "counts are unsigned; 0.5 has no `sequence_length`; there is no BLS model"),
    (
        "0.5 to 0.13",
        "a token stream has one id a response; outputs of log-probabilities and logits that "
        "are declared and not asked for are zeros; `batch_index` always comes where it is "
        "declared",
    ),
    ("0.6 to 0.13", "postprocessing passes the token model's other outputs on"),
    (
        "0.5, 0.6",
        "special tokens, such as those of the beginning and the end, are no part of texts; "
        "those versions write them",
    ),
    (
        "0.9, 0.10",
        "prompts begin without special tokens unless the repository sets `add_special_tokens`",
    ),
    ("0.5 to 0.10", "padding is the end id, even where the tokenizer has an id for padding"),
    (
        "0.5 to 0.7",
        "an answer to a text ends with the model's end ids too ([tokenizers.md]"
        "(tokenizers.md#ids-that-end-an-output)), where those versions end with the request's "
        "`end_id` alone. Their `end_to_end_test.py` finds other texts in its three steps than "
        "in the ensemble if the model ends a text early",
    ),
    (
        "0.6 to 0.11",
        "preprocessing takes several prompts in a request, which those versions refuse",
    ),
    (
        "0.6 to 0.16",
        "`nv_trt_llm_*` has the samples of the version, in 0.6 by the names "
        "`nv_trt_llm_*_statistics`; `--metrics-config trtllm_version=0.18` shows those of 0.18",
    ),
    (
        "0.5, 0.17",
        "`nv_trt_llm_*` has the samples of 0.18: 0.5 has none, and the tensors of 0.17 are "
        "those of 0.18. A repository with the `tensorrt_llm/1/model.py` of 0.17 has the "
        "samples of 0.17, without `waiting` and `fraction`, and so has any with "
        "`--metrics-config trtllm_version=0.17`",
    ),
    (
        "all",
        "`all_models/gpt`, without in-flight batching, is served too "
        "([serving.md](serving.md#2-write-the-model-repository))",
    ),
    (
        "all",
        "images, encoders and disaggregated serving are not "
        "served: [features.md](features.md) names the inputs and settings that are refused",
    ),
)
_DOCUMENTS = (
    (
        "`docker build -f dockerfile/Dockerfile.trt_llm_backend .`",
        "fails, with and without `--build-arg TORCH_INSTALL_TYPE=...`: the line here is "
        "`docker build -f deploy/Dockerfile .`, as there is no TensorRT-LLM to compile "
        "([deployment.md](deployment.md))",
    ),
    (
        "`tritonserver --model-repository=REPO`, `pkill tritonserver`",
        "as written, with the scripts of `trimaran init-repo REPO --scripts .` "
        "([clients.md](clients.md))",
    ),
    (
        "`hf_gpt_convert.py`, `convert_checkpoint.py`, `build.py`, `trtllm-build`",
        "as written, with these scripts; flags of TensorRT, such as `--parallel_build` and "
        "`--use_gemm_plugin`, have no effect, and the command says so",
    ),
    (
        "`--tp_size 8 --moe_tp_size 2 --moe_ep_size 4`",
        "as written, for a model with at least 8 attention heads",
    ),
    (
        "`sbatch tensorrt_llm_triton.sub`, `tensorrt_llm_triton.sh`",
        "`trimaran slurm render --template leader` writes the script, with the same container "
        "flags; those files start another server's container ([slurm.md](slurm.md))",
    ),
    (
        "`benchmark_core_model.py token-norm-dist`, `identity_test.py`",
        "as written, with `trimaran serve --out-of-vocabulary clamp`: they send any id, and "
        "prompts with lengths of others",
    ),
    (
        "`inflight_batcher_llm_client.py` without `--tokenizer-dir`",
        "sends ids of GPT-2, which a model with a smaller vocabulary takes with "
        "`trimaran serve --out-of-vocabulary clamp` alone",
    ),
    (
        "`inflight_batcher_llm_client.py --stop-after-ms 200`, "
        "`end_to_end_test.py --dataset P`",
        "as written, with these scripts. The backend's own scripts need `--max-input-len` "
        "too, and from 0.7 on `--request-id`",
    ),
    (
        "`inflight_batcher_llm_client.py` without `--streaming`",
        "the backend's own scripts of 0.6 and later send one request for one answer, which a "
        "decoupled model refuses, as a Triton server does; the script of `init-repo` works "
        "with both",
    ),
    (
        "`Output:` before the text",
        "`Output beam 0:`, as the scripts of 0.6 and later print; 0.5 prints `Output:`",
    ),
    (
        "figures of KV blocks in the documents",
        "blocks have 32 tokens; `trtllm-build --tokens_per_block 64` brings the figures of the "
        "documents and of the backend's own tests",
    ),
    (
        "Medusa, Eagle",
        "chains, the trees of `medusa_choices` and `eagle_choices`, and dynamic trees "
        "(`--eagle_use_dynamic_tree`) are served "
        "([speculative-decoding.md](speculative-decoding.md#trees))",
    ),
    (
        "Lookahead",
        "a step verifies one chain a sequence, and not branches "
        "([speculative-decoding.md](speculative-decoding.md#lookahead))",
    ),
    (
        "ReDrafter",
        "beams (`--redrafter_num_beams`) are verified as a tree of at most 64 nodes "
        "([speculative-decoding.md](speculative-decoding.md#beams))",
    ),
    (
        "tutorials of Baichuan, Whisper, encoder-decoder and multimodal models",
        "refused by name: `trimaran build` serves the families of [models.md](models.md)",
    ),
)
"""Lines of the backend's documents, and what becomes of them."""

TITLES = {
    "HTTP": "HTTP routes",
    "gRPC": "gRPC methods",
    "Clients": "Requests of the client scripts",
}


class NotShown(Exception):
    """A row failed, or did not run."""


def page(report: Sequence[Sequence[object]]) -> str:
    """The page's text.

    Args:
        report: version, table, number of the row, and outcome of each cell that ran.

    Raises:
        NotShown: a cell failed, or is missing.
    """
    outcomes = {(str(version), int(str(row))): str(was) for version, _, row, was in report}
    parts = [HEAD, "| repository | |\n| --- | --- |"]
    parts += [f"| {versions} | {text} |" for versions, text in _BEHAVIOUR]
    parts.append("")
    for table, title in TITLES.items():
        parts.append(f"## {title}\n")
        parts.append(f"| | {' | '.join(VERSIONS)} |\n|{' --- |' * (len(VERSIONS) + 1)}")
        for number, row in enumerate(ROWS):
            if row.table == table:
                parts.append(_line(number, row, outcomes))
        parts.append("")
    parts.append("## Lines of the documents\n\n| line | here |\n| --- | --- |")
    parts += [f"| {line} | {text} |" for line, text in _DOCUMENTS]
    parts.append("")
    return "\n".join(parts)


def _line(number: int, row: Row, outcomes: Mapping[tuple[str, int], str]) -> str:
    cells = []
    for version in VERSIONS:
        if not row.is_for(version):
            cells.append(ABSENT)
            continue
        was = outcomes.get((version, number), "did not run")
        if was != "passed":
            raise NotShown(f"{row.name} with the repository of {version}: {was}")
        cells.append(WORKS)
    is_named = "decoupled" in row.name or not row.is_decoupled
    return f"| {row.name}{'' if is_named else ', decoupled'} | {' | '.join(cells)} |"


def main() -> None:
    """Write the page, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="what --compatibility-report wrote")
    try:
        text = page(json.loads(parser.parse_args().report.read_text()))
    except NotShown as error:
        sys.exit(str(error))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
